"""Caller's side of the sandbox: start it once, open a session, run code in it.

    with Sandbox() as sandbox, sandbox.open() as session:
        ran = session.run("print(images[0].size)", images=[image])

A session keeps its variables and files from run to run. Forks of the process that started the sandbox can use it, too.
What comes out of a session is the work of a model: text, and pixels that nothing has to decode.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vlmrl
from vlmrl.errors import EngineError
from vlmrl.sandbox.confine import PAUSE, RUN, BoxLimits, Layers, layers, wrapped
from vlmrl.untrusted import parse_json
from vlmrl.workers.frames import TOKEN_BYTES, WHOLE, Frame, FrameBuffer, GarbledError, pack_frame

START_SECONDS = 120.0
READY = b"ready\n"
GONE = "the sandbox has ended"
"""Error of a run whose session was lost with its sandbox, by no fault of the code."""
MOST_JSON = 1 << 16
MOST_PRINTED = 1 << 26
"""Number of bytes after which code that prints without end is ended."""
END_SECONDS = 2.0
"""Time in which the sandbox says how a session has ended."""
BROKEN = "the code wrote into the channel of the sandbox"
CLEAN = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
         "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "MPLBACKEND": "agg", "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
"""Environment of the sandbox: nothing of the caller's."""


@dataclass
class Ran:
    """Result of a run of code.

    Args:
        printed: the text that it printed, at most `BoxLimits.output` bytes of it.
        error: what it raised, or why it was ended; "" = it came to its end.
        images: (name of the file, or "" for one that was shown; image) of its pictures, as PIL RGB; [] after an error.
        ended: the session is over; its variables and files are lost.
    """

    printed: str = ""
    error: str = ""
    images: list[tuple[str, Any]] = field(default_factory=list)
    ended: bool = False


class Sandbox:
    """Sandbox of this machine. It ends with the process that made it.

    Args:
        limits: of a session that is opened without any.
        here: the layers to use; None = all that this machine has.
    Raises: EngineError where code cannot be confined.
    """

    def __init__(self, limits: BoxLimits | None = None, here: Layers | None = None) -> None:
        here = here or layers()
        here.require()
        self.limits, self.owner = limits or BoxLimits(), os.getpid()
        # An address without a file, so that nothing is left of it. Only who knows the key gets a session.
        self.address, self.key = f"\0vlmrl-sandbox-{secrets.token_hex(8)}", secrets.token_hex(16)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.address)
        listener.listen(512)
        self._life, theirs = socket.socketpair()
        # The packages of this process and of vlmrl, whose modules the zygote imports before any code of a model runs.
        paths = [str(Path(vlmrl.__file__).parents[1]), *(path for path in sys.path if os.path.isdir(path))]
        fds = (listener.fileno(), theirs.fileno())
        start = "import sys; sys.path[:] = {paths!r}; from vlmrl.sandbox.zygote import main; main{args!r}"
        words = [sys.executable, "-I", "-c", start.format(paths=paths, args=(*fds, here.machine, here.landlock))]
        if here.bubblewrap:
            keep = [word for name, value in CLEAN.items() for word in ("--setenv", name, value)]
            words = [*wrapped(here.bubblewrap, paths), *keep, *words]
        self._process = subprocess.Popen(
            words, pass_fds=fds, env=CLEAN, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        listener.close()
        theirs.close()
        self._life.settimeout(START_SECONDS)
        answer = b""
        with suppress(OSError):  # it has ended
            self._life.sendall(self.key.encode())
            answer = self._life.recv(len(READY))
        if answer != READY:
            self._process.kill()
            _, errors = self._process.communicate()
            self.close()
            text = errors.decode(errors="replace").strip().splitlines()
            raise EngineError(f"the sandbox did not start: {text[-1] if text else 'its process ended'}")

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, seed: int = 0, limits: BoxLimits | None = None) -> Session:
        """Open a session. `seed`: of its random numbers.

        Raises: EngineError when the sandbox has ended.
        """
        return Session(self.address, self.key, limits or self.limits, seed)

    def close(self) -> None:
        """End the sandbox with all its sessions. In a fork of its owner nothing happens."""
        if os.getpid() != self.owner:
            return
        self._life.close()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


class Session:
    """One session of a sandbox, in a process of its own: variables and files stay until it is closed.

    Raises: EngineError when the sandbox has ended.
    """

    def __init__(self, address: str, key: str, limits: BoxLimits, seed: int = 0) -> None:
        self.limits, self.number, self.ended = limits, 0, False
        self._token = os.urandom(TOKEN_BYTES)
        self._control = socket.socket(socket.AF_UNIX)
        self._channel, theirs = socket.socketpair()
        self._output, their_output = os.pipe()
        try:
            self._control.connect(address)
            line = json.dumps({"key": key, "limits": limits.fields(), "seed": seed}).encode() + b"\n"
            socket.send_fds(self._control, [line], [theirs.fileno(), their_output])
        except OSError as error:
            self.close()
            raise EngineError(f"{GONE} ({error.strerror})") from error
        finally:
            theirs.close()
            os.close(their_output)
        os.set_blocking(self._output, False)
        self._channel.setblocking(False)
        self._unsent = bytearray(self._token)
        most = limits.images * limits.pixels * 3
        self._answers = FrameBuffer(self._token, (MOST_JSON, most))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        code: str,
        images: Sequence[Any] = (),
        names: Sequence[str] = (),
        files: Sequence[str] = (),
        *,
        keep: bool = False,
    ) -> Ran:
        """Run code.

        Args:
            images: PIL RGB images that are added to its variable `images`, and saved under their `names`.
            names: of the files; () = image_0.png, image_1.png, ..., numbered through the session.
            keep: whether the pictures of the run are added, too.
            files: names of picture files that are returned beside what the code shows and what it writes.
        """
        if self.ended:
            return Ran(error="the session has ended", ended=True)
        self._say(RUN)
        self.number += 1
        body = {
            "code": code,
            "names": list(names),
            "sizes": [i.size for i in images],
            "files": list(files),
            "keep": keep,
        }
        self._unsent += pack_frame(self._token, self.number, WHOLE, 0, body, [i.tobytes() for i in images])
        printed, ran = bytearray(), Ran()
        count, end = 0, time.monotonic() + self.limits.seconds
        frame = None
        while frame is None and not ran.error:
            left = end - time.monotonic()
            if left <= 0:
                ran.error = f"the code took more than {self.limits.seconds:g} s"
                break
            poll = select.poll()  # select(2) takes no descriptor above 1,023
            poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            poll.register(self._output, select.POLLIN)
            events = dict(poll.poll(math.ceil(1000 * left)))
            channel, output = events.get(self._channel.fileno(), 0), events.get(self._output, 0)
            try:
                if channel & select.POLLOUT:
                    del self._unsent[: self._channel.send(self._unsent)]
                if output:
                    piece = os.read(self._output, 1 << 16)
                    count += len(piece)
                    printed += piece[: max(0, self.limits.output - len(printed))]
                    if count > MOST_PRINTED:
                        ran.error = f"the code printed more than {MOST_PRINTED >> 20} MiB"
                if channel & ~select.POLLOUT:
                    data = self._channel.recv(1 << 20)
                    self._answers.feed(data)
                    frame = self._answers.pop()
                    if not data and frame is None:
                        ran.error = self._ending()
            except OSError:
                ran.error = self._ending()
            except GarbledError:
                ran.error = BROKEN
        count += self._drain(printed)
        if frame is not None:
            ran.error, ran.images = self._read(frame)
        if ran.error and (frame is None or ran.error == BROKEN):
            self.close()
            ran.ended = True
        else:
            self._say(PAUSE)
        ran.printed = printed.decode(errors="replace")
        if count > len(printed):
            ran.printed += f"\n[{count - len(printed):,} more bytes]"
        return ran

    def close(self) -> None:
        """End the session and all that it holds."""
        if not self.ended:
            self.ended = True
            os.close(self._output)
            self._channel.close()
            self._control.close()

    def _say(self, word: bytes) -> None:
        with suppress(OSError):  # if the sandbox has ended, the channel says so, too
            self._control.sendall(word)

    def _drain(self, printed: bytearray) -> int:
        """Read what is left of the output; return its number of bytes."""
        count = 0
        while count < MOST_PRINTED:
            try:
                piece = os.read(self._output, 1 << 16)
            except BlockingIOError:
                break
            if not piece:
                break
            count += len(piece)
            printed += piece[: max(0, self.limits.output - len(printed))]
        return count

    def _ending(self) -> str:
        """Return in words how the process of the session has ended."""
        self._control.settimeout(END_SECONDS)
        try:
            facts = parse_json(self._control.recv(4096) or b"{}")
        except (OSError, ValueError):
            facts = {}
        if facts.get("why") == "folder":
            return f"the code wrote more than {self.limits.folder_mb} MiB, or too many files"
        code = facts.get("code")
        if code is None:
            return GONE
        if code >= 0:
            return f"the code ended its interpreter (exit code {code})"
        reasons = {signal.SIGXCPU: "its processor time is used up", signal.SIGSEGV: "it crashed"}
        return f"the interpreter was ended: {reasons.get(-code, 'its memory or its processor time is used up')}"

    def _read(self, frame: Frame) -> tuple[str, list[tuple[str, Any]]]:
        """Return the error and the pictures of an answer; BROKEN if it is not one of a session's."""
        from PIL import Image

        error, sizes, names = (frame.body.get(name) for name in ("error", "sizes", "names"))
        if not isinstance(error, str) or not isinstance(sizes, list) or not isinstance(names, list):
            return BROKEN, []
        images = []
        if not len(sizes) == len(names) == len(frame.blobs) <= self.limits.images:
            return BROKEN, []
        for size, name, blob in zip(sizes, names, frame.blobs, strict=True):
            is_size = isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
            if not is_size or len(blob) != 3 * size[0] * size[1] or not isinstance(name, str):
                return BROKEN, []
            images.append((name, Image.frombytes("RGB", (size[0], size[1]), blob)))
        return error, images
