"""The processes of an environment, seen from the trainer: episodes are begun, answered and ended by one thread.

    trainer -> keeper -> process with the user's file -> a fork for each episode

An episode's process is killed with all that it started when the episode ends. The keeper (workers/keeper.py) ends all
of them with the trainer.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from vlmrl.environments.base import EnvironmentLimits, UserEnvironment
from vlmrl.environments.row_fields import Repeats, row_fields
from vlmrl.errors import DataError, RewardError
from vlmrl.owned_folder import OwnedFolder
from vlmrl.process import descendants, ending_of, kill_all, patience, send
from vlmrl.redaction.redact import excerpt
from vlmrl.rewards.identity import are_same
from vlmrl.rewards.user_reward import read_user_file
from vlmrl.types import Call, Row, Size
from vlmrl.untrusted import parse_json
from vlmrl.workers.frames import (
    CONTRACT,
    PIPE_BYTES,
    TOKEN_BYTES,
    UNAVAILABLE,
    WHOLE,
    Frame,
    FrameBuffer,
    GarbledError,
    pack,
    pack_frame,
)
from vlmrl.workers.images import pixels_of
from vlmrl.workers.pool import Limits, Lost, Pool, Worker

PACKAGE = Path(__file__).resolve().parents[1]
LOAD_SECONDS = 60.0
"""Longest time for importing the user's file, and for a fork and its reset, in seconds of wall clock."""
YIELD_SECONDS = 1.0
"""A tool over its time is interrupted in its process; if it goes on for so long, the process is killed."""
MOST_ANSWER_BYTES = (4 << 20, 64 << 20)
"""Largest JSON, and most bytes of images, of an answer."""
MOST_MESSAGE_CHARS = 500
MOST_CALL_CHARS = 120
FOLDERS = "vlmrl-env-"
"""Begin of the names of the folders with the sockets of pools."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """Begin of an episode: the columns of the row, its truth, of which reset may declare fields, and the prompt.

    Args:
        repeats: columns that repeat the truth; see row_fields.py.
    """

    columns: Mapping[str, Any]
    truth: Mapping[str, Any]
    images: Sequence[Any]
    seen_sizes: Sequence[Size]
    seed: int
    prompt: str
    repeats: Repeats = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of an episode's environment to its reset, a turn or its end.

    Args:
        parts: texts and PNG files, in order.
        done: "answer" or "done" if the episode has ended; None = it goes on.
        calls: the calls of the turn as JSON values, with the name "" for one that cannot be read.
        errors: number of calls that failed.
        measured: numbers for the reward and the metrics.
        seconds: time that the environment worked.
        spans: begin and end in `parts` of what each call returned.
    """

    parts: Sequence[str | bytes] = ()
    done: Literal["answer", "done"] | None = None
    calls: Sequence[Mapping[str, Any]] = ()
    errors: int = 0
    measured: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    spans: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class Stopped:
    """An episode whose process is gone, or whose environment raised outside a tool.

    Args:
        over_time: a tool did not end in time: no fault.
        why: what happened, in words.
        is_outage: a service that the environment needs is down.
    """

    over_time: bool
    why: str
    is_outage: bool = False


class _Forks(Pool[str, int]):
    """The process with the user's file. Keys are tickets of episodes, outcomes the processes of their forks."""

    def __init__(self, user: UserEnvironment, form: str, limits: EnvironmentLimits, address: str) -> None:
        setup = {"user": asdict(user), "limits": asdict(limits), "form": form, "socket": address}
        self.user, self.ended = user, list[int]()
        super().__init__("vlmrl.environments.worker", setup, size=1, limits=Limits(LOAD_SECONDS, LOAD_SECONDS))

    def facts(self) -> dict[str, Any]:
        """Return what the process says about the environment. Raises: RewardError when it cannot be loaded."""
        worker = self._workers[0] if self._workers else self._start()
        while worker.facts is None:
            self.advance()
        return worker.facts

    def _message(self, worker: Worker, keys: Sequence[str]) -> bytes:
        ended, self.ended = self.ended, []
        return pack({"fork": list(keys), "reap": ended})

    def _outcome(self, worker: Worker, keys: Sequence[str], frame: Frame) -> Iterable[tuple[str, int]]:
        return [(keys[0], int(frame.body["pid"]))]

    def _started(self, worker: Worker) -> None:
        assert worker.facts is not None
        if fatal := worker.facts.get("fatal"):
            words = _words(fatal)
            # In a file of vlmrl there is nothing to mend: the recipe's place is named.
            where = None if Path(self.user.file).resolve().is_relative_to(PACKAGE) else self.user.file
            raise RewardError(f"the environment cannot be loaded: {words}", where=where, hint=fatal["hint"])

    def _lost(self, worker: Worker, lost: Lost) -> Iterable[tuple[str, int]]:
        how = lost.signal or lost.ending or lost.text
        self.ended = []
        if worker.facts is None:
            raise RewardError(
                f"the environment was not loaded: its process ended ({how})", where=self.user.file, hint=lost.printed
            )
        return [(ticket, 0) for ticket in worker.busy]


@dataclass(eq=False)
class _Process:
    """Process of an episode: its connection, once it has connected, and the requests to it.

    Args:
        call: the call that it runs, with name and arguments.
    """

    key: Any
    ticket: bytes
    pid: int | None = None
    link: socket.socket | None = None
    frames: FrameBuffer | None = None
    waiting: deque[tuple[dict[str, Any], list[bytes]]] = field(default_factory=deque)
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    number: int = 0
    is_busy: bool = False
    deadline: float = 0.0
    over_time: bool = False
    call: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Described:
    """Facts of an environment that its process tells.

    Args:
        tools: schemas of its tools.
        takes: parameters of its reset, and whether each is `**row`; None = it has no reset.
        own_reward: whether it has a `get_reward`, which is then the measured number `reward`.
        is_open: whether its reset may show something, which goes on with the prompt's last message.
        note, identity, warning: see `Started`.
    """

    tools: Sequence[Mapping[str, Any]]
    takes: Mapping[str, bool] | None
    own_reward: bool
    is_open: bool
    note: str = ""
    identity: str = ""
    warning: str = ""


@dataclass(frozen=True)
class LoadedEnvironment:
    """User's environment as a recipe names it.

    Args:
        described: by the name of the environment, "" for a single one.
        files: modules that its file has imported from its own folder: relative path -> sha256.
    """

    user: UserEnvironment
    described: Mapping[str, Described]
    files: Mapping[str, str] = field(default_factory=dict)

    def of(self, row: Row) -> Described:
        """Return the facts of a row's environment. Raises: DataError where its column `environment` names none."""
        if list(self.described) == [""]:
            return self.described[""]
        name = row.columns.get("environment")
        if not isinstance(name, str) or name not in self.described:
            message = f"the row's column `environment` is {excerpt(repr(name), 60)}"
            raise DataError(message, where=row.place, hint=f"it names one of: {', '.join(self.described)}")
        return self.described[name]

    def facts(self, row: Row, repeats: Repeats) -> dict[str, Any]:
        """Return the names of the tools, of the fields of a row that the environment gets, and of those kept back.

        `repeats`: of its source.
        """
        names = dict.fromkeys(tool["function"]["name"] for one in self.described.values() for tool in one.tools)
        given, kept_back = row_fields(row.columns, row.truth, self.of(row).takes, repeats)
        return {
            "tools": list(names),
            "given": list(given),
            "kept_back": list(kept_back),
            **({"note": note} if (note := self.of(row).note) else {}),
        }

    @property
    def record(self) -> dict[str, Any]:
        """Its identity for a run's manifest: code, also that which it imports, name, arguments and schemas of tools."""
        user = self.user
        schemas = {name: list(one.tools) for name, one in self.described.items()}
        contents = {name: one.identity for name, one in self.described.items() if one.identity}
        record = {"name": user.name, "sha256": user.sha256, "args": dict(user.args), "tools": schemas}
        record["files"] = dict(self.files)
        return record | ({"contents": contents} if contents else {})


def load_environment(name: str, args: Mapping[str, Any], base_dir: Path | str | None = None) -> LoadedEnvironment:
    """Find the file of an environment, and let a process import it and describe its tools.

    Args:
        name: path/to/file.py:name.
    Raises: RewardError when it cannot be loaded.
    """
    path, target, text = read_user_file(name, base_dir, "environment")
    given = str(path), target, text, json.dumps(dict(args), sort_keys=True)
    known = _described(*given)
    if not are_same(path, known.files):
        _described.cache_clear()  # a module that it imports has changed since
        known = _described(*given)
    return known


@lru_cache(maxsize=32)
def _described(file: str, name: str, text: str, args: str) -> LoadedEnvironment:
    user = UserEnvironment(file, name, text, parse_json(args))
    forks = _Forks(user, "hermes", EnvironmentLimits(), "")
    try:
        facts = forks.facts()
    finally:
        forks.close()
    described = {name: Described(**one) for name, one in facts["environments"].items()}
    return LoadedEnvironment(user, described, facts["files"])


class EnvironmentPool:
    """Episodes of one environment, by any keys.

    Args:
        form: how the model writes calls; see environments/calls.py.
    Raises: RewardError when the user's file cannot be loaded.
    """

    def __init__(self, environment: LoadedEnvironment, form: str, limits: EnvironmentLimits) -> None:
        self.limits, self.own_reward = limits, any(one.own_reward for one in environment.described.values())
        self.form = form
        self._folder = OwnedFolder(FOLDERS)
        address = str(self._folder.path / "s")
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(address)
        except OSError as error:
            message = f"no socket can be made there: {error.strerror}"
            raise RewardError(message, where=address, hint="set TMPDIR to a short path") from error
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._forks = _Forks(environment.user, form, limits, address)
        self._episodes: dict[Any, _Process] = {}
        self._tickets: dict[bytes, _Process] = {}
        self._ready: deque[_Process] = deque()
        self._guests: list[tuple[socket.socket, bytearray]] = []
        self._outcomes: list[tuple[Any, Answer | Stopped]] = []

    @property
    def pending(self) -> bool:
        """Return whether an answer is awaited."""
        return bool(self._outcomes) or any(e.is_busy or e.waiting for e in self._episodes.values())

    def pids(self) -> list[int]:
        """Return the processes of the open episodes."""
        return [e.pid for e in self._episodes.values() if e.pid]

    def begin(self, key: Any, start: Beginning) -> None:
        """Begin an episode. Its first answer is what the environment shows in front of the first turn."""
        episode = self._episodes[key] = _Process(key, os.urandom(TOKEN_BYTES))
        self._tickets[episode.ticket] = episode
        body = {
            "columns": dict(start.columns),
            "truth": dict(start.truth),
            "sizes": [image.size for image in start.images],
            "seen_sizes": list(start.seen_sizes),
            "seed": start.seed,
            "prompt": start.prompt,
            "repeats": {name: list(fields) for name, fields in start.repeats.items()},
        }
        self._ask(episode, {"reset": body}, [pixels_of(image) for image in start.images])
        self._forks.add([[episode.ticket.hex()]])

    def turn(
        self,
        key: Any,
        text: str,
        *,
        in_thought: bool = False,
        seen_sizes: Sequence[Size] = (),
        served: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Give a turn of the policy to its environment.

        Args:
            in_thought: the prompt has opened a thought for it.
            seen_sizes: of all images that tools have shown in earlier turns.
            served: calls that a server has read out of the text: names, and arguments as JSON text.
        """
        turn = {"turn": text, "in_thought": in_thought, "seen_sizes": list(seen_sizes), "served": list(served)}
        self._ask(self._episodes[key], turn)

    def replay(self, key: Any, calls: Sequence[Call], seen_sizes: Sequence[Size] = ()) -> None:
        """Run the calls of a turn that was read before; the name "" is one that could not be read.

        Args:
            seen_sizes: as in `turn`.
        """
        again = [asdict(call) for call in calls]
        self._ask(self._episodes[key], {"turn": "", "calls": again, "seen_sizes": list(seen_sizes)})

    def finish(self, key: Any) -> None:
        """Ask for the environment's own reward: the last request of an episode."""
        self._ask(self._episodes[key], {"end": True})

    def drop(self, key: Any) -> None:
        """End the process of an episode, and all that it started."""
        episode = self._episodes.pop(key, None)
        if episode is None:
            return
        self._tickets.pop(episode.ticket, None)
        if episode in self._ready:
            self._ready.remove(episode)
        if episode.pid:
            # Before its link is closed: it would end by itself, and leave what it started to others. It is not reaped
            # yet, so the number is no other process's.
            pid = episode.pid
            kill_all(lambda: [*descendants(pid), pid])
            send([-pid], signal.SIGKILL)
            self._forks.ended.append(pid)
        if episode.link is not None:
            episode.link.close()
            episode.link = None

    def advance(self, seconds: float | None = None) -> list[tuple[Any, Answer | Stopped]]:
        """Wait until an answer comes, at most `seconds` (None = until then), and return those that are there."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self._outcomes and self.pending:
            self._feed()
            left = 1.0 if until is None else max(0.0, until - time.monotonic())
            self._wait(min(left, 1.0))
            if until is not None and time.monotonic() >= until:
                break
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self) -> None:
        """End all processes."""
        for key in list(self._episodes):
            self.drop(key)
        for link, _ in self._guests:
            link.close()
        self._forks.close()
        self._listener.close()
        self._folder.close()

    def _ask(self, episode: _Process, body: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        episode.waiting.append((body, list(blobs)))
        self._queue(episode)

    def _queue(self, episode: _Process) -> None:
        """Queue an episode that has a request, and nothing else to do."""
        if episode.link is not None and episode.waiting and not episode.is_busy and episode not in self._ready:
            self._ready.append(episode)

    def _feed(self) -> None:
        """Give as many episodes their next request as may work at the same time."""
        free = self.limits.workers - sum(e.is_busy for e in self._episodes.values())
        while free > 0 and self._ready:
            episode = self._ready.popleft()
            assert episode.link is not None
            episode.number += 1
            frame = pack_frame(episode.ticket, episode.number, WHOLE, os.getpid(), *episode.waiting.popleft())
            # The first bytes on a channel are its token.
            episode.unsent = memoryview(episode.ticket + frame if episode.number == 1 else frame)
            episode.is_busy, episode.call = True, {}
            self._send(episode)
            free -= 1

    def _wait(self, seconds: float) -> None:
        """Wait until something happens, and take it in."""
        poll, of_fd = select.poll(), dict[int, _Process]()
        poll.register(self._listener, select.POLLIN)
        for link, _ in self._guests:
            poll.register(link, select.POLLIN)
        printers = {w.output_fd: w for w in self._forks._workers if w.output_open}  # a full pipe would stop a tool
        for fd in printers:
            poll.register(fd, select.POLLIN)
        for episode in self._episodes.values():
            if episode.link is not None:
                poll.register(episode.link, select.POLLIN | (select.POLLOUT if episode.unsent else 0))
                of_fd[episode.link.fileno()] = episode
        starts = any(e.pid is None for e in self._episodes.values())
        now, deadlines = time.monotonic(), [e.deadline for e in self._episodes.values() if e.is_busy]
        left = min((d - now for d in deadlines), default=seconds)
        for fd, event in poll.poll(0 if starts else 1000 * max(0.0, min(left, seconds))):
            if fd in printers:
                printers[fd].drain()
            episode = of_fd.get(fd)
            if episode is None:
                continue
            if event & select.POLLOUT:
                self._send(episode)
            if event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                # One that answers is not late, however long this process did not read it.
                episode.deadline = max(episode.deadline, time.monotonic() + YIELD_SECONDS)
                self._receive(episode)
        self._greet()
        if starts or self._forks.ended:
            for ticket, pid in self._forks.advance(0.01 if starts else 0.0):
                self._forked(bytes.fromhex(ticket), pid)
        for episode in [e for e in self._episodes.values() if e.is_busy and now >= e.deadline]:
            self._stop(episode, over_time=True, why="no answer in time")

    def _forked(self, ticket: bytes, pid: int) -> None:
        episode = self._tickets.get(ticket)
        if episode is None:  # dropped meanwhile
            if pid:
                send([pid], signal.SIGKILL)
                self._forks.ended.append(pid)
        elif pid:
            episode.pid = pid
        else:
            self._stop(episode, over_time=False, why="the process with the environment's file ended")

    def _greet(self) -> None:
        """Accept connections, and find the episodes of their tickets."""
        while True:
            try:
                link, _ = self._listener.accept()
            except BlockingIOError:
                break
            link.setblocking(False)
            self._guests.append((link, bytearray()))
        for guest in list(self._guests):
            link, data = guest
            try:
                data += link.recv(TOKEN_BYTES - len(data))
            except BlockingIOError:
                continue
            if len(data) < TOKEN_BYTES:
                continue
            self._guests.remove(guest)
            episode = self._tickets.get(bytes(data))
            if episode is None or episode.link is not None:
                link.close()
                continue
            episode.link, episode.frames = link, FrameBuffer(episode.ticket, MOST_ANSWER_BYTES)
            self._queue(episode)

    def _send(self, episode: _Process) -> None:
        assert episode.link is not None
        episode.deadline = time.monotonic() + patience(LOAD_SECONDS)
        try:
            episode.unsent = episode.unsent[episode.link.send(episode.unsent) :]
        except BlockingIOError:
            return
        except OSError:  # its end is seen when it is read
            episode.unsent = memoryview(b"")

    def _receive(self, episode: _Process) -> None:
        assert episode.link is not None and episode.frames is not None
        try:
            data = episode.link.recv(PIPE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            how = ending_of(episode.pid) if episode.pid else ""
            why = f"its process ended{how and f' ({how})'}{_said(self._forks)}"
            if episode.call:
                words = excerpt(json.dumps(episode.call["arguments"], ensure_ascii=False), MOST_CALL_CHARS, mark="...")
                why = f"in the tool `{episode.call['name']}`, called with {words}: {why}; it may raise instead"
            self._stop(episode, over_time=False, why=why)
            return
        episode.frames.feed(data)
        try:
            while episode.link is not None and (frame := episode.frames.pop()) is not None:
                if frame.request != episode.number or not episode.is_busy or frame.pid != (episode.pid or frame.pid):
                    raise GarbledError(f"it answers request {frame.request}, not {episode.number}")
                if frame.item != WHOLE:  # a call begins: its clock starts
                    episode.call = dict(frame.body["call"])
                    episode.deadline = time.monotonic() + patience(self.limits.tool_seconds + YIELD_SECONDS)
                    continue
                episode.is_busy = False
                self._take(episode, frame)
                self._queue(episode)
        except (GarbledError, KeyError, TypeError, ValueError, IndexError) as error:
            self._stop(episode, over_time=False, why=f"its process sent a wrong message: {error}")

    def _take(self, episode: _Process, frame: Frame) -> None:
        body = frame.body
        if fault := body.get("fault"):
            hint = f"; {excerpt(str(fault['hint']), MOST_MESSAGE_CHARS)}" if fault["hint"] else ""
            is_outage = fault["kind"] == UNAVAILABLE
            self._stop(episode, over_time=False, why=_words(fault) + hint, is_outage=is_outage)
            return
        parts = [part if isinstance(part, str) else frame.blobs[part] for part in body["parts"]]
        done = body.get("done")
        if done not in ("answer", "done", None):
            raise GarbledError(f"done is {excerpt(str(done), 20)}")
        measured = {str(k): float(v) for k, v in body.get("measured", {}).items()}
        answer = Answer(
            parts, done, body.get("calls", ()), int(body.get("errors", 0)), measured,
            float(body["seconds"]), [(int(begin), int(end)) for begin, end in body.get("spans", ())],
        )  # fmt: skip
        self._outcomes.append((episode.key, answer))

    def _stop(self, episode: _Process, *, over_time: bool, why: str, is_outage: bool = False) -> None:
        self.drop(episode.key)
        self._outcomes.append((episode.key, Stopped(over_time, why, is_outage)))


def _words(error: Mapping[str, Any]) -> str:
    """Return an error of the user's code (`describe_error`) in words, with the lines that raised it."""
    kind = "" if error["kind"] in (CONTRACT, UNAVAILABLE) else f"{excerpt(str(error['kind']), MOST_MESSAGE_CHARS)}: "
    lines = "; ".join(excerpt(str(line), MOST_MESSAGE_CHARS) for line in error["lines"][-2:])
    return f"{kind}{excerpt(str(error['message']), MOST_MESSAGE_CHARS)}" + (f" ({lines})" if lines else "")


def _said(forks: _Forks) -> str:
    """Return the end of what the processes printed, in brackets."""
    for worker in forks._workers:
        worker.drain()
        if text := worker.printed.strip():
            return f" ({excerpt(text, MOST_MESSAGE_CHARS, end=True)})"
    return ""
