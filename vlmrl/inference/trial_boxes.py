"""Boxes of a trial: how well the answers fit the truth in each of the coordinates, and pictures of both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vlmrl.store.layout import MEDIA
from vlmrl.tasks.positions import Fit, Mark, caption_of, save_overlays
from vlmrl.tasks.source import Source, response_input
from vlmrl.types import Group

MOST_DRAWN = 8
"""Number of prompts of a trial that are drawn."""


def fits_of(groups: Sequence[Group], sources: Sequence[Source]) -> dict[str, Fit]:
    """Return source name -> fit of its responses, for the sources whose answers are positions."""
    fits = {}
    for source in sources:
        own = [group for group in groups if group.row.source == source.name]
        if source.task.positions is not None and own:
            positions = source.task.positions(source.reward)
            fits[source.name] = positions.fit([response_input(group, s) for group in own for s in group.samples])
    return fits


def draw_groups(groups: Sequence[Group], sources: Sequence[Source], run_dir: Path) -> dict[int, list[Path]]:
    """Draw the truth and all answers of the first prompts, in the declared coordinates, to `media/boxes-<number>.png`.

    Returns: number of a group -> its pictures.
    Raises: as `save_overlays`.
    """
    by_name = {source.name: source for source in sources}
    drawn: dict[int, list[Path]] = {}
    for number, group in enumerate(groups):
        source = by_name[group.row.source]
        if source.task.positions is None or len(drawn) == MOST_DRAWN:
            continue
        positions = source.task.positions(source.reward)
        sets = [positions.marks(response_input(group, s), positions.declared) for s in group.samples]
        marks: dict[Mark, None] = dict.fromkeys(mark for marks in sets for mark in marks)
        folder, name, caption = run_dir / MEDIA, f"boxes-{number}", caption_of(group.row.columns)
        drawn[number] = save_overlays(folder, name, group.row.media, list(marks), source.dataset.image, caption)
    return drawn
