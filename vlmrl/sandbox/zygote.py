"""Sandboxed side: a process that has imported the libraries, and its forks, in which the code of a model runs.

    caller -> zygote (runs no code of a model, sees no rows of data) -> a fork per session, confined before it runs any

The caller connects to a socket and sends a line of JSON with two descriptors: the channel of the session, and the pipe
for what its code prints. The connection then says when code may run (RUN) and when nothing may (PAUSE): threads that
code has left do not run between two calls. Its end ends the session; the zygote answers on it how a session ended. The
life of the zygote hangs on a pipe to the process that started it.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import errno
import fcntl
import io
import json
import linecache
import os
import random
import resource
import secrets
import selectors
import signal
import socket
import stat
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from vlmrl.owned_folder import OwnedFolder
from vlmrl.redaction.redact import excerpt
from vlmrl.redaction.secrets import scanner_shapes
from vlmrl.sandbox.confine import (
    RUN,
    BoxLimits,
    close_rules,
    die_with,
    drop_privileges,
    filter_calls,
    hide_memory,
    limit,
    open_rules,
)
from vlmrl.untrusted import parse_json
from vlmrl.workers.frames import WHOLE, Channel

LIBRARIES = ("numpy", "PIL.Image", "PIL.ImageDraw", "PIL.ImageEnhance", "PIL.ImageFilter", "PIL.ImageOps", "cv2",
             "matplotlib.pyplot", "matplotlib.backends.backend_agg", "scipy.ndimage", "skimage", "json", "math", "re",
             "statistics", "decimal", "fractions", "datetime", "collections", "itertools", "csv", "textwrap", "string",
             "asyncio", "subprocess", "multiprocessing", "concurrent.futures.process", "encodings.idna")  # fmt: skip
"""Modules that are imported once if they are installed, so that no session has to."""
READY, KEY_BYTES = b"ready\n", 32
FOLDERS = "vlmrl-box-"
"""Beginning of the names of folders; the number of the zygote's process follows."""
CODE = "<code>"
ENDED_IN_TIME = 20
"""Processor time of a session, in units of the wall time of one run."""
WATCH_SECONDS, MOST_FILES = 0.5, 4096
"""Time after which the sizes of the sessions' folders are read, and the number of files that one may have."""
MOST_ERROR, MOST_PIXELS = 4000, 1 << 26
NOT_HERE = "nothing outside this folder can be reached here: no network, no other process"
SAVED = "_saved_to_a_file"
"""Mark of a figure of matplotlib."""
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


class NotHereError(RuntimeError):
    """Something that code cannot do in a sandbox."""

    __module__ = "builtins"  # a traceback shows the name alone


@dataclass
class _Session:
    """Session as the zygote sees it. `why`: reason for which it was ended; "" = it ended by itself."""

    control: socket.socket
    folder: str
    pid: int
    why: str = ""
    running: bool = True


def main(listener_fd: int, life_fd: int, machine: str, landlock: int) -> None:
    """Serve until the process that holds the other end of `life_fd` ends.

    Args:
        machine, landlock: as in `Layers`.
    """
    os.setsid()
    hide_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard > soft else soft, hard))
    _preload()
    _Zygote(socket.socket(fileno=listener_fd), life_fd, machine, landlock).serve()


def _preload() -> None:
    for name in LIBRARIES:
        with contextlib.suppress(Exception):  # some are not installed; a broken one is found by the code that needs it
            import_module(name)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(1)
    if "PIL.Image" in sys.modules:
        sys.modules["PIL.Image"].init()  # the decoders of all formats
        setattr(sys.modules["PIL.Image"], "MAX_IMAGE_PIXELS", MOST_PIXELS)  # noqa: B010 (a module)
    "".encode("idna")
    scanner_shapes()  # here once: the first error in each fork would wait for it


class _Zygote:
    def __init__(self, listener: socket.socket, life_fd: int, machine: str, landlock: int) -> None:
        self.listener, self.machine, self.landlock = listener, machine, landlock
        self.life_fd, self.key = life_fd, os.read(life_fd, KEY_BYTES).decode()
        self.folder = _Root(FOLDERS)
        self.root = str(self.folder.path)
        os.chmod(self.root, 0o711)
        self.sessions: dict[int, _Session] = {}
        self.watched, self.selector = time.monotonic(), selectors.DefaultSelector()
        self.limits: dict[int, BoxLimits] = {}

    def serve(self) -> None:
        wake, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 4096))
        self.selector.register(self.life_fd, selectors.EVENT_READ, self._end)
        os.write(self.life_fd, READY)
        while True:
            for key, _ in self.selector.select(WATCH_SECONDS if self.sessions else None):
                key.data()
            self._reap()
            if time.monotonic() - self.watched > WATCH_SECONDS:
                self._watch()
                self.watched = time.monotonic()

    def _accept(self) -> None:
        control, _ = self.listener.accept()
        self.selector.register(control, selectors.EVENT_READ, lambda: self._open(control))

    def _open(self, control: socket.socket) -> None:
        """Start the session that a connection asks for."""
        self.selector.unregister(control)
        given, fds = {}, list[int]()
        with contextlib.suppress(OSError, ValueError):
            data, fds, _, _ = socket.recv_fds(control, 1 << 16, 2)
            given = parse_json(data)
        if len(fds) != 2 or given.get("key") != self.key:  # the caller ended at once, or is another one
            for fd in fds:
                os.close(fd)
            control.close()
            return
        limits, parent = BoxLimits(**given["limits"]), os.getpid()
        folder = tempfile.mkdtemp(prefix="s", dir=self.root)
        if (pid := os.fork()) == 0:
            try:
                live(fds[0], fds[1], folder, limits, given["seed"], parent, self.machine, self.landlock)
            finally:
                os._exit(1)
        for fd in fds:
            os.close(fd)
        session = self.sessions[pid] = _Session(control, folder, pid)
        self.limits[pid] = limits
        self.selector.register(control, selectors.EVENT_READ, lambda: self._obey(session))

    def _obey(self, session: _Session) -> None:
        """Do what the caller says; it has closed the connection if it says nothing."""
        said = b""
        with contextlib.suppress(OSError):
            said = session.control.recv(64)
        if said:
            os.kill(session.pid, signal.SIGCONT if said.endswith(RUN) else signal.SIGSTOP)
        else:
            self._kill(session, "")

    def _kill(self, session: _Session, why: str) -> None:
        """End a session: its caller has closed the connection, or it has used too much."""
        if session.running:
            session.running, session.why = False, why
            self.selector.unregister(session.control)
            os.kill(session.pid, signal.SIGKILL)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                session = self.sessions.pop(pid, None)
                if session is None:  # it removed a folder
                    continue
                if session.running:
                    self.selector.unregister(session.control)
                line = {"code": os.waitstatus_to_exitcode(status), "why": session.why}
                with contextlib.suppress(OSError):
                    session.control.sendall(json.dumps(line).encode() + b"\n")
                session.control.close()
                del self.limits[pid]
                if os.fork() == 0:  # it may hold a million files
                    try:
                        remove(session.folder)
                    finally:
                        os._exit(0)

    def _watch(self) -> None:
        """End the sessions whose folder has grown too large."""
        for pid, session in self.sessions.items():
            count = size = 0
            try:
                for base, folders, files in os.walk(session.folder):
                    count += len(folders) + len(files)
                    for name in files:
                        with contextlib.suppress(OSError):
                            size += os.lstat(os.path.join(base, name)).st_blocks * 512
                    if count > MOST_FILES:
                        break
            except RecursionError:  # too deep
                count = MOST_FILES + 1
            if count > MOST_FILES or size > self.limits[pid].folder_mb << 20:
                self._kill(session, "folder")

    def _end(self) -> None:
        for pid in self.sessions:
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        self.folder.close()
        os._exit(0)


class _Root(OwnedFolder):
    """Folder of the sessions' folders."""

    def remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            remove(str(path))


def remove(folder: str) -> None:
    """Remove a folder whose content may be hostile: deeper than any path, or without permissions."""
    with contextlib.suppress(FileNotFoundError):
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        while names := os.listdir(top):
            for name in names:
                if not _open_up(name, top):
                    os.unlink(name, dir_fd=top)
                    continue
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
                for child in os.listdir(below):
                    _open_up(child, below)  # a folder that cannot be written cannot be moved
                    os.rename(child, secrets.token_hex(8), src_dir_fd=below, dst_dir_fd=top)
                os.close(below)
                os.rmdir(name, dir_fd=top)
        os.close(top)
        os.rmdir(folder)


def _open_up(name: str, within: int) -> bool:
    """Return whether a name is a folder, and give its owner all rights to it."""
    is_folder = stat.S_ISDIR(os.stat(name, dir_fd=within, follow_symlinks=False).st_mode)
    if is_folder:
        os.chmod(name, 0o700, dir_fd=within)
    return is_folder


def live(
    channel_fd: int, output_fd: int, folder: str, limits: BoxLimits, seed: int, parent: int, machine: str, landlock: int
) -> None:
    """Be the process of a session until its channel ends. Never returns."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    channel_fd, output_fd = (fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in (channel_fd, output_fd))
    for fd, source in ((0, nothing), (1, output_fd), (2, output_fd), (3, channel_fd), (4, channel_fd)):
        os.dup2(source, fd)
    os.closerange(5, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    rules = open_rules(landlock, folder) if landlock else None  # before the paths cannot be read any more
    os.chdir(folder)
    drop_privileges(folder)
    die_with(parent)
    limit(limits)
    most = int(ENDED_IN_TIME * limits.seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    if rules is not None:
        close_rules(rules)
    filter_calls(machine)
    _Runner(folder, limits, seed).serve()
    os._exit(0)


@dataclass
class _Runner:
    """Runs code in one name space, in the order of the requests."""

    folder: str
    limits: BoxLimits
    seed: int
    shown: list[Any] = field(default_factory=list)
    known: dict[str, float] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)

    def serve(self) -> None:
        tempfile.tempdir = self.folder
        os.environ |= {"HOME": self.folder, "TMPDIR": self.folder, "MPLCONFIGDIR": self.folder}
        random.seed(self.seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(self.seed % 2**32)
        module = types.ModuleType("__main__")
        sys.modules["__main__"], self.names = module, vars(module)
        self.names |= {"show": self.show, "images": []}
        _say_what_is_not_here(self.show)
        channel = Channel(3, 4)
        for body, blobs in channel.requests():
            for stream in ("stdout", "stderr"):
                raw = open(1, "w", buffering=1 << 13, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
                setattr(sys, stream, raw)
            self._take(body, blobs)
            answer = self._run(body["code"])
            pictures, names = ([], []) if answer["error"] else self._pictures(body["files"])
            if body["keep"]:
                self._keep(pictures)
            sizes = [picture.size for picture in pictures]
            channel.answer(WHOLE, answer | {"sizes": sizes, "names": names}, [p.tobytes() for p in pictures])

    def _take(self, body: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
        """Put the pictures of a request into `images`, and into files."""
        if not blobs:
            return
        from PIL import Image

        pairs = zip(body["sizes"], blobs, strict=True)
        self._keep([Image.frombytes("RGB", tuple(size), blob) for size, blob in pairs], body["names"])

    def _keep(self, pictures: Sequence[Any], names: Sequence[str] = ()) -> None:
        images = self.names.setdefault("images", [])
        for number, picture in enumerate(pictures):
            name = names[number] if names else f"image_{len(images)}.png"
            images.append(picture)
            # Compressing more takes most of the time of a session's first run.
            picture.save(name, **({"quality": 95} if name.endswith((".jpg", ".jpeg")) else {"compress_level": 1}))

    def _run(self, code: str) -> dict[str, Any]:
        """Run code; the value of an expression at its end is printed, as notebooks do. Return its error, "" = none."""
        self.shown.clear()
        self.known = {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(".") if entry.is_file()}
        error = ""
        try:
            # A traceback shows the lines of this run.
            linecache.cache[CODE] = (len(code), None, code.splitlines(keepends=True), CODE)
            body = ast.parse(code, CODE)
            last = body.body[-1] if body.body else None
            value = last.value if isinstance(last, ast.Expr) else None
            if value is not None:
                body.body.pop()
            exec(compile(body, CODE, "exec"), self.names)
            if value is not None:
                self._show_value(eval(compile(ast.Expression(value), CODE, "eval"), self.names))
            self._show_figures()
        except SystemExit as end:
            error = f"the code ended itself: exit({'' if end.code is None else end.code!r})"
        except BaseException as failure:
            error = _error_text(failure)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        return {"error": excerpt(error, MOST_ERROR, end=True)}

    def _show_value(self, value: Any) -> None:
        if value is None:
            return
        if type(value).__module__.partition(".")[0] == "PIL" and hasattr(value, "getbands"):
            self.show(value)
        else:
            print(repr(value))

    def show(self, image: Any) -> None:
        """Show a picture to the model: an image of PIL, an array, a figure of matplotlib, or the name of a file."""
        if len(self.shown) >= self.limits.images:
            raise NotHereError(f"at most {self.limits.images} pictures are shown in a run")
        self.shown.append(_as_image(image, self.limits.pixels))

    def _show_figures(self) -> None:
        """Show the open figures of matplotlib, and close them."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        for figure in map(pyplot.figure, pyplot.get_fignums()) if pyplot else ():
            if not getattr(figure, SAVED, False):  # its file is shown
                self.show(figure)
        if pyplot:
            pyplot.close("all")

    def _pictures(self, files: Sequence[str]) -> tuple[list[Any], list[str]]:
        """Return what was shown, and the pictures in files (those named, those that the run wrote); and their names."""
        pictures, names = list(self.shown), [""] * len(self.shown)
        new = [n for n in sorted(os.listdir(".")) if n.lower().endswith(IMAGE_ENDINGS) and self._is_new(n)]
        for name in dict.fromkeys((*files, *new)):
            with contextlib.suppress(Exception):
                if len(pictures) < self.limits.images:
                    pictures.append(_as_image(name, self.limits.pixels))
                    names.append(name)
        return pictures, names

    def _is_new(self, name: str) -> bool:
        try:
            return os.stat(name).st_mtime_ns != self.known.get(name)
        except OSError:
            return False


def _as_image(value: Any, most: int) -> Any:
    """Return anything that is a picture as an RGB image of at most `most` pixels."""
    from PIL import Image

    if hasattr(value, "savefig") or hasattr(getattr(value, "figure", None), "savefig"):
        figure, sink = value if hasattr(value, "savefig") else value.figure, io.BytesIO()
        figure.savefig(sink, format="png", bbox_inches="tight")
        value = Image.open(sink)
    elif isinstance(value, (str, os.PathLike)):
        value = Image.open(value)
    elif not isinstance(value, Image.Image):
        import numpy as np

        array = np.asarray(value)
        if array.dtype == bool or (array.dtype.kind == "f" and array.size and array.min() >= 0 and array.max() <= 1):
            array = array * 255.0
        array = array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array
        value = Image.fromarray(array.clip(0, 255).astype("uint8"))
    if value.mode in ("RGBA", "LA", "PA") or "transparency" in value.info:
        value = Image.alpha_composite(Image.new("RGBA", value.size, "white"), value.convert("RGBA"))
    value = value.convert("RGB")
    if not all(value.size):
        raise ValueError("the picture has no pixels")
    if (count := value.width * value.height) > most:
        factor = (most / count) ** 0.5
        value = value.resize((max(1, int(value.width * factor)), max(1, int(value.height * factor))))
    return value


def _error_text(error: BaseException) -> str:
    """Return a traceback from the code of the model on, with what a sandbox refuses in words."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, frame in enumerate(frames) if frame.filename == CODE), len(frames))
    lines = traceback.format_exception_only(error)
    if own := [frame for frame in frames[first:] if frame.filename != __file__]:
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(own), *lines]
    refused = isinstance(error, OSError) and error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EROFS)
    return "".join(lines).rstrip() + (f" ({NOT_HERE})" if refused else "")


_REFUSED = {
    "os.fork": "no other process can be started here",
    "os.forkpty": "no other process can be started here",
    "os.exec": "no other program can be started here",
    "os.posix_spawn": "no other program can be started here",
    "os.system": "no other program can be started here",
    "os.spawn": "no other program can be started here",
    "subprocess.Popen": "no other program can be started here",
    "socket.__new__": "there is no network here",
    "socket.getaddrinfo": "there is no network here",
}
"""Event of Python's audit -> words. The kernel refuses these too: this is for the reader of the error alone."""


def _marking(save: Callable[..., Any]) -> Callable[..., Any]:
    """Return matplotlib's `savefig`, which then marks a figure that is saved to a file."""

    def savefig(self: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(self, SAVED, isinstance(file, (str, os.PathLike)))
        return save(self, file, *args, **kwargs)

    return savefig


def _say_what_is_not_here(show: Callable[[Any], None]) -> None:
    """Let what cannot work fail at once, in words."""

    def audit(event: str, _: Any) -> None:
        if event in _REFUSED:
            raise NotHereError(_REFUSED[event])

    def refuse(words: str) -> Callable[..., Any]:
        def refused(*_: Any, **__: Any) -> Any:
            raise NotHereError(words)

        return refused

    sys.addaudithook(audit)
    builtins.input = refuse("nobody can type here: input() has no answer")
    for name in ("multiprocessing.synchronize", "concurrent.futures.process"):
        if name in sys.modules:
            for kind in ("SemLock", "ProcessPoolExecutor"):
                if hasattr(sys.modules[name], kind):
                    setattr(sys.modules[name], kind, refuse("no other process can be started here: use one process"))
    for name in ("run", "new_event_loop", "Runner"):
        setattr(sys.modules["asyncio"], name, refuse("asyncio needs sockets, and there are none here"))
    if "PIL.Image" in sys.modules:
        kind: Any = sys.modules["PIL.Image"].Image
        kind.show = lambda self, *_, **__: show(self)
    if "matplotlib.pyplot" in sys.modules:
        pyplot: Any = sys.modules["matplotlib.pyplot"]
        pyplot.show = lambda *_, **__: None  # open figures are shown at the end of a run
        figure = sys.modules["matplotlib.figure"].Figure
        figure.savefig = _marking(figure.savefig)
    if "cv2" in sys.modules:
        for name in ("imshow", "waitKey", "namedWindow"):
            setattr(sys.modules["cv2"], name, refuse("there is no window here: use show(image)"))
