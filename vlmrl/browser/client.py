"""Client of the browser's server: pages of a model, drawn without running anything of theirs, and pages of our own.

A page of a model may be hostile. Its scripts never run, it gets no answer to any request, frames and plug-ins are
blocked, animations stand still, and pictures of other addresses are a grey placeholder. What it shows is read from the
layout and from the pixels: text counts only where its ink can be seen.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vlmrl.browser.server import FONTS, FRAME, PROGRAM, ZERO
from vlmrl.errors import VlmrlError
from vlmrl.redaction.redact import excerpt
from vlmrl.untrusted import CodeRefused, parse_json

SECONDS, MEMORY_MB = 5.0, 2048
"""Limits of a page: wall time, and main memory of all processes of the browser, in MiB."""
MOST_CHARS = 400_000
"""Longest code of a page that is drawn."""
START_SECONDS, GRACE_SECONDS = 90.0, 0.5
"""Longest start of the browser and of a page, and longest end of a page."""
ADDRESS = "http://page.invalid/"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src http: https: data:"
"""Content-Security-Policy of a hostile page: no scripts, frames, plug-ins, fonts, media, workers or forms."""
MOUSE = "Input.dispatchMouseEvent"
SHOT = {"format": "png", "optimizeForSpeed": True}
GREY = (204, 204, 204)
PLACEHOLDER_SIZE = (300, 200)
HIDE = (
    "*, *::before, *::after, *::first-line, *::first-letter, *::marker, *::placeholder {"
    "-webkit-text-fill-color: transparent !important; text-shadow: none !important}"
)
"""Style that hides the letters of a page, and nothing else."""
FILL = "-webkit-text-fill-color"
STYLES = [FILL, "font-size", "opacity", "visibility"]
MOST_LINES = 5000
"""Number of lines of text that are looked at: those on top."""
LEAST_HEIGHT = 6.0
"""Least height of a line of text that can be read, in pixels."""
LEAST_CONTRAST = 24.0
"""Least difference of the colour of a letter and of what lies behind it, of 255."""
LEAST_COVER, MOST_RESIDUE = 0.15, 40.0
"""Least share of the letter's colour in a pixel of ink; and largest difference from the mixture of both colours."""
LEAST_WIDTH, LEAST_ROWS = 0.15, 0.33
"""Least mean width of a character, and least height of the ink of letters and digits, in heights of their line."""
INSTALL = "`apt install chromium-headless-shell`"
KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Backspace": (8, ""), "Escape": (27, "")}
"""Name of a key -> (its code, its text)."""


class BrowserGone(VlmrlError):
    """Error: there is no browser, or it has ended.

    Args:
        kind: why: "memory", "size" (of a message), "time" (a page hung), "crash".
    """

    def __init__(self, message: str, *, kind: str = "crash", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


class SeenText(NamedTuple):
    """Line of text of one element, as far as its ink can be seen.

    Args:
        text: its visible characters.
        left, top, right, bottom: its box, in pixels.
        size: size of the font, in pixels.
        colour: (r, g, b) of the letters, 0 to 255.
    """

    text: str
    left: float
    top: float
    right: float
    bottom: float
    size: float
    colour: tuple[int, int, int]


class Seen(NamedTuple):
    """Page as it is seen.

    Args:
        pixels: (height, width, 3) uint8 RGB.
        texts: its lines of text, in the order of the page.
        page_height: height of the whole page, in pixels.
        unseen: share of the letters and digits in the page that cannot be seen in it, in [0, 1].
    """

    pixels: np.ndarray
    texts: tuple[SeenText, ...]
    page_height: int
    unseen: float


class BrowserServer:
    """Process with the browser; see `server.py`. It ends with this process.

    Args:
        alone: whether only one connection uses it, to look at pages of a model: one takes a third of the time then.
    """

    def __init__(self, memory_mb: int = MEMORY_MB, *, alone: bool = False) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("")  # Linux chooses an abstract name
        listener.listen(256)
        self.address = listener.getsockname()
        words = map(str, (listener.fileno(), memory_mb, os.getpid(), int(alone)))
        command = [sys.executable, "-m", "vlmrl.browser.server", *words]
        with listener:
            self._process = subprocess.Popen(
                command, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )

    def __enter__(self) -> BrowserServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait()


class Browser:
    """Connection to a browser. One thread uses it; a fork opens its own.

    Args:
        address: of a `BrowserServer`.
        seconds: longest time of a page, or of an action in it.
    Raises: BrowserGone if the server cannot be reached.
    """

    def __init__(self, address: bytes, seconds: float = SECONDS) -> None:
        self.seconds, self._number, self._rest = seconds, 0, bytearray()
        self._answers = dict[int, dict[str, Any]]()
        self._events = list[dict[str, Any]]()
        self._tabs = dict[str, Tab]()
        self._spare: Tab | None = None
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(address)
        except OSError as error:
            raise BrowserGone(f"the browser's server cannot be reached: {error.strerror}") from error

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the browser; its pages of this connection are closed."""
        self._socket.close()

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """`version` of the browser; `layers`: what confines it, in words; `is_asked`: whether it draws when asked.

        Raises: BrowserGone.
        """
        return self.call("Server.facts")

    @cached_property
    def key(self) -> str:
        """Text that changes with all that changes pictures: the browser's version and the fonts."""
        fonts = hashlib.sha256()
        for path in sorted(FONTS.glob("*.ttf")):
            fonts.update(path.read_bytes())
        return f"chromium {self.facts['version']}, fonts {fonts.hexdigest()[:12]}"

    def call(self, method: str, session: str = "", until: float | None = None, **params: Any) -> dict[str, Any]:
        """Return the result of a method of the DevTools protocol.

        Args:
            until: end of the waiting, as of `time.monotonic`; default: START_SECONDS from now.
        Raises: BrowserGone if the browser has ended or refuses; TimeoutError.
        """
        return self.result(self.post(method, session, **params), method, until or time.monotonic() + START_SECONDS)

    def result(self, number: int, method: str, until: float) -> dict[str, Any]:
        """Return the result of a method that was sent; see `call`."""
        while number not in self._answers:
            self._receive(until, method)
        answer = self._answers.pop(number)
        if (error := answer.get("error")) is None:
            return answer["result"]
        if error.get("fatal"):
            raise BrowserGone(error["message"], hint=f"{INSTALL}, or name its program in {PROGRAM}")
        raise BrowserGone(f"the browser refuses {method}: {error.get('message')}")

    def post(self, method: str, session: str = "", **params: Any) -> int:
        """Send a method without waiting; return its number."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        try:
            self._socket.settimeout(self.seconds)
            self._socket.sendall(json.dumps(message | ({"sessionId": session} if session else {})).encode() + ZERO)
        except OSError as error:
            raise BrowserGone("the browser's server has ended") from error
        return self._number

    def wait(self, event: str, session: str, until: float) -> dict[str, Any]:
        """Return the parameters of the next event of this name. Raises: BrowserGone, TimeoutError."""
        while True:
            for place, message in enumerate(self._events):
                if message["method"] == event and message.get("sessionId") == session:
                    del self._events[: place + 1]
                    return message["params"]
            self._receive(until, event)

    def _receive(self, until: float, what: str) -> None:
        """Take the next message. Raises: TimeoutError, BrowserGone."""
        while ZERO not in self._rest:
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError(f"the browser does not answer to {what}")
            self._socket.settimeout(left)
            try:
                piece = self._socket.recv(1 << 20)
            except TimeoutError:
                continue
            except OSError as error:
                raise BrowserGone("the browser's server has ended") from error
            if not piece:
                raise BrowserGone("the browser's server has ended")
            self._rest += piece
        text, _, self._rest = self._rest.partition(ZERO)
        message = parse_json(text.decode("utf-8", "replace"))
        if "id" in message:
            self._answers[message["id"]] = message
        elif message["method"] == "Server.gone":
            self._spare = None
            self._tabs.clear()
            self._events.clear()
            raise BrowserGone(message["params"]["why"], kind=message["params"]["kind"])
        elif (tab := self._tabs.get(message.get("sessionId", ""))) is None or not tab.takes(message):
            self._events.append(message)

    @contextmanager
    def tab(self, width: int, height: int) -> Iterator[Tab]:
        """Open a page of our own, whose scripts run, with a context of its own; close it at the end.

        Args:
            width, height: of what can be seen of it, in pixels.
        Raises: BrowserGone, TimeoutError.
        """
        tab = self._open(width, height, hostile=False)
        try:
            yield tab
        finally:
            self._shut(tab)

    def _open(self, width: int, height: int, *, hostile: bool) -> Tab:
        tab = Tab(self, width, height, hostile=hostile)
        self._tabs[tab.session] = tab
        return tab

    def _shut(self, tab: Tab) -> None:
        self._tabs.pop(tab.session, None)
        self._events.clear()
        with suppress(BrowserGone, TimeoutError):
            tab.close()

    def look(self, html: str, width: int, height: int) -> Seen:
        """Return what is seen of a page that a model wrote, in a window of that size.

        Raises: CodeRefused if it cannot be drawn; BrowserGone if there is no browser.
        """
        if len(html) > MOST_CHARS:
            raise CodeRefused("size", f"the page has {len(html):,} characters; at most {MOST_CHARS:,} are drawn")
        for is_last in (False, True):
            self.facts = self.call("Server.facts")  # the start of a browser is not the page's time
            try:
                return self._seen(html, width, height)
            except TimeoutError:
                self.post("Server.kill", kind="time", why="a page hung")
                with suppress(BrowserGone, TimeoutError):
                    self.wait("Server.gone", "", time.monotonic() + START_SECONDS)
                raise CodeRefused("time", f"drawing the page takes longer than {self.seconds:g} s") from None
            except BrowserGone as error:
                if error.kind in ("memory", "size") or is_last:
                    raise CodeRefused(error.kind, f"drawing the page failed: {error.message}") from error
        raise AssertionError

    def _seen(self, html: str, width: int, height: int) -> Seen:
        """Look at a page in the tab for hostile ones. It is used again: a new one takes ten times the processor time.

        Pages leave nothing behind in it, as they run nothing and get nothing but pictures.
        """
        tab, self._spare = self._spare or self._open(width, height, hostile=True), None
        try:
            tab.resize(width, height)
            tab.load(html)
            seen = tab.seen()
        except BaseException:
            self._shut(tab)
            raise
        self._spare = tab
        return seen


class Tab:
    """Page that is open in the browser. Each action has the browser's limit of time; see `Browser.tab`."""

    def __init__(self, browser: Browser, width: int, height: int, *, hostile: bool) -> None:
        self._browser, self._seconds, self._hostile = browser, browser.seconds, hostile
        self._until = time.monotonic() + START_SECONDS
        self._html: bytes | None = None
        self._world: int | None = None
        self.session = ""  # of the browser itself, until the page is attached
        self._is_asked: bool = browser.facts["is_asked"]
        self._loader, self._stages = "", set[str]()
        if kept := {} if hostile else self._ask("Server.kept"):
            self._context, self.session = kept["context"], kept["session"]
            self._ask("Storage.clearDataForOrigin", origin=ADDRESS, storageTypes="all")
        else:
            self._make(width, height)
            if not hostile:
                self._ask("Server.keep", page={"context": self._context, "session": self.session})
        self.resize(width, height)

    def _make(self, width: int, height: int) -> None:
        self._context = self._ask("Target.createBrowserContext")["browserContextId"]
        where, size = {"browserContextId": self._context}, {"width": width, "height": height}
        self._ask("Browser.setDownloadBehavior", behavior="deny", **where)
        frames = {"enableBeginFrameControl": self._is_asked}
        target = self._ask("Target.createTarget", url="about:blank", **frames, **size, **where)["targetId"]
        self.session = str(self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        self._ask_all(
            *((f"{domain}.enable", {}) for domain in ("Page", "Inspector", "DOM", "CSS", "Animation")),
            ("Page.setLifecycleEventsEnabled", {"enabled": True}),
            ("Emulation.setScriptExecutionDisabled", {"value": self._hostile}),
            ("Emulation.setFocusEmulationEnabled", {"enabled": True}),
            ("Animation.setPlaybackRate", {"playbackRate": 0 if self._hostile else 1}),
            ("Fetch.enable", {"patterns": [{"urlPattern": "*"}]}),
        )

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self.session, self._until, **params)

    def _ask_all(self, *methods: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
        """Send several methods at once, and return their results."""
        numbers = [self._browser.post(method, self.session, **params) for method, params in methods]
        return [
            self._browser.result(number, method, self._until)
            for number, (method, _) in zip(numbers, methods, strict=True)
        ]

    def close(self) -> None:
        """Close the page and its context."""
        until = time.monotonic() + GRACE_SECONDS
        self._browser.call("Server.keep", until=until)
        self._browser.call("Target.disposeBrowserContext", until=until, browserContextId=self._context)

    def takes(self, message: Mapping[str, Any]) -> bool:
        """Answer an event that the page waits for; return whether this was one. Raises: BrowserGone after a crash."""
        params = message["params"]
        match message["method"]:
            case "Fetch.requestPaused":
                self._answer(params["requestId"], params["request"]["url"], params["resourceType"])
            case "Page.javascriptDialogOpening":
                self._browser.post("Page.handleJavaScriptDialog", self.session, accept=False)
            case "Inspector.targetCrashed":
                raise BrowserGone("the page's process ended", kind="crash")
            case _:
                return False
        return True

    def _answer(self, request: str, address: str, kind: str) -> None:
        """Answer a request of the page: itself once, pictures by a placeholder, and nothing else."""
        body, form = None, "image/png"
        if kind == "Document" and address == ADDRESS and self._html is not None:
            (body, self._html), form = (self._html, None), "text/html; charset=utf-8"
        elif kind == "Image":
            body = _placeholder()
        if body is None:
            self._browser.post("Fetch.failRequest", self.session, requestId=request, errorReason="Aborted")
            return
        headers = [{"name": "Content-Type", "value": form}]
        headers += [{"name": "Content-Security-Policy", "value": POLICY}] if self._hostile else []
        answer = {"requestId": request, "responseCode": 200, "responseHeaders": headers}
        text = base64.b64encode(body).decode("ascii")
        self._browser.post("Fetch.fulfillRequest", self.session, body=text, **answer)

    def resize(self, width: int, height: int) -> None:
        """Set the size of what can be seen, in pixels."""
        self._until = time.monotonic() + self._seconds
        self._shape = height, width, 3
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", **size)

    def load(self, html: str) -> None:
        """Show a page, and wait until it is complete. Raises: BrowserGone, TimeoutError."""
        self._until = time.monotonic() + self._seconds
        self._html, self._world = html.encode("utf-8", "replace"), None
        self._stages.clear()
        self._loader = self._ask("Page.navigate", url=ADDRESS).get("loaderId", "")
        self._reach("load")

    def _reach(self, stage: str) -> None:
        """Wait until the page is loaded or painted: "load" or "firstPaint"."""
        while stage not in self._stages:
            event = self._browser.wait("Page.lifecycleEvent", self.session, self._until)
            if event["loaderId"] == self._loader:
                self._stages.add(event["name"])

    def seen(self) -> Seen:
        """Return what is seen of the page: its pixels, its lines of text and its height."""
        snapshot = {"computedStyles": STYLES, "includePaintOrder": True}
        pixels = self._shot()
        metrics, layout, tree = self._ask_all(
            ("Page.getLayoutMetrics", {}), ("DOMSnapshot.captureSnapshot", snapshot), ("Page.getFrameTree", {})
        )
        sheet = self._ask("CSS.createStyleSheet", frameId=tree["frameTree"]["frame"]["id"])["styleSheetId"]
        self._ask("CSS.setStyleSheetText", styleSheetId=sheet, text=HIDE)
        height = math.ceil(metrics["cssContentSize"]["height"])
        texts, unseen = _texts(layout, pixels, self._shot())
        return Seen(pixels, texts, height, unseen)

    def pixels(self) -> np.ndarray:
        """Return what the page shows, (height, width, 3) uint8 RGB. Raises: BrowserGone, TimeoutError."""
        self._until = time.monotonic() + self._seconds
        return self._shot()

    def _shot(self) -> np.ndarray:
        if not self._is_asked:
            return _picture(self._ask("Page.captureScreenshot", **SHOT)["data"])
        self._ask(FRAME)
        while True:  # the first frames after a change may have another size, or no picture; `_ask` ends in time
            data = self._ask(FRAME, screenshot=SHOT).get("screenshotData")
            if data and (pixels := _picture(data)).shape == self._shape:
                return pixels

    def click(self, x: float, y: float) -> None:
        """Click at a place, in pixels from the top left corner."""
        self._until = time.monotonic() + self._seconds
        self._reach("firstPaint")  # a click hits what was painted last
        mouse = {"x": x, "y": y, "button": "left", "clickCount": 1}
        down = {**mouse, "type": "mousePressed", "buttons": 1}
        moved, up = {"x": x, "y": y, "type": "mouseMoved"}, {**mouse, "type": "mouseReleased"}
        self._ask_all((MOUSE, moved), (MOUSE, down), (MOUSE, up))

    def type(self, text: str) -> None:
        """Type a text where the page has its focus."""
        self._until = time.monotonic() + self._seconds
        self._ask("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key of KEYS."""
        self._until = time.monotonic() + self._seconds
        code, text = KEYS[key]
        for kind in ("keyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)

    def value(self, expression: str) -> Any:
        """Return the JSON value of an expression, in a world apart: the page's own functions cannot change it.

        Raises: BrowserGone if it raises.
        """
        self._until = time.monotonic() + self._seconds
        if self._world is None:  # one for all: each new one, and each without a name, would keep megabytes
            frame = self._ask("Page.getFrameTree")["frameTree"]["frame"]["id"]
            world = self._ask("Page.createIsolatedWorld", frameId=frame, worldName="vlmrl")
            self._world = int(world["executionContextId"])
        answer = self._ask("Runtime.evaluate", expression=expression, contextId=self._world, returnByValue=True)
        if "exceptionDetails" in answer:
            raise BrowserGone(f"{excerpt(expression, 80)} raises an error in the page", kind="crash")
        return answer["result"].get("value")


def _picture(data: str) -> np.ndarray:
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        return np.asarray(image.convert("RGB"))


@cache
def _placeholder() -> bytes:
    """Return the picture that stands for those of other addresses, as a PNG file."""
    file = io.BytesIO()
    Image.new("RGB", PLACEHOLDER_SIZE, GREY).save(file, "PNG")
    return file.getvalue()


def _lines(page: Mapping[str, Any], strings: Any) -> Iterator[tuple[SeenText, int, bool]]:
    """Yield the lines of text of a page, with the place of their element in the layout, and whether it is a field.

    What fields hold comes last, in the boxes of the fields: the browser gives no others.
    """
    layout, nodes, boxes = page["layout"], page["nodes"], page["textBoxes"]
    x, y = page.get("scrollOffsetX", 0), page.get("scrollOffsetY", 0)
    rows = zip(boxes["layoutIndex"], boxes["bounds"], boxes["start"], boxes["length"], strict=True)
    for element, (left, top, width, height), start, length in rows:
        text = strings[layout["text"][element]].encode("utf-16-le")[2 * start : 2 * (start + length)]
        yield _line(text.decode("utf-16-le", "replace"), left - x, top - y, width, height), element, False
    values = {
        node: strings[text] if text >= 0 else ""
        for kind in ("inputValue", "textValue")
        for node, text in zip(nodes[kind]["index"], nodes[kind]["value"], strict=True)
    }
    for element, node in enumerate(layout["nodeIndex"]):
        if node in values:
            left, top, width, height = layout["bounds"][element]
            names = iter(nodes["attributes"][node])
            attributes = {strings[name]: strings[value] for name, value in zip(names, names, strict=True)}
            text = values[node] or attributes.get("placeholder", "")
            yield _line(text, left - x, top - y, width, height), element, True


def _line(text: str, left: float, top: float, width: float, height: float) -> SeenText:
    return SeenText(text, left, top, left + width, top + height, 0.0, (0, 0, 0))


def _texts(snapshot: Mapping[str, Any], pixels: np.ndarray, bare: np.ndarray) -> tuple[tuple[SeenText, ...], float]:
    """Return the lines of text whose ink shows, and the share of letters without.

    Args:
        snapshot: answer of DOMSnapshot.captureSnapshot.
        pixels: the page, (height, width, 3) uint8 RGB.
        bare: the same without letters.
    """
    strings, page = snapshot["strings"], snapshot["documents"][0]
    layout, opacities = page["layout"], _opacities(page, strings)
    free = np.ones(pixels.shape[:2], bool)
    bottom, right = pixels.shape[:2]
    every = [*_lines(page, strings)]
    near = (item for item in every if item[0].right > 0 < item[0].bottom)
    lines = [item for item in near if item[0].left < right and item[0].top < bottom and item[0].text.strip()]
    seen = dict[int, SeenText]()
    # What is painted last lies on top: no other text has the ink within its box.
    order = sorted(range(len(lines)), key=lambda place: (layout["paintOrders"][lines[place][1]], place))
    for place in reversed(order[-MOST_LINES:]):
        line, element, is_field = lines[place]
        x1, y1 = max(0, math.floor(line.left)), max(0, math.floor(line.top))
        part = slice(y1, min(bottom, math.ceil(line.bottom))), slice(x1, min(right, math.ceil(line.right)))
        styles = dict(zip(STYLES, (strings[i] for i in layout["styles"][element]), strict=True))
        colour, opacity = _colour(styles[FILL])
        if is_field:  # a placeholder has a colour of its own
            change = np.abs(pixels[part].astype(int) - bare[part]).sum(axis=2)
            colour = tuple(pixels[part].reshape(-1, 3)[change.argmax()].tolist())
        if opacity * opacities[layout["nodeIndex"][element]] >= LEAST_COVER:
            ink: np.ndarray = _ink(pixels[part], bare[part], colour) & free[part]
            if is_field and ink.any():
                rows, columns = (np.flatnonzero(ink.any(axis=axis)) for axis in (1, 0))
                left, width = x1 + columns[0], columns[-1] - columns[0] + 1
                line = _line(line.text, left, y1 + rows[0], width, rows[-1] - rows[0] + 1)
            if words := _visible(line, ink.any(axis=1).sum(), np.flatnonzero(ink.any(axis=0)) + x1):
                size = float(styles["font-size"].removesuffix("px"))
                seen[place] = line._replace(text=words, size=size, colour=colour)
        free[part] = False
    shown = tuple(seen[place] for place in sorted(seen))
    total = _letters(line for line, _, _ in every)
    return shown, 1 - _letters(shown) / total if total else 0.0


def _letters(lines: Iterable[SeenText]) -> int:
    return sum(letter.isalnum() for line in lines for letter in line.text)


def _opacities(page: Mapping[str, Any], strings: Any) -> list[float]:
    """Return the opacity of each node: its own times that of all around it."""
    nodes, layout = page["nodes"], page["layout"]
    own = [1.0] * len(nodes["parentIndex"])
    for node, styles in zip(layout["nodeIndex"], layout["styles"], strict=True):
        if styles:
            own[node] = float(strings[styles[STYLES.index("opacity")]] or 1)
    for node, parent in enumerate(nodes["parentIndex"]):  # a parent stands before its children
        own[node] *= own[parent] if 0 <= parent < node else 1.0
    return own


def _colour(text: str) -> tuple[tuple[int, int, int], float]:
    """Return a colour as Chromium computes it, `rgb(r, g, b)` or `rgba(r, g, b, a)`, and its opacity; 0 for others."""
    numbers = re.findall(r"[\d.]+", text) if text.startswith("rgb") else []
    if len(numbers) not in (3, 4):
        return (0, 0, 0), 0.0
    red, green, blue = (min(255, round(float(number))) for number in numbers[:3])
    return (red, green, blue), float(numbers[3]) if len(numbers) == 4 else 1.0


def _ink(shown: np.ndarray, bare: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """Return where a pixel is a mixture of what lies behind the letters and of their colour, (height, width) bool.

    Args:
        shown, bare: (height, width, 3) uint8, with the letters and without them.
    """
    behind = bare.astype(np.float32)
    full, change = np.asarray(colour, np.float32) - behind, shown.astype(np.float32) - behind
    contrast = (full * full).sum(axis=2)
    cover = (change * full).sum(axis=2) / np.maximum(contrast, 1.0)
    residue = np.abs(change - cover[:, :, None] * full).max(axis=2)
    return (np.abs(full).max(axis=2) >= LEAST_CONTRAST) & (cover >= LEAST_COVER) & (residue <= MOST_RESIDUE)


def _visible(line: SeenText, rows: int, ink: np.ndarray) -> str:
    """Return the characters of a line in whose place there is ink.

    Args:
        rows: number of rows of pixels that have any.
        ink: the columns that have any, (columns,) int.
    """
    count, width, height = len(line.text), line.right - line.left, line.bottom - line.top
    is_flat = rows <= LEAST_ROWS * height and any(letter.isalnum() for letter in line.text)
    if height < LEAST_HEIGHT or is_flat or width < LEAST_WIDTH * count * height:
        return ""
    step = width / count
    begins = line.left + (np.arange(count) - 0.5) * step
    near = np.searchsorted(ink, begins) < np.searchsorted(ink, begins + 2 * step)
    kept = (letter for letter, is_near in zip(line.text, near, strict=True) if is_near or letter.isspace())
    return " ".join("".join(kept).split())
