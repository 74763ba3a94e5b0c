"""Errors that are told first: each once, and without a large library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vlmrl.errors import CheckpointError
from vlmrl.model.model_files import require_source
from vlmrl.recipe.load import load_recipe
from vlmrl.setup.check import preflight, quick_look
from vlmrl.setup.rows import first_errors

RECIPE = """
[model]
path = "m"
[[data]]
path = "rows.jsonl"
columns = {prompt = "question", answer = "answer"}
DATA
[reward]
REWARD
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [{"question": f"What is 1 + {n}?", "answer": str(1 + n)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "good.py").write_text("def reward(x): return 1.0\n")
    (tmp_path / "bad.py").write_text("def reward(x)\n    return 1.0\n")
    (tmp_path / "lacks.py").write_text("import no_such_module\ndef reward(x): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(reward: str, data: str = "", column: str = "question") -> Path:
    text = RECIPE.replace("REWARD", reward).replace("DATA", data).replace('"question"', f'"{column}"')
    Path("r.toml").write_text(text)
    return Path("r.toml")


@pytest.mark.parametrize(
    ("reward", "data", "message"),
    [
        ('name = "bad.py:reward"', "", "the reward file is not valid Python"),
        ('name = "gone.py:reward"', "", "`reward.name` names a reward file that does not exist"),
        ('name = "good.py:other"', "", "good.py has no function `other`"),
        ('name = "good.py"', "", "names the file good.py but no function in it"),
        ('name = "exact_mtch"', "", "unknown reward `exact_mtch`"),
        ('name = "lacks.py:reward"', "", "No module named 'no_such_module'"),
        ("", "", "the task `table` has no reward of its own"),
        ("", 'reward = "bad.py:reward"', "the reward file is not valid Python"),
        ("[[rewards]]\nname = 'bad.py:reward'", "", "the reward file is not valid Python"),
        ('name = "good.py:reward"', 'task = "gone.py:task"', "names a task file that does not exist"),
        ('name = "good.py:reward"', 'prompt = "gone.jinja"', "`data.0.prompt` names a path that does not exist"),
    ],
)
def test_a_wrong_reward_or_task_is_told_once(place: Path, reward: str, data: str, message: str) -> None:
    loaded = load_recipe(written(reward, data))
    (first,) = [p for p in first_errors(loaded) if p.where != "r.toml:3"]
    assert message in first.message
    told = preflight(loaded, runs_folder=place / "runs").errors
    assert [p for p in told if p.where != "r.toml:3"] == [first]


def test_a_wrong_reward_does_not_hide_a_missing_column(place: Path) -> None:
    loaded = load_recipe(written('name = "bad.py:reward"', column="quest"))
    messages = [p.message for p in first_errors(loaded)]
    assert "no column `quest` (named as prompt)" in messages and any("not valid Python" in m for m in messages)


def test_a_missing_column_is_told_before_any_large_library_is_loaded(place: Path) -> None:
    written('name = "good.py:reward"', column="quest")
    code = (
        "import sys\n"
        "from vlmrl.evaluate.full_check import check_everything\n"
        "def show(errors):\n"
        "    print([e.message for e in errors], {'torch', 'transformers', 'pyarrow'} & set(sys.modules))\n"
        "    if any('quest' in e.message for e in errors): sys.exit(0)\n"
        "from pathlib import Path\n"
        "check_everything('r.toml', [], Path('runs'), gpus=None, gpu_memory=None, deep_prompts=None, show_first=show)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, timeout=120)
    assert "no column `quest` (named as prompt)" in done.stdout and done.stdout.endswith("set()\n"), done


def test_responses_that_are_missing_in_the_training_and_the_validation_rows_are_told_once(place: Path) -> None:
    path = written("", "validation = 0.5")
    path.write_text('kind = "sft"\n' + path.read_text())
    told = [p.message for p in quick_look(load_recipe(path))[0] if "no responses to learn" in p.message]
    assert told == ["task `table` of `rows` has no responses to learn from"]


def test_a_similar_model_folder_is_named(place: Path) -> None:
    (place / "tiny").mkdir()
    (place / "tiny" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        require_source("./tinny")
    assert (caught.value.hint or "").startswith("did you mean `tiny`?")


def test_a_role_of_a_column_that_does_not_exist_is_told_once(place: Path) -> None:
    path = written('name = "good.py:reward"')
    path.write_text(path.read_text().replace("columns = {prompt", "columns = {image = 'bild', prompt"))
    told = [p.message for p in preflight(load_recipe(path), runs_folder=place / "runs").errors]
    assert [m for m in told if "columns" in m or "image" in m] == ["unknown key `data.0.columns.image`"]


def test_a_first_row_to_validate_that_cannot_be_read_hides_no_other_row(place: Path) -> None:
    path = written('name = "good.py:reward"', "validation = 'bad.jsonl'")
    sound = (place / "rows.jsonl").read_text().splitlines()[0]
    rows = [json.dumps({**json.loads(sound), "images": [f"{n}.png"]}) for n in range(2)]
    (place / "bad.jsonl").write_text("\n".join([*rows, sound]))
    told = [p for p in preflight(load_recipe(path), runs_folder=place / "runs").errors if "are not valid" in p.message]
    assert [p.message.partition(" rows")[0] for p in told] == ["2 of 3"]
    assert str(told[0].hint).count("no image file") == 2
