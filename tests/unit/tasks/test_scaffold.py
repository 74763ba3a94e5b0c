from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest
import warm
from command_line import this_process

from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError
from vlmrl.recipe.load import load_recipe
from vlmrl.rewards.scoring import Scorer
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.tasks.scaffold import FUNCTIONS, STYLES, write_task
from vlmrl.tasks.source import open_source, open_validation
from vlmrl.types import RewardInput, Turn

RIGHT = "<think>two and two</think><answer>4</answer>"


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_the_folder_has_a_test_that_passes(tmp_path: Path, style: str) -> None:
    write_task(tmp_path / "squares", style=style)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "squares")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


@pytest.mark.slow
def test_two_folders_are_tested_together_each_with_its_own_reward(tmp_path: Path) -> None:
    write_task(tmp_path / "my-squares")
    write_task(tmp_path / "shapes.v2")
    (tmp_path / "shapes.v2" / "reward.py").write_text("def score(x):\n    return {'format': 0.0, 'answer': 0.0}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "my-squares", "shapes.v2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert "2 failed, 4 passed" in done.stdout and "FAILED my-squares" not in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_recipe_rows_prompt_and_reward_fit_together(tmp_path: Path, style: str) -> None:
    write_task(tmp_path / "squares", style=style, model='C:\\models\\"tiny"')
    recipe = load_recipe(tmp_path / "squares" / "recipe.toml").recipe
    assert recipe.model.path == 'C:\\models\\"tiny"'
    source = open_source(recipe.data[0], recipe.reward)
    assert len(source.rows) == 12
    validation = open_validation(recipe.data[0], recipe.reward)
    assert validation is not None and len(validation.rows) == 4
    text = source.messages(source.rows[3])[0].content
    assert text.startswith("<image>") and "How many black squares" in text
    assert source.dataset.image(source.rows[3].media[0]).size == (112, 112)
    inputs = [source.reward_input(source.rows[i], RIGHT, "stop", 9, text) for i in (3, 6)]
    with Scorer(source.reward, source.weights, timeout_seconds=20, memory_mb=4096, workers=1) as scorer:
        right, wrong = scorer.score(inputs, strict=True)
    assert right.value == pytest.approx(1.0) and wrong.value < 0.3


@pytest.mark.slow
def test_a_folder_with_a_tool_has_tests_that_pass_and_a_recipe_that_fits(tmp_path: Path, small_folder: Path) -> None:
    folder = tmp_path / "squares"
    write_task(folder, model=str(small_folder), tools=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "squares"]
    done = warm.run(command, capture_output=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0 and b"11 passed" in done.stdout, done.stdout
    checked = this_process("check", folder / "recipe.toml", cwd=tmp_path)
    assert checked.code == 0 and "zoom; reset gets" in checked.out, (checked.out, checked.err)
    assert "112 x 112" in checked.out, "the tool's image is larger than what the model sees"
    score = run_path(str(folder / "reward.py"))["score"]
    turns = (Turn("assistant", "They are small. A call follows."), Turn("tool", "", ()), Turn("assistant", RIGHT))
    parts = score(RewardInput(f"{turns[0].text}\n{RIGHT}", {"answer": "4"}, turns=turns))
    assert parts == {"format": 1.0, "answer": 1.0}


@pytest.mark.parametrize("more", [{"whole": True}, {"style": "trl"}])
def test_a_tool_is_for_rows_and_a_reward_that_reads_the_last_turn(tmp_path: Path, more: dict) -> None:
    with pytest.raises(DataError, match="--tools makes rows, a tool and a reward in vlmrl's style, and not"):
        write_task(tmp_path / "squares", tools=True, **more)
    assert not any(tmp_path.iterdir())


def test_the_reward_files_are_python_and_nothing_is_overwritten(tmp_path: Path) -> None:
    for style in STYLES:
        folder = tmp_path / style
        write_task(folder, style=style)
        tree = ast.parse((folder / "reward.py").read_text())
        assert FUNCTIONS[style] in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        with pytest.raises(DataError, match="not empty; nothing was written"):
            write_task(folder, style=style)
    with pytest.raises(DataError, match="unknown style `openrlhf`"):
        write_task(tmp_path / "x", style="openrlhf")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(STYLES)


def test_the_number_of_squares_is_the_answer(tmp_path: Path) -> None:
    write_task(tmp_path / "squares")
    dataset = open_dataset_of(tmp_path / "squares" / "rows.jsonl")
    for row in dataset.rows("train"):
        black = sum(pixel == (0, 0, 0) for pixel in dataset.image(row.media[0]).getdata())
        assert black == 14 * 14 * int(row.truth["answer"])


def open_dataset_of(path: Path):
    from vlmrl.recipe.schema import Data

    return open_dataset(Data(path=str(path)))


def test_the_default_reward_is_in_our_signature(tmp_path: Path) -> None:
    write_task(tmp_path / "squares")
    spec = load_reward(f"{tmp_path / 'squares' / 'reward.py'}:score")
    with Scorer(spec, {"format": 0.2, "answer": 0.8}, timeout_seconds=20, memory_mb=4096, workers=1) as scorer:
        (score,) = scorer.score([RewardInput(RIGHT, {"answer": "5"})], strict=True)
    assert score.parts == {"format": 1.0, "answer": 0.5} and score.value == pytest.approx(0.6)
