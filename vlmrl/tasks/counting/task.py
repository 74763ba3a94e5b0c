"""The task counting: prompts, truth, reward, measures.

The truth of a row is its `answer`, a whole number; of drawn rows also `asks`, the words that the question names
(all, colour, kind, both). Rows of published tables have None there.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import Any

from vlmrl.metric import SHARE, Metric
from vlmrl.redaction.redact import quoted
from vlmrl.rewards.answer_form import OPTIONAL, REQUIRED
from vlmrl.tasks.attack import Attack, says
from vlmrl.tasks.base import Outcome, Task, require_prepared
from vlmrl.tasks.counting.reward import LARGEST_COUNT, read_count
from vlmrl.types import RewardInput, Row, Score

NAME = "counting"
SUMMARY = "how many objects of a kind an image shows, as a whole number (made by `vlmrl prep counting`)"
THINK, DIRECT = "think", "direct"
VARIANTS: Mapping[str, str] = {THINK: REQUIRED, DIRECT: OPTIONAL}
"""Prompt -> whether its reward requires a thought. "direct" asks for the number alone, for small models."""
MOST_ERROR = 100
"""Largest absolute error of one answer that is counted: one absurd number must not decide the mean over all rows."""


def counting_task(info: Mapping[str, Any], variant: str | None = None) -> Task:
    """Return the task bound to a dataset that `vlmrl prep` made; `info` is its dataset.json.

    Raises: DataError when the dataset is a table that was not prepared.
    """
    require_prepared(NAME, info)
    chosen = variant or THINK
    return Task(
        name=NAME,
        summary=SUMMARY,
        template=files("vlmrl.tasks.counting").joinpath(f"{chosen}.jinja").read_text(encoding="utf-8"),
        template_file=f"tasks/counting/{chosen}.jinja",
        validate=truth_problems,
        profiles={"default": ("count", {"thought": VARIANTS[chosen]}), "rllava": ("rllava_count", {})},
        outcome=measure,
        metrics={
            "absolute_error": Metric("lower", (0.0, float(MOST_ERROR))),
            "bias": Metric("neither", (-float(MOST_ERROR), float(MOST_ERROR))),
            "parse_failure": Metric("lower", SHARE),
        },
        by=("answer", "asks"),
        trace=partial(write_trace, chosen),
        attacks=attacks,
        variant=chosen,
        variants=tuple(VARIANTS),
    )


def truth_problems(truth: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a truth, in words."""
    answer = truth.get("answer")
    if type(answer) is int and 0 <= answer <= LARGEST_COUNT:
        return []
    return [f"`answer` is {quoted(answer, 60)}, not a whole number from 0 to {LARGEST_COUNT:,}"]


def measure(x: RewardInput, score: Score) -> Outcome:
    """Return the measures of one answer, the same with every reward.

    Returns: accuracy; absolute_error, at most 100, where an answer without a number counts like the answer 0 (at least
        1); bias: answer minus truth, None without a number; parse_failure.
    """
    truth = x.truth.get("answer", 0)
    answer, _ = read_count(x.response)
    if answer is None:
        lost = float(min(MOST_ERROR, max(1, truth)))
        return {"accuracy": 0.0, "absolute_error": lost, "bias": None, "parse_failure": 1.0}
    error = max(-MOST_ERROR, min(MOST_ERROR, answer - truth))
    return {
        "accuracy": float(answer == truth),
        "absolute_error": float(abs(error)),
        "bias": float(error),
        "parse_failure": 0.0,
    }


def write_trace(variant: str, row: Row, rng: random.Random) -> str:
    """Return a right response in the form of the variant."""
    answer = f"<answer>{row.truth['answer']}</answer>"
    return answer if variant == DIRECT else f"<think>I count {row.truth['answer']}.</think>{answer}"


def attacks(rows: Sequence[RewardInput]) -> list[Attack]:
    """Return tricks that earned something from published rewards for counts."""
    form = "<think>I guess.</think><answer>{}</answer>"
    every = " ".join(str(number) for number in range(30))

    def other(x: RewardInput) -> int:
        return int(x.truth.get("answer", 0)) + 1

    return [
        Attack("form without a number", "the whole form, and a word as its answer", "void", says(form.format("many"))),
        Attack("numbers up to 29", "all numbers from 0 to 29 in the answer", "void", says(form.format(every))),
        Attack("a range", "an interval as the answer", "void", says(form.format("0-30"))),
        Attack(
            "right, then wrong",
            "two answers, the right one first",
            "broken",
            lambda x: f"{form.format(x.truth.get('answer', 0))}<answer>{other(x)}</answer>",
        ),
        Attack(
            "wrong, then right",
            "two answers, the right one last",
            "broken",
            lambda x: f"{form.format(other(x))}<answer>{x.truth.get('answer', 0)}</answer>",
        ),
        Attack(
            "the answer in the thought",
            "the right number only within the thought",
            "broken",
            lambda x: f"<think>It is {x.truth.get('answer', 0)}.</think>",
        ),
        Attack("one too many", "the right number plus one", "miss", lambda x: form.format(other(x))),
    ]
