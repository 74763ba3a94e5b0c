"""Common parts of all pages: head, style, macros, texts, boxes over images, drawings, formats of values.

A page has no script and loads nothing: a content security policy forbids it. Everything that comes from a model, a
dataset or a recipe is escaped (Jinja's autoescape; charts escape on their own), with visible control characters, cut
where it is long. Boxes are SVG rectangles over a picture that the page already has; their numbers are computed here.
Responses that are code of a picture are folded text, never markup; their pictures come from rewards, or from a renderer
in a process of its own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from vlmrl import __version__
from vlmrl.data.blinded_images import ImageChange, draw_picture, noise_key, picture_file
from vlmrl.data.images import decode_image
from vlmrl.errors import StoreError, VlmrlError
from vlmrl.evaluate.records import Evaluation
from vlmrl.redaction.redact import hide_known
from vlmrl.store.evaluated_rows import SHOWN_IMAGES, image_condition
from vlmrl.store.files import write_atomic
from vlmrl.store.layout import now
from vlmrl.store.media import Resolver, RunImages
from vlmrl.tasks import kind_of
from vlmrl.tasks.positions import Mark
from vlmrl.tasks.truth_kinds import Drawn
from vlmrl.types import Media
from vlmrl.untrusted import visible

MAX_TEXT = 6000
"""Characters of a text that stands open on a page."""
MAX_WHOLE = 100_000
"""Characters of a text that is folded. Longer ones are cut, or a single one could make the page too large."""
TAG = re.compile(r"&lt;/?[A-Za-z][\w-]{0,40}&gt;")


def marked_text(text: str) -> Markup:
    """Return a text of a model or dataset, escaped, with visible control characters and tags in bold; cut if long."""
    body = Markup(TAG.sub(lambda m: f"<b>{m[0]}</b>", str(escape(visible(text[:MAX_TEXT])))))
    return body + cut_note(len(text) - MAX_TEXT)


def whole_text(text: str) -> Markup:
    """Return a text for a folded place, escaped: all of it up to MAX_WHOLE characters, and no markup but the cut."""
    return escape(visible(text[:MAX_WHOLE])) + cut_note(len(text) - MAX_WHOLE)


def cut_note(cut: int) -> Markup:
    """Return the note behind a text that was cut by so many characters; "" if it was not."""
    return Markup('<span class="note"> ... {:,} more characters</span>').format(cut) if cut > 0 else Markup("")


def render(template: str, **values: Any) -> str:
    """Return a page as text, from a template in this folder. A missing value is an error."""
    from jinja2 import FunctionLoader, StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        loader=FunctionLoader(lambda name: files("vlmrl.report").joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Control characters become visible; escaped markup is not changed.
        finalize=lambda value: visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value,
    )
    environment.filters |= {"number": number, "signed": signed, "json": _json, "whole": whole_text}
    environment.filters["visible"] = lambda value: visible(str(value))
    return environment.get_template(template).render(**values, version=__version__, time=now()[:16].replace("T", " "))


def write_page(out: Path, text: str) -> None:
    """Write a page, atomically, without secrets of this process. The folder of `out` is created.

    Raises: StoreError when it cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make the folder: {error.strerror}", where=str(out.parent)) from error
    write_atomic(out, hide_known(text).encode("utf-8", "backslashreplace"))


def number(value: Any) -> str:
    """Format a number for readers: 0.634, 18.6, 1,234, 3e-05; a dash for None and NaN."""
    if value is None or not isinstance(value, (int, float)) or not math.isfinite(value):
        return "\u2013"
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if size and size < 0.001:
        return f"{value:.1e}"
    return f"{value + 0.0:.3f}" if size < 10 else f"{value:.1f}" if size < 1000 else f"{value:,.0f}"


def signed(value: float) -> str:
    """Format a number with its sign: `+0.021`, or `-0.004` with a typographic minus sign."""
    return f"{round(value, 3) + 0.0:+.3f}".replace("-", "\u2212")


def _json(value: Any) -> str:
    """Format a value as short JSON, but texts without quotes, and lists of texts with commas between them."""
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        return visible(", ".join(value))
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return visible(text)


MOST_BOXES = 60
"""Maximum number of boxes over one image."""


@dataclass
class Picture:
    """Image on the page. If it was not found or the page has no room for it, `uri` is "" and `note` is the reason."""

    key: str
    width: int
    height: int
    uri: str = ""
    note: str = ""
    uses: int = 0


@dataclass(frozen=True)
class BoxView:
    """Rectangle over a picture, in its pixels. `role`: "truth" or "answer"."""

    role: str
    x: float
    y: float
    width: float
    height: float
    label: str


@dataclass(frozen=True)
class OverlayView:
    """Picture with boxes. `caption`: text below it."""

    picture: Picture
    boxes: Sequence[BoxView]
    caption: str = ""


def overlays_of(
    truth: Mapping[str, Any], detail: Mapping[str, Any] | None, num_images: int, picture_of: Callable[[int], Picture]
) -> list[OverlayView]:
    """Return the images of a row that have boxes, with the boxes of the truth and of an answer.

    Args:
        detail: values that rewards read from the answer (`Score.detail`).
        picture_of: number of an image -> its picture.
    Returns: [] if rows of this kind have no boxes.
    """
    return views_of(marks_of(truth, detail), num_images, picture_of)


def marks_of(truth: Mapping[str, Any], detail: Mapping[str, Any] | None) -> Sequence[Mark]:
    marks = kind_of(truth).marks
    return () if marks is None else marks(truth, detail)


def views_of(marks: Sequence[Mark], num_images: int, picture_of: Callable[[int], Picture]) -> list[OverlayView]:
    views = []
    for number in range(num_images):
        own = sorted((mark for mark in marks if mark.image == number), key=lambda mark: mark.role != "truth")
        if own:
            picture = picture_of(number)
            views.append(OverlayView(picture, [_box(mark, picture) for mark in own[:MOST_BOXES]]))
    return views


def _box(mark: Mark, picture: Picture) -> BoxView:
    x1, y1, x2, y2 = mark.box
    x, width = round(x1 * picture.width, 2), round((x2 - x1) * picture.width, 2)
    y, height = round(y1 * picture.height, 2), round((y2 - y1) * picture.height, 2)
    return BoxView(mark.role, x, y, width, height, mark.label)


Truth = Mapping[str, Any]
TRUTH = "truth"
"""Label of the picture that shows the truth."""


def drawn_by(truth: Truth) -> Drawn | None:
    """Return the facts about rows whose responses are code of a picture; None for other rows."""
    return kind_of(truth).drawn


def legend(truths: Iterable[Truth]) -> str:
    """Return what the colours of the pictures of these rows mean; "" for rows without such pictures."""
    kinds = (drawn_by(truth) for truth in truths)
    return " ".join(dict.fromkeys(drawn.legend for drawn in kinds if drawn is not None and drawn.legend))


def fold_words(truth: Truth, text: str) -> str:
    """Return the line below which a response is folded; "" for a response that stands open."""
    drawn = drawn_by(truth)
    return f"{drawn.language} code, {len(text):,} characters" if drawn is not None and text else ""


def answer_text(truth: Truth, text: str) -> Markup:
    """Return a response as a page shows it: code whole, since it is folded, other texts with their tags in bold."""
    return marked_text(text) if drawn_by(truth) is None else whole_text(text)


def render_name(drawn: Drawn, artifacts: Mapping[str, Media]) -> str | None:
    """Return the name of the artifact with the picture of the response; None if there is none.

    Of several rewards, each artifact is called `<label>.<name>`; the first one with the name counts.
    """
    return next((name for name in artifacts if name == drawn.render or name.endswith(f".{drawn.render}")), None)


def compared(
    truth: Truth, artifacts: Mapping[str, Media], media: Sequence[Media], picture_of: Callable[[Media], Picture]
) -> list[tuple[str, Picture]]:
    """Return (name, picture) of a score's artifacts; before them, the image that shows the truth, if there is one."""
    drawn = drawn_by(truth)
    shows_truth = artifacts and drawn is not None and drawn.image < len(media)
    first = [(TRUTH, picture_of(media[drawn.image]))] if shows_truth and drawn is not None else []
    names = sorted(artifacts, key=lambda name: drawn is not None and name != render_name(drawn, artifacts))
    return [*first, *((name, picture_of(artifacts[name])) for name in names)]


def shown_pictures(evaluation: Evaluation, images: RunImages) -> Resolver:
    """Return a function that draws a picture of an evaluation again; it returns None for all other images.

    Args:
        images: of the run; the true images come from there.
    """
    meta = evaluation.summary.get("meta") or {}
    text, seed = image_condition(meta), meta.get("seed") or 0

    @cache
    def places() -> Mapping[str, tuple[Media, str]]:
        """Content of a picture -> the true image, and the text that random pixels come from."""
        return {
            shown["sha256"]: (Media.of(own), noise_key(seed, row["prompt_id"], position))
            for row in evaluation.rows
            for position, (shown, own) in enumerate(zip(row.get(SHOWN_IMAGES) or (), row["images"], strict=False))
            if shown["sha256"] != own["sha256"]
        }

    def draw(media: Media) -> bytes | None:
        if text is None or media.sha256 not in places():
            return None
        own, key = places()[media.sha256]
        try:
            change = ImageChange.parse(text)
            original = decode_image(images.read(own)) if change.kind in ("low", "masked") else None
        except VlmrlError:
            return None
        if change.kind == "shuffled":
            return None
        return picture_file(draw_picture(change, original, (media.width, media.height), key))

    return draw
