"""Kind of the rows that show two images and ask whether they are of one class. Their truth identifies them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vlmrl.data.dataset_visit import RowLabels, answer_labels
from vlmrl.tasks.attack import Play, Stage
from vlmrl.tasks.pairs.answer_form import form_of
from vlmrl.tasks.pairs.play import play_pairs
from vlmrl.tasks.truth_kinds import RowKind, Truth, TruthForm
from vlmrl.types import Row

NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?")


def is_pair(truth: Truth) -> bool:
    return "same" in truth


def level_names(truth: Truth) -> list[str]:
    """Return the truth fields that hold two names, in their order. They are the levels if no levels are known."""
    return [name for name, value in truth.items() if isinstance(value, list) and len(value) == 2]


def side_of(truth: Truth, answer: str) -> bool | None:
    """Return whether an answer is a probability on the right side of 0.5; None for 0.5 and for any other text."""
    if not isinstance(truth.get("same"), bool):
        return None
    confidence = float(answer) if NUMBER.fullmatch(answer) else 0.5
    return (confidence > 0.5) == truth["same"] if confidence != 0.5 and confidence <= 1 else None


def pair_labels_of(row: Row) -> RowLabels:
    """Return the labels of a pair for the data doctor: same or different, its distance, and the individuals shown."""
    same, distance = row.truth.get("same"), row.truth.get("distance")
    label = ("same" if same else "different") if isinstance(same, bool) else answer_labels(row).label
    shown = row.columns.get("individuals")
    names = tuple(str(name) for name in shown or () if name is not None)
    return RowLabels(label, distance if isinstance(distance, int) else None, "individual" if shown else "", names)


def play_by_levels(stage: Stage) -> Play:
    """Return the answers and tricks for pairs without a task; the levels are found from their truths."""
    return play_pairs(form_of(level_names(stage.rows[0].truth)), stage)


PAIRS = RowKind(
    matches=is_pair,
    arguments=lambda truth: {"levels": level_names(truth)},
    play=play_by_levels,
    is_right=side_of,
    labels=pair_labels_of,
    specificity=1,
)


def kind_of_levels(levels: Sequence[str]) -> RowKind:
    """Return the kind of rows with these levels, coarse to fine."""
    return replace(PAIRS, play=partial(play_pairs, form_of(levels)))


def truth_form(truth: Truth, columns: Sequence[str]) -> TruthForm:
    """Return the form of pair truths in a table: `same`, and two names per level, in columns or in one mapping."""
    named = level_names(truth)
    levels = {"levels": [name for name in named if name != "same"] or None}
    fields = ("same", "distance", *(name for name in columns if name in named))
    return TruthForm(fields, settings=levels, info=partial(_levels_alone, levels))


def _levels_alone(levels: Mapping[str, Any], truth: Truth, is_sure: bool) -> Mapping[str, Any]:
    return levels
