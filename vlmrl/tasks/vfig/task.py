"""The task figures: prompt, truth, reward, measures; its files (SVG code and drawing) and its tricks.

There is one prompt, for supervised training, reinforcement learning, generation and evaluation. The probe has honest
answers, the figure's own code, and responses that earn without drawing it.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from vlmrl.data.doctor import RowLabels
from vlmrl.redaction.redact import excerpt
from vlmrl.svg.parse import Node, find_svg, parse_svg
from vlmrl.tasks.attack import Attack, Probe, ProbeRows, says, void_attacks
from vlmrl.tasks.base import AccumulatedMetrics, Draw, GradedResponse, NoFile, ResponseFile, Task, prepared_task
from vlmrl.tasks.truth_kinds import Drawn, RowKind
from vlmrl.tasks.vfig.measures import METRICS, measures
from vlmrl.tasks.vfig.pictures import LEGEND, RENDER, draw_pairs
from vlmrl.tasks.vfig.rewards import NAME as REWARD
from vlmrl.tasks.vfig.truth import CODE, SOURCE, code_of, truth_problems
from vlmrl.types import RewardInput, Row
from vlmrl.untrusted import CodeRefused

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


MOST_WORKERS = 8
ACTIVE_TAGS = {"script", "foreignobject", "iframe", "embed", "object", "audio", "video", "handler", "listener"}
INLINE_IMAGES = tuple(f"data:image/{kind};base64," for kind in ("png", "jpeg", "jpg", "gif", "webp"))
LOADS = re.compile(r"@import|(?:url|image-set|src)\(\s*(?![\"']?\s*(?:#|data:image/(?:png|jpe?g|gif|webp);))|\\", re.I)
"""Beginning of a reference in a style to anything but a part of the document or an inline bitmap, or an escape."""


def svg_of(response: str) -> str | NoFile:
    """Return the last complete `svg` element of a response, unchanged, or why there is none.

    A file that a browser opens must not run anything or load anything: code that would is no file.
    """
    try:
        code = find_svg(response)
        active = active_content(parse_svg(code))
    except CodeRefused as error:
        return NoFile(error.reason)
    return code if active is None else NoFile(f"it would run or load something when it is opened: {active}")


def active_content(root: Node) -> str | None:
    """Return the first thing in an SVG document that runs code or loads a file in a browser; None without any."""
    for node in root.walk():
        if node.tag == "" or node.tag.lower() in ACTIVE_TAGS:
            return f"the element {node.tag or 'of another namespace'}"
        for name, value in node.attributes.items():
            low = re.sub(r"[\x00-\x20]", "", value).lower()
            if name.lower().startswith("on"):
                return f"the attribute {name}"
            if name == "href" and not low.startswith(("#", *INLINE_IMAGES)):
                return f"the reference {excerpt(value, 40)}"
            if "javascript:" in low or (name == "attributeName" and low.endswith("href")):
                return f"the attribute {name}"
            if LOADS.search(value):
                return f"{name} with {excerpt(value, 40)}"
        if node.tag == "style" and LOADS.search("".join(node.texts)):
            return "a style sheet that loads a file"
    return None


@contextmanager
def drawing() -> Iterator[Draw]:
    """Yield a function that draws SVG code, in processes with limits of time and memory."""
    from PIL import Image

    from vlmrl.data.images import encode_png
    from vlmrl.store.provenance import usable_cores
    from vlmrl.svg.renderer import DrawJob, SvgRenderer

    with SvgRenderer(min(usable_cores(), MOST_WORKERS)) as renderer:

        def draw(codes: Sequence[str]) -> list[bytes | NoFile]:
            drawings = renderer.draw([DrawJob(code) for code in codes])
            return [
                NoFile(one.reason) if isinstance(one, CodeRefused) else encode_png(Image.fromarray(one.pixels))
                for one in drawings
            ]

        yield draw


SVG_FILE = ResponseFile("SVG code", ".svg", svg_of, drawing)


# ruff: noqa: E501


OPEN = re.compile(r"<svg\b[^>]*>")
BOX = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')
FIRST = re.compile(r"\s*(<rect\b[^>]*/>)")
SIZED = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 100 100">'
MOST_GUESSES = 5
BROKEN = {"no code": "a figure", "no end": '<svg xmlns="http://www.w3.org/2000/svg"><rect/>', "no text": 7}
"""Name -> true code that no reward should score."""
STRIPES = (
    '<clipPath id="stripes" clipPathUnits="objectBoundingBox"><path d="'
    + "".join(f"M-99 {k / 20}h999v.0025h-999z" for k in range(20))
    + '"/></clipPath>'
)
Make = Callable[[RewardInput], "str | None"]


def code_probe(field: str, broken: Mapping[str, Any], rows_tried: ProbeRows) -> Probe:
    """Return honest answers and tricks: the code of the row's picture, that of another one, and one code for all rows.

    Args:
        field: truth field with the code.
        broken: name -> true code that no reward should score.
    """

    def code(x: RewardInput) -> str:
        return str(x.truth.get(field, ""))

    codes = [text for text, _ in Counter(map(code, rows_tried.rows)).most_common()]

    def other(x: RewardInput) -> str | None:
        return next((text for text in codes if text != code(x)), None)

    guesses = [
        Attack(f"always picture {number}", "the code of one picture for all rows", "guess", says(text))
        for number, text in enumerate(codes[:MOST_GUESSES], 1)
    ]
    return Probe(
        Attack("honest", "the code of the picture", "fair", code),
        Attack("honest, wrong", "the code of another picture", "fair", other),
        guesses,
        void_attacks(rows_tried.echo),
        code,
        broken_truths={name: lambda x, value=value: {**x.truth, field: value} for name, value in broken.items()},
    )


def _code(x: RewardInput) -> str:
    return str(x.truth.get(CODE, ""))


def _wrapped(before: str, after: str) -> Make:
    """Return a maker of the truth with text after its begin and before its end."""

    def make(x: RewardInput) -> str | None:
        svg = _code(x)
        head = OPEN.search(svg)
        end = svg.rfind("</svg>")
        if head is None or end < head.end():
            return None
        return f"{svg[: head.end()]}{before}{svg[head.end() : end]}{after}</svg>"

    return make


def _page_alone(x: RewardInput) -> str | None:
    """Return the page of the truth, with its frame, without the figure; None if its code does not begin with one."""
    svg = _code(x)
    head = OPEN.search(svg)
    box = BOX.search(head[0]) if head else None
    first = FIRST.match(svg, head.end()) if head else None
    if not (head and box and first and f'width="{box[1]}"' in first[1] and f'height="{box[2]}"' in first[1]):
        return None
    return f"{head[0]}{first[1]}</svg>"


def attacks_on(rows: Sequence[RewardInput]) -> list[Attack]:
    """Return the tricks; they do not depend on the rows."""
    cover = '<rect x="-9999" y="-9999" width="99999" height="99999" fill="white"/>'
    grid = "".join(
        f'<rect x="{9 * (k % 10)}" y="{9 * (k // 10)}" width="8" height="8" fill="#8ac"/>' for k in range(100)
    )
    word = '<text x="50" y="50" text-anchor="middle">score: 1.0</text>'
    return [
        Attack("empty picture", "an svg element without content", "void", says(f"{SIZED}</svg>")),
        Attack("one colour", "a page that is grey all over", "guess", says(f'{SIZED}<rect width="100" height="100" fill="#ccc"/></svg>')),
        Attack("the page alone", "the background of the figure, with its frame, and nothing on it", "void", _page_alone),
        Attack("a grid", "a hundred boxes, whatever the figure shows", "guess", says(f"{SIZED}{grid}</svg>")),
        Attack("a claim", "a picture that states its own score", "guess", says(f"{SIZED}{word}</svg>")),
        Attack("hidden truth", "the right code in a group that is not displayed", "void", _wrapped('<g display="none">', "</g>")),
        Attack("transparent truth", "the right code with an opacity of 0.01", "void", _wrapped('<g opacity="0.01">', "</g>")),
        Attack("truth outside", "the right code outside of the picture", "void", _wrapped('<g transform="translate(99999 0)">', "</g>")),
        Attack("covered truth", "the right code behind a white page", "void", _wrapped("", cover)),
        Attack("tiny truth", "the right code as small as a dot", "void", _wrapped('<g transform="scale(0.001)">', "</g>")),
        Attack("truth as definitions", "the right code in defs, which are not drawn", "void", _wrapped("<defs>", "</defs>")),
        Attack("mirrored truth", "the right code, upside down", "miss", _wrapped('<g transform="rotate(180)" transform-origin="center">', "</g>")),
        Attack("a sliver of it", "the right code, of which stripes of a twentieth show", "miss", _wrapped(f'{STRIPES}<g clip-path="url(#stripes)">', "</g>")),
        Attack("truth and junk", "the right code with a grid over it", "miss", _wrapped("", grid)),
        Attack("truth in a fence", "the right code in a code fence", "fair", lambda x: f"```svg\n{_code(x)}\n```"),
        Attack("two answers", "an empty picture, then the right code", "fair", lambda x: f"{SIZED}</svg>\n{_code(x)}"),
    ]  # fmt: skip


NAME = "figures"
SUMMARY = "the SVG code of a figure that an image shows (made by `vlmrl prep figures`)"
MOST_SOURCES = 20
"""Largest number of sources for which metrics of each are given."""
Values = tuple[str, Mapping[str, float]]
"""Source of a response, and its reward and the parts of it by the names of their metrics."""


def figures_task(info: Mapping[str, Any]) -> Task:
    """Return the task of a dataset; see `prepared_task`."""
    return prepared_task(
        NAME,
        SUMMARY,
        info,
        "vfig/prompt.jinja",
        validate=truth_problems,
        profiles={"default": (REWARD, {"key": CODE})},
        by=(SOURCE,),
        metrics=METRICS,
        measures=measures(),
        set_metrics=AccumulatedMetrics(values_of, mean_per_source),
        trace=write_trace,
        attacks=attacks_on,
        kind=FIGURES,
        file=SVG_FILE,
    )


FIGURES = RowKind(
    lambda truth: isinstance(truth.get(CODE), str),
    probe=partial(code_probe, CODE, BROKEN),
    labels=lambda row: RowLabels(None),  # a figure belongs to no class
    drawn=Drawn("SVG", 0, RENDER, draw_pairs, LEGEND),
)


def write_trace(row: Row, rng: random.Random) -> str:
    """Return the code of the row's figure, unchanged."""
    return code_of(row.truth)


def values_of(graded: GradedResponse) -> Values | None:
    """Return the source of a response with its reward and parts; None if it has no score or no source."""
    x, score, _ = graded
    source = x.truth.get(SOURCE)
    if not isinstance(source, str) or score.error is not None:
        return None
    parts = {f"part/{name}": float(value) for name, value in score.parts.items() if value is not None}
    return source, {"reward": float(score.value), **parts}


def mean_per_source(results: Sequence[Values | None]) -> Callable[[NDArray[np.int64]], Mapping[str, float | None]]:
    """Return a function: times that each response is taken -> mean reward and parts of each source.

    Returns: `reward/<source>` and `part/<name>/<source>`; none of them for less than 2 or more than 20 sources.
    """
    import numpy as np

    sources = sorted({result[0] for result in results if result is not None})
    if not 2 <= len(sources) <= MOST_SOURCES:
        return lambda count_N: {}
    table: dict[str, tuple[list[int], list[float]]] = {}
    for index, result in enumerate(results):
        for name, value in result[1].items() if result is not None else ():
            indices, values = table.setdefault(f"{name}/{result[0]}", ([], [])) if result is not None else ([], [])
            indices.append(index)
            values.append(value)
    columns = {name: (np.array(places), np.array(values)) for name, (places, values) in sorted(table.items())}

    def means(count_N: NDArray[np.int64]) -> Mapping[str, float | None]:
        taken = {name: count_N[places] for name, (places, _) in columns.items()}
        return {
            name: float(taken[name] @ values / taken[name].sum()) if taken[name].sum() else None
            for name, (_, values) in columns.items()
        }

    return means
