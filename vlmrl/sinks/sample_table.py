"""Sampled rollouts as the columns and rows of a table, for loggers that show tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from vlmrl.sinks.base import Line, SampledRollout

NAME = "samples"
"""What the table is called in every logger."""


def sample_table(
    line: Line, samples: Sequence[SampledRollout], show_image: Callable[[bytes], Any]
) -> tuple[list[str], list[list[Any]]]:
    """(columns, rows): one row a response, one column an image of the prompt and one a part of the reward.

    Args: show_image: an image file as the logger's own image value; called once for each image.
    """
    shown = {content: show_image(content) for sample in samples for content in sample.images}
    parts = sorted({name for sample in samples for name in sample.parts})
    num_images = max((len(sample.images) for sample in samples), default=0)
    columns = ["step", "attempt", "source", "prompt_id", *(f"image {n + 1}" for n in range(num_images)), "prompt"]
    columns += ["response", "score", *(f"reward/part/{name}" for name in parts), "advantage", "note", "finish", "truth"]
    rows = []
    for sample in samples:
        images = [shown[content] for content in sample.images]
        images += [None] * (num_images - len(images))
        note = sample.error or sample.note
        truth = json.dumps(dict(sample.truth), ensure_ascii=False)
        rows.append([
            line.step, line.attempt, sample.source, sample.prompt_id, *images, sample.prompt, sample.response,
            sample.score, *(sample.parts.get(name) for name in parts), sample.advantage, note, sample.finish, truth,
        ])  # fmt: skip
    return columns, rows
