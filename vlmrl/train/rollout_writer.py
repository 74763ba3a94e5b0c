"""Rollouts of a step are written by a thread while training goes on. What counts on them waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.store.prune import RolloutRule
from vlmrl.store.runs import Run
from vlmrl.types import Group

MOST_UNDER_WAY = 2
"""Steps whose rollouts may be on their way to the disk at once; they are held in memory until then."""


@dataclass
class _Step:
    """A step on its way. Args: written: done when its rollouts are on the disk. line: writes its metrics when known."""

    step: int
    written: Future[None]
    line: Callable[[], None] | None = None


class RolloutWriter:
    """Writes the rollouts of a run, one step after the other, and the metrics of each step after its rollouts.

    A step that has metrics on the disk has its rollouts there too, whenever the run is killed. What a write fails with
    is raised by the next call that meets it; nothing is written after it.

    Args: rule: which old rollouts are deleted after each write; None = none.
    """

    def __init__(self, run: Run, rule: RolloutRule | None = None) -> None:
        self.run, self.rule = run, rule
        self._steps: deque[_Step] = deque()
        self._thread: ThreadPoolExecutor | None = None
        self._failed = False

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Begin to write the rollouts of a step. Waits while `MOST_UNDER_WAY` others are under way.

        Raises: StoreError when those of an earlier step could not be written.
        """
        self._settle(waiting=len(self._steps) >= MOST_UNDER_WAY, at_most=1)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollouts")
        self._steps.append(_Step(step, self._thread.submit(self._write, step, groups)))

    def log(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Write a line of metrics: that of training when the step's rollouts are on the disk, others at once, after all
        that came before them. Raises: StoreError as `write`.
        """
        if kind == "train" and self._steps and self._steps[-1].step == step:
            self._steps[-1].line = lambda: self.run.log(step, kind, metrics)
            self._settle(waiting=False)
        else:
            self.finish()
            self.run.log(step, kind, metrics)

    def finish(self) -> None:
        """Wait for all rollouts, then write the metrics that waited for them. Raises: StoreError as `write`."""
        self._settle(waiting=True)

    def close(self) -> None:
        """As `finish`, for a run that may have failed already: another failure is a line of its log."""
        try:
            self.finish()
        except StoreError as error:
            self.run.write_log(f"rollouts were not written: {error.message}")
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def _write(self, step: int, groups: Sequence[Group]) -> None:
        if self._failed:
            raise StoreError(f"the rollouts of step {step} were not written: those of an earlier step could not be")
        try:
            self.run.write_rollouts(step, groups)
            if self.rule is not None:
                self.run.prune_rollouts(self.rule)
        except BaseException:
            self._failed = True
            raise

    def _settle(self, *, waiting: bool, at_most: int | None = None) -> None:
        """Let go of the first steps: of those that are written, or of all (`at_most` of them), waiting for each."""
        while self._steps and (waiting or self._steps[0].written.done()):
            first = self._steps.popleft()
            first.written.result()
            if first.line is not None:
                first.line()
            if at_most is not None and (at_most := at_most - 1) < 1:
                return
