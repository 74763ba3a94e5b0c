"""Answers over training: boxes in, or drawings of, the same rows at several steps, side by side."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.evaluate.columns import finite
from vlmrl.evaluate.records import read_evaluation
from vlmrl.report.drawings import drawn_by, render_name
from vlmrl.report.overlays import OverlayView, marks_of, views_of
from vlmrl.report.rollout_examples import Album, Picture, row_title
from vlmrl.store import layout
from vlmrl.store.evaluated_rows import read_summary, without_step
from vlmrl.store.media import RunImages
from vlmrl.store.metrics import counted
from vlmrl.store.runs import Run
from vlmrl.tasks.positions import Mark, overlap
from vlmrl.tasks.truth_kinds import Drawn
from vlmrl.types import Media, ScoredSample

MOST_STEPS, MOST_ROWS = 6, 4


@dataclass(frozen=True)
class Moves:
    """Answers to one row at several steps. `drawn`: whether they are drawings; the first cell is then the truth."""

    title: str
    cells: Sequence[Cell]
    drawn: bool = False


@dataclass(frozen=True)
class Cell:
    """Answer at one step: images with boxes, or its picture. `caption`: step, as counted on the page, and score."""

    caption: str
    overlays: Sequence[OverlayView] = ()
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True)
class Answered:
    """Answer to a row at one step, from a rollout or an evaluation.

    Args:
        drawn: facts about rows whose answers are drawings; None for others.
        render: picture of the answer; None = it was not drawn, or its picture was not kept.
        score: its score; None = it has none.
    """

    title: str
    marks: Sequence[Mark]
    media: Sequence[Media]
    drawn: Drawn | None = None
    render: Media | None = None
    score: float | None = None

    @property
    def shows(self) -> bool:
        """Whether there is a picture, or a box."""
        return bool(self.marks) or self.render is not None


def view_moves(run: Run, images: RunImages, album: Album, notes: list[str]) -> list[Moves]:
    """Return the answers to some random rows over training: from its validations, else from its rollouts.

    Args:
        notes: sentences about files that cannot be read are added.
    """
    answers = _validated(run, notes) or _sampled(run, notes)
    counts = Counter(key for rows in answers.values() for key in rows)
    shown = {key for rows in answers.values() for key, answer in rows.items() if answer.shows}
    counts = Counter({key: count for key, count in counts.items() if key in shown})
    most = max(counts.values(), default=0)
    if most < 2:
        return []
    common = sorted(key for key, count in counts.items() if count == most)
    chosen = random.Random(0).sample(common, min(MOST_ROWS, len(common)))
    return [_moves({step: rows[key] for step, rows in answers.items() if key in rows}, images, album) for key in chosen]


def _moves(answers: Mapping[str, Answered], images: RunImages, album: Album) -> Moves:
    cells = []
    first = next(iter(answers.values()))
    if first.drawn is not None:
        return _drawings(answers, first.drawn, images, album)
    for step, answer in answers.items():
        iou = overlap(answer.marks)
        caption = f"{step}: no box" if iou is None else f"{step}: IoU {iou:.2f}"
        views = views_of(answer.marks, len(answer.media), lambda i, media=answer.media: album.add(media[i], images))
        cells.append(Cell(caption, views))
    return Moves(first.title, cells)


def _drawings(answers: Mapping[str, Answered], drawn: Drawn, images: RunImages, album: Album) -> Moves:
    first = next(iter(answers.values()))
    cells = [Cell("truth", pictures=[album.add(m, images) for m in first.media[drawn.image :][:1]])]
    for step, answer in answers.items():
        picture = album.add_file("no picture") if answer.render is None else album.add(answer.render, images)
        score = "no score" if answer.score is None else f"{answer.score:.2f}"
        cells.append(Cell(f"{step}: {score}", pictures=[picture]))
    return Moves(first.title, cells if first.media else cells[1:], drawn=True)


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
            (
                row["source"],
                row["prompt_id"],
                row["truth"],
                row["detail"],
                [_media(i) for i in row["images"]],
                {artifact["name"]: Media.of(artifact) for artifact in row["artifacts"]},
                row["score"],
            )
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
            (
                row.source,
                row.prompt_id,
                row.truth,
                sample.score.detail,
                row.media,
                sample.score.artifacts,
                finite(sample.score.value),
            )
            for row, sample in firsts
        )
        if not answers[f"step {counted(step)}"]:
            return {}
    return answers


def _boxed(rows: Any) -> dict[str, Answered]:
    """Return the rows with boxes or drawings, each with its first answer."""
    answered: dict[str, Answered] = {}
    for source, prompt_id, truth, detail, media, artifacts, score in rows:
        key = f"{source} {prompt_id}"
        drawn, marks = drawn_by(truth), marks_of(truth, detail)
        if key not in answered and (marks or drawn is not None):
            render = None if drawn is None else artifacts.get(render_name(drawn, artifacts) or "")
            answered[key] = Answered(row_title(source, prompt_id), marks, media, drawn, render, score)
    return answered


def _media(image: Mapping[str, Any]) -> Media:
    return Media(image["sha256"], image["width"], image["height"])


def _spread(steps: Sequence[int]) -> list[int]:
    """Return up to MOST_STEPS of the steps, evenly spread, the first and the last included."""
    if len(steps) <= MOST_STEPS:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (MOST_STEPS - 1))] for i in range(MOST_STEPS)]
