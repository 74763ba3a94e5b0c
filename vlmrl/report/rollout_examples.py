"""Example rollouts of a report: groups with images, texts, parts and advantages.

Answers to the same rows at several steps stand side by side.
"""

from __future__ import annotations

import base64
import io
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from markupsafe import Markup

from vlmrl.data.images import decode_image, image_hash
from vlmrl.diagnose.run_facts import spread_steps
from vlmrl.errors import DataError, StoreError
from vlmrl.evaluate.metrics import finite
from vlmrl.evaluate.records import read_evaluation
from vlmrl.report.page_parts import (
    OverlayView,
    Picture,
    answer_text,
    compared,
    drawn_by,
    fold_words,
    marked_text,
    marks_of,
    overlays_of,
    render_name,
    views_of,
)
from vlmrl.report.token_colours import TokenTexts
from vlmrl.rewards.boxes.planes import Space, plane_of
from vlmrl.store import layout
from vlmrl.store.evaluated_rows import SHOWN_IMAGES, read_summary, without_step
from vlmrl.store.media import RunImages
from vlmrl.store.metrics import counted
from vlmrl.store.rollouts import read_turns
from vlmrl.store.runs import Run
from vlmrl.tasks.positions import Mark, overlap, shares_of
from vlmrl.tasks.truth_kinds import Drawn
from vlmrl.types import EPISODE_LIMITS, INAPPLICABLE, NO_SCORE, Group, Media, Row, ScoredSample, Segment, Turn, hash64
from vlmrl.untrusted import number_of, visible

MAX_STEPS = 4
MAX_SAMPLES = 8
MAX_SIDE = 448
"""Maximum width and height of a shown image, in pixels."""
MAX_IMAGE_BYTES = 12 * 1024 * 1024
"""Maximum size of all images of a page together, in bytes. Further images are left out and counted."""
MAX_COLUMN_CHARS = 200
"""Longest text of a dataset column that is shown beside the truth; longer ones are in the prompt."""
PLACE = 0.025
"""Half of the width of the box around a place, as a share of its picture."""
Acted = tuple[Space, Media, tuple[int, int]]
"""Coordinate space of the places of calls, the picture on which they act, and its size as the model saw it."""
MAX_IMAGES = 400
"""Maximum number of different images of a page; decoding more would take too long."""


@dataclass
class Album:
    """Images of a page as PNG data URIs, each content once, reduced to the displayed size, within a total limit."""

    budget: int = MAX_IMAGE_BYTES
    most: int = MAX_IMAGES
    pictures: dict[str, Picture] = field(default_factory=dict)
    spent: int = 0
    left_out: int = 0
    spaces: Mapping[str, Space] = field(default_factory=dict)
    """Source -> coordinate space of the places `x`, `y` of its calls; sources whose tools have none are left out."""

    def acted(self, source: str, media: Sequence[Media], sizes: Sequence[tuple[int, int]] = ()) -> Acted | None:
        """Return on what the calls behind these images act: the last one. `sizes`: as the model saw them."""
        if (space := self.spaces.get(source)) is None or not media:
            return None
        return space, media[-1], sizes[-1] if sizes else (media[-1].width, media[-1].height)

    def add(self, media: Media, images: RunImages) -> Picture:
        """Return the picture of an image reference. It is created at the first call."""
        if media.sha256 not in self.pictures:
            try:
                content = images.find(media)
            except StoreError:
                content = None
            blank = Picture(_key(media.sha256), max(1, media.width), max(1, media.height))
            self.pictures[media.sha256] = self._made(blank, content)
        return self.used(self.pictures[media.sha256])

    def add_file(self, content: bytes | str) -> Picture:
        """Return the picture of an image file. It is created at the first call.

        If `content` is a text with the reason why there is no image, the picture has only this note.
        """
        if isinstance(content, str):
            return Picture("", 1, 1, note=visible(content))
        sha256 = image_hash(content)
        if sha256 not in self.pictures:
            self.pictures[sha256] = self._made(Picture(_key(sha256), 1, 1), content)
        return self.used(self.pictures[sha256])

    def used(self, picture: Picture) -> Picture:
        """Return a picture of this page that is shown once more."""
        picture.uses += 1
        return picture

    def shared(self) -> list[Picture]:
        """Return the pictures that are used several times. The page contains them once and refers to them."""
        return [p for p in self.pictures.values() if p.uri and p.uses > 1]

    def _made(self, picture: Picture, content: bytes | None) -> Picture:
        if content is None:
            picture.note = "image not found"
        elif len(self.pictures) >= self.most or self.spent >= self.budget:
            self._leave_out(picture)
        else:
            try:
                picture.uri, picture.width, picture.height = png_uri(content)
            except DataError as error:
                picture.note = f"image cannot be read: {visible(error.message)}"
            if self.spent + len(picture.uri) > self.budget:
                self._leave_out(picture)
            self.spent += len(picture.uri)
        return picture

    def _leave_out(self, picture: Picture) -> None:
        picture.uri, picture.note = "", "left out: the page would be too large"
        self.left_out += 1


@dataclass(frozen=True)
class SampleView:
    """Data of one response for the page.

    Args:
        folded: the line below which the text is folded; "" = it is not.
        dependency: mean dependency of its tokens on the images, in nats; None if it was not measured.
        coloured: whether the tokens of the text are coloured by it.
    """

    number: int
    text: Markup
    score: float
    advantage: float | None
    parts: Mapping[str, float | None]
    finish: str
    tokens: int
    note: str = ""
    error: str = ""
    masked: bool = False
    unavailable: bool = False
    turns: Sequence[TurnView] = ()
    artifacts: Sequence[tuple[str, Picture]] = ()
    overlays: Sequence[OverlayView] = ()
    detail: str = ""
    folded: str = ""
    ending: str = ""
    dependency: float | None = None
    coloured: bool = False

    @property
    def filters(self) -> str:
        """Names of the filters of the page that show the response."""
        names = {"tool-errors": any(turn.errors for turn in self.turns), "limit-reached": self.ending in EPISODE_LIMITS}
        return " ".join(name for name, is_shown in names.items() if is_shown)


@dataclass(frozen=True)
class TurnView:
    """Turn of an episode.

    Args:
        calls: tools that it calls, with their arguments; "" = a call that cannot be read.
        facts: its tokens, seconds and errors, in words.
        trained: whether the policy is trained on it; None = not known.
        errors: number of the calls that failed.
        places: picture that the model saw last, with the places of its calls.
    """

    role: str
    text: Markup
    pictures: Sequence[Picture]
    calls: Sequence[str]
    facts: str = ""
    trained: bool | None = None
    errors: int = 0
    places: Sequence[OverlayView] = ()


@dataclass(frozen=True)
class GroupView:
    """Data of one prompt for the page, with its images and responses.

    Args:
        why: reason for its choice as an example.
        columns: the row's short texts, such as the expression that a box is asked for.
    """

    why: str
    title: str
    prompt: Markup
    truth: Mapping[str, Any]
    columns: Mapping[str, str]
    pictures: Sequence[Picture]
    samples: Sequence[SampleView]
    mean: float | None
    spread: float | None
    hidden: int = 0


@dataclass(frozen=True)
class StepView:
    """Examples of one step. `number`: the step counted from 1. `file`: name of its rollout file."""

    number: int
    file: str
    groups: Sequence[GroupView]
    problem: str = ""


def example_steps(run: Run, images: RunImages, album: Album, *, max_steps: int = MAX_STEPS) -> list[StepView]:
    """Return example groups (see `choose_groups`) of steps that are spread over the run, the last step first.

    If the rollout file of a step is damaged, the step has a `problem` instead of groups.
    """
    files, views, texts = run.rollout_files(), [], TokenTexts(run)
    for step in reversed(spread_steps(list(files), max_steps)):
        try:
            groups = run.read_rollouts(step)
        except StoreError as error:
            views.append(StepView(counted(step), files[step].name, (), error.message))
            continue
        group_views = [view_group(g, why, images, album, texts) for why, g in choose_groups(groups, seed=step)]
        views.append(StepView(counted(step), files[step].name, group_views))
    return views


def choose_groups(groups: Sequence[Group], *, seed: int) -> list[tuple[str, Group]]:
    """Return (reason, group): the best and the worst mean score, the largest spread of scores, and a random group.

    Before these comes the group with the most tool errors. Each group is returned at most once. A group without any
    score comes first, with its error.
    """
    scored = [g for g in groups if _scores(g)]
    unscored = [g for g in groups if g.samples and not _scores(g)]
    picks = [(NO_SCORE.get(g.samples[0].score.status, INAPPLICABLE), g) for g in unscored[:1]]
    remaining = list(scored)

    def spread(group: Group) -> float:
        return pstdev(_scores(group))

    def take(why: str, key: Callable[[Group], float]) -> None:
        if remaining:
            picks.append((why, max(remaining, key=key)))
            remaining.remove(picks[-1][1])

    if any(map(_tool_errors, remaining)):
        take("most tool errors", _tool_errors)
    take("best", lambda g: fmean(_scores(g)))
    take("worst", lambda g: -fmean(_scores(g)))
    if any(spread(g) > 0 for g in remaining):
        take("most disagreeing", spread)
    if remaining:
        picks.append(("random", random.Random(seed).choice(remaining)))
    return picks


def view_group(group: Group, why: str, images: RunImages, album: Album, texts: TokenTexts | None = None) -> GroupView:
    """Return the data of a group for the page, with its samples from the best to the worst.

    Args:
        texts: of the tokens, to colour them; None = they have no colours.
    """
    ordered = sorted(group.samples, key=lambda s: -s.score.value if math.isfinite(s.score.value) else math.inf)
    shown = ordered if len(ordered) <= MAX_SAMPLES else [*ordered[: MAX_SAMPLES - 2], *ordered[-2:]]
    samples = [_view_sample(group.row, s, images, album, texts) for s in shown]
    scores = _scores(group)
    return GroupView(
        why,
        row_title(group.row.source, group.row.prompt_id),
        marked_text(group.prompt_text),
        group.row.truth,
        short_columns(group.row.columns),
        [album.add(m, images) for m in dict.fromkeys(group.row.media)],
        samples,
        fmean(scores) if scores else None,
        pstdev(scores) if scores else None,
        len(ordered) - len(shown),
    )


def _view_sample(
    row: Row, s: ScoredSample, images: RunImages, album: Album, texts: TokenTexts | None = None
) -> SampleView:
    score, folded = s.score, fold_words(row.truth, s.text)
    coloured = texts.coloured(s) if texts is not None and not folded else None
    turns = s.turns
    if not turns and (pictured := [Turn(part.role, "", part.media) for part in s.trajectory.segments if part.media]):
        turns = [Turn("assistant", s.text), *pictured]
    acted = album.acted(row.source, row.media, s.trajectory.seen_sizes)
    return SampleView(
        number=s.trajectory.sample,
        text=answer_text(row.truth, s.text) if coloured is None else coloured,
        folded=folded,
        score=score.value,
        advantage=s.advantage,
        parts=score.parts,
        finish=s.trajectory.finish,
        tokens=s.trajectory.num_sampled_tokens,
        note=visible(score.note),
        error=visible(score.error or ""),
        masked=s.masked,
        unavailable=score.status == "unavailable",
        turns=turn_views(turns, s.trajectory.segments if s.turns else (), images, album, row.source, acted),
        ending=s.ending or "",
        artifacts=compared(row.truth, score.artifacts, row.media, lambda m: album.add(m, images)),
        overlays=overlays_of(row.truth, score.detail, len(row.media), lambda i: album.add(row.media[i], images)),
        detail=detail_text(score.detail),
        dependency=fmean(s.dependency) if s.dependency else None,
        coloured=coloured is not None,
    )


def turn_views(
    turns: Sequence[Turn],
    segments: Sequence[Segment],
    images: RunImages,
    album: Album,
    source: str = "",
    acted: Acted | None = None,
) -> list[TurnView]:
    """Return the turns of an episode for the page. `segments`: their tokens; () = not known."""
    views = []
    # A reset that shows nothing has tokens, and no turn.
    parts = segments[len(segments) - len(turns) :] if len(segments) >= len(turns) else [None] * len(turns)
    for turn, part in zip(turns, parts, strict=True):
        facts = [] if part is None else [number_of(part.num_tokens, "token")]
        facts += [f"{turn.seconds:.3f} s"] if turn.seconds else []
        facts += [number_of(turn.errors, "error")] if turn.errors else []
        facts += [f"what they return, {turn.unfit:,} tokens, did not fit"] if turn.unfit else []
        calls = [
            f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})" if call.name else ""
            for call in turn.calls
        ]
        pictures = [album.add(m, images) for m in turn.media]
        trained = None if part is None else part.trained
        places = _places(turn, acted, lambda media: album.add(media, images)) if acted is not None else ()
        text, words = marked_text(turn.text), ", ".join(facts)
        views.append(TurnView(turn.role, text, pictures, calls, words, trained, turn.errors, places))
        acted = album.acted(source, turn.media, turn.seen_sizes) or acted
    return views


def _places(turn: Turn, acted: Acted, picture_of: Callable[[Media], Picture]) -> list[OverlayView]:
    """Return the picture on which the calls of a turn act, with a small box around each place; [] without a place."""
    space, media, seen = acted
    plane = plane_of(space, (media.width, media.height), seen)
    marks, across, down = list[Mark](), PLACE * plane.width, PLACE * plane.height
    for call in turn.calls:
        x, y = (call.arguments.get(name) for name in "xy")
        if isinstance(x, (int, float)) and isinstance(y, (int, float)):
            box = shares_of([x - across, y - down, x + across, y + down], plane)
            marks += [Mark("answer", box, call.name)] if box is not None else []
    return views_of(marks, 1, lambda i: picture_of(media))


def answer_views(rows: Sequence[Mapping[str, Any]], images: RunImages, album: Album, count: int = 4) -> list[GroupView]:
    """Return example answers of an evaluation: those with the lowest and the highest scores, and some random ones.

    The images are those that the model saw.
    """
    scored = sorted((r for r in rows if r["score"] is not None), key=lambda r: (r["score"], str(r["prompt_id"])))
    worst, others = scored[:count], scored[count:]
    best = others[::-1][: count // 2]
    rest = others[: len(others) - len(best)]
    picks = [*(("worst", r) for r in worst), *(("best", r) for r in best)]
    picks += [("random", r) for r in random.Random(0).sample(rest, min(count // 2, len(rest)))]
    views = []
    for why, row in picks:
        own = _artifacts(row)
        true_media = list(map(Media.of, row["images"]))
        artifacts = compared(row["truth"], own, true_media, lambda m: album.add(m, images))
        media = list(map(Media.of, row.get(SHOWN_IMAGES) or row["images"]))
        pictures = [album.add(m, images) for m in media]
        acted = album.acted(row["source"], media)
        sample = SampleView(
            row["sample"],
            answer_text(row["truth"], row["text"]),
            row["score"],
            None,
            row["parts"],
            row["finish"],
            row["num_tokens"],
            visible(row["note"] or ""),
            visible(row["error"] or ""),
            artifacts=artifacts,
            overlays=overlays_of(row["truth"], row["detail"], len(media), lambda i, own=pictures: album.used(own[i])),
            detail=detail_text(row["detail"]),
            folded=fold_words(row["truth"], row["text"]),
            turns=turn_views(read_turns(row.get("turns")), (), images, album, row["source"], acted),
            ending=row.get("ending") or "",
        )
        title = row_title(row["source"], row["prompt_id"])
        prompt = marked_text(row.get("prompt_text") or "")
        columns = short_columns(row["columns"])
        views.append(GroupView(why, title, prompt, row["truth"], columns, pictures, [sample], row["score"], None))
    return views


def short_columns(columns: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns of a dataset row that are short texts."""
    return {name: text for name, text in columns.items() if isinstance(text, str) and len(text) <= MAX_COLUMN_CHARS}


def detail_text(detail: Mapping[str, Any] | None) -> str:
    """Return the detail of a reward as indented JSON, escaped; "" if there is none."""
    return marked_text(json.dumps(detail, ensure_ascii=False, indent=1)) if detail else ""


def png_uri(content: bytes) -> tuple[str, int, int]:
    """Return (PNG data URI, width, height) of an image file, reduced to at most MAX_SIDE pixels per side.

    Raises: see `decode_image`.
    """
    image = decode_image(content)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    sink = io.BytesIO()
    image.save(sink, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(sink.getvalue()).decode()}", image.width, image.height


def _key(sha256: str) -> str:
    return f"i{hash64(sha256):x}"


def row_title(source: str, prompt_id: str) -> str:
    """Return source and prompt id, or the id alone if it begins with the source's name, as in prepared datasets."""
    return prompt_id if prompt_id.startswith(source) else f"{source} {prompt_id}"


def _tool_errors(group: Group) -> float:
    return float(sum(turn.errors for s in group.samples for turn in s.turns))


def _scores(group: Group) -> list[float]:
    return [s.score.value for s in group.samples if s.score.error is None and math.isfinite(s.score.value)]


MOST_STEPS, MOST_ROWS = 6, 4


@dataclass(frozen=True)
class Moves:
    """Answers to one row at several steps. `drawn`: whether they are drawings; the first panel is then the truth."""

    title: str
    panels: Sequence[Panel]
    drawn: bool = False


@dataclass(frozen=True)
class Panel:
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
    """

    title: str
    marks: Sequence[Mark]
    media: Sequence[Media]
    drawn: Drawn | None = None
    render: Media | None = None
    score: float | None = None

    @property
    def shows(self) -> bool:
        """Return whether there is a picture, or a box."""
        return bool(self.marks) or self.render is not None


def view_moves(run: Run, images: RunImages, album: Album, notes: list[str]) -> list[Moves]:
    """Return the answers to some random rows over training: from its validations, else from its rollouts.

    Args:
        notes: sentences about files that cannot be read are added.
    """
    answers = _boxed(_validated(run, notes)) or _boxed(_sampled(run))
    shown = {key for rows in answers.values() for key, answer in rows.items() if answer.shows}
    counts = Counter(key for rows in answers.values() for key in rows if key in shown)
    most = max(counts.values(), default=0)
    if most < 2:
        return []
    common = sorted(key for key, count in counts.items() if count == most)
    chosen = random.Random(0).sample(common, min(MOST_ROWS, len(common)))
    return [_moves({step: rows[key] for step, rows in answers.items() if key in rows}, images, album) for key in chosen]


def _moves(answers: Mapping[str, Answered], images: RunImages, album: Album) -> Moves:
    panels = []
    first = next(iter(answers.values()))
    if first.drawn is not None:
        return _drawings(answers, first.drawn, images, album)
    for step, answer in answers.items():
        iou = overlap(answer.marks)
        caption = f"{step}: no box" if iou is None else f"{step}: IoU {iou:.2f}"
        views = views_of(answer.marks, len(answer.media), lambda i, media=answer.media: album.add(media[i], images))
        panels.append(Panel(caption, views))
    return Moves(first.title, panels)


def _drawings(answers: Mapping[str, Answered], drawn: Drawn, images: RunImages, album: Album) -> Moves:
    first = next(iter(answers.values()))
    panels = [Panel("truth", pictures=[album.add(m, images) for m in first.media[drawn.image :][:1]])]
    for step, answer in answers.items():
        picture = album.add_file("no picture") if answer.render is None else album.add(answer.render, images)
        score = "no score" if answer.score is None else f"{answer.score:.2f}"
        panels.append(Panel(f"{step}: {score}", pictures=[picture]))
    return Moves(first.title, panels if first.media else panels[1:], drawn=True)


def _validated(run: Run, notes: list[str]) -> Iterator[tuple[int, list[tuple[Any, ...]]]]:
    """Yield (step, answers) of the validations of training that cover the most steps; see `_boxed`."""
    sets: dict[str, dict[int, Path]] = {}
    for folder in layout.eval_dirs(run.dir):
        try:
            meta = read_summary(folder).get("meta") or {}
        except StoreError:
            continue  # the page has a sentence about it beside its metrics
        if meta.get("during") and isinstance(meta.get("step"), int):
            sets.setdefault(without_step(folder.name), {})[meta["step"]] = folder
    steps = max(sets.values(), key=len, default={})
    for step in spread_steps(sorted(steps), MOST_STEPS):
        try:
            rows = read_evaluation(steps[step]).rows
        except StoreError as error:
            notes.append(f"Evaluation {steps[step].name}: {error.message}.")
            continue
        facts = ((r, [r[name] for name in ("source", "prompt_id", "truth", "detail")]) for r in rows)
        yield step, [(*own, list(map(Media.of, r["images"])), _artifacts(r), r["score"]) for r, own in facts]


def _sampled(run: Run) -> Iterator[tuple[int, list[tuple[Any, ...]]]]:
    """Yield (step, first answers to its rows) of the rollouts; see `_boxed`."""
    for step in spread_steps(list(run.rollout_files()), MOST_STEPS):
        try:
            groups = run.read_rollouts(step)
        except StoreError:
            continue  # the page has a sentence about it at the step
        firsts = ((g.row, g.samples[0].score) for g in groups if g.samples)
        yield (
            counted(step),
            [(r.source, r.prompt_id, r.truth, s.detail, r.media, s.artifacts, finite(s.value)) for r, s in firsts],
        )


def _boxed(steps: Iterable[tuple[int, Sequence[tuple[Any, ...]]]]) -> dict[str, dict[str, Answered]]:
    """Return step -> row with boxes or drawings -> its first answer; {} if a step has no such row.

    Args:
        steps: (step, its answers), each (source, prompt id, truth, detail, images, artifacts, score).
    """
    answers: dict[str, dict[str, Answered]] = {}
    for step, rows in steps:
        answered = answers[f"step {step}"] = dict[str, Answered]()
        for source, prompt_id, truth, detail, media, artifacts, score in rows:
            key = f"{source} {prompt_id}"
            drawn, marks = drawn_by(truth), marks_of(truth, detail)
            if key not in answered and (marks or drawn is not None):
                render = None if drawn is None else artifacts.get(render_name(drawn, artifacts) or "")
                answered[key] = Answered(row_title(source, prompt_id), marks, media, drawn, render, score)
        if not answered:
            return {}
    return answers


def _artifacts(row: Mapping[str, Any]) -> dict[str, Media]:
    return {artifact["name"]: Media.of(artifact) for artifact in row["artifacts"]}
