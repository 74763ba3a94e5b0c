r"""Grader of the reward we_math. Runs in workers only.

An answer to a question with options is one letter, alone or before the text of its option. Any other answer has one
value or several. Each value is judged as the reward `math` judges it (rewards/math/rules.py has the rules). Several
values must all be there, in their order, and no others: a part of them earns nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vlmrl.rewards.math.expressions import warm_up
from vlmrl.rewards.math.grader import judge
from vlmrl.rewards.math.latex import BOX, MOST_ANSWER_CHARS, is_denied, last_box, split_top
from vlmrl.rewards.math.rules import Policy
from vlmrl.rewards.text_parsing import final_answer, form_problem, untagged
from vlmrl.tasks.we_math.truth import true_answer, true_options
from vlmrl.types import RewardInput, RewardResult

POLICY = Policy()
LETTER = re.compile(r"\(?\s*([A-Ha-h])\s*\)?\s*(?:[.:)]\s*(.*))?", re.DOTALL)
NUMBERED = re.compile(r"(?:^|\s)\((\d{1,2})\)")
AND = re.compile(r",?\s*(?:\\text\{\s*and\s*\}|\band\b)\s*")
ALTERNATIVES = re.compile(r"\s+or\s+", re.IGNORECASE)
THOUSANDS = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
ANOTHER = re.compile(rf"{BOX.pattern}.*{BOX.pattern}|^\s*(?:[A-Ha-h]|[-+0-9.]+)[\s.,;:]*{BOX.pattern}", re.DOTALL)
"""Second box, or a letter or a number beside a box: what is meant is open."""
MOST_VALUES = 20
MOST_WORDS = 8
MOST_SHOWN = 200


def make_grader(*, thought: str) -> Callable[..., Any]:
    """Return the grader for the arguments of `rewards.we_math`, with the parser of expressions warmed up."""
    warm_up()
    return partial(graded, thought=thought)


def graded(x: RewardInput, *, thought: str) -> RewardResult:
    """Return the parts of a response."""
    truth, options = untagged(true_answer(x.truth)).strip(), true_options(x.truth)
    answer, problem = read_answer(x.response)
    right: list[bool] = []
    if answer is not None and options:
        letter = read_letter(answer, options)
        problem = "" if letter else "the answer is not the letter of an option"
        right = [letter == truth]
        answer = letter or None
    elif answer is not None:
        right = right_values(answer, truth)
    problem = problem or form_problem(x, thought)
    parts = {
        "accuracy": float(bool(right) and all(right)),
        "format": float(not problem),
        "share": sum(right) / len(right) if right else 0.0,
    }
    return RewardResult(parts, problem, {"answer": None if answer is None else answer[:MOST_SHOWN]})


def read_answer(response: str) -> tuple[str | None, str]:
    r"""Return (the only answer of a response, ""), or (None, the reason). A box around it is removed."""
    text, problem = final_answer(response)
    if text is None:
        return None, problem
    if ANOTHER.search(text):
        return None, "two answers in one"
    if is_denied(text):
        return None, "the words before the box deny it"
    text = last_box(text).text or text.strip()
    if not text:
        return None, "the answer is empty"
    if len(text) > MOST_ANSWER_CHARS:
        return None, f"the answer has more than {MOST_ANSWER_CHARS} characters"
    return text, ""


def read_letter(answer: str, options: dict[str, str]) -> str:
    """Return the letter of the option that an answer names; "" if it names none.

    Text behind the letter must be that of its option: `B. 45` is B only if the option B is 45.
    """
    match = LETTER.fullmatch(answer.strip())
    letter = match[1].upper() if match else ""
    if match is None or letter not in options:
        return ""
    rest = _plain(match[2] or "")
    return letter if not rest or rest == _plain(options[letter]) else ""


def _plain(text: str) -> str:
    return "".join(text.split()).rstrip(".").casefold()


def answer_problem(truth: str) -> str:
    """Return why no response can be right where this free answer is the truth; "" if one can."""
    if len(truth) > MOST_ANSWER_CHARS:
        return f"it has more than {MOST_ANSWER_CHARS} characters"
    if not all(right_values(truth, truth)):
        return judge(truth, truth, POLICY).reason or "its values cannot be told apart"
    return ""


def right_values(answer: str, truth: str) -> list[bool]:
    """Return which values of an answer are right, each at its own place; [False] for another number of values."""
    answer, truth = answer.strip(), truth.strip()
    items = numbered(truth)
    if len(items) > 1:
        return _each(numbered(answer), items)
    alternatives = ALTERNATIVES.split(truth)
    if len(alternatives) > 1:
        given = [one for piece in ALTERNATIVES.split(answer) for one in split_top(piece, (",",))]
        if len(given) == 1:
            return [any(judge(one, answer, POLICY).is_right for one in alternatives)]
        return [_is_permutation(given, alternatives)]
    values = _values(truth)
    if len(values) > 1:
        given = _values(answer) if "," in answer else answer.split()
        return _each(given if len(given) == len(values) else _values(AND.sub(", ", answer)), values)
    if judge(truth, answer, POLICY).is_right:
        return [True]
    words = truth.split()
    return _each(answer.replace(",", " ").split(), words) if 1 < len(words) <= MOST_WORDS else [False]


def _each(answers: Sequence[str], truths: Sequence[str]) -> list[bool]:
    if len(answers) != len(truths) or len(truths) > MOST_VALUES:
        return [False]
    return [judge(truth, answer, POLICY).is_right for answer, truth in zip(answers, truths, strict=True)]


def _is_permutation(answers: Sequence[str], truths: Sequence[str]) -> bool:
    """Return whether each answer is another one of the truths, in any order."""
    left = list(truths)
    for answer in answers if len(answers) <= MOST_VALUES else ():
        place = next((i for i, truth in enumerate(left) if judge(truth, answer, POLICY).is_right), None)
        if place is None:
            return False
        del left[place]
    return not left


def _values(text: str) -> list[str]:
    """Return the values between commas outside of brackets, braces and thousands."""
    plain = THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    return [piece.strip() for piece in split_top(plain, (",",))]


def numbered(text: str, pattern: re.Pattern[str] = NUMBERED) -> list[str]:
    """Return the texts behind (1), (2), ...; the whole text if it is not numbered so."""
    marks = list(pattern.finditer(text))
    if len(marks) < 2 or [int(mark[1]) for mark in marks] != list(range(1, len(marks) + 1)):
        return [text]
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return [text[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=True)]
