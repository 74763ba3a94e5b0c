"""Worker process of a user's reward: reads frames, calls the function, writes frames. A trainer never imports this.

Requests: {"op": "load", ...} once, then {"op": "score", "items", "sent", "dropped"} with image pixels as blobs
(images.py). Answers: {"loaded"} or {"fatal": error}; then, in the order of the items, {"parts", "note", "seconds"} or
{"error"} for each, or one {"failed": error} for a whole batch. An answer may also have {"detail"} as JSON text, and
{"artifacts"}, names whose PNG files are the blobs. Every answer repeats the number of its request, gives its item and
has the id of this process (frames.py). Output of the function goes to a pipe of its own and is shown with an error.

The user's code may replace functions of `os` and `json`, built-ins and sys.stdout, close descriptors, leave alarms and
fork. So this module binds what it needs before that code is imported, and restores built-ins, alarms and the recursion
limit after every call. A child that returns from a call ends instead of answering.
"""

from __future__ import annotations

import bdb
import builtins
import linecache
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from vlmrl.errors import RewardUnavailable, VlmrlError
from vlmrl.rewards.base import UserReward, WorkerFunction, WorkerReward, check_parts, split_result
from vlmrl.rewards.outcomes import MOST_NAME_CHARS, artifact_files, detail_text
from vlmrl.rewards.user_reward import BoundReward, bind_builtin, bind_user_reward
from vlmrl.types import Media, RewardInput, Turn
from vlmrl.workers.frames import (
    BROKEN,
    CONTRACT,
    LOST_PIPE,
    TOKEN_BYTES,
    UNAVAILABLE,
    WHOLE,
    Frame,
    FrameBuffer,
    GarbledError,
    pack_frame,
)
from vlmrl.workers.images import ReceivedImages

Answer = tuple[dict[str, Any], Sequence[bytes]]
"""Answer and its blobs."""
MODULE = "vlmrl_user_reward"
MOST_PARTS = 256
HINTS = {
    MemoryError: "raise [reward] memory_mb, or use less memory",
    bdb.BdbQuit: "for breakpoint() in a reward: vlmrl reward-check or try with --debug, train with --debug-rank 0",
}
SENT_CHARS = 10_000
"""Maximum number of characters of a text in an answer. The parent hides secrets in it, and then cuts it further."""

_read, _write, _fstat, _getpid, _exit = os.read, os.write, os.fstat, os.getpid, os._exit
_clock, _alarm, _setitimer = time.perf_counter, signal.alarm, signal.setitimer
_timers = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_set_recursion_limit = sys.setrecursionlimit
_builtins: dict[str, Any] = builtins.__dict__
_original = dict(_builtins)


class Channel:
    """The two pipes to the scorer. A pipe that the user's code has closed or replaced ends the process.

    Attributes:
        token: token of all frames; the first bytes that are read.
        request: number of the request that is being answered.
    """

    def __init__(self, request_fd: int, response_fd: int) -> None:
        self._fds = (request_fd, response_fd)
        self._identities = tuple(map(_identity, self._fds))
        self._pid, self.request = _getpid(), 0
        self.token = b""
        while len(self.token) < TOKEN_BYTES:
            data = _read(request_fd, TOKEN_BYTES - len(self.token))
            if not data:
                _exit(0)
            self.token += data
        self._buffer = FrameBuffer(self.token)

    def requests(self) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
        """Yield every request in order, until the pipe ends."""
        while True:
            while (frame := self._next()) is not None:
                self.request = frame.request
                yield frame.body, frame.blobs
            data = self._guarded(0, _read, 1 << 20)
            if not data:
                return
            self._buffer.feed(data)

    def _next(self) -> Frame | None:
        try:
            return self._buffer.pop()
        except GarbledError:  # the user's code has read from the pipe, or replaced it
            _exit(LOST_PIPE)

    def answer(self, item: int, body: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Send the answer to an item of the request. A child of this process ends instead."""
        self.stay_alone()
        data = memoryview(pack_frame(self.token, self.request, item, self._pid, body, blobs))
        while data:
            data = data[self._guarded(1, _write, data) :]

    def stay_alone(self) -> None:
        """End this process if it is a child that returned from the user's code: it must not answer."""
        if _getpid() != self._pid:
            _exit(0)

    def _guarded(self, end: int, call: Any, argument: Any) -> Any:
        """Read or write, if the descriptor is still the same pipe."""
        try:
            if _identity(self._fds[end]) == self._identities[end]:
                return call(self._fds[end], argument)
        except OSError:
            pass
        _exit(LOST_PIPE)


def _identity(fd: int) -> tuple[int, int]:
    status = _fstat(fd)
    return status.st_dev, status.st_ino


class Guard:
    """Restorer of what the user's code may change, after each of its calls. Within its calls, its changes hold."""

    def __init__(self) -> None:
        self._limit = sys.getrecursionlimit()
        self._theirs: dict[str, Any] = {}
        self._streams = (sys.stdout, sys.stderr)

    def __enter__(self) -> None:
        _builtins.update(self._theirs)

    def __exit__(self, *exc: object) -> None:
        _alarm(0)
        for timer in _timers:
            _setitimer(timer, 0)
        self._theirs = {name: was for name, ours in _original.items() if (was := _builtins.get(name)) is not ours}
        _builtins.update(_original)
        _set_recursion_limit(self._limit)

    def flush(self) -> None:
        """Send the output; a stream that was closed has none."""
        for stream in self._streams:
            with suppress(Exception):
                stream.flush()


DEEP = 3
"""Processes at this depth of forks get idle priority, so that the machine stays usable."""


class _Generations:
    """Counter of the forks in this process's line. Of a fork bomb, which doubles, most processes are deep."""

    def __init__(self) -> None:
        self._depth = 0
        os.register_at_fork(after_in_child=self._born)

    def _born(self) -> None:
        self._depth += 1
        if self._depth >= DEEP and hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main(request_fd: int, response_fd: int) -> None:
    """Serve until the request pipe ends."""
    _Generations()
    for fd in (request_fd, response_fd):
        os.set_inheritable(fd, False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    channel, guard = Channel(request_fd, response_fd), Guard()
    try:
        serve(channel, guard)
    except BaseException as error:  # only if the user's code damaged Python: report it with plain system calls
        channel.stay_alone()
        with suppress(BaseException):
            _write(2, f"{type(error).__name__}: {error}"[:SENT_CHARS].encode(errors="backslashreplace"))
        _exit(BROKEN)


def serve(channel: Channel, guard: Guard) -> None:
    """Answer every request."""
    reward, file, received = None, "", ReceivedImages()
    for body, blobs in channel.requests():
        if body["op"] == "load":
            runs = UserReward(**body["user"]) if "user" in body else WorkerFunction(**body["builtin"])
            reward, answer = _load(runs, body["memory_mb"], guard)
            module = None if isinstance(runs, UserReward) else sys.modules.get(runs.module)
            file = str(getattr(module, "__file__", runs.file))
            guard.flush()
            channel.answer(WHOLE, answer)
        elif reward is not None:
            received.take(body, blobs)
            for item, (answer, images) in _score(reward, body["items"], received, file, channel, guard):
                channel.answer(item, answer, images)


def limit_memory(memory_mb: int) -> None:
    """Limit the address space; an allocation beyond it raises MemoryError. Core files are disabled."""
    import resource

    with suppress(ValueError, OSError):  # a lower hard limit of the system stays
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def import_source(user: UserReward) -> ModuleType:
    """Return the user's file as a module, from the text that was hashed. Its folder comes last in sys.path."""
    module = ModuleType(MODULE)
    module.__file__ = user.file
    sys.modules[MODULE] = module
    sys.path.append(str(Path(user.file).parent))
    linecache.cache[user.file] = (len(user.code), None, user.code.splitlines(keepends=True), user.file)
    exec(compile(user.code, user.file, "exec", dont_inherit=True), module.__dict__)
    return module


def read_input(item: dict[str, Any], received: ReceivedImages) -> RewardInput:
    """Return an item of a request as a RewardInput, with images of its own."""
    fields = {**item, "images": received.images(item["images"])}
    fields["media"] = tuple(Media(**reference) for reference in item["media"])
    fields["seen_sizes"] = tuple((width, height) for width, height in item["seen_sizes"])
    fields["turns"] = tuple(map(Turn.of, item["turns"]))
    fields["token_ids"] = None if item["token_ids"] is None else tuple(item["token_ids"])
    return RewardInput(**fields)


def _load(runs: WorkerReward, memory_mb: int, guard: Guard) -> tuple[BoundReward | None, dict[str, Any]]:
    try:
        limit_memory(memory_mb)
        if isinstance(runs, UserReward):
            with guard:
                module = import_source(runs)
            reward = bind_user_reward(module, runs, guard)
        else:
            reward = bind_builtin(runs)
    except BaseException as error:
        return None, {"fatal": describe_error(error, runs.file)}
    facts = {
        "style": reward.style,
        "batched": reward.batched,
        "needs_images": reward.needs_images,
        "needs_token_ids": reward.needs_token_ids,
        "accuracy": reward.accuracy,
        "on_timeout": dict(reward.on_timeout),
        "weights": dict(reward.weights),
        "ranges": {k: list(v) for k, v in reward.ranges.items()},
    }
    return reward, {"loaded": facts}


def _score(
    reward: BoundReward,
    items: Sequence[dict[str, Any]],
    received: ReceivedImages,
    file: str,
    channel: Channel,
    guard: Guard,
) -> Iterator[tuple[int, Answer]]:
    """Yield (item, answer) of one request: for a batch after one call for all, else after one call per item."""
    groups = [range(len(items))] if reward.batched else [range(i, i + 1) for i in range(len(items))]
    for group in groups:
        start, described, results = _clock(), None, []
        try:
            inputs = [read_input(items[i], received) for i in group]
            start = _clock()
            results = reward.call(inputs)
        except BaseException as error:
            channel.stay_alone()
            described = describe_error(error, file)
        channel.stay_alone()
        guard.flush()
        if described is not None:
            item, kind = (WHOLE, "failed") if reward.batched else (group[0], "error")
            yield item, ({kind: described}, ())
            continue
        seconds = (_clock() - start) / len(group)
        for item, result in zip(group, results, strict=True):
            yield item, _answer_of(result, seconds, file)


def _answer_of(result: Any, seconds: float, file: str) -> Answer:
    """Return the answer for one item. Values of the result are objects of the user's code, so they may raise."""
    try:
        parts, note, detail, artifacts = split_result(result)
        if len(parts) > MOST_PARTS or any(len(str(name)) > MOST_NAME_CHARS for name in parts):
            return {
                "error": {
                    "kind": CONTRACT,
                    "hint": None,
                    "lines": [],
                    "message": f"it returned {len(parts):,} parts; a reward has at most {MOST_PARTS}, "
                    f"with names of at most {MOST_NAME_CHARS} characters",
                }
            }, ()
        note = str.__str__(note)[:SENT_CHARS]  # a subclass of str may return anything from its own methods
        answer: dict[str, Any] = {"parts": check_parts(parts, {}), "note": note, "seconds": seconds}
        text, files = detail_text(detail), artifact_files(artifacts)
        if text is not None:
            answer["detail"] = text
        if files:
            answer["artifacts"] = list(files)
        return answer, list(files.values())
    except BaseException as error:
        return {"error": describe_error(error, file)}, ()


def describe_error(error: BaseException, file: str) -> dict[str, Any]:
    """Return an exception as JSON: kind, message, and the user's own lines of the traceback."""
    if isinstance(error, VlmrlError):
        kind = UNAVAILABLE if isinstance(error, RewardUnavailable) else CONTRACT
        hint = None if error.hint is None else _text(error.hint)
        return {"kind": kind, "message": _text(error.message), "hint": hint, "lines": []}
    lines = []
    with suppress(Exception):  # the user's code may have changed the modules that make the traceback
        if isinstance(error, SyntaxError) and error.filename == file:
            lines = [f"{Path(file).name}:{error.lineno}: {(error.text or '').strip()[:SENT_CHARS]}"]
        for frame in extract_tb(error.__traceback__):
            if frame.filename == file:
                lines.append(f"{Path(file).name}:{frame.lineno} in {frame.name}: {(frame.line or '')[:SENT_CHARS]}")
    hint = next((hint for kind, hint in HINTS.items() if isinstance(error, kind)), None)
    return {"kind": type(error).__name__[:SENT_CHARS], "message": _text(error), "hint": hint, "lines": lines[-8:]}


def _text(said: Any) -> str:
    """Return the text of an exception, or of a value of it. The user's own methods may make that text."""
    try:
        return str.__str__(str(said))[:SENT_CHARS]
    except BaseException as nested:
        return f"(its text cannot be made: {type(nested).__name__})"
