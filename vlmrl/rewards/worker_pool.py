"""Workers of a reward (workers/pool.py): what is sent to them, and what their answers and losses mean.

`run` waits until all rows are done. A caller with other work in the same thread uses `begin` and `add`, and calls
`advance` again and again. A row on which a worker is lost is sent once more, to a new worker, if the lost worker had
answered before: an alarm, a thread or a child of an earlier row may have caused it. If the second worker is lost too,
the row itself is the cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from vlmrl.errors import RewardError
from vlmrl.process import has_terminal
from vlmrl.redaction.redact import excerpt
from vlmrl.rewards.base import UserReward, WorkerReward, part_name
from vlmrl.rewards.identity import are_same
from vlmrl.rewards.outcomes import (
    MOST_LINE_CHARS,
    MOST_MESSAGE_CHARS,
    MOST_NOTE_CHARS,
    Failure,
    Outcome,
    Place,
    Result,
    as_error,
    read_artifacts,
    read_detail,
)
from vlmrl.types import RewardInput
from vlmrl.workers.frames import (
    BROKEN,
    CONTRACT,
    LOST_PIPE,
    MOST_ANSWER_BYTES,
    MOST_BLOB_BYTES,
    MOST_PROCESSES,
    WHOLE,
    Frame,
    GarbledError,
    pack,
)
from vlmrl.workers.images import HELD_SHARE, HeldImages, ImageKeys
from vlmrl.workers.pool import Limits, Lost, Pool, Worker

LOAD_SECONDS = 60.0
"""Minimum time limit for importing the user's file, in seconds of wall clock."""
SENT = (
    "response", "truth", "columns", "finish", "num_tokens", "prompt", "token_ids", "step", "prompt_id", "sample",
    "seen_sizes", "measured",
)  # fmt: skip
"""Fields of a RewardInput that are sent as they are.

Images are sent as pixels (images.py), references and turns as JSON objects.
"""
ONE_VOICE = "only the return value may be an answer: look for os.write, os.fork, os.dup2 and the like"


class WorkerPool(Pool[Place, Outcome]):
    """Up to `size` workers of one reward; started when there is work, ended by `close`."""

    def __init__(self, runs: WorkerReward, *, size: int, memory_mb: int, timeout_seconds: float) -> None:
        self.runs, self._held_bytes = runs, (memory_mb << 20) // HELD_SHARE
        self._held: WeakKeyDictionary[Worker, HeldImages] = WeakKeyDictionary()
        setup = {"user" if isinstance(runs, UserReward) else "builtin": asdict(runs), "memory_mb": memory_mb}
        limits = Limits(timeout_seconds, LOAD_SECONDS, (MOST_ANSWER_BYTES, MOST_BLOB_BYTES), terminal=True)
        size = 1 if has_terminal() else size
        super().__init__("vlmrl.rewards.worker", setup, size=size, limits=limits)

    def begin(self, *, fresh: bool = False) -> None:
        """Begin with an empty queue. `fresh`: each request gets a worker that has had no other one."""
        super().begin(fresh=fresh)
        self._inputs: dict[Place, RewardInput] = {}
        self._images = ImageKeys()
        self._asked_again: dict[Place, str] = {}

    def add(self, batches: Sequence[Sequence[Place]], inputs: Mapping[Place, RewardInput]) -> None:
        """Queue requests, one for each batch, and give them to idle workers. Does not wait."""
        self._inputs |= inputs
        self._images.add([inputs[place] for batch in batches for place in batch])
        super().add(batches)

    def hold(self) -> list[Place]:
        """Remove the inputs that no worker has yet from the queue, and return them."""
        return self._done(super().hold())

    def describe(self) -> dict[str, Any]:
        """Return facts about the function that a worker found: style, batched, needs_images, weights, ranges."""
        worker = self._start()
        while worker.facts is None:
            self.advance()
        return worker.facts

    def _done(self, places: list[Place]) -> list[Place]:
        for place in places:
            self._images.done(self._inputs[place])
        return places

    def _answers(self, worker: Worker) -> list[tuple[Place, Outcome]]:
        outcomes = super()._answers(worker)
        self._done([place for place, _ in outcomes])
        return outcomes

    def _message(self, worker: Worker, keys: Sequence[Place]) -> bytes:
        """Return a request. Images that the worker has are not sent again."""
        own, items = [self._inputs[place] for place in keys], []
        parcel = self._held.setdefault(worker, HeldImages(self._held_bytes)).parcel(own, self._images)
        for x, of_x in zip(own, parcel.keys, strict=True):
            item = {name: getattr(x, name) for name in SENT}
            item |= {"media": [asdict(m) for m in x.media], "turns": [asdict(turn) for turn in x.turns]}
            items.append({**item, "images": of_x})
        return pack({"items": items, "sent": parcel.sent, "dropped": parcel.dropped}, parcel.blobs)

    def _started(self, worker: Worker) -> None:
        assert worker.facts is not None
        if "fatal" in worker.facts:
            worker.drain()
            raise as_error(_failure(worker.facts["fatal"], worker), _name_of(self.runs), self.runs.file)

    def _outcome(self, worker: Worker, keys: Sequence[Place], frame: Frame) -> list[tuple[Place, Outcome]]:
        answer = frame.body
        if (frame.item == WHOLE) != ("failed" in answer):
            raise GarbledError(f"it answers item {frame.item}, not {worker.item}")
        if "failed" in answer:
            return [(key, _failure(answer["failed"], worker)) for key in keys]
        outcome = _failure(answer["error"], worker) if "error" in answer else _result(answer, frame.blobs)
        if isinstance(outcome, Result) and keys[0] in self._asked_again:
            note = f"asked again: {self._asked_again[keys[0]]}"
            outcome = replace(outcome, note="; ".join(filter(None, (outcome.note, note))))
        return [(keys[0], outcome)]

    def _lost(self, worker: Worker, lost: Lost) -> list[tuple[Place, Outcome]]:
        failure = _failure_of(lost, LOAD_SECONDS if worker.facts is None else self.limits.seconds, worker)
        if worker.facts is None:
            raise as_error(failure, _name_of(self.runs), self.runs.file)
        places = worker.busy if self.runs.batched else worker.busy[:1]
        if rest := worker.busy[len(places) :]:
            self._queue.appendleft(rest)
        if places and lost.why != "time" and worker.answered and places[0] not in self._asked_again:
            self._asked_again |= dict.fromkeys(places, failure.message)
            self._queue.appendleft(places)
            return []
        return [(place, failure) for place in places]


def _name_of(runs: WorkerReward) -> str:
    """Return the reward's name in messages."""
    return runs.function if isinstance(runs, UserReward) else runs.name


_facts: dict[str, dict[str, Any]] = {}


def inspect_user_reward(user: UserReward) -> dict[str, Any]:
    """Import the user's file in a worker and return the facts about its function (see `WorkerPool.describe`).

    A process does this once for the same code and arguments: a run opens its reward for training and each validation.
    """
    facts = _facts.get(repr(user))
    if facts and are_same(Path(user.file), facts["files"]):
        return facts
    pool = WorkerPool(user, size=1, memory_mb=4096, timeout_seconds=LOAD_SECONDS)
    try:
        _facts[repr(user)] = facts = pool.describe()
        return facts
    finally:
        pool.close()


def _result(answer: dict[str, Any], blobs: Sequence[bytes]) -> Outcome:
    parts, note, seconds, detail = (answer.get(name) for name in ("parts", "note", "seconds", "detail"))
    if not isinstance(parts, dict) or not all(v is None or isinstance(v, float) for v in parts.values()):
        raise GarbledError(f"its parts are not numbers: {excerpt(str(parts), 200)}")
    if not isinstance(note, str) or not isinstance(seconds, float):
        raise GarbledError(f"it is not a score: {excerpt(str(answer), 200)}")
    names = answer.get("artifacts", [])
    if not isinstance(detail, str | None) or not isinstance(names, list) or len(names) != len(blobs):
        raise GarbledError(f"its images have no names: {excerpt(str(answer), 200)}")
    try:
        named = {part_name(n, "artifact"): b for n, b in zip(names, blobs, strict=True)}
        artifacts, files = read_artifacts(named) if named else ({}, {})
        detail = None if detail is None else read_detail(detail)
        note = excerpt(note, MOST_NOTE_CHARS) if note else ""
        return Result(parts, note, seconds, detail, artifacts, files)
    except RewardError as error:
        return Failure(CONTRACT, excerpt(error.message, MOST_MESSAGE_CHARS), hint=error.hint)


def _failure(error: dict[str, Any], worker: Worker) -> Failure:
    kind, message = excerpt(error["kind"], MOST_LINE_CHARS), excerpt(error["message"], MOST_MESSAGE_CHARS)
    hint = None if error["hint"] is None else excerpt(error["hint"], MOST_MESSAGE_CHARS)
    lines = tuple(excerpt(line, MOST_LINE_CHARS) for line in error["lines"])
    return Failure(kind, message, lines, hint, worker.printed)


def _failure_of(lost: Lost, seconds: float, worker: Worker) -> Failure:
    """Return the reason why a worker was lost. `seconds`: its time limit."""
    message, hint = "its worker process was killed", None
    if lost.why == "garbled":
        message, hint = f"its worker's pipe had a wrong message: {lost.text}", ONE_VOICE
    elif lost.why == "time" and worker.facts is None:
        message = f"the file was not imported within {seconds:g} s"
    elif lost.why == "time":
        message = f"no answer within {seconds:g} s; its worker was ended"
        hint = "make it faster, or raise [reward] timeout_seconds"
    elif lost.signal:
        message = f"its worker process was ended by {lost.signal}"
        is_memory = lost.signal in ("SIGKILL", "SIGABRT", "SIGSEGV")
        hint = "it may be out of memory: see [reward] memory_mb" if is_memory else None
    elif lost.ending == "crowd":
        message = f"more than {MOST_PROCESSES} processes ran below its worker, which was ended with all of them"
        hint = "end every process that a call starts before it returns"
    elif lost.ending == "alive" or lost.code == LOST_PIPE:
        message, hint = "it closed or took over the pipes through which its worker answers", ONE_VOICE
    elif lost.code == BROKEN:
        message = "it changed its worker's Python so much that the worker cannot continue"
        hint = "does it replace functions of the standard library? keep such changes inside the call"
    elif lost.ending:
        message = f"it ended its worker process with exit code {lost.code}"
    return Failure("", message, (), hint, lost.printed)
