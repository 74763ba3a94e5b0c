"""Choice of example rollouts for a report, and their data: groups with images, texts, parts and advantages."""

from __future__ import annotations

import base64
import io
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from vlmrl.data.images import decode_image, image_hash
from vlmrl.errors import DataError, StoreError
from vlmrl.report.drawings import answer_text, compared, fold_words
from vlmrl.report.overlays import OverlayView, overlays_of
from vlmrl.report.texts import marked_text
from vlmrl.store.evaluated_rows import SHOWN_IMAGES
from vlmrl.store.media import RunImages
from vlmrl.store.metrics import counted
from vlmrl.store.runs import Run
from vlmrl.types import INAPPLICABLE, NO_SCORE, Group, Media, Row, ScoredSample, Turn, hash64
from vlmrl.untrusted import visible

MAX_STEPS = 4
MAX_SAMPLES = 8
MAX_SIDE = 448
"""Maximum width and height of a shown image, in pixels."""
MAX_IMAGE_BYTES = 12 * 1024 * 1024
"""Maximum size of all images of a page together, in bytes. Further images are left out and counted."""
MAX_COLUMN_CHARS = 200
"""Longest text of a dataset column that is shown beside the truth; longer ones are in the prompt."""
MAX_IMAGES = 400
"""Maximum number of different images of a page; decoding more would take too long."""


@dataclass
class Picture:
    """Image on the page. If it was not found or the page has no room for it, `uri` is "" and `note` is the reason."""

    key: str
    width: int
    height: int
    uri: str = ""
    note: str = ""
    uses: int = 0


@dataclass
class Album:
    """Images of a page as PNG data URIs, each content once, reduced to the displayed size, within a total limit."""

    budget: int = MAX_IMAGE_BYTES
    most: int = MAX_IMAGES
    pictures: dict[str, Picture] = field(default_factory=dict)
    spent: int = 0
    left_out: int = 0

    def add(self, media: Media, images: RunImages) -> Picture:
        """Return the picture of an image reference. It is created at the first call."""
        if media.sha256 not in self.pictures:
            try:
                content = images.find(media)
            except StoreError:
                content = None
            blank = Picture(_key(media.sha256), max(1, media.width), max(1, media.height))
            self.pictures[media.sha256] = self._made(blank, content)
        return self._used(media.sha256)

    def add_file(self, content: bytes | str) -> Picture:
        """Return the picture of an image file. It is created at the first call.

        If `content` is a text with the reason why there is no image, the picture has only this note.
        """
        if isinstance(content, str):
            return Picture("", 1, 1, note=visible(content))
        sha256 = image_hash(content)
        if sha256 not in self.pictures:
            self.pictures[sha256] = self._made(Picture(_key(sha256), 1, 1), content)
        return self._used(sha256)

    def used(self, picture: Picture) -> Picture:
        """Return a picture of this page that is shown once more."""
        picture.uses += 1
        return picture

    def shared(self) -> list[Picture]:
        """Return the pictures that are used several times. The page contains them once and refers to them."""
        return [p for p in self.pictures.values() if p.uri and p.uses > 1]

    def _used(self, sha256: str) -> Picture:
        picture = self.pictures[sha256]
        picture.uses += 1
        return picture

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
    """Data of one response for the page. `folded`: the line below which the text is folded; "" = it is not."""

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


@dataclass(frozen=True)
class TurnView:
    """Turn of an episode: the speaker, the text, its images, and the tools that it calls."""

    role: str
    text: Markup
    pictures: Sequence[Picture]
    calls: Sequence[str]


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
    files = run.rollout_files()
    steps = list(files)
    if len(steps) > max_steps:
        steps = [steps[round(i * (len(steps) - 1) / (max_steps - 1))] for i in range(max_steps)]
    views = []
    for step in reversed(steps):
        try:
            groups = run.read_rollouts(step)
        except StoreError as error:
            views.append(StepView(counted(step), files[step].name, (), error.message))
            continue
        group_views = [view_group(g, why, images, album) for why, g in choose_groups(groups, seed=step)]
        views.append(StepView(counted(step), files[step].name, group_views))
    return views


def choose_groups(groups: Sequence[Group], *, seed: int) -> list[tuple[str, Group]]:
    """Return (reason, group): the best and the worst mean score, the largest spread of scores, and a random group.

    Each group is returned at most once. A group without any score comes first, with its error.
    """
    scored = [g for g in groups if _scores(g)]
    unscored = [g for g in groups if g.samples and not _scores(g)]
    picks = [(NO_SCORE.get(g.samples[0].score.status, INAPPLICABLE), g) for g in unscored[:1]]
    remaining = list(scored)

    def take(why: str, key: Callable[[Group], float]) -> None:
        if remaining:
            picks.append((why, max(remaining, key=key)))
            remaining.remove(picks[-1][1])

    take("best", _mean)
    take("worst", lambda g: -_mean(g))
    if any(_spread(g) > 0 for g in remaining):
        take("most disagreeing", _spread)
    if remaining:
        picks.append(("random", random.Random(seed).choice(remaining)))
    return picks


def view_group(group: Group, why: str, images: RunImages, album: Album) -> GroupView:
    """Return the data of a group for the page, with its samples from the best to the worst."""
    ordered = sorted(group.samples, key=lambda s: -s.score.value if math.isfinite(s.score.value) else math.inf)
    shown = ordered if len(ordered) <= MAX_SAMPLES else [*ordered[: MAX_SAMPLES - 2], *ordered[-2:]]
    samples = [_view_sample(group.row, s, images, album) for s in shown]
    return GroupView(
        why,
        row_title(group.row.source, group.row.prompt_id),
        marked_text(group.prompt_text),
        group.row.truth,
        short_columns(group.row.columns),
        [album.add(m, images) for m in dict.fromkeys(group.row.media)],
        samples,
        _mean(group) if _scores(group) else None,
        _spread(group) if _scores(group) else None,
        len(ordered) - len(shown),
    )


def _view_sample(row: Row, s: ScoredSample, images: RunImages, album: Album) -> SampleView:
    score = s.score
    turns = s.turns or _turns_of_images(s)
    return SampleView(
        number=s.trajectory.sample,
        text=answer_text(row.truth, s.text),
        folded=fold_words(row.truth, s.text),
        score=score.value,
        advantage=s.advantage,
        parts=score.parts,
        finish=s.trajectory.finish,
        tokens=s.trajectory.num_sampled_tokens,
        note=visible(score.note),
        error=visible(score.error or ""),
        masked=s.masked,
        unavailable=score.status == "unavailable",
        turns=[
            TurnView(
                turn.role,
                marked_text(turn.text),
                [album.add(m, images) for m in turn.media],
                [f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})" for call in turn.calls],
            )
            for turn in turns
        ],
        artifacts=compared(row.truth, score.artifacts, row.media, lambda m: album.add(m, images)),
        overlays=overlays_of(row.truth, score.detail, len(row.media), lambda i: album.add(row.media[i], images)),
        detail=detail_text(score.detail),
    )


def _turns_of_images(s: ScoredSample) -> list[Turn]:
    """Return turns for a response with images but without turns: its text, then each segment's author and images."""
    pictured = [Turn(part.role, "", part.media) for part in s.trajectory.segments if part.media]
    return [Turn("assistant", s.text), *pictured] if pictured else []


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
        own = {artifact["name"]: Media.of(artifact) for artifact in row["artifacts"]}
        true_media = [Media(i["sha256"], i["width"], i["height"]) for i in row["images"]]
        artifacts = compared(row["truth"], own, true_media, lambda m: album.add(m, images))
        media = [Media(i["sha256"], i["width"], i["height"]) for i in row.get(SHOWN_IMAGES) or row["images"]]
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
            overlays=_overlays(row, media, images, album),
            detail=detail_text(row["detail"]),
            folded=fold_words(row["truth"], row["text"]),
        )
        pictures = [album.add(m, images) for m in media]
        title = row_title(row["source"], row["prompt_id"])
        prompt = marked_text(row.get("prompt_text") or "")
        columns = short_columns(row["columns"])
        views.append(GroupView(why, title, prompt, row["truth"], columns, pictures, [sample], row["score"], None))
    return views


def _overlays(row: Mapping[str, Any], media: Sequence[Media], images: RunImages, album: Album) -> Sequence[OverlayView]:
    return overlays_of(row["truth"], row["detail"], len(media), lambda i: album.add(media[i], images))


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


def _scores(group: Group) -> list[float]:
    return [s.score.value for s in group.samples if s.score.error is None and math.isfinite(s.score.value)]


def _mean(group: Group) -> float:
    """Return the mean score of a group, which must have at least one score."""
    scores = _scores(group)
    return math.fsum(scores) / len(scores)


def _spread(group: Group) -> float:
    """Return the standard deviation of the scores of a group, which must have at least one score."""
    scores, mean = _scores(group), _mean(group)
    return math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / len(scores))
