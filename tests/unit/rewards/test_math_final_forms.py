"""Answers that are not worked out, and texts that look like arithmetic: dates, times, ranges, ratios."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.rewards.math.expressions import warm_up
from vlmrl.rewards.math.grader import judge
from vlmrl.rewards.math.reading import read
from vlmrl.rewards.math.rules import Policy


@pytest.fixture(scope="module", autouse=True)
def grammar() -> None:
    warm_up()


CALCULATIONS = [
    ("1776", r"37\cdot 48"),
    ("1776", "37*48"),
    ("1776", "1800-24"),
    ("7", "3+4"),
    ("120", "180-60"),
    (r"6\sqrt5", r"2\cdot 3\sqrt5"),
    ("-10", "10-20"),
    ("(1,2)", "(1,1+1)"),
    (r"7+4\sqrt3", r"3+4+4\sqrt3"),
    ("5", r"\frac{2+3}{1}"),
    (r"\frac{3}{8}", r"\frac{1}{2}\times\frac{3}{4}"),
]
FINAL = [
    (r"\frac{1}{2}", "0.5"),
    ("0.5", r"\frac12"),
    ("13.4", r"6\sqrt{5}"),
    (r"6\sqrt5", r"\sqrt{180}"),
    ("8", "2^{3}"),
    (r"1+\sqrt2", r"\sqrt2+1"),
    (r"\frac{5\pi}{6}", r"\frac{5}{6}\pi"),
    ("2^{10}", "4^5"),
    ("100000", "10^5"),
    ("1500", r"1.5\times 10^3"),
    ("x^2+2x+1", "(x+1)^2"),
    ("1776", r"37\cdot 48=1776"),
    (r"7+4\sqrt3", r"4\sqrt3+7"),
    ("3+4i", "4i+3"),
    (r"\pi", "3.14159"),
    (r"\frac{1+\sqrt{5}}{2}", r"\frac{\sqrt5+1}{2}"),
    (r"120^\circ", r"\frac{2\pi}{3}"),
    (r"16-4\pi", r"4(4-\pi)"),
    (r"\ln 4", r"2\ln 2"),
    (r"2\sqrt{13}", r"\sqrt{52}"),
    ("3.5", r"3\frac12"),
    (r"3\cdot 4", r"3\cdot 4"),
]
SAME = [
    ("2020-01-02", "2020-01-02"),
    ("2020-01-02", "2020-1-2"),
    ("10:30", "10:30"),
    ("10-20", "10-20"),
    ("10-20", "10\u201320"),
    ("1/2/2020", "1/2/2020"),
    ("3:1", "6:2"),
    ("3:4", r"\frac{3}{4}"),
    (r"\frac34", "3:4"),
    ("1:4", "3:12"),
    ("10-20 cm", "10-20 cm"),
    ("2:3:4", "2:3:4"),
    ("3:1", r"3 \colon 1"),
    ("5 RMB", "5 yuan"),
]
OTHER = [
    ("2020-01-02", "2020-02-01"),
    ("2020-01-02", "2017"),
    ("10:30", "1/3"),
    ("10:30", "1:3"),
    ("10-20", "-10"),
    ("1/2/2020", "0.00024752"),
    ("3:1", "3"),
    ("3", "3:1"),
    ("3:4", "4:3"),
    ("10-20 cm", "-10 cm"),
    ("5-3", "2"),
    ("3:1", "3-1"),
    ("5 yuan", "5 yen"),
    ("2:3:4", "4:6:8:1"),
]


@pytest.mark.parametrize(("gold", "answer"), CALCULATIONS + OTHER)
def test_these_are_wrong(gold: str, answer: str) -> None:
    assert not judge(gold, answer, Policy()).is_right


@pytest.mark.parametrize(("gold", "answer"), FINAL + SAME)
def test_these_are_right(gold: str, answer: str) -> None:
    assert judge(gold, answer, Policy()).is_right


@given(st.integers(1, 999), st.integers(1, 999), st.sampled_from(["+", "-", r"\cdot ", r"\times ", "*"]))
def test_no_arithmetic_of_two_numbers_is_its_result(a: int, b: int, sign: str) -> None:
    value = {"+": a + b, "-": a - b}.get(sign, a * b)
    assert not judge(str(value), f"{a}{sign}{b}", Policy()).is_right
    assert judge(str(value), f"{a}{sign}{b}={value}", Policy()).is_right
    assert judge(str(value), str(value), Policy()).is_right


def test_a_letter_with_a_value_is_refused_by_the_exact_policy_for_both_kinds_of_gold() -> None:
    assert judge("9", "C. 9", Policy()).is_right and judge("C", "C. 9", Policy()).is_right
    exact = Policy(choices="exact")
    assert not judge("9", "C. 9", exact).is_right and not judge("C", "C. 9", exact).is_right


@pytest.mark.parametrize("text", [r"\frac{1}{1+" * 18 + "2" + "}" * 18, "[" * 240 + "5" + "]" * 240, "x_" * 100 + "1"])
def test_what_the_parser_would_take_seconds_for_is_not_parsed(text: str) -> None:
    assert read(text).kind == "unclear"
