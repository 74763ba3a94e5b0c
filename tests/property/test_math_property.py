"""The grader of mathematical answers: total on any text, and one result for all spellings of a value."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.rewards.math.grader import make_grader
from vlmrl.rewards.math.latex import PLACES, find_answer, read_number
from vlmrl.rewards.math.reading import read
from vlmrl.types import RewardInput

PIECES = st.sampled_from([
    "\\boxed{", "}", "{", "\\frac", "1", "20", "-", "+", "=", "\\pm", ",", "(", ")", "[", "\\{", "\\}", "\\cup", "<",
    "\\le", "\\text{", "cm", "%", "\\$", "^", "_", "\\circ", "x", "\\in", " and ", "not", "\\infty", "\\approx",
    "</think>", "B", ".", "\\left", "\\sqrt", "'", "\\overline{", "\u00bd", "\u03c0", "\x00", "\ud800", "10^{3}", "/",
    "<think>", ])  # fmt: skip
TEXTS = st.one_of(st.text(max_size=30), st.lists(PIECES, max_size=14).map("".join))


@pytest.fixture(scope="module")
def grade():
    grader = make_grader()
    return lambda gold, answer: grader(RewardInput(f"\\boxed{{{answer}}}", {"answer": gold})).parts["accuracy"] == 1.0


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.sampled_from(PLACES), st.sampled_from(["skip", "read"]))
def test_every_text_has_a_reading(text, place, thought):
    answer = find_answer(text, place=place, thought=thought)
    assert (answer.text is None) == bool(answer.reason)
    reading = read(text)
    assert bool(reading.problem) == (reading.kind == "unclear")


def spellings(value: Fraction) -> list[str]:
    """Texts that all mean the value, exactly."""
    sign, top, bottom = "-" if value < 0 else "", abs(value.numerator), value.denominator
    texts = [f"{value.numerator}/{bottom}"]
    texts += [f"{sign}\\frac{{{top}}}{{{bottom}}}", f"\\dfrac{{{sign}{3 * top}}}{{{3 * bottom}}}"]
    texts += [f"${value.numerator}/{bottom}$", f"x = {value.numerator}/{bottom}", f"({value.numerator}/{bottom})"]
    if bottom == 1:
        texts += [f"{sign}{top}", f"{sign}{top}.00", f"{sign}{top:,}", f"{sign}{top}.0\\times 10^{{0}}"]
    elif top > bottom:
        texts.append(f"{sign}{top // bottom}\\frac{{{top % bottom}}}{{{bottom}}}")
    return texts


@settings(max_examples=60, deadline=None)
@given(
    st.fractions(min_value=-9999, max_value=9999, max_denominator=50), st.integers(min_value=1, max_value=99), st.data()
)
def test_all_spellings_of_a_value_are_one_answer(grade, value, more, data):
    texts = spellings(value)
    gold, answer = data.draw(st.sampled_from(texts)), data.draw(st.sampled_from(texts))
    assert grade(gold, answer), (gold, answer)
    other = data.draw(st.sampled_from(spellings(value + more)))
    assert not grade(gold, other), (gold, other)
    number = read_number(texts[0])
    assert number is not None and number.value == value


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 999), st.integers(2, 97), st.integers(3, 9))
def test_a_rounded_decimal_is_the_root_and_its_neighbour_is_not(grade, factor, inside, places):
    exact = factor * inside**0.5
    gold = f"{factor}\\sqrt{{{inside}}}"
    rounded = f"{exact:.{places}f}"
    assert grade(gold, rounded)
    neighbour = f"{float(rounded) + 2 * 10**-places:.{places}f}"
    assert not grade(gold, neighbour)
