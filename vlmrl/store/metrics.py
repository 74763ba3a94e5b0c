"""metrics.jsonl: one JSON object per line, appended, never truncated; and the rule which attempt counts.

Step = policy version. An attempt that resumed from the checkpoint of step S holds policy version S and samples with it.
So its first rollouts file and its first `train` line are those of step S, and this line's update makes version S + 1. A
`validation` line of step S measures version S. Therefore a resume from S makes void:

- rollouts and `train` lines of older attempts with step >= S,
- `validation` lines of older attempts with step > S (that of S measured the same weights as the checkpoint),
- never `event` lines: they are history.

If two attempts that count have the same step and kind, the newer attempt wins.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.json_text import parse_json
from vlmrl.store import layout

KINDS = ("train", "validation", "event")
LINE_HEAD = b'{"step": '
"""Begin of every line: `Run.log` puts the step first."""
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def counts(step: int, attempt: int, starts: Mapping[int, int], kind: str = "train") -> bool:
    """Return whether something that an attempt made at a step still counts for the run, by the rule above.

    Args:
        starts: attempt -> the step it began at (`Manifest.attempt_starts`).
        kind: "train" (rollouts too), "validation" or "event".
    """
    if kind == "event":
        return True
    slack = 1 if kind == "validation" else 0
    return all(step < start + slack for number, start in starts.items() if number > attempt)


def counted(step: int) -> int:
    """Return the number that users know for the step of a train line or rollout file: they count steps from 1.

    Files name the policy version that sampled, from 0. Step 24 of 24 is `"step": 23` and `rollouts/step-000023`; it
    made version 24, which is the step of its validation and its checkpoint.
    """
    return step + 1


def newest(
    candidates: Iterable[tuple[int, int, Any]], starts: Mapping[int, int], kind: str = "train"
) -> dict[int, Any]:
    """Return step -> the thing that counts for it, from (step, attempt, thing), in order of steps."""
    best: dict[int, tuple[int, Any]] = {}
    for step, attempt, thing in candidates:
        if counts(step, attempt, starts, kind) and (step not in best or attempt >= best[step][0]):
            best[step] = (attempt, thing)
    return {step: best[step][1] for step in sorted(best)}


class MetricsWriter:
    """Writer that appends lines to one metrics.jsonl. Each line is on disk, in one write, before `write` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._handle).st_size
        if size and os.pread(self._handle, 1, size - 1) != b"\n":
            # A kill cut the last line. It is kept and gets a line end, so that the next line is separate.
            os.write(self._handle, b"\n")

    def write(self, line: Mapping[str, Any]) -> None:
        content = json.dumps(encode(line), ensure_ascii=False, allow_nan=False) + "\n"
        data = content.encode("utf-8", "backslashreplace")
        try:
            written = os.write(self._handle, data)
            os.fsync(self._handle)
        except OSError as error:
            raise StoreError(f"cannot write metrics: {error.strerror}", where=str(self.path)) from error
        if written != len(data):
            raise StoreError("cannot write metrics: the disk is full", where=str(self.path))

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def encode(value: Any) -> Any:
    """Return a value as plain JSON.

    NaN and infinities become the strings "NaN", "Infinity", "-Infinity"; arrays of one element (NumPy or torch scalars)
    become numbers.

    Raises: TypeError for any other type that JSON does not have.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    if hasattr(value, "item"):
        return encode(value.item())
    raise TypeError(f"a metric cannot be {type(value).__name__}: {value!r:.80}")


def decode(value: Any) -> Any:
    """Return the inverse of `encode` for the values of one line."""
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


@dataclass(frozen=True)
class MetricsFile:
    """Content of metrics.jsonl. Line numbers count from 1.

    Args:
        lines: whole lines in file order.
        torn: numbers of the other lines; a kill during a write leaves one.
        numbers: line numbers of `lines`.
        foreign: those of `torn` that are not the beginning of a line either; a kill does not leave such lines.
    """

    lines: tuple[dict[str, Any], ...] = ()
    torn: tuple[int, ...] = ()
    numbers: tuple[int, ...] = field(default=(), repr=False)
    foreign: tuple[int, ...] = ()


def read_file(run_dir: Path) -> MetricsFile:
    """Return every whole line of every attempt. A torn line (a kill during a write) is skipped and its number kept."""
    path = run_dir / layout.METRICS
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return MetricsFile()
    except OSError as error:
        raise StoreError(f"cannot read metrics: {error.strerror}", where=str(path)) from error
    lines: list[dict[str, Any]] = []
    numbers: list[int] = []
    torn: list[int] = []
    foreign: list[int] = []
    for number, raw in enumerate(content.split(b"\n"), start=1):
        if not raw.strip():
            continue
        line = parse_line(raw)
        if line is None:
            torn.append(number)
            foreign += [] if is_beginning(raw) else [number]
        else:
            lines.append(line)
            numbers.append(number)
    return MetricsFile(tuple(lines), tuple(torn), tuple(numbers), tuple(foreign))


def current(lines: Iterable[dict[str, Any]], starts: Mapping[int, int], kind: str) -> list[dict[str, Any]]:
    """Return the lines of one kind that count, one per step, by step. Events: all, in the order of the file."""
    lines_of_kind = [line for line in lines if line["kind"] == kind]
    if kind == "event":
        return lines_of_kind
    return list(newest(((n["step"], n["attempt"], n) for n in lines_of_kind), starts, kind).values())


def read_tail(run_dir: Path, max_bytes: int = 16_384) -> dict[str, Any] | None:
    """Return the last whole `train` line, or any last line, for listings. Only the end of the file is read."""
    try:
        with open(run_dir / layout.METRICS, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            rows = file.read().split(b"\n")
    except OSError:
        return None
    lines = [line for raw in reversed(rows) if (line := parse_line(raw)) is not None]
    return next((line for line in lines if line["kind"] == "train"), lines[0] if lines else None)


def is_beginning(raw: bytes) -> bool:
    """Return whether these bytes begin a line but do not complete it: its first object is still open."""
    if not (raw.startswith(LINE_HEAD) or LINE_HEAD.startswith(raw)):
        return False
    depth, quoted, escaped = 0, False, False
    for byte in raw:
        if byte < 0x20:
            return False
        if quoted:
            quoted, escaped = escaped or byte != 0x22, byte == 0x5C and not escaped
        elif byte == 0x22:
            quoted = True
        else:
            depth += (byte in b"{[") - (byte in b"}]")
            if depth == 0:
                return False
    return True


def parse_line(raw: bytes) -> dict[str, Any] | None:
    try:
        line = parse_json(raw)
    except ValueError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return None
    if type(line.get("step")) is not int or type(line.get("attempt")) is not int:
        return None
    return {key: decode(value) for key, value in line.items()}
