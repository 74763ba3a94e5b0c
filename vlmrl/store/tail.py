"""Observation of a run that another process writes: its new metrics, and the estimated time to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.store import layout
from vlmrl.store.clock import seconds_between
from vlmrl.store.kept_recipe import read_resolved
from vlmrl.store.metrics import current, parse_line
from vlmrl.store.open_run import open_run
from vlmrl.store.runs import Run

WAITS = "waiting for a service"
"""Name of the event that a run writes when it begins to wait for a service of a reward."""
ANSWERS = "service answers"
"""Name of the event at the end of such a wait."""
STEPS_FOR_SPEED = 20
"""Number of last steps from which the time to the end is estimated."""


@dataclass
class Followed:
    """Run that another process writes. Each call of `look` reads the new complete lines of metrics.jsonl."""

    run_dir: Path
    run: Run = field(init=False)
    steps: int | None = field(init=False)
    """Planned number of steps; None if no recipe of the run has it."""
    _lines: list[dict[str, Any]] = field(default_factory=list, repr=False)
    _offset: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        self.look()

    def look(self) -> bool:
        """Read the manifest and the new lines. Return whether the run is still being written.

        The status is read before the lines. So if the run has ended, all its lines have been read.
        """
        self.run, self.steps = open_run(self.run_dir.parent, str(self.run_dir)), _steps(self.run_dir)
        is_running = self.run.status == "running"
        try:
            with open(self.run_dir / layout.METRICS, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return is_running
        whole_lines = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole_lines)
        self._lines += [line for raw in whole_lines.split(b"\n") if (line := parse_line(raw)) is not None]
        return is_running

    def lines(self, kind: str = "train") -> list[dict[str, Any]]:
        """Return the valid lines of a kind that were read so far, one per step, sorted by step."""
        return current(self._lines, self.run.manifest.attempt_starts, kind)

    @property
    def waits_for(self) -> dict[str, Any] | None:
        """The event with which the run began to wait for a service; None if the service has answered since."""
        for line in reversed(self._lines):
            if line.get("event") == WAITS:
                return line
            if line.get("event") == ANSWERS or line.get("kind") != "event":
                return None
        return None

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the end of the run, from the speed of the last steps; None = unknown.

        Validations and saving are included.
        """
        train = self.lines()
        if not train or self.steps is None:
            return None
        attempt = train[-1]["attempt"]
        recent = [line for line in train[-STEPS_FOR_SPEED - 1 :] if line["attempt"] == attempt]
        if len(recent) > 1:
            span = seconds_between(recent[0].get("time"), recent[-1].get("time"))
            step_seconds = None if span is None else span / (len(recent) - 1)
        else:
            step_seconds = recent[0].get("time/step_seconds")
        return None if step_seconds is None else step_seconds * max(0, self.steps - 1 - train[-1]["step"])


def phase_seconds(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return phase of a step -> its mean seconds over these lines, longest first. The whole step is left out."""
    names = {name for line in lines for name in line if name.startswith("time/") and name != "time/step_seconds"}
    means = {n: fmean(float(line.get(n, 0.0)) for line in lines) for n in names}
    ordered = sorted(means.items(), key=lambda item: (-item[1], item[0]))
    return {name.removeprefix("time/").removesuffix("_seconds"): seconds for name, seconds in ordered}


def _steps(run_dir: Path) -> int | None:
    try:
        steps = read_resolved(run_dir)["recipe"].get("train", {}).get("steps")
    except StoreError:
        return None
    return steps if isinstance(steps, int) else None
