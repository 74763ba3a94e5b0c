from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlmrl.data.images import encode_png
from vlmrl.errors import DataError, RecipeError, RewardError, VlmrlError
from vlmrl.recipe.schema import Data, Reward
from vlmrl.rewards.base import NO_REWARD
from vlmrl.tasks import TASKS
from vlmrl.tasks.source import open_source, open_validation

TEXT64 = base64.b64encode(encode_png(Image.new("RGB", (6, 4), "red"))).decode()
EXACT = Reward(name="exact_match")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = [{"prompt": f"What {i}?", "images": [TEXT64] * (i % 2), "answer": str(i), "hard": i > 1} for i in range(4)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def template(tmp_path: Path, text: str) -> str:
    (tmp_path / "prompt.jinja").write_text(text)
    return str(tmp_path / "prompt.jinja")


def said(source: Any, index: int) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in source.messages(source.rows[index])]


def test_a_table_without_marks_gets_its_images_in_front_and_says_so(table: Path) -> None:
    source = open_source(Data(path=str(table), system="Be brief."), EXACT)
    assert said(source, 0) == [("system", "Be brief."), ("user", "What 0?")]
    assert said(source, 1) == [("system", "Be brief."), ("user", "<image>What 1?")]
    source.messages(source.rows[3])
    assert [note for note in source.notes if "in front" in note] == source.notes and len(source.notes) == 1


@pytest.mark.parametrize("task", [name for name in TASKS if name not in ("table", "digits", "pairs")])
def test_a_table_that_was_not_prepared_is_refused_with_the_command(table: Path, task: str) -> None:
    with pytest.raises(DataError, match=f"task `{task}` needs a prepared dataset") as caught:
        open_source(Data(path=str(table), task=task), Reward())
    assert f"vlmrl prep {task} {table}" in str(caught.value.hint)


def test_a_template_sees_the_columns_and_not_the_truth(table: Path, tmp_path: Path) -> None:
    prompt = template(tmp_path, "{{ prompt }}{% if hard %} (hard){% endif %} {{ columns.answer }}")
    source = open_source(Data(path=str(table), prompt=prompt), EXACT)
    assert said(source, 2) == [("user", "What 2? (hard) 2")]
    other = open_source(Data(path=str(table), prompt=template(tmp_path, "{{ truth }}")), EXACT)
    with pytest.raises(DataError, match="'truth' is undefined"):
        other.messages(other.rows[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ promt }}", "did you mean `prompt`"),
        ("{{ prompt.__class__.__mro__ }}", "template fails"),
        ("{{ prompt + 1 }}", "template fails"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("<image><image>{{ prompt }}", "0 images but its prompt has 2"),
    ],
)
def test_a_template_that_fails_names_the_row_and_the_file(table: Path, tmp_path: Path, text: str, message: str) -> None:
    source = open_source(Data(path=str(table), prompt=template(tmp_path, text)), EXACT)
    with pytest.raises(DataError, match=message) as caught:
        source.messages(source.rows[0])
    assert source.rows[0].prompt_id in str(caught.value)


@pytest.mark.parametrize("text", ["{{ prompt", "{% if x %}", "", "  \n"])
def test_a_template_that_is_no_template_is_found_before_any_row_is_read(table: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError, match=r"prompt\.jinja"):
        open_source(Data(path=str(table), prompt=template(tmp_path, text)), EXACT)
    with pytest.raises(RecipeError, match="cannot be read"):
        open_source(Data(path=str(table), prompt=str(tmp_path / "gone.jinja")), EXACT)


def test_the_prompt_hash_follows_template_and_system(table: Path, tmp_path: Path) -> None:
    hashes = {
        open_source(Data(path=str(table), prompt=prompt, system=system), EXACT).prompt_sha256
        for prompt in (None, template(tmp_path, "{{ prompt }}"))
        for system in (None, "a", "b")
    }
    assert len(hashes) == 6


def test_rewards_come_from_the_entry_then_the_recipe_then_the_task(table: Path) -> None:
    assert open_source(Data(path=str(table), reward="number_match"), EXACT).reward.name == "number_match"
    assert open_source(Data(path=str(table)), EXACT).reward.name == "exact_match"
    with pytest.raises(RecipeError, match="no reward of its own"):
        open_source(Data(path=str(table)), Reward())
    assert open_source(Data(path=str(table)), Reward(), scored=False).reward is NO_REWARD
    assert open_source(Data(path=str(table)), EXACT, scored=False).reward.name == "exact_match"


def test_a_built_in_of_workers_is_chosen_and_weighed_like_any_other(table: Path) -> None:
    math = Reward(name="math", args={"units": "required"}, weights={"accuracy": 1.0, "think_format": 0.1})
    source = open_source(Data(path=str(table)), math)
    assert source.reward.worker is not None and source.reward.args == {"units": "required"}
    assert source.weights == {"accuracy": 1.0, "think_format": 0.1}
    with pytest.raises(RecipeError, match="no part `nope`"):
        open_source(Data(path=str(table)), Reward(name="math", weights={"nope": 1.0}))
    with pytest.raises(RewardError, match="no part `nope`"):
        open_source(Data(path=str(table)), Reward(name="math", on_timeout={"nope": 0.0}))
    with pytest.raises(RewardError, match="accuracy names the part `nope`"):
        open_source(Data(path=str(table)), Reward(name="math", accuracy="nope"))


def test_weights_of_the_recipe_replace_the_rewards_own_and_must_name_its_parts(table: Path) -> None:
    own = open_source(Data(path=str(table)), EXACT).weights
    part = next(iter(own))
    assert open_source(Data(path=str(table)), Reward(name="exact_match", weights={part: 3.0})).weights == {part: 3.0}
    with pytest.raises(RecipeError, match="no part `nope`"):
        open_source(Data(path=str(table)), Reward(name="exact_match", weights={"nope": 1.0}))


def test_max_rows_cuts_the_training_rows_alone(table: Path) -> None:
    data = Data(path=str(table), max_rows=2, validation=str(table))
    assert len(open_source(data, EXACT).rows) == 2
    validation = open_validation(data, EXACT)
    assert validation is not None and len(validation.rows) == 4 and validation.split == "validation"
    assert open_validation(Data(path=str(table)), EXACT) is None
    with pytest.raises(DataError, match="no split `held`"):
        open_validation(Data(path=str(table), validation="held"), EXACT)


def test_the_reward_gets_images_only_when_it_asks(table: Path) -> None:
    source = open_source(Data(path=str(table)), EXACT)
    row = source.rows[1]
    seen = source.reward_input(row, "text", "length", 7, "prompt")
    assert (seen.response, seen.finish, seen.num_tokens, seen.prompt, seen.images) == (
        "text",
        "length",
        7,
        "prompt",
        [],
    )
    assert seen.truth == {"answer": "1"} and seen.columns["hard"] is False


def test_an_empty_answer_is_a_finding_of_the_task(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "x", "answer": null}\n')
    source = open_source(Data(path=str(path)), EXACT)
    assert source.task.validate(source.rows[0].truth) == ["the answer is empty"]


def test_an_unknown_task_is_the_users_mistake(table: Path) -> None:
    with pytest.raises(VlmrlError, match="did you mean `table`"):
        open_source(Data(path=str(table), task="tabel"), EXACT)


@pytest.mark.slow
def test_data_and_tasks_do_not_import_torch() -> None:
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} must not be imported here")
sys.meta_path.insert(0, Refuse())
from pathlib import Path
import vlmrl.tasks
assert "pydantic" not in sys.modules, "each worker of a reward loads the tasks, and the recipe's keys with them"
import vlmrl.tasks.source, vlmrl.tasks.dataset_assembly, vlmrl.tasks.scaffold
import vlmrl.data.table_dataset
from vlmrl.tasks.digits import prepare_digits
from vlmrl.recipe.schema import Data, Reward
from vlmrl.tasks.source import open_source
made = prepare_digits(Path(sys.argv[1]), num_pairs=20)
source = open_source(Data(path=str(made.path)), Reward())
source.messages(source.rows[0]); source.dataset.image(source.rows[0].media[0])
heavy = {"torch", "transformers", "datasets"} & set(sys.modules)
assert not heavy, heavy
"""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", code, f"{folder}/digits"], check=True, timeout=120)
