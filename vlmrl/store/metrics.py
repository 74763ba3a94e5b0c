"""metrics.jsonl: one JSON object per line, appended, never truncated; and the rule for lines of several attempts.

The step is the policy version. An attempt that resumed from the checkpoint of step S has policy version S and samples
with it. So its first rollout file and its first `train` line have step S, and the update of this step makes version
S + 1. A `validation` line of step S measures version S. Therefore a resume from S makes these invalid:

- rollouts and `train` lines of older attempts with step >= S,
- `validation` lines of older attempts with step > S (the one of S measured the same weights as the checkpoint).

`event` lines never become invalid, because they are history. Lines and files that are not invalid "count". If two
attempts have a valid line of the same step and kind, only the line of the newer attempt counts.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.redaction.redact import quoted
from vlmrl.store import layout
from vlmrl.types import EPISODE_LIMITS, TOKEN_LIMITS
from vlmrl.untrusted import parse_json, read_regular

KINDS = ("train", "validation", "event")
WARNING = "health/warning"
"""The only metric that is a text: a step's warnings (diagnose/signs.py); a step without warnings lacks it."""
LINE_HEAD = b'{"step": '
"""First bytes of every line: `MetricsWriter` writes the step first."""
SEAL = re.compile(rb', "crc32": "[0-9a-f]{8}"}$')
"""End of a line with a checksum: CRC-32 of the bytes before it."""
MOST_BYTES = 1 << 32
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def counts(step: int, attempt: int, starts: Mapping[int, int], kind: str = "train") -> bool:
    """Return whether a line or a rollout file of an attempt is still valid, by the rule in this module's docstring.

    Args:
        starts: attempt -> the step at which it began (`Manifest.attempt_starts`).
        kind: "train" (rollouts too), "validation" or "event".
    """
    if kind == "event":
        return True
    slack = 1 if kind == "validation" else 0
    return all(step < start + slack for number, start in starts.items() if number > attempt)


def counted(step: int) -> int:
    """Return the number of a step in output for users, who count from 1, for a train line.

    Train lines have the policy version that sampled, from 0. Example: step 24 of 24 is `"step": 23` there, and
    `rollouts/000024.parquet`. It made version 24, and its validation and its checkpoint have the step 24.
    """
    return step + 1


def newest(
    candidates: Iterable[tuple[int, int, Any]], starts: Mapping[int, int], kind: str = "train"
) -> dict[int, Any]:
    """Return step -> the valid item of the newest attempt, in order of steps. `candidates`: (step, attempt, item)."""
    best: dict[int, tuple[int, Any]] = {}
    for step, attempt, thing in candidates:
        if counts(step, attempt, starts, kind) and (step not in best or attempt >= best[step][0]):
            best[step] = (attempt, thing)
    return {step: best[step][1] for step in sorted(best)}


class MetricsWriter:
    """Writer that appends the lines of an attempt to metrics.jsonl. Each is on disk, in one write, before `write` ends.

    Attributes:
        files: name in the run's folder -> sha256 of the files written since the last line; the next line holds them.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self.path, self.attempt = path, attempt
        self.files: dict[str, str] = {}
        self._handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._handle).st_size
        if size and os.pread(self._handle, 1, size - 1) != b"\n":
            # A kill left the last line incomplete. It is kept, and a line end separates it from the next line.
            os.write(self._handle, b"\n")

    def write(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Append a line. `kind`: one of KINDS. Raises: ValueError for another kind, StoreError when the write fails."""
        if kind not in KINDS:
            raise ValueError(f"kind of a metrics line must be one of {KINDS}, not {kind!r}")
        files, self.files = {"files": self.files} if self.files else {}, {}
        time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")  # as `layout.now`
        line = {"step": int(step), "attempt": self.attempt, "kind": kind, "time": time, **metrics, **files}
        content = json.dumps(encode(line), ensure_ascii=False, allow_nan=False)
        data = sealed(content.encode("utf-8", "backslashreplace")) + b"\n"
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


def ended_by(ending: str) -> str:
    """Return the metric with the share of the episodes of an ending."""
    return f"episode/ended/{ending.replace(' ', '_')}"


def other_limits(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return limit -> share of the episodes that it ended, without the limits of tokens; only those with a share."""
    limits = (ending for ending in EPISODE_LIMITS if ending not in TOKEN_LIMITS)
    return {limit: share for limit in limits if (share := metrics.get(ended_by(limit)))}


def sealed(line: bytes) -> bytes:
    """Return a line with its checksum as the last value, so that a changed byte is noticed."""
    return line[:-1] + b', "crc32": "%08x"}' % zlib.crc32(line[:-1])


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
    raise TypeError(f"a metric cannot be {type(value).__name__}: {quoted(value)}")


def decode(value: Any) -> Any:
    """Return the inverse of `encode` for the values of one line."""
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


@dataclass(frozen=True)
class MetricsFile:
    """Content of metrics.jsonl. Line numbers count from 1.

    Args:
        lines: whole lines in file order.
        torn: line numbers of the other lines; a kill during a write leaves such a line.
        numbers: line numbers of `lines`.
        unsealed: numbers of `lines` without a checksum, as versions before it wrote them.
        foreign: numbers in `torn` whose text is not even the beginning of a line; a kill does not leave such lines.
    """

    lines: tuple[dict[str, Any], ...] = ()
    torn: tuple[int, ...] = ()
    numbers: tuple[int, ...] = field(default=(), repr=False)
    foreign: tuple[int, ...] = ()
    unsealed: frozenset[int] = frozenset()


def read_file(run_dir: Path) -> MetricsFile:
    """Read all lines of all attempts. An incomplete line (a kill during a write) is skipped; its number is kept."""
    path = run_dir / layout.METRICS
    try:
        content = read_regular(path, MOST_BYTES)
    except FileNotFoundError:
        return MetricsFile()
    except OSError as error:
        raise StoreError(f"cannot read metrics: {error.strerror}", where=str(path)) from error
    lines: list[dict[str, Any]] = []
    numbers: list[int] = []
    torn: list[int] = []
    foreign: list[int] = []
    unsealed: list[int] = []
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
            unsealed += [] if SEAL.search(raw) else [number]
    return MetricsFile(tuple(lines), tuple(torn), tuple(numbers), tuple(foreign), frozenset(unsealed))


def current(lines: Iterable[dict[str, Any]], starts: Mapping[int, int], kind: str) -> list[dict[str, Any]]:
    """Return the valid lines of one kind, one per step, sorted by step. For events: all, in the order of the file."""
    lines_of_kind = [line for line in lines if line["kind"] == kind]
    if kind == "event":
        return lines_of_kind
    return list(newest(((n["step"], n["attempt"], n) for n in lines_of_kind), starts, kind).values())


def read_tail(run_dir: Path, max_bytes: int = 16_384) -> dict[str, Any] | None:
    """Return the last complete `train` line or, if there is none, the last line. Only the end of the file is read."""
    try:
        rows = read_regular(run_dir / layout.METRICS, last=max_bytes).split(b"\n")
    except OSError:
        return None
    lines = [line for raw in reversed(rows) if (line := parse_line(raw)) is not None]
    return next((line for line in lines if line["kind"] == "train"), lines[0] if lines else None)


def is_beginning(raw: bytes) -> bool:
    """Return whether the bytes are the beginning of an incomplete line: its JSON object is not closed."""
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
    """Return the values of a line; None if it is cut or damaged."""
    if (seal := SEAL.search(raw)) and raw != sealed(raw[: seal.start()] + b"}"):
        return None
    try:
        line = parse_json(raw)
    except ValueError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return None
    if type(line.get("step")) is not int or type(line.get("attempt")) is not int:
        return None
    line = {key: decode(value) for key, value in line.items() if key != "crc32"}
    measured = (v for key, v in line.items() if "/" in key and key != WARNING and line["kind"] != "event")
    right = isinstance(line.get(WARNING, ""), str) and all(v is None or isinstance(v, (int, float)) for v in measured)
    return line if right else None
