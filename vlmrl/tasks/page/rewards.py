"""Reward for the code of web pages, and where a response has its page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.metric import SHARE
from vlmrl.redaction.redact import quoted
from vlmrl.rewards import Builtin
from vlmrl.rewards.base import RewardSpec, WorkerFunction
from vlmrl.types import Size
from vlmrl.untrusted import CodeRefused

NAME, HTML = "page", "html"
"""Name of the task and of its reward; truth field with the code of a page."""
SECONDS = 60.0
"""Time limit of one response: two pages, each with the time limit of the browser."""
WEIGHTS = {"picture": 0.5, "text": 0.25, "layout": 0.25}
PARTS = (*WEIGHTS, "render", "accuracy")
MOST_CHARS = 200_000
"""Largest number of characters of a page."""
MOST_SIDE, MOST_PIXELS = 8192, 16_777_216
"""Largest sides and area of a page's picture, in pixels."""
FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[ \t]*$", re.MULTILINE)
PAGE = re.compile(
    r"<(?:!doctype|html|head|body)\b.*?(?:(</html\s*>|</body\s*>(?!\s*</html))|\Z)", re.DOTALL | re.IGNORECASE
)


def page(*, pictures: bool = False) -> RewardSpec:
    """Return a reward: the page of a response beside the true one, as a browser shows both. The truth itself earns 1.

    Part `picture`, weight 0.5: ink, edges and structure of the two pictures where there is ink, times the ratio of the
    heights of the pages; one colour earns 0. `text`, 0.25: the words that can be seen, pairs of neighbouring words, and
    triples of characters. `layout`, 0.25: lines of text, assigned one to one: how alike their characters are, times
    place (half), size and colour. For a truth without text, `picture` alone counts.

    Reported: `render`, 1 if the response has a page that can be shown; `accuracy`, 1 if all three are at least 0.9.

    A response without a page, or with one that the browser refuses, earns 0, with the reason in its note.

    Args:
        pictures: whether the score has the artifacts `render` and `overlay`.
    """
    worker = WorkerFunction(NAME, "vlmrl.tasks.page.grader", "make_grader", {"pictures": bool(pictures)})
    return worker.reward(dict.fromkeys(PARTS, SHARE), WEIGHTS, seconds=SECONDS, accuracy="accuracy")


def find_html(response: str) -> str:
    """Return the page in a response: of the last code fence with one, else from its first tag to its end.

    A page begins with `<!doctype`, `<html`, `<head` or `<body`; in a fence it may be any code. A thought does not
    count. Of several pages the last complete one counts; if none is, the last one, to the end of the text.

    Raises: CodeRefused.
    """
    _, has_thought, text = response.rpartition("</think>")
    if not has_thought and "<think>" in text:
        raise CodeRefused("missing", "the thought has no end")
    code = _fenced(text)
    if code is None:
        pages = [*PAGE.finditer(text)]
        if not pages:
            raise CodeRefused("missing", "there is no HTML code")
        code = ([page for page in pages if page[1]] or pages)[-1][0]
    if len(code) > MOST_CHARS:
        raise CodeRefused("size", f"the page has {len(code):,} characters; the limit is {MOST_CHARS:,}")
    return code.strip()


def _fenced(text: str) -> str | None:
    """Return the code of the last fence that has a page; None without one."""
    marks, code = [*FENCE.finditer(text)], None
    for start, end in zip(marks[::2], [*marks[1::2], None], strict=False):
        inner = text[start.end() : end.start() if end is not None else len(text)]
        if "<" in inner and start[1].casefold() in ("html", ""):
            code = inner
    return code


def write_answer(html: str) -> str:
    """Return a response with a page: the code alone, or in a fence where it would not be found.

    Raises: CodeRefused for code that no response can have.
    """
    for answer in (html, f"```html\n{html}\n```"):
        try:
            if find_html(answer) == html:
                return answer
        except CodeRefused:
            continue
    raise CodeRefused(
        "size", f"its code cannot be an answer: it has over {MOST_CHARS:,} characters, or the marks of answers"
    )


def page_of(truth: Mapping[str, Any]) -> tuple[str, Size]:
    """Return the code of a row's page, and the width and height of its picture. Raises: RewardError without them."""
    html, sides = truth.get(HTML), (truth.get("width"), truth.get("height"))
    if not isinstance(html, str) or not html.strip():
        raise RewardError(f"the row's `{HTML}` is {quoted(html, 60)}, not the code of a page")
    width, height = (side if type(side) is int and 0 < side <= MOST_SIDE else 0 for side in sides)
    if not 0 < width * height <= MOST_PIXELS:
        raise RewardError(f"the row's width and height are {quoted(sides, 60)}, not the size of a picture in pixels")
    return html, (width, height)


REWARDS: Mapping[str, Builtin] = {
    NAME: Builtin(
        page,
        "HTML code: the picture, the words and the place of the text beside the true page; runs in workers",
        version=1,
        shown=("pictures",),
    ),
}
