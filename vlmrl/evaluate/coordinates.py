"""Coordinates of the boxes of an evaluation: the declared ones, beside others that might fit the truth better."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from vlmrl.errors import VlmrlError
from vlmrl.store.evaluated_rows import SHOWN_IMAGES
from vlmrl.store.rollouts import seen_of
from vlmrl.tasks.positions import MOST_FITTED
from vlmrl.tasks.source import Source
from vlmrl.types import Media, RewardInput


def coordinates_of(source: Source, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how well responses fit the truth in each of the coordinates (`Fit.fields`), of the first `MOST_FITTED`.

    Args:
        rows: as `evaluate.run.make_records` makes them.
    Returns: {} for a task whose answers are no positions; {"problem": ...} if its reading of them failed.
    """
    if source.task.positions is None:
        return {}
    try:
        inputs = [input_of(row) for row in islice(rows, MOST_FITTED)]
        return source.task.positions(source.reward).fit(inputs).fields()
    except VlmrlError as error:  # the metrics of the evaluation do not depend on this
        return {"problem": str(error)}


def input_of(row: Mapping[str, Any]) -> RewardInput:
    """Return the reward's input for a row of an evaluation, without tokens, turns and pixels."""
    shown = row.get(SHOWN_IMAGES) or row["images"]
    return RewardInput(
        row["text"],
        row["truth"],
        row["columns"],
        finish=row["finish"],
        num_tokens=row["num_tokens"] or 0,
        prompt=row["prompt_text"],
        prompt_id=row["prompt_id"],
        sample=row["sample"],
        media=tuple(map(Media.of, row["images"])),
        seen_sizes=seen_of(shown),
    )


def coordinate_problems(summary: Mapping[str, Any]) -> list[str]:
    """Return in words that the boxes fit other coordinates clearly better, or that this is not known; else []."""
    positions = summary.get("positions") or {}
    if problem := positions.get("problem"):
        return [f"it is not known whether the boxes fit other coordinates: {problem}"]
    return [f"{positions['words']}; {positions['advice']}"] if positions.get("better") else []
