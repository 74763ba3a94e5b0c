"""The task we_math: prompts, truth, reward, measures over sets. `truth.py` describes the truth of a row."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import Any

from vlmrl.rewards.answer_form import OPTIONAL, REQUIRED
from vlmrl.tasks.attack import Attack, says
from vlmrl.tasks.base import Task, require_prepared
from vlmrl.tasks.we_math.metrics import METRICS, set_metrics, unit_of
from vlmrl.tasks.we_math.truth import LETTERS, notes_on, read_options, truth_problems
from vlmrl.types import RewardInput, Row

NAME = "we_math"
SUMMARY = (
    "composite problems with a figure, and their sub-problems; options or free answers (made by `vlmrl prep we_math`)"
)
THINK, DIRECT = "think", "direct"
VARIANTS: Mapping[str, str] = {THINK: REQUIRED, DIRECT: OPTIONAL}
"""Prompt -> whether its reward requires a thought. "direct" asks for the answer alone, for small models."""


def we_math_task(info: Mapping[str, Any], variant: str | None = None) -> Task:
    """Return the task bound to a dataset that `vlmrl prep` made; `info` is its dataset.json.

    Raises: DataError when the dataset is a table that was not prepared.
    """
    require_prepared(NAME, info)
    chosen = variant or THINK
    return Task(
        name=NAME,
        summary=SUMMARY,
        template=files("vlmrl.tasks.we_math").joinpath(f"{chosen}.jinja").read_text(encoding="utf-8"),
        template_file=f"tasks/we_math/{chosen}.jinja",
        validate=truth_problems,
        notes=notes_on,
        profiles={"default": ("we_math", {"thought": VARIANTS[chosen]}), "rllava": ("rllava_we_math", {})},
        set_metrics=set_metrics,
        metrics=METRICS,
        by=("num_steps",),
        unit=lambda row: unit_of(row.truth, row.prompt_id),
        trace=partial(write_trace, chosen),
        attacks=attacks,
        variant=chosen,
        variants=tuple(VARIANTS),
    )


def write_trace(variant: str, row: Row, rng: random.Random) -> str:
    """Return a right response in the form of the variant; its thought is the published solution if there is one."""
    answer = f"<answer>{row.truth['answer']}</answer>"
    solution = str(row.truth.get("solution") or f"The answer is {row.truth['answer']}.")
    return answer if variant == DIRECT else f"<think>{solution}</think>\n{answer}"


def attacks(rows: Sequence[RewardInput]) -> list[Attack]:
    """Return tricks that earned something from published rewards for such answers."""
    form = "<think>I guess.</think><answer>{}</answer>"
    numbers = " ".join(str(number) for number in range(60))

    def other(x: RewardInput) -> str:
        """Return an answer that is wrong: another option, or a number that no row has."""
        options = x.truth.get("options")
        letters = list(read_options(options)) if isinstance(options, str) else []
        wrong = [letter for letter in letters if letter != x.truth.get("answer")]
        return wrong[0] if wrong else "987654.5"

    def truth(x: RewardInput) -> str:
        return str(x.truth.get("answer", ""))

    return [
        Attack("every number", "all numbers from 0 to 59 in the answer", "void", says(form.format(numbers))),
        Attack("every letter", "all letters of options in the answer", "void", says(form.format(", ".join(LETTERS)))),
        Attack(
            "words that begin with a letter", "a word for each option", "void", says(form.format("Because Any Can"))
        ),
        Attack(
            "right, then wrong",
            "two answers, the right one first",
            "broken",
            lambda x: f"{form.format(truth(x))}<answer>{other(x)}</answer>",
        ),
        Attack(
            "right among others",
            "the right answer and a wrong one",
            "miss",
            lambda x: form.format(f"{truth(x)} {other(x)}"),
        ),
        Attack(
            "the answer in the thought",
            "the right answer only within the thought",
            "broken",
            lambda x: f"<think>The Answer: {truth(x)}</think>",
        ),
        Attack("another option", "a wrong answer", "miss", lambda x: form.format(other(x))),
    ]
