from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pair_responses import parse_pair_response

from vlmrl.errors import DataError
from vlmrl.rewards.base import UNSCORED
from vlmrl.tasks import TASKS, make_task
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.tasks.pairs.task import levels_due, pair_task, write_trace
from vlmrl.tasks.prompt import render_user
from vlmrl.types import Media, RewardInput, Row

LEVELS = ["order", "family", "genus"]
INFO = {"name": "birds", "levels": LEVELS}
SAME = {"same": True, "distance": 0, "order": ["P", "P"], "family": ["C", "C"], "genus": ["X", "X"]}
COUSINS = {"same": False, "distance": 2, "order": ["P", "P"], "family": ["C", "D"], "genus": ["X", "Y"]}
ROW = Row("p", "birds", "pairs", SAME, (Media("a", 4, 4), Media("b", 4, 4)), {})
NAMES = st.sampled_from(["Corvus", "Pica", "Parus"])


@st.composite
def truths(draw: st.DrawFn) -> dict[str, Any]:
    first, second = (tuple(draw(NAMES) for _ in LEVELS) for _ in range(2))
    differing = [i for i in range(len(LEVELS)) if first[i] != second[i]]
    distance = len(LEVELS) - differing[0] if differing else 0
    names = {level: [first[i], second[i]] for i, level in enumerate(LEVELS)}
    return {"same": distance == 0, "distance": distance, **names}


@given(truths(), st.integers(0, 100))
def test_a_trace_is_a_right_answer_that_earns_all_but_its_hedging(truth: dict[str, Any], seed: int) -> None:
    task = pair_task(INFO)
    assert task.validate(truth) == [] and task.trace is not None
    text = task.trace(Row("p", "s", "pairs", truth), random.Random(seed))
    outcome = task.outcome(RewardInput(text, truth), UNSCORED)
    assert outcome["accuracy"] == 1.0 and outcome["parse_failure"] == 0.0
    assert all(
        outcome[f"accuracy/{level}"] == (1.0 if level in levels_due(truth, LEVELS) else None) for level in LEVELS
    )
    spec = load_reward("taxonomy", args=dict(task.profiles["default"][1]))
    parts = dict(spec(RewardInput(text, truth)))
    assert parts["format"] == 1.0 and all(parts[level] == 1.0 for level in LEVELS)
    assert parts["answer"] == pytest.approx(1 - float(outcome["brier"] or 0), rel=1e-12)
    assert parts["answer"] >= 1 - 0.4**2 - 1e-12


def test_a_trace_stops_at_the_first_level_that_differs() -> None:
    text = write_trace(COUSINS, LEVELS, random.Random(0))
    assert re.fullmatch(r"<think><order>P; P</order><family>C; D</family></think><answer>0\.[1-4]</answer>", text)
    confidences = Counter(write_trace(SAME, LEVELS, random.Random(s))[-12:-9] for s in range(300))
    assert set(confidences) == {"0.6", "0.7", "0.8", "0.9"} and confidences["0.9"] > 150


def answer(p: str, order: str = "P; P", family: str = "C; D") -> str:
    return f"<think><order>{order}</order><family>{family}</family></think><answer>{p}</answer>"


def test_the_outcome_of_a_wrong_a_half_right_and_an_undecided_answer() -> None:
    task = pair_task(INFO)

    def outcome(truth: dict[str, Any], text: str) -> Any:
        return task.outcome(RewardInput(text, truth), UNSCORED)

    right = outcome(COUSINS, answer("0.2"))
    assert right == {
        "accuracy": 1.0,
        "brier": pytest.approx(0.04),
        "confidence": 0.2,
        "label": 0.0,
        "parse_failure": 0.0,
        "accuracy/order": 1.0,
        "accuracy/family": 1.0,
        "accuracy/genus": None,
        "consistent": 1.0,
    }
    assert outcome(COUSINS, answer("0.8"))["accuracy"] == 0.0
    assert outcome(COUSINS, answer("0.5"))["accuracy"] == 0.0 == outcome(SAME, answer("0.5"))["accuracy"]
    assert outcome(COUSINS, answer("0.2", family="C; E"))["accuracy/family"] == 0.0
    assert outcome(COUSINS, answer("0.2", order="p; p"))["accuracy/order"] == 1.0  # case does not count


@pytest.mark.parametrize("text", ["", "yes", "<answer>0.1</answer>", answer("2"), answer("0.2") + answer("0.2")])
def test_what_cannot_be_parsed_counts_as_wrong_everywhere(text: str) -> None:
    outcome = pair_task(INFO).outcome(RewardInput(text, COUSINS), UNSCORED)
    assert outcome["parse_failure"] == 1.0 and outcome["accuracy"] == 0.0 and outcome["brier"] == 1.0
    assert outcome["accuracy/order"] == 0.0 and outcome["confidence"] is None and outcome["label"] == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"same": 1}, "`same` is 1"),
        ({"same": False}, "the names are equal"),
        ({"distance": 1}, "the names make it 0"),
        ({"order": ["P"]}, "`order` is"),
        ({"order": ["P", ""]}, "`order` is"),
        ({"order": None}, "`order` is None"),
        ({"order": ["P;Q", "P;Q"]}, "cannot hold"),
        ({"order": [" P", " P"]}, "cannot hold"),
    ],
)
def test_a_truth_that_does_not_fit_is_told_in_words(change: dict[str, Any], message: str) -> None:
    assert any(message in problem for problem in pair_task(INFO).validate({**SAME, **change}))


def test_the_prompt_shows_a_format_that_parses_and_echoing_it_earns_nothing() -> None:
    task = pair_task(INFO)
    text = render_user(task.template, ROW, task.variables, where="prompt")
    assert text.count("<image>") == 2 and "\\<" not in text and "Stop after the first level" in text
    for level in LEVELS:
        assert f"<{level}>first; second</{level}>" in text
    filled = "".join(re.findall(r"<(?:order|family|genus)>.*", text))
    assert parse_pair_response(f"<think>{filled}</think><answer>0.5</answer>", LEVELS).ok
    spec = load_reward("taxonomy", args=dict(task.profiles["default"][1]))
    assert spec(RewardInput(text, SAME)) == dict.fromkeys(("format", "answer", *LEVELS), 0.0)


def test_the_digits_prompt_is_short_and_names_both_levels() -> None:
    task = make_task("digits", {"name": "digits", "levels": ["loop", "digit"]})
    text = render_user(task.template, ROW, task.variables, where="prompt").replace("<image>", "")
    assert len(text.split()) <= 20 and "loop" in text and "digit" in text


@pytest.mark.parametrize("levels", [None, [], "order", ["a", "a"], ["think"], ["same"], ["two words"], ["1st"]])
def test_levels_that_cannot_be_tags_are_refused(levels: Any) -> None:
    with pytest.raises(DataError):
        pair_task({"name": "x", "levels": levels})


def test_every_task_has_a_summary_and_an_unknown_one_gets_the_nearest_name() -> None:
    assert all(entry.summary and len(entry.summary) < 120 for entry in TASKS.values())
    with pytest.raises(Exception, match="did you mean `digits`"):
        make_task("digit", {})
