"""Journal of a run: writes metrics and rollouts, informs the console and the loggers, and measures the run's health."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vlmrl.diagnose.signs import Sampled, find_signs, is_watched, measure_health, warning_of
from vlmrl.dist.world import ALONE, World
from vlmrl.store.metrics import WARNING
from vlmrl.store.runs import Run
from vlmrl.train.loggers import Loggers
from vlmrl.train.progress import Progress
from vlmrl.train.rollout_writer import RolloutWriter
from vlmrl.types import Group


class Watcher(Protocol):
    """Console of a run. Its methods return at once and never raise."""

    def message(self, text: str) -> None: ...
    def generated(self, done: int, total: int) -> None: ...
    def step(self, step: int, total: int, metrics: Mapping[str, Any]) -> None: ...
    def validation(self, step: int, summary: Mapping[str, Any], best: bool, metric: str) -> None: ...
    def sample(self, step: int, group: Group) -> None: ...


@dataclass
class Journal:
    """Record of a training run: its folder, counters, console and loggers.

    Args:
        run: the run's folder.
        watcher: the console.
        progress: the counters; a checkpoint saves all of them.
        loggers: the loggers of `log.sinks`.
        rollouts: writes the rollouts of each step, and its metrics after them.
        world: the ranks of the run; rank 0 writes.

    Attributes:
        health: the run's metrics so far, and their warnings.
        counted_before: (samples, failed rewards) of earlier attempts; they do not count against a repaired reward.
        started: start of this attempt, in seconds of `time.perf_counter`.
    """

    run: Run
    watcher: Watcher
    progress: Progress
    loggers: Loggers
    rollouts: RolloutWriter
    world: World = ALONE
    health: Health = field(init=False)
    counted_before: tuple[int, int] = field(init=False)
    started: float = field(init=False, default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.health = Health(self.run)
        self.counted_before = (self.progress.samples, self.progress.reward_errors)

    @property
    def seconds(self) -> float:
        """Seconds of training over all attempts."""
        return self.progress.seconds + time.perf_counter() - self.started

    def log(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of a step to metrics.jsonl and send them to the loggers.

        Training metrics are written after the rollouts of their step.

        Args:
            step: the step that the metrics belong to.
            kind: "train" or "validation".
            metrics: the metrics by name.
        """
        if kind == "validation":
            self.health.note_validation(step, metrics)
        self.rollouts.log(step, kind, metrics)
        self.loggers.log(step, kind, metrics)
        for text in self.loggers.news():
            self.watcher.message(text)


class Health:
    """Health of a run, measured on its metrics so far, those of earlier attempts included.

    Only the rank that writes the run measures it.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lines: list[dict[str, Any]] | None = None
        self._validation: list[dict[str, Any]] = []

    def measure(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the `health/...` metrics of a step."""
        return measure_health(list(samples_of(groups))) if self._run.writable else {}

    def note_validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Remember the metrics of a validation."""
        self._validation.append({"step": step, **metrics})

    def warn(self, step: int, metrics: Mapping[str, Any]) -> dict[str, str]:
        """Remember the metrics of a step. Return a warning in words as a metric, or {} without one."""
        if not self._run.writable:
            return {}
        if self._lines is None:
            # First step of this attempt: read what earlier attempts have logged. The validations in the file include
            # those of this attempt.
            self._lines = [_watched(line) for line in self._run.metrics("train")]
            self._validation = [*self._run.metrics("validation")] if self._lines else self._validation
        self._lines.append(_watched({"step": step, **metrics}))
        warning = warning_of(find_signs(self._lines, self._validation))
        return {WARNING: warning} if warning else {}


def samples_of(groups: Sequence[Group]) -> Iterator[Sampled]:
    """Yield the responses of the groups in the form that `measure_health` takes."""
    for number, group in enumerate(groups):
        truth = json.dumps(dict(group.row.truth), sort_keys=True, default=str) if group.row.truth else ""
        for s in group.samples:
            # Well formed: no part of the score with "format" in its name is 0.
            formed = all(value != 0 for name, value in s.score.parts.items() if "format" in name.lower())
            score = s.score.value if s.score.error is None else None
            yield Sampled(
                number,
                group.row.prompt_id,
                truth,
                s.text,
                s.trajectory.num_sampled_tokens,
                s.trajectory.finish == "length",
                score,
                formed,
            )


def _watched(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a line that the search for signs reads; a long run keeps only these in memory."""
    return {name: value for name, value in line.items() if is_watched(name)}
