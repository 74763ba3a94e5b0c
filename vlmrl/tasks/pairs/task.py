"""The pair task: its truth schema, its outcome, and correct answers from which a model learns the format."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from vlmrl.errors import DataError
from vlmrl.rewards.text_parsing import LEVEL_NAME
from vlmrl.tasks.base import Task
from vlmrl.tasks.pairs.draw import pair_distance
from vlmrl.tasks.pairs.outcome import METRICS, confidence_figures, outcome_as
from vlmrl.tasks.pairs.truth_kind import kind_of_levels

SUMMARY = "same class or not: two images, a hierarchy of names, a probability (made by `vlmrl prep pairs`)"
RESERVED_LEVELS = frozenset({"think", "answer", "format", "consistency", "note", "detail", "same", "distance"})
"""Names that no level may have, because the answer format, the truth or the reward's parts use them."""


def pair_task(info: Mapping[str, Any], *, name: str = "pairs", summary: str = SUMMARY) -> Task:
    """Return the task bound to a dataset made by `vlmrl prep`; `info` is its dataset.json (`levels`, coarse to fine).

    Raises: DataError when the dataset has no levels.
    """
    levels = info.get("levels")
    if not isinstance(levels, list) or not levels:
        raise DataError(
            f"task `{name}` needs a dataset with levels",
            where=str(info.get("name")),
            hint="make one with `vlmrl prep pairs --levels a,b`, or use task `table`",
        )
    check_levels(levels)
    measure = outcome_as("taxonomy", {"levels": levels})
    template = files("vlmrl.tasks").joinpath(name).joinpath("prompt.jinja").read_text(encoding="utf-8")
    return Task(
        name=name,
        summary=summary,
        template=template,
        template_file=f"tasks/{name}/prompt.jinja",
        variables={"levels": levels},
        validate=_validator(levels),
        profiles={"default": ("taxonomy", {"levels": levels})},
        outcome=measure(None),
        outcome_as=measure,
        metrics=METRICS,
        figures=confidence_figures,
        by=("distance",),
        trace=lambda row, rng: write_trace(row.truth, levels, rng),
        kind=kind_of_levels(levels),
    )


def check_levels(levels: Sequence[str]) -> None:
    """Raise a DataError unless all levels are valid tags, no level is repeated, and none has a reserved name."""
    for level in levels:
        if not LEVEL_NAME.fullmatch(level) or level in RESERVED_LEVELS:
            raise DataError(
                f"level name {level!r} cannot be used",
                hint=f"letters, digits, - and _, a letter first; not {', '.join(sorted(RESERVED_LEVELS))}",
            )
    if not levels or len(set(levels)) < len(levels):
        raise DataError(f"levels {', '.join(levels) or '(none)'}: name each level once, coarse to fine")


def levels_due(truth: Mapping[str, Any], levels: Sequence[str]) -> list[str]:
    """Return the levels that an answer must state: all levels down to the first one whose two names differ."""
    due = []
    for level in levels:
        due.append(level)
        if truth[level][0] != truth[level][1]:
            break
    return due


def write_trace(truth: Mapping[str, Any], levels: Sequence[str], rng: random.Random) -> str:
    """Return a correct answer: the names of the required levels (`levels_due`), and a probability on the right side.

    For a pair of the same class, the probability is at least 0.6, and most often 0.9. For a different pair it is at
    most 0.4, and most often 0.1. It varies, so that a policy trained on these answers can explore several
    probabilities. It varies little, because random numbers are noise: they delay learning how the answer follows from
    the names.
    """
    tags = "".join(f"<{level}>{truth[level][0]}; {truth[level][1]}</{level}>" for level in levels_due(truth, levels))
    return f"<think>{tags}</think><answer>{draw_probability(truth['same'], rng):.1f}</answer>"


def draw_probability(same: bool, rng: random.Random) -> float:
    """Draw a probability on the right side of 0.5, a multiple of 0.1; see `write_trace`."""
    tenths = rng.choices((9, 8, 7, 6), (6, 2, 1, 1))[0]
    return (tenths if same else 10 - tenths) / 10


def _validator(levels: Sequence[str]) -> Callable[[Mapping[str, Any]], list[str]]:
    def validate(truth: Mapping[str, Any]) -> list[str]:
        wrong = []
        if not isinstance(truth.get("same"), bool):
            wrong.append(f"`same` is {truth.get('same')!r}, not true or false")
        for level in levels:
            names = truth.get(level)
            if not (
                isinstance(names, (list, tuple)) and len(names) == 2 and all(isinstance(n, str) and n for n in names)
            ):
                wrong.append(f"`{level}` is {names!r}, not two names")
            elif bad := [n for n in names if any(c in n for c in ";<>\n") or n != n.strip()]:
                wrong.append(
                    f"`{level}` has the name {bad[0]!r}, which the answer format cannot hold (; < > or outer spaces)"
                )
        if wrong:
            return wrong
        first, second = (tuple(truth[level][side] for level in levels) for side in (0, 1))
        distance = pair_distance(first, second)
        if truth["same"] != (distance == 0):
            wrong.append(f"`same` is {truth['same']} but the names are {'equal' if distance == 0 else 'different'}")
        if truth.get("distance") != distance:
            wrong.append(f"`distance` is {truth.get('distance')!r}; the names make it {distance}")
        return wrong

    return validate
