"""Tricks for the probe: responses that earn something from rewards for SVG code without drawing the figure."""

# ruff: noqa: E501
from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from vlmrl.tasks.attack import Attack, says
from vlmrl.types import RewardInput

OPEN = re.compile(r"<svg\b[^>]*>")
BOX = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')
FIRST = re.compile(r"\s*(<rect\b[^>]*/>)")
SIZED = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 100 100">'
STRIPES = (
    '<clipPath id="stripes" clipPathUnits="objectBoundingBox"><path d="'
    + "".join(f"M-99 {k / 20}h999v.0025h-999z" for k in range(20))
    + '"/></clipPath>'
)
Make = Callable[[RewardInput], "str | None"]


def _wrapped(before: str, after: str) -> Make:
    """Return a maker of the truth with text after its begin and before its end."""

    def make(x: RewardInput) -> str | None:
        svg = str(x.truth.get("svg", ""))
        head = OPEN.search(svg)
        end = svg.rfind("</svg>")
        if head is None or end < head.end():
            return None
        return f"{svg[: head.end()]}{before}{svg[head.end() : end]}{after}</svg>"

    return make


def _page_alone(x: RewardInput) -> str | None:
    """Return the page of the truth, with its frame, without the figure; None if its code does not begin with one."""
    svg = str(x.truth.get("svg", ""))
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
        Attack("one colour", "a page that is grey all over", "void", says(f'{SIZED}<rect width="100" height="100" fill="#ccc"/></svg>')),
        Attack("the page alone", "the background of the figure, with its frame, and nothing on it", "void", _page_alone),
        Attack("a grid", "a hundred boxes, whatever the figure shows", "guess", says(f"{SIZED}{grid}</svg>")),
        Attack("a claim", "a picture that states its own score", "void", says(f"{SIZED}{word}</svg>")),
        Attack("hidden truth", "the right code in a group that is not displayed", "void", _wrapped('<g display="none">', "</g>")),
        Attack("transparent truth", "the right code with an opacity of 0.01", "void", _wrapped('<g opacity="0.01">', "</g>")),
        Attack("truth outside", "the right code outside of the picture", "void", _wrapped('<g transform="translate(99999 0)">', "</g>")),
        Attack("covered truth", "the right code behind a white page", "void", _wrapped("", cover)),
        Attack("tiny truth", "the right code as small as a dot", "void", _wrapped('<g transform="scale(0.001)">', "</g>")),
        Attack("truth as definitions", "the right code in defs, which are not drawn", "void", _wrapped("<defs>", "</defs>")),
        Attack("mirrored truth", "the right code, upside down", "miss", _wrapped('<g transform="rotate(180)" transform-origin="center">', "</g>")),
        Attack("a sliver of it", "the right code, of which stripes of a twentieth show", "miss", _wrapped(f'{STRIPES}<g clip-path="url(#stripes)">', "</g>")),
        Attack("truth and junk", "the right code with a grid over it", "miss", _wrapped("", grid)),
        Attack("truth in a fence", "the right code in a code fence", "fair", lambda x: f"```svg\n{x.truth.get('svg', '')}\n```"),
        Attack("two answers", "an empty picture, then the right code", "fair", lambda x: f"{SIZED}</svg>\n{x.truth.get('svg', '')}"),
    ]  # fmt: skip
