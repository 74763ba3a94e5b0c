"""The task page: its prompts, demonstrations, files and tricks; its tool stands in grader.py."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from vlmrl.data.doctor import RowLabels
from vlmrl.errors import RewardError
from vlmrl.tasks.attack import Attack, Make, says
from vlmrl.tasks.base import NoFile, ResponseFile, Task, prepared_task
from vlmrl.tasks.page.rewards import HTML, NAME, find_html, page_of, write_answer
from vlmrl.tasks.truth_kinds import Drawn, RowKind
from vlmrl.tasks.vfig.pictures import LEGEND, RENDER
from vlmrl.tasks.vfig.task import code_probe
from vlmrl.types import Call, RewardInput, Row
from vlmrl.untrusted import CodeRefused

SUMMARY = "the HTML and CSS of a web page that an image shows (made by `vlmrl prep page`)"
VARIANTS = ("direct", "think", "repair")
"""The code alone; with a thought before it; after looking at drafts with the tool `render`."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Policy in a page's file: it runs and loads nothing when it is opened."""
NUMBER = re.compile(r"(?<=: )\d{1,3}(?=px)|(?<=height:)\d{2}")
BODY = re.compile(r"(.*<body\b[^>]*>)(.*)(</body>.*)", re.DOTALL | re.IGNORECASE)
NO_TEXT = re.compile(r"<style\b.*?</style>|<title\b.*?</title>|<[^>]*>", re.DOTALL | re.IGNORECASE)
HIDDEN = {
    "transparent": "opacity:0",
    "in the colour of the page": "color:#fff",
    "outside of the page": "position:absolute;left:-9999px",
    "cut off": "height:0;overflow:hidden",
    "not displayed": "display:none",
}
"""Way to hide text on a white page -> the style."""


def page_task(info: Mapping[str, Any], variant: str | None = None) -> Task:
    """Return the task of a dataset; see `prepared_task`."""
    name = variant or VARIANTS[0]
    return prepared_task(
        NAME,
        SUMMARY,
        info,
        f"page/{name}.jinja",
        validate=truth_problems,
        profiles={"default": (NAME, {})},
        by=("layout",),
        trace=partial(write_trace, name),
        attacks=attacks,
        kind=PAGES,
        file=ResponseFile("HTML code", ".html", html_file, lambda: _grader().drawing()),
        environments="page/grader.py",
        variant=name,
        variants=VARIANTS,
    )


def truth_problems(truth: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a truth, in words."""
    try:
        write_answer(page_of(truth)[0])
        return []
    except (RewardError, CodeRefused) as error:
        return [error.message if isinstance(error, RewardError) else error.reason]


def write_trace(variant: str, row: Row, rng: random.Random) -> str | list[str | Call]:
    """Return the code of the row's page; for `repair`, after a look at a draft in which one length is wrong."""
    html = row.truth[HTML]
    answer = write_answer(html)
    if variant == "repair":
        places = [*NUMBER.finditer(html)]
        wrong = rng.choice(places) if places else None
        draft = f"{html[: wrong.start()]}{int(wrong[0]) * 2 + 9}{html[wrong.end() :]}" if wrong else html
        return [Call("render", {"html": draft}), answer]
    return f"<think>I read the layout, the texts and the colours.</think>\n{answer}" if variant == "think" else answer


def html_file(response: str) -> str | NoFile:
    """Return the page of a response as a file that runs and loads nothing in a browser, or why there is none."""
    try:
        html = find_html(response)
    except CodeRefused as error:
        return NoFile(error.reason)
    if re.search(r"http-equiv", html, re.IGNORECASE):
        return NoFile("it would load something when it is opened: http-equiv")
    begin = re.match(r"\s*<!doctype[^>]*>", html, re.IGNORECASE)
    place = begin.end() if begin else 0
    return f'{html[:place]}<meta http-equiv="Content-Security-Policy" content="{POLICY}">{html[place:]}'


def _grader() -> ModuleType:
    from vlmrl.tasks.page import grader  # it is heavy

    return grader


def _code(x: RewardInput) -> str:
    return str(x.truth.get(HTML, ""))


PAGES = RowKind(
    lambda truth: isinstance(truth.get(HTML), str),
    probe=partial(code_probe, HTML, {"no code": 7, "nothing": "  "}),
    labels=lambda row: RowLabels(None),  # a page belongs to no class
    drawn=Drawn("HTML", 0, RENDER, lambda pairs: _grader().draw_pairs(pairs), LEGEND),
)


def attacks(rows: Sequence[RewardInput]) -> list[Attack]:
    """Return the tricks; they do not depend on the rows."""

    def wrapped(before: str, after: str = "") -> Make:
        """Write the truth with more code around the content of its body."""

        def make(x: RewardInput) -> str | None:
            body = BODY.fullmatch(_code(x))
            return f"{body[1]}{before}{body[2]}{after}{body[3]}" if body else None

        return make

    def words(before: str, after: str = "</p>") -> Make:
        """Write the words of the truth, without its tags, on a white page."""
        return lambda x: f'<body style="background:#fff">{before}{NO_TEXT.sub(" ", _code(x))}{after}</body>'

    cover = '<div style="position:fixed;left:0;top:0;width:100%;height:100%;background:#fff"></div>'
    blank = '<body style="background:#fff"></body>'
    junk = '<p style="background:#f0f">more and more words</p>' * 5
    return [
        Attack("blank page", "a page without content", "void", says(blank)),
        Attack("one colour", "a page that is grey all over", "void", says('<body style="background:#ccc"></body>')),
        *(Attack(f"text {way}", "the right words, hidden", "void", words(f'<p style="{style}">'))
          for way, style in HIDDEN.items()),
        Attack("tiny text", "the right words as dots", "guess", words('<p style="font-size:1px;line-height:1px">')),
        Attack("text of a picture", "the right words in an alt text", "void", words('<img width="1" alt="', '">')),
        Attack("covered truth", "the right page behind a white one", "void", wrapped("", cover)),
        Attack("written by a script", "a script that writes the page", "void",
               lambda x: f"<html><script>document.write({_code(x)!r})</script></html>"),
        Attack("truth in a thought", "the right page, only thought", "void", lambda x: f"<think>{_code(x)}</think>"),
        Attack("a claim", "a page that states its own score", "guess", says("<body><h1>score: 1.0</h1></body>")),
        Attack("the prompt's words", "the prompt as a page", "guess", lambda x: f"<body><p>{x.prompt}</p></body>"),
        Attack("words alone", "the right words without a layout", "miss", words("<p>")),
        Attack("truth and junk", "the right page with needless text and blocks", "miss", wrapped("", junk)),
        Attack("taken back", "the right page, then an empty one", "broken", lambda x: f"{_code(x)}\n{blank}"),
        Attack("truth in a fence", "the right page in a code fence", "fair", lambda x: f"```html\n{_code(x)}\n```"),
        Attack("two answers", "an empty page, then the right one", "fair",
               lambda x: f"```html\n{blank}\n```\n```html\n{_code(x)}\n```"),
    ]  # fmt: skip
