"""Honest answers and tricks for the probe: the figure's own code, and responses that earn without drawing it."""

# ruff: noqa: E501
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vlmrl.tasks.attack import Attack, Play, Stage, says, void_attacks
from vlmrl.tasks.vfig.truth import CODE
from vlmrl.types import RewardInput

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


def play_figures(stage: Stage) -> Play:
    """Return honest answers and tricks: the code of the figure, that of another one, and one code for all rows."""
    codes = [text for text, _ in Counter(map(_code, stage.rows)).most_common()]

    def other(x: RewardInput) -> str | None:
        return next((text for text in codes if text != _code(x)), None)

    guesses = [
        Attack(f"always figure {number}", "the code of one figure for all rows", "guess", says(text))
        for number, text in enumerate(codes[:MOST_GUESSES], 1)
    ]
    return Play(
        Attack("honest", "the code of the figure", "fair", _code),
        Attack("honest, wrong", "the code of another figure", "fair", other),
        guesses,
        void_attacks(stage.echo),
        _code,
        broken_truths={name: _with_code(value) for name, value in BROKEN.items()},
    )


def _code(x: RewardInput) -> str:
    return str(x.truth.get(CODE, ""))


def _with_code(value: Any) -> Callable[[RewardInput], Mapping[str, Any]]:
    return lambda x: {**x.truth, CODE: value}


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
