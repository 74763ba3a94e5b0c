"""The task we_math: prompts, truth (truth.py), reward, and metrics over composite problems with their sub-problems.

A composite problem of two or three steps and its sub-problems, one for each step, are a set (We-Math, arXiv:2407.01284,
section 3.3). A set is in one of four classes, strictly:

- IK, insufficient knowledge: a sub-problem is wrong, and the composite problem, too.
- IG, inadequate generalisation: all sub-problems are right, the composite problem is wrong.
- CM, complete mastery: all are right.
- RM, rote memorisation: a sub-problem is wrong, and the composite problem is right.

Loosely, a set whose composite problem is right is RM only if all its sub-problems are wrong, else CM.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from vlmrl.metric import SHARE, Metric
from vlmrl.rewards.text_parsing import OPTIONAL, REQUIRED
from vlmrl.tasks.attack import Attack, Kind, attacks_of
from vlmrl.tasks.base import GradedResponse, Task, prepared_task
from vlmrl.tasks.we_math.truth import LETTERS, MULTI, NUM_STEPS, notes_on, read_options, truth_problems
from vlmrl.types import RewardInput, Row

METRICS = {
    "score_strict": Metric("higher", SHARE),
    "score_loose": Metric("higher", SHARE),
    "IK": Metric("lower", SHARE),
    "IG": Metric("neither", SHARE),
    "CM_strict": Metric("higher", SHARE),
    "CM_loose": Metric("higher", SHARE),
    "RM_strict": Metric("lower", SHARE),
    "RM_loose": Metric("lower", SHARE),
}


def set_metrics(responses: Sequence[GradedResponse]) -> dict[str, float | None]:
    """Return the metrics of complete sets; all None if no set is complete.

    `IK`, `IG` and `CM_*` are shares of the sets; `RM_*` is RM / (CM + RM), as published, None without such a set. A
    score is (N - IG / 2 - RM - IK) / N. A response whose reward gave no accuracy counts as wrong. Several samples of a
    set are several sets: the first samples of all its problems, the second ones, and so on.
    """
    counts: dict[str, int] = dict.fromkeys(("IK", "IG", "CM_strict", "CM_loose", "RM_strict", "RM_loose"), 0)
    total = 0
    for parts, whole in complete_sets(responses):
        total += 1
        if not whole:
            counts["IG" if all(parts) else "IK"] += 1
        else:
            counts["CM_strict" if all(parts) else "RM_strict"] += 1
            counts["CM_loose" if any(parts) else "RM_loose"] += 1
    metrics: dict[str, float | None] = dict.fromkeys(METRICS)
    if not total:
        return metrics
    for kind in ("strict", "loose"):
        mastered, learnt_by_rote = counts[f"CM_{kind}"], counts[f"RM_{kind}"]
        metrics[f"score_{kind}"] = (total - 0.5 * counts["IG"] - learnt_by_rote - counts["IK"]) / total
        metrics[f"CM_{kind}"] = mastered / total
        both = mastered + learnt_by_rote
        metrics[f"RM_{kind}"] = learnt_by_rote / both if both else None
    return metrics | {"IK": counts["IK"] / total, "IG": counts["IG"] / total}


def complete_sets(responses: Sequence[GradedResponse]) -> list[tuple[list[bool], bool]]:
    """Return (whether each sub-problem is right, whether the composite problem is right) of each complete set.

    In a resample a set may be there several times, with all its rows.
    """
    members: dict[tuple[str, int], dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    steps: dict[tuple[str, int], int] = {}
    for x, _, outcome in responses:
        name, step = x.truth.get("set"), x.truth.get("step")
        if isinstance(name, str) and isinstance(step, str):
            members[name, x.sample][step].append((outcome.get("accuracy") or 0.0) > 0)
            if step == MULTI:
                number = x.truth.get("num_steps")
                steps[name, x.sample] = number if type(number) is int and number in NUM_STEPS else 0
    sets = []
    for key, by_step in members.items():
        names = [str(number) for number in range(1, steps.get(key, 0) + 1)]
        if len(names) > 1:
            copies = min(len(by_step.get(name, ())) for name in (*names, MULTI))
            sets += [([by_step[name][i] for name in names], by_step[MULTI][i]) for i in range(copies)]
    return sets


def unit_of(truth: Mapping[str, object], prompt_id: str) -> str:
    """Return the unit with which a row is resampled: its set, or the row alone."""
    name = truth.get("set")
    return f"set {name}" if isinstance(name, str) else f"row {prompt_id}"


NAME = "we_math"
SUMMARY = (
    "composite problems with a figure, and their sub-problems; options or free answers (made by `vlmrl prep we_math`)"
)
THINK, DIRECT = "think", "direct"
VARIANTS: Mapping[str, str] = {THINK: REQUIRED, DIRECT: OPTIONAL}
"""Prompt -> whether its reward requires a thought. "direct" asks for the answer alone, for small models."""


def we_math_task(info: Mapping[str, Any], variant: str | None = None) -> Task:
    """Return the task of a dataset; see `prepared_task`."""
    chosen = variant or THINK
    return prepared_task(
        NAME,
        SUMMARY,
        info,
        f"we_math/{chosen}.jinja",
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


TRICKS: Sequence[tuple[str, str, Kind, str]] = (
    ("every number", "all numbers from 0 to 59 in the answer", "void", "{guess}<answer>{numbers}</answer>"),
    ("every letter", "all letters of options in the answer", "void", "{guess}<answer>{letters}</answer>"),
    ("words that begin with a letter", "a word for each option", "void", "{guess}<answer>Because Any Can</answer>"),
    ("right, then wrong", "two answers, the right one first", "broken",
     "{guess}<answer>{truth}</answer><answer>{other}</answer>"),
    ("right among others", "the right answer and a wrong one", "miss", "{guess}<answer>{truth} {other}</answer>"),
    ("the answer in the thought", "the right answer only within the thought", "broken",
     "<think>The Answer: {truth}</think>"),
    ("another option", "a wrong answer", "miss", "{guess}<answer>{other}</answer>"),
)  # fmt: skip
"""Tricks that earned something from published rewards for such answers; see `attacks_of`."""


def attacks(rows: Sequence[RewardInput]) -> list[Attack]:
    """Return tricks with answers, of which `other` is wrong: another option, or a number that no row has."""

    def pieces(x: RewardInput) -> dict[str, str]:
        options = x.truth.get("options")
        letters = list(read_options(options)) if isinstance(options, str) else []
        wrong = [letter for letter in letters if letter != x.truth.get("answer")]
        chosen = {"truth": str(x.truth.get("answer", "")), "other": wrong[0] if wrong else "987654.5"}
        every = {"numbers": " ".join(map(str, range(60))), "letters": ", ".join(LETTERS)}
        return {**chosen, **every, "guess": "<think>I guess.</think>"}

    return attacks_of(TRICKS, pieces)
