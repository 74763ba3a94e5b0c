"""Search for the SVG code in a response."""

from __future__ import annotations

import re

from vlmrl.svg.limits import SvgRefused

TOKEN = re.compile(r"<!--|-->|<!\[CDATA\[|\]\]>|<(/?)(?:[A-Za-z_][\w.-]*:)?svg(?=[\s/>])", re.IGNORECASE)
"""Begin and end of comments and of CDATA sections, and tags of `svg` elements with or without a prefix."""
ENDS = {"<!--": "-->", "<![CDATA[": "]]>"}
"""Begin of a comment and of a CDATA section -> its end."""
TAG_END = re.compile(r"[^\"'>]*(?:\"[^\"]*\"[^\"'>]*|'[^']*'[^\"'>]*)*>")
"""Rest of a tag. A `>` within quotes does not end it."""


def find_svg(response: str) -> str:
    """Return the last complete `svg` element of a response, from its tag to the end tag that belongs to it.

    Prose, thoughts and code fences around it are left out. An `svg` within an `svg` belongs to the outer one. A word
    such as `<svg>` in prose that no end tag follows is not an element.

    Raises: SvgRefused (`missing` without an element, `cut` if the last one has no end).
    """
    complete: list[tuple[int, int]] = []
    starts: list[int] = []
    place, last_ends = 0, {end: response.rfind(end) for end in ENDS.values()}
    while token := TOKEN.search(response, place):
        place = token.end()
        if token[0] in ENDS:
            end = ENDS[token[0]]
            # Not searched where there is none: of many that have no end, each would search the rest of the text.
            place = response.find(end, place) + len(end) if starts and last_ends[end] >= place else place
            continue
        if token[0] in ENDS.values():
            continue
        rest = TAG_END.match(response, place)
        if rest is None:
            starts.append(token.start())
            break
        place = rest.end()
        if token[1]:
            if starts:
                complete.append((starts.pop(), place))
        elif rest[0].endswith("/>"):
            complete.append((token.start(), place))
        else:
            starts.append(token.start())
    if not complete:
        raise SvgRefused(
            *(("cut", "the svg element has no end tag") if starts else ("missing", "there is no svg element"))
        )
    # An open tag after the last complete element: the answer was cut, and what is complete is an earlier draft.
    last = max(end for _, end in complete)
    if starts and starts[-1] > last:
        raise SvgRefused("cut", "the last svg element has no end tag")
    first = min(start for start, end in complete if end == last)
    return response[first:last]
