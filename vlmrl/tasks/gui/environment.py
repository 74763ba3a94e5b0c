"""Pages in which a model acts by what it sees, and the drawing of rows. Each process of an episode runs this file.

All episodes share one browser, and each has a page in a context of its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Literal

from PIL import Image

from vlmrl.browser.client import Browser, BrowserGone, BrowserServer, Tab
from vlmrl.data.images import encode_png, image_hash
from vlmrl.environments.base import EnvironmentUnavailable, Observation, Start, Started
from vlmrl.environments.tools import ToolError
from vlmrl.errors import DataError, RewardError
from vlmrl.rewards.boxes.planes import Box, Plane, Space, check_space, convert, plane_of
from vlmrl.tasks.base import NewRow
from vlmrl.tasks.gui.kinds import KINDS
from vlmrl.types import hash64
from vlmrl.untrusted import parse_json

STATE, SCROLL = "({...document.body.dataset})", "scrollBy(0, {})"
PLACE = """(s => {const e = document.querySelector(s), r = e.getBoundingClientRect(), x = r.x + r.width / 2
const y = r.y + r.height / 2, top = document.elementFromPoint(x, y); return [x, y, top !== null && e.contains(top)]})"""
"""Expressions for a page: its state; to scroll at once; the middle of an element, and whether a click there hits it."""
MEMORY_MB = 16384
"""Memory of the browser with the pages of all episodes, in MiB, unless an argument says otherwise."""
MOST_CHARS, MOST_TRIES = 200, 20
"""Longest text that is typed at once; largest number of drawings for one row."""


class Clicks:
    """Page with one tool, `click`. Its state decides the reward: 1 if it is the row's goal at the end.

    Args:
        space: coordinate space of places and distances.
        seconds: longest time of one step; an action has three, for which `environment.tool_seconds` must last.
        memory_mb: memory of the browser with all pages, in MiB; it ends above that.
    """

    server: ClassVar[BrowserServer | None] = None

    def __init__(self, space: str = "thousand", seconds: float = 8.0, memory_mb: int = MEMORY_MB) -> None:
        self._space: Space = check_space(space)
        self._seconds, self._actions, self._reached, self._holds = seconds, 0, False, False

    @classmethod
    def __vlmrl_start__(cls, args: Mapping[str, Any], *, forks: bool) -> Started:
        """Start the browser of all episodes, which are forks of this process. Raises: RewardError if there is none."""
        server = BrowserServer(int(args.get("memory_mb", MEMORY_MB)))
        try:
            with Browser(server.address) as browser:
                key, layers = browser.key, browser.facts["layers"]
        except BrowserGone as error:
            server.close()
            raise RewardError(error.message, hint=error.hint) from error
        if not forks:
            server.close()
        Clicks.server = server if forks else None
        return Started(f"pages in {key}; {layers}", identity=key)

    def reset(self, page: str, goal: str, side: int) -> None:
        """Open the page of a row. Raises: EnvironmentUnavailable if the browser is gone."""
        if self.server is None:
            raise RewardError("the browser of the tools was not started")
        self._goal, self._side = parse_json(goal), side
        try:
            self._open = ExitStack()  # until the process ends
            browser = self._open.enter_context(Browser(self.server.address, self._seconds))
            self._tab = self._open.enter_context(browser.tab(side, side))
            self._tab.load(page)
        except (BrowserGone, TimeoutError) as error:
            raise EnvironmentUnavailable(f"the browser opens no page: {error}") from error

    def click(self, start: Start, x: float, y: float) -> Observation:
        """Click at a place of the page, and see the page after it.

        Args:
            x, y: distances from the left and the upper edge.
        """
        across, down = self._pixels(start, x, y)
        if not (0 <= across < self._side and 0 <= down < self._side):
            raise ToolError(f"the place ({x:g}, {y:g}) is not on the page")
        return self._after(lambda tab: tab.click(across, down))

    def get_reward(self) -> float:
        """Return 1 if the state of the page is the goal, else 0."""
        return float(self._holds)

    def _pixels(self, start: Start, x: float, y: float) -> tuple[float, float]:
        size, seen = (self._side, self._side), start.seen_sizes[-1] if start.seen_sizes else None
        return convert(Box(x, y, x, y), plane_of(self._space, size, seen), Plane("pixels", *size))[:2]

    def _after(self, act: Callable[[Tab], object], actions: int = 1) -> Observation:
        """Act, and return the page after it. Raises: EnvironmentUnavailable if the browser is gone or hangs."""
        try:
            act(self._tab)
            pixels, self._holds = self._tab.pixels(), holds(self._tab, self._goal)
        except (BrowserGone, TimeoutError) as error:
            raise EnvironmentUnavailable(f"the browser ended or hangs: {error}") from error
        self._actions += actions
        self._reached = self._reached or self._holds
        measured = {"actions": float(self._actions), "reached": float(self._reached)}
        return Observation("", [Image.fromarray(pixels)], measured=measured)


class Page(Clicks):
    """Page with the tools to click, type, press keys and scroll."""

    def type(self, text: str) -> Observation:
        """Type a text into the field that was clicked last, and see the page after it.

        Args:
            text: the text, one line.
        """
        if not text.isprintable() or not 0 < len(text) <= MOST_CHARS:
            raise ToolError(f"the text must be one line of 1 to {MOST_CHARS} characters")
        return self._after(lambda tab: tab.type(text))

    def press(self, key: Literal["Enter", "Tab", "Backspace", "Escape"]) -> Observation:
        """Press a key, and see the page after it.

        Args:
            key: its name.
        """
        return self._after(lambda tab: tab.press(key))

    def scroll(self, start: Start, dy: float) -> Observation:
        """Scroll the page, and see the page after it.

        Args:
            dy: how far, in the units of y; positive is down.
        """
        _, down = self._pixels(start, 0, max(-1e6, min(dy, 1e6)))
        return self._after(lambda tab: tab.value(SCROLL.format(round(down))))

    def screenshot(self) -> Observation:
        """See the page again."""
        return self._after(lambda tab: None, actions=0)


def holds(tab: Tab, goal: Mapping[str, str]) -> bool:
    """Return whether the state of a page is the goal; an empty value counts like none."""
    return {name: value for name, value in tab.value(STATE).items() if value} == dict(goal)


def draw_splits(
    counts: Mapping[str, int], kinds: Mapping[str, Sequence[str]], side: int, seed: int
) -> dict[str, list[NewRow]]:
    """Return split -> drawn rows, no two of which begin with the same picture.

    Args:
        counts, kinds: split -> its number of rows, and the kinds of its pages.
        side: width and height of a page, in pixels.
    Raises: DataError without a browser, or if no drawing of a row can be used.
    """
    images = set[str]()

    def row(tab: Tab, split: str, number: int) -> NewRow:
        kind = kinds[split][number % len(kinds[split])]
        for attempt in range(MOST_TRIES):
            rng = random.Random(hash64("gui", str(seed), split, str(number), str(attempt)))
            drawn = draw_row(tab, kind, side, rng)
            if drawn is not None and (sha256 := image_hash(drawn.images[0])) not in images:
                images.add(sha256)
                truth = {**drawn.truth, "group": "known" if kind in kinds["train"] else "unseen"}
                return NewRow(truth, drawn.images, drawn.columns, origin=f"{split} {number}")
        raise DataError(f"{MOST_TRIES} drawings gave no new page of the kind {kind}", hint="fewer rows")

    try:
        with BrowserServer() as server, Browser(server.address) as browser, browser.tab(side, side) as tab:
            return {split: [row(tab, split, number) for number in range(count)] for split, count in counts.items()}
    except (BrowserGone, TimeoutError) as error:
        why, hint = (error.message, error.hint) if isinstance(error, BrowserGone) else (str(error), None)
        raise DataError(f"pages cannot be drawn: {why}", hint=hint) from error


def draw_row(tab: Tab, kind: str, side: int, rng: random.Random) -> NewRow | None:
    """Return a row of a kind, with the actions that reach its goal; None if this drawing hides what must be clicked."""
    page = KINDS[kind](rng)
    html, actions = page.html(kind, rng, side), list[tuple[str, Any]]()
    tab.load(html)
    image = encode_png(Image.fromarray(tab.pixels()))
    for name, value in page.steps:
        if name == "click":
            place = f"{PLACE}({json.dumps(value)})"
            x, y, is_free = tab.value(place)
            if not 0 <= y - side * 0.02 < side * 0.96:
                actions.append(("scroll", round(y - side / 2)))
                tab.value(SCROLL.format(actions[-1][1]))
                x, y, is_free = tab.value(place)
            if not is_free:
                return None
            actions.append((name, [round(x, 1), round(y, 1)]))
            tab.click(*actions[-1][1])
        else:
            actions.append((name, value))
            (tab.type if name == "type" else tab.press)(value)
    if not holds(tab, page.goal):
        raise DataError(f"the steps of a page of the kind {kind} do not reach its goal")
    facts = {"kind": kind, "goal": json.dumps(page.goal), "actions": json.dumps(actions), "side": side, "page": html}
    return NewRow(facts, [image], {"request": page.request})
