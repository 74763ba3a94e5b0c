"""Grader of the math reward. Runs in workers: math-verify needs about a second to load, and some answers never end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import quoted
from vlmrl.rewards.math.answer_text import BOX, MOST_ANSWER_CHARS, find_answer, last_box
from vlmrl.rewards.math.expressions import TooLargeError, UnreadableError, check_size, constant, warm_up
from vlmrl.rewards.math.policy import Policy, checked_policy
from vlmrl.rewards.math.reading import Item, Reading, read
from vlmrl.rewards.math.verdict import judge
from vlmrl.rewards.response_parts import response_parts
from vlmrl.rewards.text_rewards import ground_truth
from vlmrl.types import RewardInput, RewardResult

MOST_SHOWN = 200
"""Maximum length of a text in the detail."""


def make_grader(*, key: str | None = None, parts: Mapping[str, Any] | None = None, **policy: Any) -> Callable[..., Any]:
    """Return the grader for the arguments of `vlmrl.rewards.math.rules.math`, with the parser warmed up."""
    warm_up()
    return partial(_graded, key=key, parts=dict(parts or {}), policy=checked_policy(policy))


def _graded(x: RewardInput, *, key: str | None, parts: Mapping[str, Any], policy: Policy) -> RewardResult:
    golds = [gold_text(one, policy) for one in _accepted(ground_truth(x, key))]
    answer, reason = find_answer(x.response, place=policy.place, thought=policy.thought)
    detail: dict[str, Any] = {"gold": golds[0][:MOST_SHOWN], "answer": None if answer is None else answer[:MOST_SHOWN]}
    is_right = False
    if answer is not None:
        for gold in golds:
            is_right, reason = judge(gold, answer, policy)
            if is_right:
                detail["gold"] = gold[:MOST_SHOWN]
                break
        mixed = policy.mixed == "mixed"
        detail["gold_value"] = shown(read(detail["gold"], mixed=mixed))
        detail["answer_value"] = shown(read(answer, mixed=mixed))
    verdict = "right" if is_right else "wrong" if answer is not None else "no answer"
    detail |= {"verdict": verdict, "reason": reason}
    note = "" if is_right else f"{verdict}: {reason}"
    return RewardResult({"accuracy": float(is_right), **response_parts(x, **parts)}, note, detail)


def _accepted(truth: Any) -> list[Any]:
    accepted = list(truth) if isinstance(truth, (list, tuple)) else [truth]
    if not accepted:
        raise RewardError("the expected answer is an empty list", hint="repair the row")
    return accepted


def gold_text(truth: Any, policy: Policy) -> str:
    r"""Return the gold answer: the last box of a solution, what follows `####`, else the whole text.

    Raises: RewardError for a truth that is empty, too long without a box, or too large to compute.
    """
    return _gold_of(str(truth), policy)


@lru_cache(maxsize=8192)
def _gold_of(text: str, policy: Policy) -> str:
    if BOX.search(text):
        gold, problem = last_box(text)
    else:
        gold, problem = text.rpartition("####")[2].strip(), ""
    if gold is not None and len(gold) > MOST_ANSWER_CHARS:
        problem = f"it has more than {MOST_ANSWER_CHARS} characters and no box"
    problem = problem or gold_problem(gold or "", policy)
    if problem or gold is None:
        raise RewardError(
            f"the expected answer {quoted(text)} cannot be graded: {problem}",
            hint='name the column with the answer: [reward.args] key = "...", or repair the row',
        )
    return gold


def gold_problem(gold: str, policy: Policy) -> str:
    """Return why a gold answer cannot be compared with anything; "" for a sound one."""
    reading = read(gold, mixed=policy.mixed == "mixed")
    if reading.kind == "unclear":
        return reading.problem
    for item in reading.items if reading.kind != "denial" else ():
        if item.number is None:
            try:
                check_size(item.text)
            except TooLargeError:
                continue  # an answer with the same text is right
            except UnreadableError as error:
                return str(error)
    return ""


def shown(reading: Reading) -> str:
    """Return what was read of an answer, in one line; of a single value also the number."""
    if reading.kind in ("unclear", "denial", "words"):
        return f"{reading.kind}: {reading.problem or reading.text}"[:MOST_SHOWN]
    if reading.kind == "choice":
        return f"choice {reading.letter}"
    if reading.parts:
        return " with ".join(shown(part) for part in reading.parts)[:MOST_SHOWN]
    if reading.kind in ("value", "equation"):
        return _shown_item(reading.items[0], reading.kind == "value")[:MOST_SHOWN]
    values = ", ".join(_shown_item(item, False) for item in reading.items)
    if reading.kind == "figures":
        return reading.text[:MOST_SHOWN]
    if reading.kind == "tuple":
        return f"{reading.brackets[0]}{values}{reading.brackets[1]}"[:MOST_SHOWN]
    return f"{reading.kind} of {values}"[:MOST_SHOWN]


def _shown_item(item: Item, computed: bool) -> str:
    """Return an item in words. `computed`: with the value of an expression; the comparison has computed it, too."""
    text = item.text
    if item.number is not None:
        text = text if item.number.step is not None else str(item.number.value)
    elif computed:
        with suppress(UnreadableError, OverflowError):  # the verdict's reason says why there is no value
            real, imaginary = constant(item.text)
            text = text if imaginary else f"{text} = {float(real):.12g}"
    unit = f" {item.unit.name}" if item.unit is not None else ""
    return f"{item.name + ' = ' if item.name else ''}{text}{unit}"
