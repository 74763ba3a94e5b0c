r"""We-Math reward that RLLaVA published, with its flaws. Use it only to reproduce its runs. Runs in workers only.

Source: TinyLoopX/RLLaVA at 4753d4a, `examples/reward_function/wemath.py:accuracy_reward` and `format_reward`.

The flaws that are kept: the first letter of the answer is its option, so that `Because` is B; what follows the last
word `Answer`, the first box with a letter and the last single letter of the response count as answers, too; of several
values, those that stand anywhere in the answer earn their share, so that a list of numbers is right; the first answer
counts, and without a tag the whole response.

Differences to the published code: those of the grader of single values, which rewards/math/rllava.py lists; the time
is linear in the length of the response, but for the number of different words in an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from vlmrl.rewards.math.rllava import same_answer
from vlmrl.tasks.perception.rewards import CLOSE, OPEN, first_answer, has_counting_form
from vlmrl.tasks.we_math.grader import numbered
from vlmrl.tasks.we_math.truth import LETTERS, true_answer
from vlmrl.types import RewardInput, RewardResult

BOXED_LETTER = re.compile(r"\\boxed\{([A-Ha-h])\}")
LONE_LETTER = re.compile(r"\b[A-E]\b")
NUMBERED = re.compile(r"(?:^|\s)\((\d+)\)")
NO_LIST = re.compile(r"\\frac|\\binom|\\sqrt")
MOST_WORDS = 8
MOST_SHOWN = 200
STOP_WORDS = {
    "the", "a", "an", "is", "are", "was", "were", "be", "been", "being", "have", "has", "had", "do", "does", "did",
    "will", "would", "could", "should", "may", "might", "shall", "can", "to", "of", "in", "for", "on", "with", "at",
    "by", "from", "it", "its", "this", "that", "these", "those", "not", "and", "but", "if", "then", "so", "because",
    "there", "here", "all", "each", "every", "both", "few", "more", "some", "any", "no", "than", "too", "very",
    "just", "about",
}  # fmt: skip


def make_grader() -> Callable[..., Any]:
    """Return the grader, with SymPy warmed up."""
    same_answer("2x+1", "1+2x")
    return graded


def graded(x: RewardInput) -> RewardResult:
    """Return the published parts of a response."""
    truth = true_answer(x.truth)
    if len(truth) == 1 and truth in LETTERS:
        answer = option_letter(x.response)
        accuracy = float(answer == truth)
    else:
        answer, truth = first_answer(x.response), first_answer(truth)
        accuracy = share_of_values(answer, truth)
    parts = {"accuracy": accuracy, "format": float(has_counting_form(x.response))}
    return RewardResult(parts, "", {"answer": answer[:MOST_SHOWN]})


def option_letter(response: str) -> str:
    """Return the letter that the published code takes for the answer; "" without one."""
    start = response.find(OPEN)
    if start >= 0 and CLOSE in response[start:]:
        inside = first_answer(response[start:])
        if inside and inside[0].upper() in LETTERS:
            return inside[0].upper()
    _, word, after = response.rpartition("Answer")
    after = re.sub(r"[><:.]", "", after).strip() if word else ""
    if after and after[0].upper() in LETTERS:
        return after[0].upper()
    if (box := BOXED_LETTER.search(response)) is not None:
        return box[1].upper()
    lone = LONE_LETTER.findall(response)
    return lone[-1] if lone else ""


def share_of_values(answer: str, truth: str) -> float:
    """Return the share of the values of a truth that the published code finds in an answer."""
    if same_answer(answer, truth):
        return 1.0
    items = _numbered(truth)
    if len(items) > 1:
        given = _numbered(answer)
        if len(given) == len(items):
            return sum(map(same_answer, given, items)) / len(items)
        return sum(same_answer(answer, one) for one in items) / len(items)
    if re.search(r"\bor\b", truth, re.IGNORECASE):
        alternatives = [one.strip() for one in re.split(r"\s+or\s+", truth, flags=re.IGNORECASE) if one.strip()]
        if len(alternatives) > 1:
            return float(any(same_answer(answer, one) for one in alternatives))
    if "," in truth and not NO_LIST.search(truth):
        values = [piece.strip() for piece in truth.split(",") if piece.strip()]
        if len(values) > 1:
            pieces = (
                [piece.strip() for piece in answer.split(",") if piece.strip()] if "," in answer else answer.split()
            )
            return _share_among(values, pieces or [answer])
    values = truth.split()
    if 1 < len(values) <= MOST_WORDS and not any(value.lower() in STOP_WORDS for value in values):
        return _share_among(values, answer.replace(",", " ").split() or [answer])
    return 0.0


def _share_among(values: Sequence[str], pieces: Sequence[str]) -> float:
    """Return the share of values that are somewhere among the pieces."""
    different = list(dict.fromkeys(pieces))
    return sum(any(_same_word(piece, value) for piece in different) for value in values) / len(values)


def _same_word(piece: str, value: str) -> bool:
    return same_answer(piece, value) or piece.strip().lower() == value.strip().lower()


def _numbered(text: str) -> list[str]:
    """Return the texts behind (1), (2), ... that are not empty; the whole text without two of them."""
    pieces = [piece for piece in numbered(text, NUMBERED) if piece]
    return pieces if len(pieces) > 1 else [text]
