"""Boxes over training: the answers to the same rows at several steps, side by side."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.evaluate.records import read_evaluation
from vlmrl.report.overlays import OverlayView, marks_of, views_of
from vlmrl.report.rollout_examples import Album, row_title
from vlmrl.store import layout
from vlmrl.store.evaluated_rows import read_summary, without_step
from vlmrl.store.media import RunImages
from vlmrl.store.metrics import counted
from vlmrl.store.runs import Run
from vlmrl.tasks.overlay import Mark
from vlmrl.tasks.positions import overlap
from vlmrl.types import Media, ScoredSample

MOST_STEPS, MOST_ROWS = 6, 4


@dataclass(frozen=True)
class Moves:
    """Answers to one row at several steps. `cells`: (step, as counted on the page; pictures)."""

    title: str
    cells: Sequence[tuple[str, Sequence[OverlayView]]]


@dataclass(frozen=True)
class Answered:
    """Answer to a row at one step, from a rollout or an evaluation."""

    title: str
    marks: Sequence[Mark]
    media: Sequence[Media]


def view_moves(run: Run, images: RunImages, album: Album, notes: list[str]) -> list[Moves]:
    """Return the answers to some random rows over training: from its validations, else from its rollouts.

    Args:
        notes: sentences about files that cannot be read are added.
    """
    answers = _validated(run, notes) or _sampled(run, notes)
    counts = Counter(key for rows in answers.values() for key in rows)
    most = max(counts.values(), default=0)
    if most < 2:
        return []
    common = sorted(key for key, count in counts.items() if count == most)
    chosen = random.Random(0).sample(common, min(MOST_ROWS, len(common)))
    return [_moves({step: rows[key] for step, rows in answers.items() if key in rows}, images, album) for key in chosen]


def _moves(answers: Mapping[str, Answered], images: RunImages, album: Album) -> Moves:
    cells = []
    for step, answer in answers.items():
        iou = overlap(answer.marks)
        caption = f"{step}: no box" if iou is None else f"{step}: IoU {iou:.2f}"
        views = views_of(answer.marks, len(answer.media), lambda i, media=answer.media: album.add(media[i], images))
        cells.append((caption, views))
    return Moves(next(iter(answers.values())).title, cells)


def _validated(run: Run, notes: list[str]) -> dict[str, dict[str, Answered]]:
    """Return step -> row -> answer, from the validations of training that cover the most steps."""
    sets: dict[str, dict[int, Path]] = {}
    for folder in layout.eval_dirs(run.dir):
        try:
            meta = read_summary(folder).get("meta") or {}
        except StoreError:
            continue  # the page has a sentence about it beside its metrics
        if meta.get("during") and isinstance(meta.get("step"), int):
            sets.setdefault(without_step(folder.name), {})[meta["step"]] = folder
    steps = max(sets.values(), key=len, default={})
    answers: dict[str, dict[str, Answered]] = {}
    for step in _spread(sorted(steps)):
        try:
            rows = read_evaluation(steps[step]).rows
        except StoreError as error:
            notes.append(f"Evaluation {steps[step].name}: {error.message}.")
            continue
        answers[f"step {step}"] = _boxed(
            (row["source"], row["prompt_id"], row["truth"], row["detail"], [_media(i) for i in row["images"]])
            for row in rows
        )
        if not answers[f"step {step}"]:
            return {}
    return answers


def _sampled(run: Run, notes: list[str]) -> dict[str, dict[str, Answered]]:
    """Return step -> row -> its first answer, from the rollouts."""
    answers: dict[str, dict[str, Answered]] = {}
    for step in _spread(list(run.rollout_files())):
        try:
            groups = run.read_rollouts(step)
        except StoreError:
            continue  # the page has a sentence about it at the step
        firsts: list[tuple[Any, ScoredSample]] = [(group.row, group.samples[0]) for group in groups if group.samples]
        answers[f"step {counted(step)}"] = _boxed(
            (row.source, row.prompt_id, row.truth, sample.score.detail, row.media) for row, sample in firsts
        )
        if not answers[f"step {counted(step)}"]:
            return {}
    return answers


def _boxed(rows: Any) -> dict[str, Answered]:
    """Return the rows with boxes, each with its first answer."""
    answered: dict[str, Answered] = {}
    for source, prompt_id, truth, detail, media in rows:
        key = f"{source} {prompt_id}"
        if key not in answered and (marks := marks_of(truth, detail)):
            answered[key] = Answered(row_title(source, prompt_id), marks, media)
    return answered


def _media(image: Mapping[str, Any]) -> Media:
    return Media(image["sha256"], image["width"], image["height"])


def _spread(steps: Sequence[int]) -> list[int]:
    """Return up to MOST_STEPS of the steps, evenly spread, the first and the last included."""
    if len(steps) <= MOST_STEPS:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (MOST_STEPS - 1))] for i in range(MOST_STEPS)]
