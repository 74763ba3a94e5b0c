"""Creating, opening and resuming runs."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vlmrl import __version__
from vlmrl.errors import StoreError
from vlmrl.redaction.redact import learn, learn_argv, redact_argv
from vlmrl.store import kept_recipe, layout, provenance
from vlmrl.store import manifest as manifests
from vlmrl.store.clock import now
from vlmrl.store.files import TEMP_PREFIX, link_tree, remove_tree, require_ordinary, sweep, sync_folder, temp_path
from vlmrl.store.listing import find
from vlmrl.store.lock import RunLock
from vlmrl.store.manifest import Best, Manifest
from vlmrl.store.runs import Run


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
    """Create a run folder and lock it. It gets its final name only when manifest, recipe and lock are in it.

    Args:
        recipe_text: text of recipe.toml.
        resolved: content of resolved.json.
        texts: reward files and prompts to keep.
        fork: the checkpoint from which the run continues.
        kind, name, tags, note ...: see the fields of `Manifest`.
    Raises: StoreError for a name or tag that is not allowed, or if the runs root cannot be written.
    """
    if name is not None:
        manifests.check_name(name)
    for tag in tags:
        manifests.check_tag(tag)
    root = Path(root)
    run_dir = root / layout.new_run_id(recipe_name)
    temp_dir = temp_path(run_dir)
    try:
        temp_dir.mkdir(parents=True)
    except OSError as error:
        raise StoreError(f"cannot make a run folder: {error.strerror}", where=str(root)) from error
    _sweep_root(root)
    git, diff = provenance.git_state()
    start = now()
    learn_argv(argv)
    learn(filter(None, (recipe_text, *texts.values())))
    try:
        files = kept_recipe.write_recipe(temp_dir, resolved, recipe_text) | kept_recipe.keep_texts(temp_dir, texts)
        files |= kept_recipe.keep_diff(temp_dir, diff) if diff else {}
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
            packages=provenance.packages(),
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
            written = kept_recipe.write_renewal(run_dir, number, renewal)
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
