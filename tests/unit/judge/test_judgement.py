"""Strict reading of judgements: one JSON object with a number from 0 to 1 for each axis."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_server import AXES, judgement_text

from vlmrl.services.protocol import ChatAnswer, InvalidJudgement
from vlmrl.services.rubric import MOST_REASON_CHARS, VFIG, Judgement, Rubric, judgement_of, read_judgement

GOOD = judgement_text(0.5)


def test_a_judgement_is_read_in_the_order_of_the_rubric() -> None:
    text = '{"details": 0, "reason": "ok", "presence": 1, "connectivity": 0.25, "layout": 0.5}'
    judgement = read_judgement(VFIG, f" \n{text}\n")
    assert list(judgement.scores.items()) == [
        ("presence", 1.0),
        ("layout", 0.5),
        ("connectivity", 0.25),
        ("details", 0.0),
    ]
    assert all(type(score) is float for score in judgement.scores.values())
    assert judgement.total(VFIG) == 0.4375  # 0.25 * (1 + 0.5 + 0.25 + 0)


def test_the_total_is_a_mean_by_the_weights() -> None:
    axes = [{"name": "a", "weight": 3.0, "describe": "x"}, {"name": "b", "weight": 1.0, "describe": "y"}]
    rubric = Rubric.model_validate({"instructions": "i", "axes": axes})
    assert Judgement({"a": 1.0, "b": 0.5}, "").total(rubric) == 0.875  # (3 * 1 + 1 * 0.5) / 4


BAD = {
    "nan": judgement_text("NaN"),
    "infinity": judgement_text("Infinity"),
    "an overflow": judgement_text("1e999"),
    "9.0": judgement_text("9.0"),
    "just above 1": judgement_text("1.0000000001"),
    "below 0": judgement_text("-0.001"),
    "a text": judgement_text('"0.5"'),
    "a truth value": judgement_text("true"),
    "null": judgement_text("null"),
    "a list": judgement_text("[0.5]"),
    "a huge whole number": judgement_text("1" + "0" * 400),
    "digits without end": judgement_text("1" * 5000),
    "a missing axis": json.dumps({"reason": "r", "presence": 1, "layout": 1, "connectivity": 1}),
    "another schema": '{"score": 0.9}',
    "no words": json.dumps(dict.fromkeys(AXES, 1)),
    "words that are a number": judgement_text(1).replace('"as drawn"', "3"),
    "an axis twice": judgement_text(1).replace('"layout": 1', '"layout": 0, "layout": 1'),
    "a list of two": f"[{GOOD}, {GOOD}]",
    "a list of a list": f"[[{GOOD}]]",
    "a list of nothing": "[]",
    "another axis for one": judgement_text(1, beauty=1).replace('"layout"', '"order"'),
    "a wrong number in a fence": f"```json\n{judgement_text('9.0')}\n```",
    "an axis twice in a list": "[" + judgement_text(1).replace('"layout": 1', '"layout": 0, "layout": 1') + "]",
    "two": GOOD + GOOD,
    "prose before": f"Here it is: {GOOD}",
    "prose behind": f"{GOOD} I hope that this helps.",
    "an open fence": f"```json\n{GOOD}",
    "two fences": f"```json\n{GOOD}\n```\n```json\n{GOOD}\n```",
    "a fence in prose": f"Here it is:\n```json\n{GOOD}\n```",
    "a fence of another language": f"```python\n{GOOD}\n```",
    "an argument": "I will not score this picture: it says that I must give 1.0, so I give 1.0 for all.",
    "a number alone": "0.5",
    "nothing": "",
    "half of it": GOOD[: len(GOOD) // 2],
    "nested": "[" * 100_000,
    "very long": judgement_text(1, reason="x" * 100_000),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_exactly_one_judgement_is_refused(name: str) -> None:
    with pytest.raises(InvalidJudgement) as raised:
        read_judgement(VFIG, BAD[name])
    assert len(raised.value.message) < 300


@pytest.mark.parametrize(
    "text",
    [
        f"```json\n{GOOD}\n```",
        f"\n```\n{GOOD}\n```\n",
        f"[{GOOD}]",
        f"```JSON\n[\n{GOOD}\n]\n```",
        judgement_text(0.5, beauty=1, total="high"),
    ],
)
def test_a_fence_a_list_with_one_judgement_and_further_fields_are_passed_over(text: str) -> None:
    assert read_judgement(VFIG, text) == read_judgement(VFIG, GOOD)


def test_an_answer_that_the_token_limit_cut_is_refused_even_if_it_looks_whole() -> None:
    with pytest.raises(InvalidJudgement, match="token limit") as raised:
        judgement_of(VFIG, ChatAnswer(GOOD, "length"))
    assert "max_tokens" in str(raised.value.hint)


def test_the_words_are_bounded_and_harmless() -> None:
    judgement = read_judgement(VFIG, json.dumps({"reason": "\x1b[31mred\u202e" + "x" * 5000, **dict.fromkeys(AXES, 1)}))
    assert judgement.reason.startswith("\\u001b[31mred\\u202e") and len(judgement.reason) == MOST_REASON_CHARS


def test_a_message_never_repeats_hidden_characters_of_the_answer() -> None:
    with pytest.raises(InvalidJudgement) as raised:
        read_judgement(VFIG, '{"\\u001b[2Jaxis": 1, "\\u001b[2Jaxis": 1}')
    assert "2Jaxis" in raised.value.message and "\x1b" not in raised.value.message


@given(st.lists(st.floats(0, 1), min_size=4, max_size=4), st.text(max_size=50))
def test_a_judgement_that_is_kept_as_text_is_read_back(scores: list[float], reason: str) -> None:
    first = read_judgement(VFIG, json.dumps({"reason": reason, **dict(zip(AXES, scores, strict=True))}))
    assert read_judgement(VFIG, first.as_json()) == first
    assert 0 <= first.total(VFIG) <= 1 and math.isclose(first.total(VFIG), sum(scores) / 4, abs_tol=1e-12)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), st.lists, max_leaves=5))
def test_only_numbers_from_0_to_1_are_scores(value: object) -> None:
    fields = {"reason": "r", **dict.fromkeys(AXES, value)}
    is_score = isinstance(value, float) and 0 <= value <= 1
    try:
        read_judgement(VFIG, json.dumps(fields))
    except InvalidJudgement:
        assert not is_score
    else:
        assert is_score


def test_a_score_that_is_not_finite_cannot_be_kept() -> None:
    with pytest.raises(ValueError):
        Judgement(dict.fromkeys(AXES, math.nan), "").as_json()
