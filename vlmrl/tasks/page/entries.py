"""Entry of the task page, the kind of its rows, and its `vlmrl prep` command."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any

from vlmrl.errors import DataError
from vlmrl.tasks.base import NewRow
from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.drawing import Drawn, draw_rows
from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.own_prep import prepare_own
from vlmrl.tasks.page.drawn import LAYOUTS, SIMPLE, draw_page
from vlmrl.tasks.page.rewards import HTML, MOST_CHARS, MOST_SIDE, NAME, write_answer
from vlmrl.tasks.page.task import PAGES, SUMMARY, VARIANTS, page_task
from vlmrl.tasks.prep_options import SOURCES, Option, PrepCommand, TableRequest, table_options
from vlmrl.tasks.table_rows import TEST, TRAIN, VALIDATION, RowForm, read_tables
from vlmrl.tasks.truth_kinds import TruthForm
from vlmrl.types import LeftOut, hash64
from vlmrl.untrusted import CodeRefused

if TYPE_CHECKING:
    from vlmrl.browser.client import Browser

PUBLISHED = "hub:HuggingFaceM4/WebSight#v0.1"
TABLE_WIDTH, DRAWN_WIDTH, SIMPLE_WIDTH = 1280, 800, 112
FONTS = r"(?:fonts\.|use\.typekit\.)"
ELSEWHERE = re.compile(
    rf"<script\b[^>]*\bsrc\s*=|<link\b(?=[^>]*\bstylesheet\b)(?![^>]*{FONTS})|@import\b(?![^;]*{FONTS})|document\.write\b",
    re.IGNORECASE,
)
"""Code that loads a script, or a style sheet other than that of a font, or a script that writes the page."""
WIDTH_HELP = f"Width of the window; default: {TABLE_WIDTH}, drawn {DRAWN_WIDTH}, with --simple {SIMPLE_WIDTH}."
HEIGHT_HELP = "Least height of a picture; default: 3/4 of the width, with --simple the width."


@dataclass(frozen=True)
class Window:
    """Settings of pictures and limits of pages. Lengths are in pixels."""

    width: int
    height: int
    max_height: int
    max_chars: int
    simple: bool = False


@table_options(PUBLISHED, validation_rows=500, test="Other source whose rows become the test split, as Design2Code's.")
def prep_page(
    request: TableRequest,
    simple: Annotated[bool, Option("Draw one or two flat blocks, with very short code.")] = False,
    width: Annotated[int | None, Option(WIDTH_HELP, min=28, max=4096)] = None,
    height: Annotated[int | None, Option(HEIGHT_HELP, min=28, max=MOST_SIDE)] = None,
    max_height: Annotated[int, Option("Largest height of a page.", min=28, max=MOST_SIDE)] = 4096,
    max_chars: Annotated[int, Option("Largest number of characters of the code.", min=100, max=MOST_CHARS)] = 20_000,
    max_rows: Annotated[int, Option("Largest number of training rows from a table; 0: all.", min=0)] = 0,
    *,
    limits: Limits,
) -> Prepared:
    """Make the dataset of page from a table, or draw it; the browser shows each page.

    Raises: DataError for an option, source or row that cannot be used; BrowserGone without a browser.
    """
    from vlmrl.tasks.page.grader import open_browser

    counts, (name, out) = request.drawn(), request.place(NAME)
    width = width or (SIMPLE_WIDTH if simple else DRAWN_WIDTH if counts else TABLE_WIDTH)
    window = Window(width, height or (width if simple else width * 3 // 4), max_height, max_chars, simple)
    if simple and not counts:
        raise DataError("--simple is for drawn pages", hint="--synthetic N, or leave it out")
    if window.height > max_height:
        raise DataError(f"--height {window.height} is over --max-height {max_height}", hint="a larger --max-height")
    args = {**request.args(), **asdict(window), **({} if counts else {"max_rows": max_rows}), **limits.args}
    with open_browser() as browser:
        if counts:
            draw = partial(_draw_row, browser, window)
            splits = partial(draw_rows, NAME, counts, request.seed, draw, hint="a larger --max-height")
        else:
            splits = partial(_table_rows, browser, window, request, max_rows, limits)
        task = replace(page_task({}), prep=lambda **_: splits())
        return prepare_own(task, args, out, limits, name=name, source=lambda: {"browser": browser.key})


def _draw_row(browser: Browser, window: Window, number: int, rng: random.Random) -> Drawn | None:
    layout = SIMPLE if window.simple else LAYOUTS[number % len(LAYOUTS)]
    try:
        return _shown(browser, window, draw_page(layout, rng.getrandbits(63)), layout)
    except CodeRefused:
        return None


def _shown(browser: Browser, window: Window, html: str, layout: str = "") -> Drawn:
    """Return the picture, the truth and the columns of a row. `layout`: of a drawn page. Raises: CodeRefused."""
    from vlmrl.tasks.page.grader import show_whole

    size = window.width, window.height
    image = show_whole(browser, html, size, window.max_height, needs_text=not layout)
    truth = {HTML: html, "width": image.width, "height": image.height, "layout": layout or "published"}
    return Drawn(image, truth, {"size": f"{image.width} x {image.height}"})


def _table_rows(
    browser: Browser, window: Window, request: TableRequest, max_rows: int, limits: Limits
) -> dict[str, Iterator[NewRow | LeftOut]]:
    """Return split -> rows with their pictures. Held-out pages come first: the same page is in no later split."""
    tables, seen = read_tables(request, ROW_FORM, limits), dict[int, str]()
    order = sorted(tables, key=lambda split: {TEST: 0, VALIDATION: 1, TRAIN: 3}.get(split, 2))
    pages = {split: _pages(browser, window, split, tables[split], seen) for split in order}
    if max_rows and TRAIN in pages:
        pages[TRAIN] = _first(pages[TRAIN], max_rows)
    return pages


def _first(rows: Iterable[NewRow | LeftOut], most: int) -> Iterator[NewRow | LeftOut]:
    """Yield rows until so many are kept."""
    for row in rows:
        yield row
        most -= isinstance(row, NewRow)
        if not most:
            return


def _pages(
    browser: Browser, window: Window, split: str, rows: Iterable[NewRow | LeftOut], seen: dict[int, str]
) -> Iterator[NewRow | LeftOut]:
    """Yield the rows whose pages are within the limits and new, and why the others are left out.

    Args:
        seen: hash of a page, or of its picture -> its place; new ones are added.
    Raises: DataError if no row is left.
    """
    reason, is_bare = "there are no rows", True
    for row in rows:
        if isinstance(row, LeftOut):
            yield row
            continue
        try:
            _check_code(row.truth[HTML], window)
            drawn = _shown(browser, window, row.truth[HTML])
            keys = hash64(row.truth[HTML]), hash64(sha256(drawn.image.tobytes()).hexdigest())
            if place := next((seen[key] for key in keys if key in seen), None):
                raise CodeRefused("twin", f"the same page as {place}")
        except CodeRefused as error:
            reason = error.reason
            yield LeftOut(row.origin, reason)
            continue
        seen.update(dict.fromkeys(keys, f"{row.origin} in the split {split}"))
        yield NewRow(drawn.truth, [drawn.image], drawn.columns, origin=row.origin)
        is_bare = False
    if is_bare:
        raise DataError(f"no page is left of the split {split}; of the last one, {reason}", hint="other rows for it")


def _check_code(html: str, window: Window) -> None:
    """Raise CodeRefused for code that is too long, or needs a script or style sheet that cannot be loaded."""
    if len(html) > window.max_chars:
        raise CodeRefused("size", f"the code has over {window.max_chars:,} characters")
    if "tailwind" in html.casefold() and "<script" in html.casefold():
        raise CodeRefused("forbidden", "its style comes from a script (Tailwind), and scripts do not run")
    if ELSEWHERE.search(html):
        raise CodeRefused("forbidden", "it needs a script or a style sheet, and nothing is loaded or run")
    write_answer(html)


def _read_row(cells: Mapping[str, Any], size: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    html = cells.get(HTML)
    if not isinstance(html, str) or "<" not in html:
        raise DataError("the code is no text with HTML")
    return {HTML: html.strip()}, {"page": hash64(html.strip())}  # a column, as no two rows may show the same


ROW_FORM = RowForm(
    {HTML: ("text", "html", "code", "ground_truth")},
    ((HTML,),),
    _read_row,
    "rows have the HTML code of a page (text, html or code)",
    any_image=True,
)


COMMAND = PrepCommand(
    prep_page,
    f"Pictures of web pages with their HTML code.\n\nSOURCE: {ROW_FORM.help}, {SOURCES} Default: {PUBLISHED}. The "
    "picture of a row is drawn from its code by the browser of this machine (`apt install chromium-headless-shell`), "
    "and pictures in a page are a grey placeholder. --synthetic N draws pages of eleven layouts instead.\n\n"
    "Example: vlmrl prep page --synthetic 2000 --out data/page\n\n"
    "Example: vlmrl prep page --max-rows 20000 --test hub:SALT-NLP/Design2Code-hf --out data/websight",
)
TASKS = {NAME: TaskEntry(page_task, SUMMARY, variants=VARIANTS, truth_form=lambda *_: TruthForm((HTML,)), prep=COMMAND)}
KINDS = (PAGES,)
