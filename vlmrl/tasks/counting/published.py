r"""Counting reward that RLLaVA published, with identical results and with its flaws. Use it only to reproduce its runs.

Source: TinyLoopX/RLLaVA at 4753d4a, `examples/reward_function/r1v.py:compute_score`, and the grader that it calls
    (`mathruler.grader.grade_answer`, version 0.1.0) for truths that are whole numbers.

The flaws that are kept: a well-formed response without any answer earns half of the score; the first answer counts, so
that a second one does no harm; without a tag, the whole response is the answer; units, currencies and percent signs are
removed, so that "4 feet" is 4. tests/unit/tasks/test_counting_published.py names each.

Differences to the published code: an answer with a backslash is compared without the conversion of LaTeX (`\\boxed{4}`
is not read as 4); the time is linear in the length of the response.
"""

from __future__ import annotations

import re
from typing import Any

from vlmrl.rewards.answer_form import format_weights
from vlmrl.rewards.base import RewardSpec
from vlmrl.tasks.counting.reward import UNIT, true_count
from vlmrl.types import RewardInput

OPEN, CLOSE = "<answer>", "</answer>"
BEGIN = "<think>"
BETWEEN = re.compile(r"</think>\s*<answer>")
TEXT = re.compile(r"^\\text\{(?P<text>.+?)\}$")
UNITS = (
    "degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year", "foot",
    "feet", "inch", "yard",
)  # fmt: skip
LARGE = {"million": "*10^6", "billion": "*10^9", "trillion": "*10^12"}
THOUSANDS = re.compile(r"(\d)(,)(\d\d\d)($|\D)")
NEARLY = 1e-7
MOST_DETAIL = 200


def rllava_count(*, format_weight: float = 0.5) -> RewardSpec:
    """Return the published reward: accuracy and format, each 0 or 1.

    Args:
        format_weight: weight of the format, in [0, 1]; the accuracy has the rest.
    """
    weights = format_weights(format_weight)
    return RewardSpec(
        "rllava_count", score, {"accuracy": UNIT, "format": UNIT}, weights, pure=True, accuracy="accuracy"
    )


def score(x: RewardInput) -> dict[str, Any]:
    """Return the published parts of a response."""
    answer = first_answer(x.response)
    return {
        "accuracy": float(is_equal(answer, str(true_count(x)))),
        "format": float(has_form(x.response)),
        "detail": {"answer": answer[:MOST_DETAIL]},
    }


def first_answer(response: str) -> str:
    """Return the text of the first answer; the whole response if there is none."""
    start = response.find(OPEN)
    end = response.find(CLOSE, start + len(OPEN)) if start >= 0 else -1
    return (response[start + len(OPEN) : end] if end >= 0 else response).strip()


def has_form(response: str) -> bool:
    """Return whether the response is a thought, white space, and something between answer tags."""
    if not response.startswith(BEGIN) or not response.endswith(CLOSE):
        return False
    middle = BETWEEN.search(response, len(BEGIN))
    return middle is not None and middle.end() <= len(response) - len(CLOSE)


def is_equal(given: str, truth: str) -> bool:
    """Return whether the published grader takes a text for a whole number, `truth`, written in digits."""
    if _first_form(given) == truth:
        return True
    form = _second_form(given)
    if len(form) > 2 and form[0] in "([" and form[-1] in ")]" and not set(form[1:-1]) & set("()[]"):
        inner = form[1:-1].strip()
        return _is_whole(inner) and round(float(_without_thousands(inner))) == int(truth)
    return form == truth


def _first_form(text: str) -> str:
    """Return a text without units, percent signs, a name before `=`, and spaces."""
    text = _inner_text(text.strip()).strip()
    for mark in ("\n", "\\!"):
        text = text.replace(mark, "")
    text = text.replace("\\\\", "\\")
    for mark in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$"):
        text = text.replace(mark, "")
    sides = text.split("\\text{ ")
    if len(sides) > 2:
        return text
    text = sides[0].replace("\\%", "").replace("%", "")
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    return text.replace(" ", "")


def _second_form(text: str) -> str:
    """Return a text as the grader compares it after the first form has failed."""
    text = _inner_text(text)
    for mark in ("\\%", "\\$", "$", "%"):
        text = text.replace(mark, {"\\%": "%", "\\$": "$"}.get(mark, ""))
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in LARGE.items():
        text = text.replace(word, power)
    for unit in UNITS:
        text = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text and text[0] == "{" and text[-1] == "}":
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    if _is_whole(text, thousands=False):
        text = str(round(float(text)))
    text = re.sub("- *", "-", text)
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", text)
    for mark in " {}":
        text = text.replace(mark, "")
    text = text.lower()
    return str(int(float(text.replace(",", "")))) if _is_whole(text) else text


def _inner_text(text: str) -> str:
    match = TEXT.search(text)
    return match["text"] if match is not None else text


def _without_thousands(text: str) -> str:
    while (shorter := THOUSANDS.sub(r"\1\3\4", text)) != text:
        text = shorter
    return text


def _is_whole(text: str, *, thousands: bool = True) -> bool:
    """Return whether a text is a number that is whole up to 1e-7."""
    try:
        number = float(_without_thousands(text) if thousands else text)
        return abs(number - round(number)) <= NEARLY
    except (ValueError, OverflowError):
        return False
