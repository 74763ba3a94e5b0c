"""The tasks geometry3k and mm_math: prompts, traces, rewards, and the drawn dataset as a whole."""

from __future__ import annotations

import random
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from task_tables import checks_of, prepare

from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError, RecipeError
from vlmrl.recipe.schema import Data, Reward
from vlmrl.tasks import TASKS, make_task
from vlmrl.tasks.geometry.task import GEOMETRY3K, GRADING, MM_MATH, TEXT_MATH, Collection
from vlmrl.tasks.source import Source, open_source
from vlmrl.types import RewardInput, Row


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(GEOMETRY3K, tmp_path_factory.mktemp("data") / "drawn", synthetic=20, seed=7, width=224)


def made(collection: Collection, out: Path, **options: Any) -> Path:
    return prepare(collection.name, out.parent, out=out, **options).path


def source_of(path: Path, variant: str | None = None, profile: str = "default") -> Source:
    return open_source(Data(path=str(path), variant=variant), Reward(profile=profile))


def test_a_drawn_dataset_is_sound_and_its_rows_pass_their_own_checks(drawn: Path) -> None:
    dataset = open_dataset(Data(path=str(drawn)))
    assert dict(dataset.splits) == {"train": 20, "validation": 20, "test": 40}
    task = make_task("geometry3k", dataset.info)
    for split in dataset.splits:
        for row in dataset.rows(split):
            assert task.validate(row.truth) == []
            assert dataset.image(row.media[0]).size == (224, 168)
    assert {row.truth["topic"] for row in dataset.rows("test")} == {"angles", "lengths", "circles", "areas"}
    assert checks_of(dataset.info)["same image in two splits"][0] == "ok"


def test_the_prompt_holds_the_problem_with_one_mark_and_asks_for_a_box(drawn: Path) -> None:
    for variant, words in ((None, "step by step"), ("zero", "<think>"), ("think", "</think>")):
        source = source_of(drawn, variant)
        row = source.rows[0]
        (message,) = source.messages(row)
        assert message.content.count("<image>") == 1
        assert str(row.columns["problem"]) in message.content and words in message.content
        assert "\\boxed{answer}" in message.content
        assert str(row.truth["solution"]) not in message.content
        assert source.notes == []


def test_the_default_prompt_is_chat_and_its_print_differs_from_zero(drawn: Path) -> None:
    assert source_of(drawn).prompt_sha256 == source_of(drawn, "chat").prompt_sha256
    assert source_of(drawn).prompt_sha256 != source_of(drawn, "zero").prompt_sha256
    with pytest.raises(RecipeError, match="variant"):
        source_of(drawn, "chta")


@pytest.mark.parametrize("variant", ["chat", "zero", "think"])
@pytest.mark.parametrize("profile", ["default", "maye", "rllava"])
def test_a_trace_earns_all_accuracy_and_a_wrong_box_none(drawn: Path, variant: str, profile: str) -> None:
    source = source_of(drawn, variant, profile)
    assert source.task.trace is not None
    for row in [source.rows[i] for i in range(20)]:
        text = source.task.trace(row, random.Random(0))
        assert text.startswith("<think>") == (variant != "chat")
        assert accuracy(source, row, text) == 1.0, (text, row.truth)
        assert accuracy(source, row, f"{text} No, it is \\boxed{{123456.5}}") == 0.0
        assert accuracy(source, row, "I do not know.") == 0.0


def accuracy(source: Source, row: Row, text: str) -> float:
    result: Any = source.reward.fn(RewardInput(text, row.truth, row.columns, [], "stop", 10, ""))
    return float(getattr(result, "parts", result)["accuracy"])


def test_published_rows_without_a_solution_are_learnt_as_a_box() -> None:
    task = make_task("mm_math", {}, "zero")
    row = Row("r", "s", "mm_math", {"answer": "3\\pi", "solution": None}, (), {})
    assert task.trace is not None
    assert task.trace(row, random.Random(0)) == "<think>\\boxed{3\\pi}</think>\n\\boxed{3\\pi}"
    assert make_task("mm_math", {}).trace(row, random.Random(0)) == "\\boxed{3\\pi}"  # type: ignore[misc]


def test_all_tasks_use_the_grading_that_one_place_names() -> None:
    for name in ("geometry3k", "mm_math", "geoqa", "text_math"):
        assert make_task(name, {}).profiles["default"] == GRADING
        assert TASKS[name].variants == (("chat", "think") if name == "text_math" else ("chat", "zero", "think"))
        assert set(TASKS[name].profiles) == set(make_task(name, {}).profiles)


def test_a_truth_without_an_answer_or_with_a_solution_without_a_box_is_refused() -> None:
    validate = make_task("geometry3k", {}).validate
    assert validate({"answer": "5", "solution": "\\boxed{5}"}) == validate({"answer": "5"}) == []
    assert len(validate({"answer": " ", "solution": "five"})) == 2
    assert len(validate({"answer": 5})) == 1


def test_the_text_of_mm_math_states_the_values_and_its_figure_shows_none(tmp_path: Path) -> None:
    path = made(MM_MATH, tmp_path / "drawn", synthetic=20, topics="angles", width=224)
    rows = list(open_dataset(Data(path=str(path))).rows("train"))
    assert {row.truth["topic"] for row in rows} == {"angles"}
    assert all("^\\circ$" in row.columns["problem"] for row in rows)


def test_written_problems_have_exact_answers_and_no_split_shares_one(tmp_path: Path) -> None:
    path = made(TEXT_MATH, tmp_path / "written", synthetic=60, seed=3)
    dataset = open_dataset(Data(path=str(path)))
    rows = [row for split in dataset.splits for row in dataset.rows(split)]
    assert len({row.columns["problem"] for row in rows}) == len(rows) == 60 + 20 + 40
    assert {row.truth["topic"] for row in rows} == {"arithmetic", "fractions", "equations"}
    task = make_task("text_math", dataset.info)
    for row in rows:
        assert task.validate(row.truth) == [] and not row.media
        assert value_of(row) == latex_value(str(row.truth["answer"])), row.columns["problem"]
    again = made(TEXT_MATH, tmp_path / "again", synthetic=60, seed=3)
    assert open_dataset(Data(path=str(again))).info["fingerprint"] == dataset.info["fingerprint"]
    with pytest.raises(DataError, match="no new one"):
        made(TEXT_MATH, tmp_path / "x", synthetic=3000, seed=3, topics="sums")
    with pytest.raises(DataError, match="topic"):
        made(TEXT_MATH, tmp_path / "x", synthetic=60, topics="angles")


def latex_value(text: str) -> Fraction:
    match = re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", text)
    return Fraction(f"{match[1]}{match[2]}/{match[3]}") if match else Fraction(text)


def value_of(row: Row) -> Fraction:
    """The answer, computed from the words of the problem alone."""
    text = str(row.columns["problem"]).replace("\\frac{", "").replace("}{", "/").replace("}", "").replace("$", "")
    n = [Fraction(number) for number in re.findall(r"\d+(?:/\d+)?", text)]
    if " times " in text:
        return n[0] * n[1]
    if "remainder" in text:
        return Fraction(int(n[0]) % int(n[1]))
    if " of " in text and "sum" not in text:
        return n[0] * n[1]
    if "Solve" in text:  # a x + b = c
        b = -n[1] if "x - " in text else n[1]
        c = -n[2] if "= -" in text else n[2]
        return (c - b) / n[0]
    if "difference is" in text:
        return (n[0] + n[1]) / 2
    return n[0] + n[1] if " + " in text else n[0] - n[1]
