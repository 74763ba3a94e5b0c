"""Object of one run: its methods write the run's files and read them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from vlmrl.errors import StoreError, reason_of
from vlmrl.redaction.redact import excerpt, redact_text, redact_value
from vlmrl.store import layout
from vlmrl.store import manifest as manifests
from vlmrl.store import metrics as metrics_
from vlmrl.store import rollouts as rollouts_
from vlmrl.store.checkpoints import choose_checkpoint, hashes_of
from vlmrl.store.clock import now
from vlmrl.store.files import remove_tree
from vlmrl.store.listing import status_of
from vlmrl.store.lock import RunLock
from vlmrl.store.manifest import MAX_ERROR_CHARS, Best, Manifest, Status
from vlmrl.store.media import write_shard
from vlmrl.store.prune import RolloutRule, delete_rollouts, prunable, rollout_steps
from vlmrl.types import Group
from vlmrl.visible import visible


class Run:
    """One run folder. `create_run` and `resume_run` return it for writing, `open_run` for reading.

    Used as a context manager, it records the end of the run: "done", "interrupted" (Ctrl-C) or "failed" with the error.

    Attributes:
        dir: the folder.
        id: name of the folder.
        manifest: the manifest when it was last read or written.
        attempt: number of the attempt that writes now; for a reader, number of the last attempt.
    """

    def __init__(self, run_dir: Path, manifest: Manifest, lock: RunLock | None = None) -> None:
        self.dir = run_dir
        self.id = manifest.id
        self.manifest = manifest
        self.attempt = manifest.attempts[-1].number if manifest.attempts else 1
        self._lock = lock
        self._metrics: metrics_.MetricsWriter | None = None
        self._written: dict[str, str] = {}

    @property
    def writable(self) -> bool:
        return self._lock is not None

    @property
    def status(self) -> Status:
        """Current status; "killed" if "running" is stored but the owner is dead."""
        return "running" if self.writable else status_of(self.dir, self.manifest.status)

    @property
    def start_step(self) -> int:
        """Step at which the current attempt began: 0, or the step of the checkpoint from which it resumed."""
        return self.manifest.attempts[-1].from_step if self.manifest.attempts else 0

    # Written by the owner

    def log(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl; it is on disk when this returns. `kind`: train, validation or event.

        Raises: ValueError for another kind.
        """
        if kind not in metrics_.KINDS:
            raise ValueError(f"kind of a metrics line must be one of {metrics_.KINDS}, not {kind!r}")
        if self._metrics is None:
            self._own()
            self._metrics = metrics_.MetricsWriter(self.dir / layout.METRICS)
        files, self._written = {"files": self._written} if self._written else {}, {}
        self._metrics.write(
            {"step": int(step), "attempt": self.attempt, "kind": kind, "time": now(), **metrics, **files}
        )

    def event(self, step: int, event: str, **details: Any) -> None:
        """Record an event (saved, resumed, early stop ...): an `event` line in metrics.jsonl and a line in the log."""
        details = redact_value(metrics_.encode(details))
        self.log(step, "event", {"event": event, **details})
        text = " ".join(f"{k}={v}" for k, v in details.items())
        self.write_log(f"step {step}: {event}" + (f" ({text})" if text else ""))

    def write_log(self, text: str, rank: int = 0) -> None:
        """Append a line with the time to logs/attempt-N/rank-R.log. Secrets are hidden, control characters escaped."""
        path = self.log_path(rank)
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{now()} {visible(redact_text(text))}\n")

    def write_rollouts(self, step: int, groups: Sequence[Group]) -> Path:
        """Write the images that were made in a step, then its groups, atomically. Return the path of the rollouts."""
        self._own()
        samples = [sample for group in groups for sample in group.samples]
        images = {sha: content for s in samples for sha, content in (*s.files.items(), *s.score.files.items())}
        if images:
            write_shard(shard := layout.media_path(self.dir, step, self.attempt), sorted(images.items()))
            self._written |= hashes_of(self.dir, [shard])
        path = layout.rollout_path(self.dir, step, self.attempt)
        rollouts_.write_rollouts(path, groups, step=step, attempt=self.attempt)
        self._written |= hashes_of(self.dir, [path])  # the next line of metrics holds them
        return path

    def update(self, **changes: Any) -> None:
        """Change fields of the manifest, atomically. Name, note and tags that a user has edited meanwhile stay."""
        self._own()
        try:
            self.manifest = manifests.update_manifest(self.dir, lambda m: replace(m, **changes))
        except StoreError:
            # manifest.json was damaged during the run: write the copy that is in memory.
            self.manifest = replace(self.manifest, **changes)
            manifests.write_manifest(self.dir, self.manifest)

    def set_best(self, step: int, metric: str, value: float) -> None:
        """Record the best validation so far. Callers of `prune_checkpoints` must keep its checkpoint."""
        self.update(best=Best(int(step), metric, float(value)))

    def add_label(self, label: str) -> None:
        """Add a label, which is printed beside the run's numbers in all output."""
        if label not in self.manifest.labels:
            self.update(labels=(*self.manifest.labels, label))

    def prune_checkpoints(self, keep_last: int, keep_steps: Iterable[int] = ()) -> list[Path]:
        """Delete complete checkpoints except the newest `keep_last` and those of `keep_steps`. Return the deleted ones.

        Each is renamed before it is deleted, so that a kill leaves no half-deleted checkpoint under its name.
        """
        self._own()
        doomed = prunable(self.dir, keep_last, keep_steps)
        for path in doomed:
            remove_tree(path)
        return doomed

    def prune_rollouts(self, rule: RolloutRule) -> None:
        """Delete the rollouts of the steps that the rule does not keep."""
        self._own()
        files = rollout_steps(self.dir)
        doomed = set(rule.doomed(step for step, _ in files))
        delete_rollouts(self.dir, [path for step, path in files if step in doomed])

    def finish(self, status: Status = "done", error: str | None = None) -> None:
        """End the attempt and the run: record its status and release the lock. A second call does nothing."""
        if self._lock is None:
            return
        end = now()
        last = replace(self.manifest.attempts[-1], end=end, status=status)
        if error is not None:
            error = excerpt(error, MAX_ERROR_CHARS)
        try:
            self.update(status=status, end=end, error=error, attempts=(*self.manifest.attempts[:-1], last))
        finally:
            self.close()

    def close(self) -> None:
        """Release the lock without a record of the end: readers then treat the run as killed."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # Read by any process

    def metrics(self, kind: str = "train") -> list[dict[str, Any]]:
        """Return the valid metrics lines of one kind, one per step, sorted by step (see store/metrics.py)."""
        return metrics_.current(metrics_.read_file(self.dir).lines, self.manifest.attempt_starts, kind)

    def rollout_files(self) -> dict[int, Path]:
        """Return step -> its valid rollout file (see store/metrics.py), in order of steps."""
        return rollout_files(self.dir, self.manifest.attempt_starts)

    def read_rollouts(self, step: int) -> list[Group]:
        """Return the groups of a step. Raises: StoreError when there are none."""
        files = self.rollout_files()
        if step not in files:
            steps = f"steps {min(files)} to {max(files)}" if files else "none"
            fork = self.manifest.forked_at
            if fork is not None and step < fork and self.manifest.parent:
                steps += f"; those before step {fork} are its parent's, {self.manifest.parent['run']}"
            raise StoreError(
                f"run {self.id} has no rollouts of step {step}", where=str(self.dir), hint=f"it has: {steps}"
            )
        return rollouts_.read_rollouts(files[step])

    def checkpoint_dirs(self) -> list[Path]:
        """Return complete checkpoints, oldest first."""
        return layout.complete_checkpoints(self.dir)

    def checkpoint(self, which: str | int = "best") -> Path:
        """Return the checkpoint of a step, the "last", or the "best". Raises: StoreError as `choose_checkpoint`."""
        return choose_checkpoint(self.dir, self.manifest, which)[0]

    def log_path(self, rank: int = 0) -> Path:
        """Return logs/attempt-N/rank-R.log. Its folder is created."""
        path = layout.log_path(self.dir, self.attempt, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def process_log(self, name: str) -> Path:
        """Return logs/attempt-N/<name>.log, for a process that a rank has started. Its folder is created."""
        return self.log_path().with_name(f"{name}.log")

    def _own(self) -> None:
        if self._lock is None:
            raise StoreError(f"run {self.id} was opened for reading only", where=str(self.dir))

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or (isinstance(error, SystemExit) and not error.code):
            self.finish("done")
        elif issubclass(kind, KeyboardInterrupt):
            self.finish("interrupted")
        else:
            # On a full disk this fails, too. Then the first error is raised.
            with contextlib.suppress(StoreError):
                self.finish("failed", reason_of(error) if error is not None else kind.__name__)


def rollout_files(run_dir: Path, starts: Mapping[int, int]) -> dict[int, Path]:
    """Return step -> its valid rollout file. `starts`: attempt -> the step at which it began."""
    files: list[tuple[int, int, Path]] = []
    with contextlib.suppress(FileNotFoundError), os.scandir(run_dir / layout.ROLLOUTS) as entries:
        for entry in entries:
            if (parsed := layout.parse_rollout_name(entry.name)) is not None:
                files.append((*parsed, Path(entry.path)))
    return metrics_.newest(files, starts)
