"""RLLaVA's reward for boxed answers: equal to its published code, flaws included; the reward `math` has none of them.

tests/golden/rllava/math.json holds what `examples/reward_function/math.py` of TinyLoopX/RLLaVA at 4753d4a computed,
with mathruler 0.1.0, pylatexenc 2.11 and SymPy 1.14: [response, truth, overall, accuracy, format].
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlmrl.errors import RewardError
from vlmrl.rewards.base import combine
from vlmrl.rewards.math.rllava import boxed_text, plain_text, same_answer, without_blanks
from vlmrl.rewards.math.rules import math, rllava_math
from vlmrl.types import RewardInput

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "rllava" / "math.json").read_text("utf-8"))
PUBLISHED, FIXED = rllava_math(key="answer"), math(key="answer")
THOUGHT = "<think>a</think> "


def earned(spec: Any, response: str, answer: str) -> float:
    return combine(spec(RewardInput(response, {"answer": answer})), spec.weights)[0]


def test_scores_are_those_of_the_published_code_to_the_digit() -> None:
    assert len(GOLDEN) > 500
    assert 200 < sum(case[3] for case in GOLDEN) < len(GOLDEN) - 200
    for response, answer, overall, accuracy, form in GOLDEN:
        parts = PUBLISHED(RewardInput(response, {"answer": answer}))
        assert (parts["accuracy"], parts["format"]) == (accuracy, form), (response, answer)
        assert earned(PUBLISHED, response, answer) == overall


# (flaw, response, truth, what the published reward earns, what `math` earns)
FLAWS = [
    ("an empty thought has the form", "<think></think>\\boxed{5}", "4", 0.1, 0.0),
    ("so have several thoughts", "<think>a</think><think>b</think></think>\\boxed{5}", "4", 0.1, 0.0),
    ("no box is right for the truth None", "I do not know", "None", 0.9, 0.0),
    ("a box in the thought counts", "<think>\\boxed{4}</think>", "4", 0.9, 0.0),
    ("units are removed without a look", THOUGHT + "\\boxed{4\\text{ cm}}", "4\\text{ miles}", 1.0, 0.0),
    ("a degree sign is not \\circ", THOUGHT + "\\boxed{140^\\circ}", "140\u00b0", 0.1, 1.0),
    ("sums lose their brackets in fractions", THOUGHT + "\\boxed{\\frac{x+1}{2}}", "x+\\frac{1}{2}", 1.0, 0.0),
    ("roots lose their degree", THOUGHT + "\\boxed{\\sqrt[3]{8}}", "\\sqrt{8}", 1.0, 0.0),
    ("fractions that are not in lowest terms are wrong", THOUGHT + "\\boxed{2/4}", "\\frac{1}{2}", 0.1, 1.0),
    ("a name before an equals sign is removed", THOUGHT + "\\boxed{7=4}", "4", 1.0, 0.0),
]


@pytest.mark.parametrize(("response", "answer", "published", "fixed"), [flaw[1:] for flaw in FLAWS], ids=lambda v: None)
def test_flaws_are_kept_by_the_published_reward_alone(
    response: str, answer: str, published: float, fixed: float
) -> None:
    assert earned(PUBLISHED, response, answer) == pytest.approx(published, abs=1e-12)
    assert earned(FIXED, response, answer) == fixed


def test_expressions_outside_of_the_grammar_are_not_equal_and_run_nothing() -> None:
    for text in (
        "__import__('os')",
        "5!/7",
        "sin(30)",
        "9**9**9",
        "((9**99)**99)**99",
        "(x",
        "x)",
        "0x1f.",
        "a.b",
        "007/x",
    ):
        assert not same_answer(f"{text}+y-y", text + " ")
    assert same_answer("2**9x", "512x") and same_answer("(x+1)(x-1)", "x^2-1")
    assert not same_answer("xyz+0", "zyx")  # three letters are never computed


@pytest.mark.parametrize("given", [f"{'(' * 240}1{')' * 240}", "2^(0/0)+1-1", "x**(0/0)", "1+x\u00b2"])
def test_an_expression_without_a_known_value_is_not_equal(given: str) -> None:
    assert not same_answer(given, "1+x") and not same_answer(given, "x+3")


def test_a_fault_of_the_library_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(expression: object) -> object:
        raise KeyError("a fault")

    monkeypatch.setattr("vlmrl.rewards.math.rllava.sympy.simplify", fail)
    with pytest.raises(KeyError, match="a fault"):
        same_answer("7x+1", "8x+1")


def test_boxes_and_blanks_as_the_published_code_reads_them() -> None:
    assert boxed_text("\\boxed{1} \\boxed{ {2} }") == "{2}"
    assert boxed_text("\\boxed{1} \\boxed{2") == boxed_text("") == "None"
    assert without_blanks("a < b / c >\n d ") == "a<b/c>d "
    assert plain_text("2\\frac{1}{2}\\cdot\\sqrt 3") == "2 1/2*sqrt(3)"


def test_the_weight_of_the_format_is_an_argument() -> None:
    assert earned(rllava_math(key="answer", format_weight=0.5), THOUGHT + "\\boxed{5}", "4") == 0.5
    with pytest.raises(RewardError, match="format_weight"):
        rllava_math(format_weight=2.0)


def test_hostile_responses_are_linear() -> None:
    for text in ("<" + " " * 400_000, "\\boxed{" * 50_000, "<think></think>" * 30_000, "\\boxed{" + "{" * 400_000):
        assert earned(PUBLISHED, text, "4") <= 0.1
    for answer in ("1," * 5_000, "\\frac" * 100, "{" * 490, "(" * 490, "-" * 490 + "x", "9^" * 240, "\\sqrt" * 90):
        assert earned(PUBLISHED, f"{THOUGHT}\\boxed{{{answer}}}", "4x") <= 0.1
