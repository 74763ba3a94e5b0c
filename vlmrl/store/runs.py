"""Runs: making one, finding one, opening it, resuming it, and writing to it."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from vlmrl import __version__
from vlmrl.errors import StoreError, reason_of
from vlmrl.store import kept_recipe, layout, provenance
from vlmrl.store import manifest as manifests
from vlmrl.store import metrics as metrics_
from vlmrl.store import rollouts as rollouts_
from vlmrl.store.checkpoints import choose_checkpoint
from vlmrl.store.clock import now
from vlmrl.store.files import TEMP_PREFIX, link_tree, remove_tree, sweep, sync_folder, temp_path
from vlmrl.store.listing import find, status_of
from vlmrl.store.lock import RunLock
from vlmrl.store.manifest import MAX_ERROR_CHARS, Best, Manifest, Status
from vlmrl.store.media import write_shard
from vlmrl.store.prune import RolloutRule, delete_rollouts, prunable, rollout_steps
from vlmrl.store.secrets.redact import learn, learn_argv, redact_argv, redact_text, redact_value
from vlmrl.types import Group
from vlmrl.visible import visible


class Run:
    """One run folder. Made by `create_run` or `resume_run` it may be written, made by `open_run` it is for reading.

    Attributes:
        dir: the folder.     id: its name.     manifest: as last read or written.
        attempt: number of the attempt that writes now; for a reader, of the last one.
    As a context manager it ends the run: "done", "interrupted" (Ctrl-C) or "failed" with the error.
    """

    def __init__(self, run_dir: Path, manifest: Manifest, lock: RunLock | None = None) -> None:
        self.dir = run_dir
        self.id = manifest.id
        self.manifest = manifest
        self.attempt = manifest.attempts[-1].number if manifest.attempts else 1
        self._lock = lock
        self._metrics: metrics_.MetricsWriter | None = None

    @property
    def writable(self) -> bool:
        return self._lock is not None

    @property
    def status(self) -> Status:
        """How it is now; "killed" when it says running but its owner is dead."""
        return "running" if self.writable else status_of(self.dir, self.manifest.status)

    @property
    def start_step(self) -> int:
        """The step the current attempt began at: 0, or that of the checkpoint it resumed from."""
        return self.manifest.attempts[-1].from_step if self.manifest.attempts else 0

    # What the owner writes

    def log(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl: on disk, whole, when this returns. `kind`: train, validation or event."""
        if kind not in metrics_.KINDS:
            raise ValueError(f"kind of a metrics line must be one of {metrics_.KINDS}, not {kind!r}")
        if self._metrics is None:
            self._own()
            self._metrics = metrics_.MetricsWriter(self.dir / layout.METRICS)
        self._metrics.write({"step": int(step), "attempt": self.attempt, "kind": kind, "time": now(), **metrics})

    def event(self, step: int, event: str, **details: Any) -> None:
        """Note that something happened (saved, resumed, early stop ...): an `event` line, and a line in the log."""
        details = redact_value(metrics_.encode(details))
        self.log(step, "event", {"event": event, **details})
        told = " ".join(f"{k}={v}" for k, v in details.items())
        self.write_log(f"step {step}: {event}" + (f" ({told})" if told else ""))

    def write_log(self, text: str, rank: int = 0) -> None:
        """Append a line with the time to logs/attempt-N/rank-R.log. Secrets are hidden, control characters escaped."""
        path = self.log_path(rank)
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{now()} {visible(redact_text(text))}\n")

    def write_rollouts(self, step: int, groups: Sequence[Group]) -> Path:
        """Write all groups of a step, atomically, after the images that it made. Returns the path of the rollouts."""
        self._own()
        samples = [sample for group in groups for sample in group.samples]
        images = {sha: content for s in samples for sha, content in (*s.files.items(), *s.score.files.items())}
        if images:
            write_shard(layout.media_path(self.dir, step, self.attempt), sorted(images.items()))
        path = layout.rollout_path(self.dir, step, self.attempt)
        rollouts_.write_rollouts(path, groups, step=step, attempt=self.attempt)
        return path

    def update(self, **changes: Any) -> None:
        """Change fields of the manifest, atomically. Name, note and tags that a person edited meanwhile stay."""
        self._own()
        try:
            self.manifest = manifests.update_manifest(self.dir, lambda m: replace(m, **changes))
        except StoreError:
            # Somebody damaged manifest.json under us: the copy in memory is the better one. The disk is tried again.
            self.manifest = replace(self.manifest, **changes)
            manifests.write_manifest(self.dir, self.manifest)

    def set_best(self, step: int, metric: str, value: float) -> None:
        """Record the best validation so far; `prune_checkpoints` callers keep its checkpoint."""
        self.update(best=Best(int(step), metric, float(value)))

    def add_label(self, label: str) -> None:
        """A label is shown beside the run's numbers wherever they appear."""
        if label not in self.manifest.labels:
            self.update(labels=(*self.manifest.labels, label))

    def prune_checkpoints(self, keep_last: int, keep_steps: Iterable[int] = ()) -> list[Path]:
        """Delete complete checkpoints but the newest `keep_last` and those of `keep_steps`. Returns what was deleted.

        Each is renamed before it is deleted: a kill in between leaves no half checkpoint under a checkpoint's name.
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
        """End the attempt and the run: write how it ended, give the lock back. Safe to call twice."""
        if self._lock is None:
            return
        end = now()
        last = replace(self.manifest.attempts[-1], end=end, status=status)
        if error is not None:
            error = redact_text(error)[:MAX_ERROR_CHARS]
        try:
            self.update(status=status, end=end, error=error, attempts=(*self.manifest.attempts[:-1], last))
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the run without saying how it ended: readers then see it as killed."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # What anybody reads

    def metrics(self, kind: str = "train") -> list[dict[str, Any]]:
        """The metrics lines of one kind that count, one a step, by step (store/metrics.py says what a resume voids)."""
        return metrics_.current(metrics_.read_file(self.dir).lines, self.manifest.attempt_starts, kind)

    def rollout_files(self) -> dict[int, Path]:
        """Step -> the rollout file that counts, in order of steps."""
        return rollout_files(self.dir, self.manifest.attempt_starts)

    def read_rollouts(self, step: int) -> list[Group]:
        """The groups of a step. Raises: StoreError when there are none."""
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
        """Complete checkpoints, oldest first."""
        return layout.complete_checkpoints(self.dir)

    def checkpoint(self, which: str | int = "best") -> Path:
        """Return the checkpoint of a step, the "last", or the "best". Raises: StoreError as `choose_checkpoint`."""
        return choose_checkpoint(self.dir, self.manifest, which)[0]

    def log_path(self, rank: int = 0) -> Path:
        """logs/attempt-N/rank-R.log; its folder is made."""
        path = layout.log_path(self.dir, self.attempt, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def process_log(self, name: str) -> Path:
        """logs/attempt-N/<name>.log, of a process that a rank has started; its folder is made."""
        return self.log_path().with_name(f"{name}.log")

    def _own(self) -> None:
        if self._lock is None:
            raise StoreError(f"run {self.id} was opened for reading", where=str(self.dir))

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
            # On a disk that is full this is refused too: what happened first is then the error that goes on.
            with contextlib.suppress(StoreError):
                self.finish("failed", reason_of(error) if error is not None else kind.__name__)


def create_run(
    root: Path | str,
    *,
    kind: str,
    recipe_name: str,
    recipe_text: str | None = None,
    resolved: Mapping[str, Any] | None = None,
    argv: Sequence[str] = (),
    seeds: Mapping[str, int] | None = None,
    name: str | None = None,
    tags: Sequence[str] = (),
    note: str = "",
    parent: Mapping[str, Any] | None = None,
    datasets: Sequence[Mapping[str, Any]] = (),
    rewards: Sequence[Mapping[str, Any]] = (),
    prompts: Sequence[Mapping[str, Any]] = (),
    labels: Sequence[str] = (),
    threads: int | None = None,
    texts: kept_recipe.Texts = MappingProxyType({}),
    fork: kept_recipe.Fork | None = None,
) -> Run:
    """Make a run folder and take it. The folder appears under its name whole, with manifest, recipe and lock.

    Args: as the fields of `Manifest`; `recipe_text` is written to recipe.toml, `resolved` to resolved.json, `texts` are
        kept, `fork` is the checkpoint that it goes on from.
    Raises: StoreError for an unusable name or tag, or when the runs root cannot be written.
    """
    if name is not None:
        manifests.check_name(name)
    for tag in tags:
        manifests.check_tag(tag)
    root = Path(root)
    run_dir = root / layout.new_run_id(recipe_name)
    making = temp_path(run_dir)
    try:
        making.mkdir(parents=True)
    except OSError as error:
        raise StoreError(f"cannot make a run folder: {error.strerror}", where=str(root)) from error
    _sweep_root(root)
    git, diff = provenance.git_state()
    start = now()
    learn_argv(argv)
    learn(filter(None, (recipe_text, *texts.values())))
    try:
        files = kept_recipe.write_recipe(making, resolved, recipe_text) | kept_recipe.keep_texts(making, texts)
        files |= kept_recipe.keep_diff(making, diff) if diff else {}
        if fork:
            link_tree(fork.checkpoint, making / layout.CHECKPOINTS / fork.checkpoint.name)
        manifest = Manifest(
            id=run_dir.name, kind=kind, recipe=recipe_name, start=start, name=name, tags=tuple(dict.fromkeys(tags)),
            note=note, labels=tuple(labels), argv=tuple(redact_argv(argv)), cwd=os.getcwd(), parent=parent,
            origin=fork.origin if fork else None,
            seeds=dict(seeds or {}), threads=threads, datasets=tuple(datasets), rewards=tuple(rewards),
            prompts=tuple(prompts), recipe_sha256=files.get(layout.RECIPE, ""), files=files,
            source_sha256=provenance.source_sha256(), git=git, vlmrl=__version__, python=platform.python_version(),
            packages=provenance.packages(), environment=provenance.environment(), hardware=provenance.hardware(),
            attempts=(manifests.new_attempt(1, start, argv, fork and fork.checkpoint, fork.changes if fork else ()),),
        )  # fmt: skip
        manifests.write_manifest(making, manifest)
    except (OSError, StoreError) as error:
        shutil.rmtree(making, ignore_errors=True)
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"cannot make a run folder: {error.strerror}", where=str(error.filename or root)) from error
    lock = RunLock(making)
    lock.acquire()
    os.rename(making, run_dir)
    sync_folder(root)
    lock.moved(run_dir)
    return Run(run_dir, manifests.read_manifest(run_dir), lock)


def open_run(root: Path | str, ref: str, *, trained: bool = False) -> Run:
    """Open a run for reading. `ref`: a unique prefix of its id, its last four characters, `last`, its name, or a path.

    Args: trained: `last` is the last run that trains, where there is one: not a later `vlmrl try`.
    Raises: StoreError when no run or more than one answers to `ref` (candidates are listed), or its manifest is bad.
    """
    run_dir = find(root, ref, trained=trained)
    return Run(run_dir, manifests.read_manifest(run_dir))


def resume_run(
    root: Path | str, ref: str, *, argv: Sequence[str] = (), from_step: int | None = None, threads: int | None = None,
    renewal: kept_recipe.Renewal | None = None,
) -> Run:  # fmt: skip
    """Take an existing run for a new attempt.

    Leftovers of a kill are removed (they never counted), a torn last line of metrics.jsonl is closed off, and the
    attempt before, if it did not end by itself, is marked killed.

    Args:
        from_step: step of the complete checkpoint it continues from; default: the newest; 0 when there is none.
        renewal: what it does otherwise than before.
    Raises: StoreError when another process writes the run, or `from_step` has no complete checkpoint.
    """
    learn_argv(argv)
    run_dir = open_run(root, ref).dir
    lock = RunLock(run_dir)
    lock.acquire()
    try:
        reader = Run(run_dir, manifests.read_manifest(run_dir))
        sweep(run_dir)
        for path in layout.incomplete_checkpoints(run_dir):
            remove_tree(path)
        found = {layout.parse_checkpoint_name(path.name) or 0: path for path in reader.checkpoint_dirs()}
        step = max(found, default=0) if from_step is None else from_step
        if step and step not in found:
            have = ", ".join(map(str, found)) or "none"
            raise StoreError(f"run {reader.id} has no complete checkpoint of step {step}", hint=f"steps it has: {have}")
        before = tuple(replace(a, status="killed") if a.status == "running" else a for a in reader.manifest.attempts)
        number = max((a.number for a in before), default=0) + 1
        attempt = manifests.new_attempt(number, now(), argv, found.get(step), renewal.changes if renewal else ())
        changes: dict[str, Any] = {"status": "running", "end": None, "error": None}
        if reader.manifest.best is not None and reader.manifest.best.step > step:
            changes["best"] = _best_until(reader, step)
        if renewal is not None:
            written = kept_recipe.write_renewal(run_dir, number, renewal)
            changes["files"] = {**written, **reader.manifest.files}
            attempt = replace(attempt, accepted=renewal.accepted)
            changes |= {name: tuple(r) for name, r in renewal.records.items()}
            changes |= {"best": None} if renewal.restarts_best else {}
            changes |= {"seeds": dict(renewal.seeds)} if renewal.seeds else {}
        changes["attempts"] = (*before, attempt)
        if threads is not None:
            changes["threads"] = threads
        manifest = manifests.update_manifest(run_dir, lambda m: replace(m, **changes))
    except BaseException:
        lock.release()
        raise
    return Run(run_dir, manifest, lock)


def rollout_files(run_dir: Path, starts: Mapping[int, int]) -> dict[int, Path]:
    """Step -> the rollout file that counts. `starts`: attempt -> the step it began at."""
    found: list[tuple[int, int, Path]] = []
    with contextlib.suppress(FileNotFoundError), os.scandir(run_dir / layout.ROLLOUTS) as entries:
        for entry in entries:
            if (parsed := layout.parse_rollout_name(entry.name)) is not None:
                found.append((*parsed, Path(entry.path)))
    return metrics_.newest(found, starts)


def _sweep_root(root: Path) -> None:
    """Remove run folders that a kill left half made. Young ones stay: another process may be making them."""
    with os.scandir(root) as entries:
        stale = [e.path for e in entries if e.name.startswith(TEMP_PREFIX) and e.stat().st_mtime < time.time() - 3600]
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)


def _best_until(run: Run, step: int) -> Best | None:
    """The best validation up to a step: what a resume from there goes back to. From the lines marked `eval/is_best`.

    Validations before a change that made the best begin anew are of another kind.
    """
    restarts = (a.number for a in run.manifest.attempts if any("best" in c.get("restarts", ()) for c in a.changes))
    first = max(restarts, default=1)
    lines = [n for n in run.metrics("validation") if n["step"] <= step and n["attempt"] >= first]
    best = next((n for n in reversed(lines) if n.get("eval/is_best") is True), {})
    value = best.get("eval/metric")
    if run.manifest.best is None or not isinstance(value, (int, float)):
        return None
    return Best(best["step"], run.manifest.best.metric, float(value))
