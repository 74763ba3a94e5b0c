"""Process that starts one headless Chromium, watches it, and relays the DevTools protocol between it and its clients.

    python -m vlmrl.browser.server SOCKET MEMORY_MB PARENT ALONE    (descriptor of a listening Unix socket, process)

Messages are JSON with a zero byte behind each, towards the browser (over two pipes) and towards clients alike. Ids of
clients are replaced by own ones; an event goes to the client that has attached to its target. Methods of the server
itself: `Server.facts` starts the browser if need be, `Server.kill` ends it. When it ends, each client that has used it
gets the event `Server.gone` with the reason, and the next message starts a new one. `Server.keep` says that the
client's page may serve another client after it, and `Server.kept` gives such a page: a new one takes five times the
processor time. The server ends with the process that started it, and the browser with the server.

Three layers keep the network and files away from a page: a namespace of bubblewrap without a network, where it works;
Chromium's own sandbox, where user namespaces work; always a user without privileges, a proxy that does not exist, and
no names.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from vlmrl.owned_folder import OwnedFolder
from vlmrl.process import descendants, die_with_parent, kill_all, private_memory
from vlmrl.sandbox.confine import NOBODY, layers, wrapped
from vlmrl.untrusted import parse_json

PROGRAM = "VLMRL_BROWSER"
"""Environment variable with the path of the browser's program."""
PROGRAMS = (
    *(f"{place}chromium-headless-shell" for place in ("/usr/lib/chromium/", "")), "chrome-headless-shell",
    "/usr/lib/chromium/chromium", "chromium", "chromium-browser", "google-chrome", "chrome",
)  # fmt: skip
"""Programs that are tried in this order. The headless shell has no windows: a fifth of the processor time for a new
page, a third of the memory, and the same pixels. Debian's `chromium` is a script that adds options of its own."""
FONTS = Path(__file__).parents[1] / "svg" / "fonts"
FAMILIES = {
    "sans-serif": "Liberation Sans", "system-ui": "Liberation Sans", "Arial": "Liberation Sans",
    "Helvetica": "Liberation Sans", "Verdana": "DejaVu Sans", "serif": "Liberation Serif",
    "Times New Roman": "Liberation Serif", "Times": "Liberation Serif", "Georgia": "Liberation Serif",
    "monospace": "Liberation Mono", "Courier New": "Liberation Mono", "Courier": "Liberation Mono",
}  # fmt: skip
"""Family that a page names -> family of vlmrl's own fonts. Those of the machine are not used, so pages look alike."""
FLAGS = """
--headless --remote-debugging-pipe --disable-gpu --disable-software-rasterizer --hide-scrollbars --no-first-run
--no-default-browser-check --disable-dev-shm-usage --disable-extensions --mute-audio --lang=en-US

--disable-background-networking --disable-component-update --disable-sync --disable-default-apps --no-pings
--disable-breakpad --disable-crash-reporter --disable-domain-reliability --dns-prefetch-disable
--disable-features=Translate,MediaRouter,OptimizationHints,AutofillServerCommunication,SpareRendererForSitePerProcess

--proxy-server=127.0.0.1:9 --proxy-bypass-list=<-loopback> --force-webrtc-ip-handling-policy
--webrtc-ip-handling-policy=disable_non_proxied_udp

--force-color-profile=srgb --font-render-hinting=none --disable-lcd-text --disable-skia-runtime-opts
--disable-checker-imaging --disable-partial-raster --disable-low-res-tiling --force-device-scale-factor=1
--disable-threaded-animation --disable-threaded-scrolling --disable-smooth-scrolling
--disable-new-content-rendering-timeout --blink-settings=imageAnimationPolicy=2
"""
"""Options in four groups: headless; no requests of the browser's own; no network (a proxy that nobody serves, also for
this machine's own addresses); equal pixels on every machine, at once, and of moving pictures the first one."""
NAMES = "--host-resolver-rules=MAP * ~NOTFOUND"
"""Option by which no name has an address. It has blanks."""
FRAME = "HeadlessExperimental.beginFrame"
ASKED = "--enable-begin-frame-control", "--run-all-compositor-stages-before-draw"
"""Method that draws one frame, and the options without which a browser draws frames by itself: then a screenshot waits
for its clock, 50 ms instead of 5. Two frames at once end the browser, so only one page may be open. Where many pages
are, the second option leaves some of them without any frame for ever."""
READ_END, WRITE_END = 3, 4
"""Descriptors from which the browser reads, and to which it writes."""
WATCH_SECONDS, START_SECONDS = 0.2, 30.0
MOST_KEPT, KEPT_MB = 64, 64
"""Largest number of pages that wait for another client, each with a process of its own of some 20 MiB; least main
memory that the browser may have for each of them, in MiB."""
MOST_BYTES = 64 << 20
"""Largest message, in bytes."""
ZERO = b"\0"
HOME = "vlmrl-browser-"
"""Begin of the names of the servers' folders."""
PEER = struct.Struct("3i")
"""Process, user and group of a client (SO_PEERCRED)."""


class Mode(NamedTuple):
    """Way to start the browser.

    Args:
        words: what confines it.
        before: words of the command before the program.
        home: folder that it may write to.
        flags: more options.
    """

    words: str
    before: tuple[str, ...]
    home: str
    flags: tuple[str, ...]


def program_of_browser() -> str:
    """Return the path of the browser's program; "" if there is none."""
    names = (os.environ[PROGRAM],) if os.environ.get(PROGRAM) else PROGRAMS
    return next((path for name in names if (path := shutil.which(name))), "")


def modes(program: str, home: str) -> list[Mode]:
    """Return the ways to start the browser, the safest first. In none it is root."""
    own = [("Chromium's own sandbox", ()), ("no privileges", ("--no-sandbox",))]
    free = [Mode(words, (), f"{home}/own", flags) for words, flags in own]
    if not (bubblewrap := layers().bubblewrap):
        return free
    inner = tempfile.gettempdir()  # in main memory there
    variables = [word for name, value in surroundings(home, inner).items() for word in ("--setenv", name, value)]
    begin = wrapped(bubblewrap, [str(Path(program).resolve().parent), home], python=False)
    before = (*begin, "--uid", str(NOBODY), "--gid", str(NOBODY), *variables)
    inside = [Mode(f"bubblewrap without a network, {words}", before, inner, flags) for words, flags in own]
    return [inside[0], free[0], inside[1], free[1]]


def surroundings(home: str, own: str) -> dict[str, str]:
    """Return the browser's environment variables: nothing of this process's own. `own`: folder that it may write to."""
    fonts = f"{home}/fonts.conf"
    return {"HOME": own, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TZ": "UTC", "FONTCONFIG_FILE": fonts}


def make_home(home: Path) -> None:
    """Write what the browser needs into its folder: the fonts, and fontconfig's settings that name them alone."""
    shutil.copytree(FONTS, home / "fonts", ignore=shutil.ignore_patterns("*.md"))
    aliases = "".join(
        f'<match target="pattern"><test name="family"><string>{name}</string></test>'
        f'<edit name="family" mode="assign" binding="strong"><string>{family}</string></edit></match>'
        for name, family in FAMILIES.items()
    )
    text = f'<?xml version="1.0"?><fontconfig><dir>{home}/fonts</dir>{aliases}</fontconfig>'
    (home / "fonts.conf").write_text(text, encoding="utf-8")
    (home / "own").mkdir()
    if os.geteuid() == 0:
        os.chown(home / "own", NOBODY, NOBODY)


def _prepare(ends: tuple[int, int], parent: int, becomes_nobody: bool) -> None:
    """Give a new process its pipes as descriptors 3 and 4, before it becomes the browser."""
    high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in ends]
    for end, number in zip(high, (READ_END, WRITE_END), strict=True):
        os.dup2(end, number)
    os.setsid()
    die_with_parent(parent)
    if becomes_nobody:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


class Client:
    """Connection of a client, and the browser's contexts and sessions that are its own."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.contexts, self.sessions = set[str](), set[str]()
        self.kept: dict[str, Any] | None = None

    def send(self, message: dict[str, Any]) -> None:
        """Write a message; it is dropped if the client has left."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + ZERO)

    def close(self) -> None:
        """End the connection."""
        self._writer.close()


class Waiting(NamedTuple):
    """Request that the browser has not answered: whose it is, its id there, and its method."""

    client: Client | None
    number: Any
    method: str


class Chromium:
    """One running browser, its pipes, and the requests that it has not answered."""

    def __init__(self, program: str, mode: Mode, home: str, is_asked: bool = False) -> None:
        self.mode, self.version, self.is_asked = mode, "", is_asked
        self.why_ended = "crash", "the browser ended by itself"
        flags = [*FLAGS.split(), NAMES, *ASKED * is_asked, *mode.flags, f"--user-data-dir={mode.home}/profile"]
        self._command = [*mode.before, program, *flags, "about:blank"]
        self._home, self._number = home, 0
        self.waiting = dict[int, Waiting]()

    async def start(self) -> None:
        """Start the browser, and wait until it answers. Raises: OSError if it does not."""
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        nobody = os.geteuid() == 0 and not self.mode.before
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            env=surroundings(self._home, self.mode.home),
            preexec_fn=partial(_prepare, (theirs_in, theirs_out), os.getpid(), nobody),
        )
        os.close(theirs_in)
        os.close(theirs_out)
        loop = asyncio.get_running_loop()
        self._reader = asyncio.StreamReader(limit=MOST_BYTES)
        protocol = asyncio.StreamReaderProtocol(self._reader)
        await loop.connect_read_pipe(lambda: protocol, os.fdopen(ours_in, "rb"))
        self._pipe, _ = await loop.connect_write_pipe(asyncio.Protocol, os.fdopen(ours_out, "wb"))
        try:
            self.version = str((await self._result("Browser.getVersion"))["product"]).partition("/")[2]
            if self.is_asked:  # not every browser draws frames when asked
                target = await self._result("Target.createTarget", url="about:blank", enableBeginFrameControl=True)
                session = await self._result("Target.attachToTarget", **target, flatten=True)
                await self._result(FRAME, session["sessionId"])
                await self._result("Target.closeTarget", **target)
        except (asyncio.TimeoutError, EOFError, KeyError) as error:
            self.kill("crash", "it did not start")
            raise OSError(f"the browser does not start with {self.mode.words}") from error
        self.waiting.clear()

    async def _result(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Return the result of a request before there are clients. Raises: KeyError if it is refused, EOFError."""
        message = {"method": method, "params": params}
        self.ask(None, 0, message | ({"sessionId": session} if session else {}))
        while (answer := await asyncio.wait_for(self.read(), START_SECONDS)).get("id") != self._number:
            pass
        return answer["result"]

    def ask(self, client: Client | None, number: Any, message: dict[str, Any]) -> None:
        """Send a request under an id of its own. `client`: who gets the answer; None = nobody."""
        self._number += 1
        self.waiting[self._number] = Waiting(client, number, str(message.get("method")))
        self._pipe.write(json.dumps({**message, "id": self._number}).encode() + ZERO)

    async def read(self) -> dict[str, Any]:
        """Return the next message. Raises: EOFError when the browser has ended, or writes too much at once."""
        try:
            return parse_json((await self._reader.readuntil(ZERO))[:-1].decode("utf-8", "replace"))
        except asyncio.LimitOverrunError as error:
            self.kill("size", f"a message was longer than {MOST_BYTES >> 20} MiB")
            raise EOFError from error
        except asyncio.IncompleteReadError as error:
            raise EOFError from error

    def memory(self) -> int:
        """Return the main memory of all its processes, without files, in bytes."""
        return private_memory([self._process.pid, *descendants(self._process.pid)])

    def kill(self, kind: str, why: str) -> None:
        """End all its processes. `kind`, `why`: the reason, for clients; see client.BrowserGone."""
        self.why_ended = kind, why
        if self._process.returncode is None:
            kill_all(lambda: [*descendants(self._process.pid), self._process.pid])
            self._process.wait()


class Server:
    """Server of one browser, for any number of clients of this machine.

    Args:
        memory_mb: main memory of the browser's processes together, in MiB, above which it is ended.
        is_asked: whether frames are drawn when asked, if the browser can do so.
    """

    def __init__(self, home: str, memory_mb: int, is_asked: bool) -> None:
        self._is_asked = is_asked
        self._home, self._memory_mb = home, memory_mb
        self._clients, self._lock = set[Client](), asyncio.Lock()
        self._browser: Chromium | None = None
        self._mode: Mode | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._kept = list[dict[str, Any]]()

    async def serve(self, listener: socket.socket) -> None:
        """Serve clients until this process gets SIGTERM."""
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        await asyncio.start_unix_server(self._serve_client, sock=listener, limit=MOST_BYTES)
        await ended.wait()
        for client in self._clients:
            client.close()
        await asyncio.sleep(WATCH_SECONDS)  # so that their tasks end
        if self._browser is not None:
            self._browser.kill("crash", "the server ended")

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        if PEER.unpack(peer)[1] != os.getuid():
            writer.close()
            return
        client = Client(writer)
        self._clients.add(client)
        try:
            while True:
                await self._handle(client, parse_json((await reader.readuntil(ZERO))[:-1].decode("utf-8", "replace")))
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass
        finally:
            self._clients.discard(client)
            if self._browser is not None:
                is_idle = all(waiting.client is not client for waiting in self._browser.waiting.values())
                if client.kept is not None and is_idle and len(self._kept) < min(MOST_KEPT, self._memory_mb // KEPT_MB):
                    self._kept.append(client.kept)
                    client.contexts.discard(client.kept["context"])
                for context in client.contexts:
                    params = {"browserContextId": context}
                    self._browser.ask(None, 0, {"method": "Target.disposeBrowserContext", "params": params})
            writer.close()

    async def _handle(self, client: Client, message: dict[str, Any]) -> None:
        if message["method"] == "Server.kill":
            if self._browser is not None:
                self._end(self._browser, message["params"]["kind"], message["params"]["why"])
            return
        try:
            browser = await self._running()
        except OSError as error:
            client.send({"id": message["id"], "error": {"message": str(error), "fatal": True}})
            return
        if message["method"] == "Server.facts":
            facts = {"version": browser.version, "layers": browser.mode.words, "is_asked": browser.is_asked}
            client.send({"id": message["id"], "result": facts})
        elif message["method"] == "Server.keep":
            client.kept = message["params"].get("page")
            client.send({"id": message["id"], "result": {}})
        elif message["method"] == "Server.kept":
            if self._kept:
                client.kept = self._kept.pop()
                client.contexts.add(client.kept["context"])
                client.sessions.add(client.kept["session"])
            client.send({"id": message["id"], "result": client.kept or {}})
        else:
            browser.ask(client, message["id"], {k: v for k, v in message.items() if k != "id"})

    async def _running(self) -> Chromium:
        """Return the browser; it is started if none runs. Raises: OSError if none starts."""
        async with self._lock:
            if self._browser is None:
                if not (program := program_of_browser()):
                    raise OSError("there is no browser on this machine")
                tried = [self._mode] if self._mode else modes(program, self._home)
                for mode, is_asked in product(tried, (True, False) if self._is_asked else (False,)):
                    browser = Chromium(program, mode, self._home, is_asked)
                    with contextlib.suppress(OSError):
                        await browser.start()
                        self._mode, self._is_asked, self._browser = mode, is_asked, browser
                        break
                else:
                    raise OSError(f"the browser {program} does not start")
                self._tasks = {asyncio.create_task(job(browser)) for job in (self._pump, self._watch)}
            return self._browser

    async def _pump(self, browser: Chromium) -> None:
        """Pass on what the browser writes, until it ends."""
        with contextlib.suppress(EOFError):
            while True:
                self._pass_on(browser, await browser.read())
        self._end(browser, *browser.why_ended)

    def _end(self, browser: Chromium, kind: str, why: str) -> None:
        """End a browser, and tell the clients, once."""
        browser.kill(kind, why)
        if self._browser is not browser:
            return
        self._browser = None
        self._kept.clear()
        shutil.rmtree(f"{self._home}/own/profile", ignore_errors=True)
        for client in self._clients:
            client.contexts.clear()
            client.sessions.clear()
            client.kept = None
            client.send({"method": "Server.gone", "params": {"kind": kind, "why": why}})

    def _pass_on(self, browser: Chromium, message: dict[str, Any]) -> None:
        if "id" not in message:
            if message.get("method") == "Inspector.targetCrashed":
                self._kept = [kept for kept in self._kept if kept["session"] != message.get("sessionId")]
            for client in self._clients:
                if message.get("sessionId") in client.sessions:
                    client.send(message)
            return
        client, number, method = browser.waiting.pop(message["id"], Waiting(None, 0, ""))
        if client is None:
            return
        result = message.get("result", {})
        if method == "Target.createBrowserContext" and "browserContextId" in result:
            client.contexts.add(result["browserContextId"])
        if method == "Target.attachToTarget" and "sessionId" in result:
            client.sessions.add(result["sessionId"])
        client.send({**message, "id": number})

    async def _watch(self, browser: Chromium) -> None:
        """End the browser when it needs too much memory."""
        while self._browser is browser:
            if browser.memory() > self._memory_mb << 20:
                self._end(browser, "memory", f"it needed more than {self._memory_mb} MiB")
            await asyncio.sleep(WATCH_SECONDS)


def main(words: Sequence[str]) -> None:
    """Serve until the parent ends."""
    descriptor, memory_mb, parent, is_asked = map(int, words)
    die_with_parent(parent)
    listener = socket.socket(fileno=fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, WRITE_END + 1))
    os.close(descriptor)
    nothing = fcntl.fcntl(os.open(os.devnull, os.O_RDWR), fcntl.F_DUPFD_CLOEXEC, WRITE_END + 1)
    for number in (READ_END, WRITE_END):  # kept free for the browser's pipes
        os.dup2(nothing, number, inheritable=False)
    with contextlib.closing(OwnedFolder(HOME)) as home:
        home.path.chmod(0o755)
        make_home(home.path)
        asyncio.run(Server(str(home.path), memory_mb, bool(is_asked)).serve(listener))


if __name__ == "__main__":
    main(sys.argv[1:])
