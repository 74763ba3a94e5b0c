r"""MAYE's published judge and rewards, where they can be reproduced. Runs in workers only.

Its judge accepts an answer by any of three rules, after the same preparation of response and solution: (A) math-verify,
with response and solution in swapped order; (B) its own text judge; (C) equal digits in both boxes before `^`.

Differences to the published code:

- (A) reads LaTeX and, where there is none, a number. math-verify also evaluates arithmetic outside of LaTeX as
  Python, which is left out. Its 5 s clock is replaced by the worker's.
- (B) compares texts and plain numbers only: the whole, or the elements between commas in any order. Two numbers may
  differ by 0.0101 or by a factor of 100, which happens only inside a box with three or more elements. The published
  code also hands model text to `sympify`, which runs Python in SymPy up to 1.12 and raises in the versions that its
  environment pins.
- A solution without a box is an error. The published code compares "" with "" and calls every response without a box
  right.
- A response's length counts its end token. The published code compares one token less.

Source: GAIR-NLP/MAYE at af35b9a, maye/datasets/math.py, maye/rlhf/rewards.py; arXiv:2504.02587.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, parser, verify

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import excerpt
from vlmrl.rewards.math.expressions import number_token, warm_up
from vlmrl.rewards.text_rewards import ground_truth
from vlmrl.types import RewardInput, RewardResult

SENTENCE_END = re.compile(r"(?<!\d)[.!?](?!\d)")
DEGREE_WORDS = (
    "\\text{circ}", "\\text{degree}", "\\{circ}", "\\{degree}", "\\textcirc", "\\textdegree", "\\text{circles}",
    "\\textcircles", "\\text{o}", "\\texto", "\\bigcirc", "\\bullet",
)  # fmt: skip
"""Texts that become `\\circ`, in this order."""
ROOT_WORDS = ("{sqrt}", "{radical}")
"""Texts that become `\\sqrt`."""
DIGITS_IN_BOX = re.compile(r"\\boxed\{(\d*?)(?:\^|$)")
IDEOGRAPHS = re.compile("[\u4e00-\u9fff]+")
LANGUAGE_WEIGHT = -0.1
FLOAT = re.compile(r"[+-]?(?:[0-9]{1,300}(?:\.[0-9]{0,300})?|\.[0-9]{1,300})")
TOLERANCE = 0.0101


def make_grader(**args: Any) -> Callable[..., Any]:
    """Return the grader for the arguments of `vlmrl.rewards.math.rules.maye`, with the parser warmed up."""
    warm_up()
    if not (hasattr(parser, "parse_expr_cached") and hasattr(parser, "Number")):
        raise RewardError(
            "this version of math-verify reads arithmetic in a way that vlmrl does not know",
            hint="install math-verify 0.9.0",
        )
    # Both would evaluate Python.
    parser.parse_expr_cached, parser.Number = _no_arithmetic, number_token
    return partial(_graded, **args)


def _graded(x: RewardInput, *, key: str | None, min_tokens: int, penalty: float) -> RewardResult:
    solution = str(ground_truth(x, key))
    if not boxed_sentence(solution):
        raise RewardError(
            f"the solution {excerpt(repr(solution), 80)} has no box",
            hint="name the column with the boxed solution: [reward.args] key",
        )
    is_right, rule = judge(x.response, solution)
    parts = {"accuracy": float(is_right), "format": format_part(x.response), "language": language_part(x.response)}
    is_penalised = x.finish != "stop" or x.num_tokens < min_tokens
    detail = {
        "gold": boxed_sentence(solution)[:200], "answer": boxed_sentence(x.response)[:200],
        "verdict": "right" if is_right else "wrong", "reason": rule,
    }  # fmt: skip
    note = "cut, or too short" if is_penalised else "" if is_right else f"wrong: {rule}"
    return RewardResult({**parts, "penalty": penalty - sum(parts.values()) if is_penalised else 0.0}, note, detail)


def format_part(response: str) -> float:
    """Return 1 if the response has exactly one closed thought, wherever it stands and whatever it holds; else 0."""
    thoughts, end = 0, 0
    while (start := response.find("<think>", end)) >= 0 and (close := response.find("</think>", start)) >= 0:
        thoughts, end = thoughts + 1, close
    return float(thoughts == 1)


def language_part(response: str) -> float:
    """Return -0.1 times the share of the characters that are CJK ideographs (U+4E00 to U+9FFF)."""
    ideographs = sum(map(len, IDEOGRAPHS.findall(response)))
    return LANGUAGE_WEIGHT * ideographs / len(response) if ideographs else 0.0


@lru_cache(maxsize=8192)
def judge(response: str, solution: str) -> tuple[bool, str]:
    """Return whether the published judge calls a response right, and by which of its rules."""
    answer, gold = boxed_sentence(response), boxed_sentence(solution)
    problem = ""
    try:
        if verify(_parsed(answer), _parsed(gold), timeout_seconds=0, raise_on_error=True):
            return True, "rule A: math-verify"
    except Exception as error:  # of the library, for this text; the published code calls it wrong, too
        problem = f"; math-verify failed: {type(error).__name__}: {excerpt(str(error), 100)}"
    if _same_texts(answer, gold):
        return True, "rule B: the same text"
    digits = [DIGITS_IN_BOX.search(text) for text in (answer, gold)]
    if digits[0] and digits[1] and digits[0].group(1) == digits[1].group(1):
        return True, "rule C: the same digits before `^`"
    return False, ("no rule applies" if answer else "no sentence holds a box") + problem


def boxed_sentence(text: str) -> str:
    """Return the last sentence that holds `boxed`, prepared as the published code does; "" without one."""
    sentences = [s.strip() for s in SENTENCE_END.split(text) if "boxed" in s]
    if not sentences:
        return ""
    last = sentences[-1]
    for words, command in ((DEGREE_WORDS, "\\circ"), (ROOT_WORDS, "\\sqrt"), (("{\u00b0}",), "\\circ")):
        for word in words:
            last = last.replace(word, command)
    return last.replace("\\,\\text{cm}", "cm")


def _parsed(text: str) -> list[Any]:
    return parse(text, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=0, raise_on_error=True)


def _no_arithmetic(text: str) -> None:
    raise ValueError(f"arithmetic outside of LaTeX: {excerpt(text, 40)}")


def _same_texts(answer: str, gold: str) -> bool:
    """Return whether the texts, or their elements between commas in any order, agree, ideographs aside."""
    if answer == gold:
        return True
    sides: list[list[str]] = []
    for text in (answer, gold):
        text = text if IDEOGRAPHS.fullmatch(text) else IDEOGRAPHS.sub("", text)
        if text.count("<") == 2:
            pieces = text.split("<")
            text = f"({pieces[0]}, {pieces[-1]})"
        sides.append([element for piece in _elements(text) for element in _signs(piece)])
    answers, golds = sides
    if len(answers) != len(golds):
        return False
    for one in answers:
        other = next((other for other in golds if _same_element(one, other)), None)
        if other is None:
            return False
        golds.remove(other)
    return True


def _same_element(one: str, other: str) -> bool:
    if one and one == other:
        return True
    if not (FLOAT.fullmatch(one) and FLOAT.fullmatch(other)):
        return False
    return any(abs(float(one) * factor - float(other)) <= TOLERANCE for factor in (0.01, 1.0, 100.0))


def _elements(text: str) -> list[str]:
    """Return the pieces between commas outside of round and square brackets."""
    pieces, depth, start = [], 0, 0
    for place, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            pieces.append(text[start:place].strip())
            start = place + 1
    return [*pieces, text[start:].strip()] if start < len(text) else pieces


def _signs(piece: str) -> list[str]:
    return [piece.replace("\\pm", "+"), piece.replace("\\pm", "-")] if "\\pm" in piece else [piece]
