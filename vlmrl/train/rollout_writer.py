"""Writer of rollouts: a thread writes them while training goes on; a step's metrics wait for its rollouts."""

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
"""Maximum number of steps whose rollouts are being written at once; they are held in memory until then."""


@dataclass
class _Step:
    """Step whose rollouts are being written.

    Args:
        written: done when its rollouts are on disk.
        line: writes its metrics; None until they are known.
    """

    step: int
    written: Future[None]
    line: Callable[[], None] | None = None


class RolloutWriter:
    """Writer of a run's rollouts, one step after the other, and of the metrics of each step after its rollouts.

    A step that has metrics on disk has its rollouts there too, whenever the run is killed. The next call after a failed
    write raises its error; nothing is written after it.

    Args:
        rule: rule for deleting old rollouts after each write; None = all are kept.
    """

    def __init__(self, run: Run, rule: RolloutRule | None = None) -> None:
        self.run, self.rule = run, rule
        self._steps: deque[_Step] = deque()
        self._thread: ThreadPoolExecutor | None = None
        self._failed = False

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Begin to write the rollouts of a step. Wait while those of `MOST_UNDER_WAY` steps are being written.

        Raises: StoreError when the rollouts of an earlier step could not be written.
        """
        self._settle(waiting=len(self._steps) >= MOST_UNDER_WAY, at_most=1)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollouts")
        self._steps.append(_Step(step, self._thread.submit(self._write, step, groups)))

    def log(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Write a line of metrics.

        A line of training waits until the step's rollouts are on disk. Any other line is written at once, after all
        earlier rollouts and lines.

        Raises: StoreError as `write`.
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
        """Finish in a run that may already have failed: a further failure is only a line in its log."""
        try:
            self.finish()
        except StoreError as error:
            self.run.write_log(f"rollouts were not written: {error.message}")
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def _write(self, step: int, groups: Sequence[Group]) -> None:
        if self._failed:
            raise StoreError(f"the rollouts of step {step} were not written, since an earlier write failed")
        try:
            self.run.write_rollouts(step, groups)
            if self.rule is not None:
                self.run.prune_rollouts(self.rule)
        except BaseException:
            self._failed = True
            raise

    def _settle(self, *, waiting: bool, at_most: int | None = None) -> None:
        """Write the metrics of the oldest steps whose rollouts are on disk, and forget these steps.

        Args:
            waiting: wait for the steps whose rollouts are still being written.
            at_most: maximum number of steps; None = no limit.
        """
        while self._steps and (waiting or self._steps[0].written.done()):
            first = self._steps.popleft()
            first.written.result()
            if first.line is not None:
                first.line()
            if at_most is not None and (at_most := at_most - 1) < 1:
                return
