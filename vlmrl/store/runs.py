"""One run: created, opened, resumed; its methods write the run's files and read them.

Processes of a run that do not write its files get an object that only reads.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from vlmrl import __version__
from vlmrl.errors import StoreError, listed, reason_of, shortened
from vlmrl.redaction.redact import excerpt, learn, learn_argv, redact_argv, redact_text, redact_value
from vlmrl.store import kept_recipe, layout, provenance
from vlmrl.store import manifest as manifests
from vlmrl.store import metrics as metrics_
from vlmrl.store import rollouts as rollouts_
from vlmrl.store.checkpoints import choose_checkpoint, hashes_of
from vlmrl.store.files import TEMP_PREFIX, link_tree, remove_tree, require_ordinary, sweep, sync_folder, temp_path
from vlmrl.store.layout import now
from vlmrl.store.listing import MOST_CANDIDATES, command_line, find, run_ids, runs_option, status_of
from vlmrl.store.lock import RunLock
from vlmrl.store.manifest import MAX_ERROR_CHARS, Attempt, Best, Manifest, Status, read_manifest
from vlmrl.store.prune import RolloutRule, delete_rollouts, prunable, rollout_steps
from vlmrl.types import Group
from vlmrl.untrusted import visible


class Run:
    """One run folder. `create_run` and `resume_run` return it for writing, `open_run` for reading.

    Used as a context manager, it records the end of the run: "done", "interrupted" (Ctrl-C) or "failed" with the error.

    Attributes:
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

    @property
    def writable(self) -> bool:
        return self._lock is not None

    @property
    def status(self) -> Status:
        """Current status; "killed" if "running" is stored but the owner is dead."""
        return "running" if self.writable else status_of(self.dir, self.manifest.status)

    @property
    def attempts(self) -> list[Attempt]:
        """Attempts of the run. The one that is stored as running has the current status of the run."""
        status = self.status
        return [replace(a, status=status) if a.status == "running" else a for a in self.manifest.attempts]

    @property
    def start_step(self) -> int:
        """Step at which the current attempt began: 0, or the step of the checkpoint from which it resumed."""
        return self.manifest.attempts[-1].from_step if self.manifest.attempts else 0

    # Written by the owner

    def log(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl; it is on disk when this returns. `kind`: train, validation or event.

        Raises: ValueError for another kind.
        """
        self.lines.write(step, kind, metrics)

    @property
    def lines(self) -> metrics_.MetricsWriter:
        """Writer of this attempt's lines in metrics.jsonl."""
        if self._metrics is None:
            self._own()
            self._metrics = metrics_.MetricsWriter(self.dir / layout.METRICS, self.attempt)
        return self._metrics

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
        self.lines.files |= rollouts_.RolloutFiles(self.dir, self.attempt).write(step, groups)
        return layout.rollout_path(self.dir, step, self.attempt)

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
        changes = {"status": status, "end": end, "error": error, "attempts": (*self.manifest.attempts[:-1], last)}
        try:
            try:
                self.update(**changes)
            except StoreError:
                self._lock.give_room()
                self.update(**changes)
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
            # This may fail, too. Then the first error is raised.
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
    start: str | None = None,
) -> Run:
    """Create a run folder and lock it. It gets its final name only when manifest, recipe and lock are in it.

    Args:
        recipe_text: text of recipe.toml.
        resolved: content of resolved.json.
        texts: reward files and prompts to keep.
        start: when its work began; None = now.
        kind, name, tags, note ...: see the fields of `Manifest`.
    Raises: StoreError for a name or tag that is not allowed, or if the runs root cannot be written.
    """
    if name is not None:
        manifests.check_name(name)
    for tag in tags:
        manifests.check_tag(tag)
    root = Path(root)
    start = start or now()
    run_dir = root / layout.new_run_id(recipe_name, layout.parse(start))
    temp_dir = temp_path(run_dir)
    try:
        temp_dir.mkdir(parents=True)
    except OSError as error:
        raise StoreError(f"cannot make a run folder: {error.strerror}", where=str(root)) from error
    _sweep_root(root)
    git, diff = provenance.git_state()
    learn_argv(argv)
    learn(filter(None, (recipe_text, *texts.values())))
    try:
        files = kept_recipe.write_recipe(temp_dir, resolved, recipe_text) | kept_recipe.keep_texts(temp_dir, texts)
        if diff:
            kept_recipe.write_text(temp_dir / layout.CODE_DIFF, diff)
            files |= hashes_of(temp_dir, [temp_dir / layout.CODE_DIFF])
        if fork:
            link_tree(fork.checkpoint, temp_dir / layout.CHECKPOINTS / fork.checkpoint.name)
        manifest = Manifest(
            id=run_dir.name,
            kind=kind,
            recipe=recipe_name,
            start=start,
            name=name,
            tags=tuple(dict.fromkeys(tags)),
            note=note,
            labels=tuple(labels),
            argv=tuple(redact_argv(argv)),
            cwd=os.getcwd(),
            parent=parent,
            origin=fork.origin if fork else None,
            seeds=dict(seeds or {}),
            threads=threads,
            datasets=tuple(datasets),
            rewards=tuple(rewards),
            prompts=tuple(prompts),
            recipe_sha256=files.get(layout.RECIPE, ""),
            files=files,
            source_sha256=provenance.source_sha256(),
            git=git,
            vlmrl=__version__,
            python=platform.python_version(),
            packages=dict(provenance.packages()),
            environment=provenance.environment(),
            hardware=provenance.hardware(),
            attempts=(manifests.new_attempt(1, start, argv, fork and fork.checkpoint, fork.changes if fork else ()),),
        )
        manifests.write_manifest(temp_dir, manifest)
    except (OSError, StoreError) as error:
        shutil.rmtree(temp_dir, ignore_errors=True)
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"cannot make a run folder: {error.strerror}", where=str(error.filename or root)) from error
    lock = RunLock(temp_dir)
    lock.acquire()
    os.rename(temp_dir, run_dir)
    sync_folder(root)
    lock.moved(run_dir)
    return Run(run_dir, manifests.read_manifest(run_dir), lock)


def open_run(root: Path | str, ref: str, *, trained: bool = False) -> Run:
    """Open a run for reading.

    Args:
        ref: a unique prefix of its id, its last four characters, `last`, its name, or a path.
        trained: `last` means the last run that trains, if there is one, and not a later `vlmrl try`.
    Raises: StoreError if no run or several runs match `ref` (the error lists them), or if the manifest is damaged.
    """
    run_dir = find(root, ref, trained=trained)
    require_ordinary(run_dir)
    return Run(run_dir, manifests.read_manifest(run_dir))


def open_evaluation(root: Path, ref: str, *, trained: bool = False) -> Path | Run:
    """Return the folder of the evaluation that `ref` names, a path or RUN/NAME; of a RUN alone, the run.

    Args:
        trained: as of `open_run`.
    Raises: StoreError when there is none; the error lists evaluations.
    """
    if (Path(ref) / layout.EVAL_SUMMARY).is_file():
        return Path(ref)
    head, _, tail = ref.rpartition("/")
    is_folder_of_runs = Path(head).is_dir() and not (Path(head) / layout.MANIFEST).is_file()
    if head and not is_folder_of_runs and not (Path(ref) / layout.MANIFEST).is_file():
        folder = layout.eval_dir((run := open_run(root, head)).dir, tail)
        if (folder / layout.EVAL_SUMMARY).is_file():
            return folder
        names = [one.name for one in layout.eval_dirs(run.dir)]
        raise StoreError(f"run `{head}` has no evaluation `{tail}`", where=str(folder), hint=listed(tail, names))
    try:
        return open_run(root, ref, trained=trained)
    except StoreError as error:
        names = {one.name: None for run in run_ids(root)[:MOST_CANDIDATES] for one in layout.eval_dirs(root / run)}
        here = f"\n{shortened(listed(ref, names, 'evaluations of these, as RUN/NAME'), 400)}" if names else ""
        raise StoreError(error.message, where=error.where, hint=f"{error.hint}{here}") from None


def names_in(ref: str) -> list[str]:
    """Return the runs or evaluations that `A1,A2,A3` names; a path may have a comma."""
    names = [name for name in ref.split(",") if name]
    return [ref] if Path(ref).exists() or not names else names


def resume_run(
    root: Path | str,
    ref: str,
    *,
    argv: Sequence[str] = (),
    from_step: int | None = None,
    threads: int | None = None,
    renewal: kept_recipe.Renewal | None = None,
) -> Run:
    """Lock an existing run for a new attempt.

    Temporary files that a kill left are removed; no reader used them. An incomplete last line of metrics.jsonl gets a
    line end. The attempt before is marked as killed if it did not record its end.

    Args:
        from_step: step of the complete checkpoint from which it continues; default: the newest; 0 if there is none.
        renewal: changes from the attempt before; None = no changes.
    Raises: StoreError if another process writes the run, or `from_step` has no complete checkpoint.
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
        checkpoints = {layout.parse_checkpoint_name(path.name) or 0: path for path in reader.checkpoint_dirs()}
        step = max(checkpoints, default=0) if from_step is None else from_step
        if step and step not in checkpoints:
            steps = ", ".join(map(str, checkpoints)) or "none"
            raise StoreError(
                f"run {reader.id} has no complete checkpoint of step {step}", hint=f"steps it has: {steps}"
            )
        previous_attempts = tuple(
            replace(a, status="killed") if a.status == "running" else a for a in reader.manifest.attempts
        )
        number = max((a.number for a in previous_attempts), default=0) + 1
        attempt = manifests.new_attempt(number, now(), argv, checkpoints.get(step), renewal.changes if renewal else ())
        changes: dict[str, Any] = {"status": "running", "end": None, "error": None}
        if reader.manifest.best is not None and reader.manifest.best.step > step:
            changes["best"] = _best_until(reader, step)
        if renewal is not None:
            written = kept_recipe.write_recipe(run_dir, renewal.resolved, renewal.recipe_text, number)
            written |= kept_recipe.keep_texts(run_dir, renewal.texts)
            changes["files"] = {**written, **reader.manifest.files}
            attempt = replace(attempt, accepted=renewal.accepted)
            changes |= {name: tuple(r) for name, r in renewal.records.items()}
            changes |= {"best": None} if renewal.restarts_best else {}
            changes |= {"seeds": dict(renewal.seeds)} if renewal.seeds else {}
        changes["attempts"] = (*previous_attempts, attempt)
        if threads is not None:
            changes["threads"] = threads
        manifest = manifests.update_manifest(run_dir, lambda m: replace(m, **changes))
    except BaseException:
        lock.release()
        raise
    return Run(run_dir, manifest, lock)


def _sweep_root(root: Path) -> None:
    """Remove unfinished run folders that a kill left. Folders younger than an hour stay, because they may be in use."""
    with os.scandir(root) as entries:
        stale = [e.path for e in entries if e.name.startswith(TEMP_PREFIX) and e.stat().st_mtime < time.time() - 3600]
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)


def _best_until(run: Run, step: int) -> Best | None:
    """Return the best validation up to a step, for a resume from this step; None if there is none.

    The line of such a validation has `eval/is_best`. If a change of the recipe restarted the search for the best,
    earlier validations are not comparable and are ignored.
    """
    restarts = (a.number for a in run.manifest.attempts if any("best" in c.get("restarts", ()) for c in a.changes))
    first = max(restarts, default=1)
    lines = [n for n in run.metrics("validation") if n["step"] <= step and n["attempt"] >= first]
    best = next((n for n in reversed(lines) if n.get("eval/is_best") is True), {})
    value = best.get("eval/metric")
    if run.manifest.best is None or not isinstance(value, (int, float)):
        return None
    return Best(best["step"], run.manifest.best.metric, float(value))


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

    def update(self, **changes: Any) -> None:
        self.manifest = replace(self.manifest, **changes)

    def prune_checkpoints(self, keep_last: int, keep_steps: Iterable[int] = ()) -> list[Path]:
        return []

    def finish(self, status: Status = "done", error: str | None = None) -> None:
        """Do nothing: the writing process records the end of the run."""


def eval_command(run: Run, *options: str) -> str:
    """Return the command that evaluates a run. `options`: words after it."""
    return command_line(("eval",), run.dir, run.manifest.name, *checkpoint_option(run), *options)


def checkpoint_option(run: Run) -> tuple[str, ...]:
    """Return `--checkpoint last` for a run whose best checkpoint does not exist; () for others."""
    best = run.manifest.best
    is_lost = best is not None and layout.checkpoint_dir(run.dir, best.step) not in run.checkpoint_dirs()
    return ("--checkpoint", "last") if is_lost else ()


def eval_merged(run: Run, folder: Path) -> str:
    """Return the command that evaluates a model that a run's checkpoint was merged into; "" without a reward."""
    return shlex.join(["vlmrl", "eval", str(folder), *runs_option(run.dir)]) if run.manifest.rewards else ""


def can_be_scored(run: Run) -> bool:
    """Return whether `vlmrl eval RUN` has weights to evaluate and, without another recipe, a reward to score by."""
    return bool(run.manifest.rewards and run.checkpoint_dirs())
