"""Grader of the reward `page`, pictures of rows, comparisons for pages, and the tool `render`. All use the browser."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from math import hypot, sqrt
from typing import Any, ClassVar, NamedTuple

import numpy as np
from PIL import Image
from scipy.optimize import linear_sum_assignment

from vlmrl.browser.client import Browser, BrowserGone, BrowserServer, Seen, SeenText
from vlmrl.data.images import encode_png
from vlmrl.environments.base import EnvironmentUnavailable, Start, Started
from vlmrl.environments.tools import ToolError
from vlmrl.errors import RewardError
from vlmrl.tasks.base import Draw, NoFile
from vlmrl.tasks.page.rewards import MOST_SIDE, WEIGHTS, find_html, page_of
from vlmrl.tasks.vfig.pictures import RENDER, overlaid, shown_pictures
from vlmrl.tasks.vfig.scoring.picture import TruePicture
from vlmrl.types import RewardInput, RewardResult, Size
from vlmrl.untrusted import CodeRefused

SECONDS = 20.0
"""Time limit of a page: far above what pages take, also on a busy machine."""
AREA = 100_000
"""Area in pixels to which larger pictures are reduced before they are compared."""
KEPT = 64
"""Number of pages that are kept: all responses to a prompt need one, and some are equal."""
RIGHT = 0.9
"""Least score of each part of a page that counts as right."""
UNSEEN = 0.1
"""Least share of letters that cannot be seen of which the note speaks."""
MOST_LINES = 400
"""Largest number of lines of text that are assigned one to one: the longest ones."""
REACH = 0.25
"""Distance at which the place of a line counts 0, in diagonals of the picture."""
DIFFERENCE = 128
"""Difference of a channel, of 255, at which the colour of a line counts 0."""
DECIMALS = 6
FILE_WINDOW = 1280, 960
"""Width and least height of the pictures of responses' files, in pixels."""


class View(NamedTuple):
    """View of a page: its reduced picture, lines of text, height, share of letters unseen, and size of its window."""

    picture: TruePicture
    pixels: np.ndarray
    texts: Sequence[SeenText]
    height: int
    unseen: float
    size: Size

    @classmethod
    def of(cls, seen: Seen, size: Size) -> View:
        pixels = _reduced(seen.pixels)
        return cls(TruePicture(pixels), pixels, seen.texts, seen.page_height, seen.unseen, size)


def make_grader(*, pictures: bool) -> Callable[[RewardInput], RewardResult]:
    """Return the grader for the arguments of the reward `page`, with the browser started. Raises: BrowserGone."""
    browser = Browser(_server().address, SECONDS)

    @lru_cache(maxsize=KEPT)
    def view(html: str, size: Size) -> View:
        return View.of(browser.look(html, *size), size)

    def grade(x: RewardInput) -> RewardResult:
        html, size = page_of(x.truth)
        try:
            truth = view(html, size)
        except CodeRefused as error:
            raise RewardError(f"the row's true page cannot be shown: {error.reason}", hint="leave it out") from None
        try:
            response = view(find_html(x.answer), size)
        except CodeRefused as error:
            parts = dict.fromkeys(("render", "accuracy"), 0.0) | _applying(truth, dict.fromkeys(WEIGHTS, 0.0))
            return RewardResult(parts, f"not shown: {error.reason}", {"refused": error.kind, "reason": error.reason})
        parts = compare(truth, response)
        right = all(value is None or value >= RIGHT for value in parts.values())
        detail = {"lines": [len(view.texts) for view in (truth, response)], "heights": [truth.height, response.height]}
        note = f"{response.unseen:.0%} of its letters cannot be seen" if response.unseen >= UNSEEN else ""
        if (response.pixels == response.pixels[0, 0]).all():
            note = "the page is empty" + ("; scripts do not run" if "<script" in x.answer else "")
        shown = shown_pictures(truth.pixels, response.pixels) if pictures else {}
        return RewardResult({**parts, "render": 1.0, "accuracy": float(right)}, note, detail, shown)

    return grade


@cache
def _server() -> BrowserServer:
    return BrowserServer(alone=True)  # it ends with this process


def compare(truth: View, response: View) -> dict[str, float | None]:
    """Return the parts `picture`, `text` and `layout` of a page, in [0, 1]; None for parts that do not apply."""
    tall = min(truth.height, response.height) / max(truth.height, response.height)
    parts = {
        "picture": truth.picture.similarity(response.pixels).value * tall,
        "text": text_score(truth.texts, response.texts),
        "layout": layout_score(truth.texts, response.texts, hypot(*truth.size)),
    }
    # Processors differ in the last digits of sums: equal responses have equal scores everywhere.
    return _applying(truth, {name: round(value, DECIMALS) for name, value in parts.items()})


def _applying(truth: View, parts: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if truth.texts or name == "picture" else None for name, value in parts.items()}


def _reduced(pixels: np.ndarray) -> np.ndarray:
    height, width = pixels.shape[:2]
    scale = sqrt(AREA / (height * width))
    if scale >= 1:
        return pixels
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BOX))


def text_score(truth: Sequence[SeenText], response: Sequence[SeenText]) -> float:
    """Return how alike the texts of two pages are, in [0, 1], ignoring case and breaks of lines; 1 for equal texts.

    It is the mean of three shares: of the words, of the pairs of neighbouring words, with the edges of the page, and of
    the triples of characters. A share is 2 * what both have / (what one has + what the other has). So the order counts,
    but a block of text in another place costs only the pairs at its edges.
    """
    first, second = (" ".join(line.text for line in lines).casefold().split() for lines in (truth, response))
    if not first or not second:
        return float(first == second)
    pairs = (list(zip(["", *words], [*words, ""], strict=True)) for words in (first, second))
    triples = (_triples(f" {' '.join(words)} ") for words in (first, second))
    return (_shared(first, second) + _shared(*pairs) + _shared(*triples)) / 3


def _triples(text: str) -> list[str]:
    return [text[i : i + 3] for i in range(len(text) - 2)]


def _shared(first: Sequence[Any], second: Sequence[Any]) -> float:
    return 2 * (Counter(first) & Counter(second)).total() / (len(first) + len(second))


def layout_score(truth: Sequence[SeenText], response: Sequence[SeenText], diagonal: float) -> float:
    """Return how well the lines of text of two pages correspond, in [0, 1]; 1 for equal ones.

    The lines are assigned one to one, so that the sum is largest. A pair counts by the pairs of neighbouring characters
    that both have, times place (half; the distance of the middles), size (the ratio of the fonts) and colour. Lines
    weigh as many as their characters; those without a partner count 0 on either side.

    Args:
        diagonal: of the window, in pixels.
    """
    sides = [sorted(lines, key=lambda line: -len(line.text))[:MOST_LINES] for lines in (truth, response)]
    if not all(sides):
        return float(not any(sides))
    middles = [np.array([(s.left + s.right, s.top + s.bottom) for s in side]) / 2 for side in sides]
    sizes = [np.array([max(s.size, 1.0) for s in side]) for side in sides]
    colours = [np.array([s.colour for s in side], float) for side in sides]
    chars = [np.array([len(s.text) for s in side], float) for side in sides]
    apart = middles[0][:, None] - middles[1][None]
    place = np.maximum(0.0, 1 - np.hypot(apart[..., 0], apart[..., 1]) / (REACH * diagonal))
    size = np.minimum(sizes[0][:, None], sizes[1]) / np.maximum(sizes[0][:, None], sizes[1])
    colour = np.maximum(0.0, 1 - np.abs(colours[0][:, None] - colours[1][None]).max(axis=2) / DIFFERENCE)
    value = _alike(*sides) * (0.5 * place + 0.25 * size + 0.25 * colour) * (chars[0][:, None] + chars[1])
    rows, columns = linear_sum_assignment(value, maximize=True)
    return min(1.0, float(value[rows, columns].sum() / (chars[0].sum() + chars[1].sum())))


def _alike(first: Sequence[SeenText], second: Sequence[SeenText]) -> np.ndarray:
    """Return the share of pairs of neighbouring characters that two lines have in common, (len(first), len(second))."""
    numbers: dict[str, int] = {}
    sets = []
    for line in (*first, *second):
        text = f"\n{' '.join(line.text.casefold().split())}\n"
        sets.append({numbers.setdefault(text[i : i + 2], len(numbers)) for i in range(len(text) - 1)})
    table = np.zeros((len(sets), len(numbers)))
    for row, places in enumerate(sets):
        table[row, list(places)] = 1.0
    a, b = table[: len(first)], table[len(first) :]
    return 2 * (a @ b.T) / (a.sum(axis=1)[:, None] + b.sum(axis=1))


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a browser, yield a connection, and end both. Raises: BrowserGone."""
    with BrowserServer(alone=True) as server, Browser(server.address, SECONDS) as browser:
        yield browser


def show_whole(browser: Browser, html: str, window: Size, most_height: int, *, needs_text: bool = False) -> Image.Image:
    """Return the picture of a whole page, as wide as its window.

    Args:
        window: width and least height, in pixels.
        most_height: largest height.
        needs_text: whether a page without text that can be seen is refused.
    Raises: CodeRefused, also for a page that is too tall or blank.
    """
    seen = browser.look(html, *window)
    if seen.page_height > most_height:
        raise CodeRefused("size", f"the page is over {most_height:,} pixels tall")
    if seen.page_height > window[1]:
        seen = browser.look(html, window[0], seen.page_height)
    if (seen.pixels == seen.pixels[0, 0]).all():
        raise CodeRefused("blank", "the page is blank")
    if needs_text and not seen.texts:
        raise CodeRefused("blank", "the page has no text that can be seen")
    return Image.fromarray(seen.pixels)


def draw_pairs(pairs: Sequence[tuple[Mapping[str, Any], str]]) -> list[Mapping[str, bytes] | str]:
    """Return the pictures of truths and responses as PNG files: truth, render, overlay. See `Drawn.draw`."""
    results: list[Mapping[str, bytes] | str] = []
    try:
        with open_browser() as browser:
            for truth, response in pairs:
                html, size = page_of(truth)
                pixels = [browser.look(html, *size).pixels]
                with suppress(CodeRefused):
                    pixels.append(browser.look(find_html(response), *size).pixels)
                    pixels.append(overlaid(*pixels))
                named = zip(("truth", RENDER, "overlay"), pixels, strict=False)
                results.append({name: encode_png(Image.fromarray(picture)) for name, picture in named})
    except (RewardError, BrowserGone, CodeRefused) as error:
        results += [str(error)] * (len(pairs) - len(results))
    return results


@contextmanager
def drawing() -> Iterator[Draw]:
    """Yield a function that draws pages in a window of FILE_WINDOW."""
    with open_browser() as browser:

        def drawn(html: str) -> bytes | NoFile:
            try:
                return encode_png(show_whole(browser, html, FILE_WINDOW, MOST_SIDE))
            except CodeRefused as error:
                return NoFile(error.reason)

        yield lambda pages: [drawn(html) for html in pages]


class Render:
    """The tool `render`. The episodes of a process share a browser."""

    _server: ClassVar[BrowserServer | None] = None

    @classmethod
    def __vlmrl_start__(cls, args: Mapping[str, Any], *, forks: bool) -> Started:
        cls._server = BrowserServer() if forks else None
        return Started("pages are shown by the browser of this machine")

    def render(self, start: Start, html: str) -> Any:
        """Show the picture of a page.

        Args:
            html: the whole code of the page.
        """
        assert self._server is not None  # it was started
        try:
            with Browser(self._server.address) as browser:
                return Image.fromarray(browser.look(html, *start.images[0].size).pixels)
        except CodeRefused as error:
            raise ToolError(error.reason) from None
        except BrowserGone as error:
            raise EnvironmentUnavailable(f"the browser shows no page: {error}") from error
