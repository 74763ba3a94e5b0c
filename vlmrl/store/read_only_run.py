"""Run object for the processes of a run that do not write its files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmrl.store import layout
from vlmrl.store.manifest import Status, read_manifest
from vlmrl.store.prune import RolloutRule
from vlmrl.store.runs import Run
from vlmrl.types import Group


class FollowedRun(Run):
    """Run object of a rank that does not write the run: reading works as usual, and writing does nothing.

    Only logs are written: each process has its own log. One rank writes all other files.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        super().__init__(run_dir, read_manifest(run_dir))
        self._rank = rank

    def log(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Do nothing: all ranks have the same numbers, and only one of them writes them."""

    def write_log(self, text: str, rank: int = 0) -> None:
        super().write_log(text, self._rank)

    def write_rollouts(self, step: int, groups: Sequence[Group]) -> Path:
        return layout.rollout_path(self.dir, step, self.attempt)

    def update(self, **changes: Any) -> None:
        self.manifest = replace(self.manifest, **changes)

    def prune_checkpoints(self, keep_last: int, keep_steps: Iterable[int] = ()) -> list[Path]:
        return []

    def prune_rollouts(self, rule: RolloutRule) -> None:
        """Do nothing."""

    def finish(self, status: Status = "done", error: str | None = None) -> None:
        """Do nothing: the writing process records the end of the run."""
