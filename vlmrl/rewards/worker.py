"""Worker process of a user's reward: reads frames, calls the function, writes frames. A trainer never imports this.

Requests: {"items", "sent", "dropped"} with image pixels as blobs (images.py). Answers: {"parts", "note", "seconds"} or
{"error"} for each item in their order, or one {"failed": error} for a whole batch. An answer may also have {"detail"}
as JSON text, and {"artifacts"}, names whose PNG files are the blobs. Output of the function goes to a pipe of its own
and is shown with an error.

The user's code may replace functions of `os` and `json`, built-ins and sys.stdout, close descriptors, leave alarms and
fork. So this module and the kit bind what they need before that code is imported, and this one restores built-ins,
alarms and the recursion limit after every call. A child that returns from a call ends instead of answering.
"""

from __future__ import annotations

import bdb
import builtins
import hashlib
import linecache
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from vlmrl.errors import RewardUnavailable, VlmrlError
from vlmrl.process import own_shared_memory
from vlmrl.redaction.redact import CUT_MARGIN
from vlmrl.rewards.base import UserReward, WorkerFunction, WorkerReward, check_parts, split_result
from vlmrl.rewards.outcomes import MOST_NAME_CHARS, MOST_NOTE_CHARS, artifact_files, detail_text
from vlmrl.rewards.user_reward import BoundReward, bind_builtin, bind_user_reward
from vlmrl.types import Media, RewardInput, Turn
from vlmrl.workers.frames import CONTRACT, UNAVAILABLE, WHOLE, Channel
from vlmrl.workers.images import ReceivedImages
from vlmrl.workers.serve import Answer, Handler, limit_memory

MODULE = "vlmrl_user_reward"
MOST_PARTS = 256
HINTS = {
    MemoryError: "raise [reward] memory_mb, or use less memory",
    bdb.BdbQuit: "for breakpoint() in a reward: vlmrl reward-check or try with --debug, train with --debug-rank 0",
}
SENT_CHARS = MOST_NOTE_CHARS + CUT_MARGIN + 1
"""Maximum number of characters of a text in an answer: all that the parent looks at to hide secrets and then to cut."""

_clock, _alarm, _setitimer = time.perf_counter, signal.alarm, signal.setitimer
_timers = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_set_recursion_limit = sys.setrecursionlimit
_loaded = frozenset(sys.modules)  # before any code of the user's
_builtins: dict[str, Any] = builtins.__dict__
_original = dict(_builtins)


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


def begin(setup: dict[str, Any], channel: Channel) -> tuple[dict[str, Any], Handler]:
    """Load the reward. Return facts about its function, or {"fatal": error}, and the handler of requests."""
    _Generations()
    own_shared_memory()
    guard, received = Guard(), ReceivedImages()
    runs = UserReward(**setup["user"]) if "user" in setup else WorkerFunction(**setup["builtin"])
    reward, facts = _load(runs, setup["memory_mb"], guard)
    module = None if isinstance(runs, UserReward) else sys.modules.get(runs.module)
    file = str(getattr(module, "__file__", runs.file))
    guard.flush()

    def score(body: dict[str, Any], blobs: Sequence[bytes]) -> Iterator[Answer]:
        assert reward is not None
        if body["sent"] or body["dropped"]:
            received.take(body, blobs)
        return _score(reward, body["items"], received, file, channel, guard)

    return facts, score


def import_source(user: UserReward) -> ModuleType:
    """Return the user's file as a module, from the text that was hashed. Its folder comes last in sys.path."""
    module = ModuleType(MODULE)
    module.__file__ = user.file
    sys.modules[MODULE] = module
    sys.path.append(str(Path(user.file).parent))
    linecache.cache[user.file] = (len(user.code), None, user.code.splitlines(keepends=True), user.file)
    exec(compile(user.code, user.file, "exec", dont_inherit=True), module.__dict__)
    return module


def own_files(file: str) -> dict[str, str]:
    """Return the modules that the user's file has imported from its own folder: relative path -> sha256.

    Installed packages below this folder, as those of a virtual environment, are left out, and so is vlmrl.
    """
    folder, files = Path(file).resolve().parent, dict[str, str]()
    installed = [Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")]
    for name in sys.modules.keys() - _loaded:
        with suppress(Exception):  # it has no file, lies elsewhere, or is no module
            path = Path(sys.modules[name].__file__ or "").resolve()
            own = path.relative_to(folder).as_posix()
            if name.partition(".")[0] not in ("vlmrl", MODULE) and not any(map(path.is_relative_to, installed)):
                files[own] = hashlib.sha256(path.read_bytes()).hexdigest()
    return dict(sorted(files.items()))


def read_input(item: dict[str, Any], received: ReceivedImages) -> RewardInput:
    """Return an item of a request as a RewardInput, with images of its own."""
    fields = {**item, "images": received.images(item["images"]) if item["images"] else []}
    fields["media"] = tuple(Media(**reference) for reference in item["media"])
    fields["seen_sizes"] = tuple((width, height) for width, height in item["seen_sizes"])
    fields["turns"] = tuple(map(Turn.of, item["turns"]))
    fields["token_ids"] = None if item["token_ids"] is None else tuple(item["token_ids"])
    return RewardInput(**fields)


def _load(runs: WorkerReward, memory_mb: int, guard: Guard) -> tuple[BoundReward | None, dict[str, Any]]:
    try:
        if isinstance(runs, UserReward):
            limit_memory(memory_mb << 20)
            with guard:
                module = import_source(runs)
            reward = bind_user_reward(module, runs, guard)
        else:  # what it starts, such as a browser, has limits of its own
            reward = bind_builtin(runs)
            limit_memory(memory_mb << 20)
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
        "files": own_files(runs.file) if isinstance(runs, UserReward) else {},
    }
    return reward, facts


def _score(
    reward: BoundReward,
    items: Sequence[dict[str, Any]],
    received: ReceivedImages,
    file: str,
    channel: Channel,
    guard: Guard,
) -> Iterator[Answer]:
    """Yield the answers to one request: for a batch after one call for all, else after one call per item."""
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
            yield item, {kind: described}, ()
            continue
        seconds = (_clock() - start) / len(group)
        for item, result in zip(group, results, strict=True):
            yield item, *_answer_of(result, seconds, file)


def _answer_of(result: Any, seconds: float, file: str) -> tuple[dict[str, Any], Sequence[bytes]]:
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
        if detail is not None:
            answer["detail"] = detail_text(detail)
        files = artifact_files(artifacts) if artifacts or type(artifacts) is not dict else {}
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
