"""Removal of whole runs: those that a user names, and those that failed before their first step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from vlmrl.errors import StoreError
from vlmrl.store import layout
from vlmrl.store.files import remove_tree, sync_folder
from vlmrl.store.listing import find
from vlmrl.store.lock import RunLock
from vlmrl.store.manifest import Manifest, read_manifest, update_manifest
from vlmrl.store.metrics import read_file
from vlmrl.store.prune import children
from vlmrl.store.runs import rollout_files

RUN_ENTRIES = (layout.MANIFEST, layout.METRICS, layout.RESOLVED, layout.EVAL)
"""Entries of which a damaged run has at least one."""


def removable(root: Path, refs: Sequence[str]) -> list[Path]:
    """Return the folders of runs that may all be removed.

    Args:
        root: folder of the runs; a run elsewhere is never removed.
        refs: the runs, as for `find`, but not `last`: that name means another run after every removal.
    Raises: StoreError for `last`, a link, a run outside the root, a folder that is no run (see `_require_run`), or a
        run with a checkpoint that another run, which stays, began with.
    """
    if "last" in refs:
        raise StoreError("`last` is another run after each removal", hint="name the run: `vlmrl runs list` shows it")
    folders = {ref: find(root, ref) for ref in refs}
    for ref, folder in folders.items():
        if folder.is_symlink() or folder.resolve().parent != root.resolve():
            message, hint = f"`{ref}` is not a folder in {root}: only runs there are removed", "name it with --runs DIR"
            raise StoreError(message, where=str(folder), hint=hint)
        _require_run(folder)
        if used := {*children(folder).values()} - {other.name for other in folders.values()}:
            message = f"{min(used)} began with a checkpoint of run {folder.name}"
            raise StoreError(message, where=str(folder), hint="name both to remove both")
    return list(dict.fromkeys(folders.values()))


def _require_run(folder: Path) -> None:
    """Check that a folder is a run: its manifest is valid; or it has the name and an entry of a run, if damaged.

    Raises: StoreError if it is not.
    """
    try:
        read_manifest(folder)
    except StoreError as error:
        has_entry = any((folder / name).exists() for name in RUN_ENTRIES)
        if not (layout.RUN_ID.fullmatch(folder.name) and has_entry):
            message = f"this folder is not removed, because nothing shows that it is a run: {error.message}"
            hint = "a damaged run is removed only under its id, as 20260718-101500-digits-3f2a; else delete it by hand"
            raise StoreError(message, where=str(folder), hint=hint) from None


def remove_runs(folders: Sequence[Path]) -> None:
    """Delete the folders of runs. Links in them are removed, and what they lead to stays.

    Raises: StoreError if a process writes one of them (none is deleted then), or one cannot be deleted completely.
    """
    with ExitStack() as stack:
        for folder in folders:
            lock = RunLock(folder)
            lock.acquire()
            stack.callback(lock.release)
        for folder in folders:
            remove_tree(folder, strict=True)


def set_aside(folder: Path) -> str:
    """Move a run that failed before its first step to the folder `unfinished`: its name is then free.

    Such a run has no step, no validation, no rollouts and no checkpoint. If it is a resume that failed before its first
    step, the run stays and has its status from before; only the record of the attempt has the failure.

    Returns: a line that says so; "" = the run or the attempt began or did not fail.
    """
    manifest = read_manifest(folder)
    if manifest.status == "failed" and len(manifest.attempts) > 1:
        return _set_back(folder, manifest)
    worked = any(line.get("kind") != "event" for line in read_file(folder).lines)
    worked = worked or layout.complete_checkpoints(folder) or rollout_files(folder, manifest.attempt_starts)
    if worked or manifest.status != "failed":
        return ""
    target = folder.parent / layout.UNFINISHED / folder.name
    if target.parent.is_symlink():
        return f"the run failed before its first step; it stays in {folder}, because {target.parent} is a link"
    target.parent.mkdir(exist_ok=True)
    os.replace(folder, target)
    sync_folder(folder.parent)
    return f"the run failed before its first step: its files are now in {target}, and its name is free"


def _set_back(folder: Path, manifest: Manifest) -> str:
    """Give a run the status of its last attempt that trained, if its newest attempt failed and trained nothing."""
    trained = {line.get("attempt") for line in read_file(folder).lines if line.get("kind") == "train"}
    before = next((a for a in reversed(manifest.attempts) if a.number in trained), manifest.attempts[0])
    if before is manifest.attempts[-1] or before.status == "failed":
        return ""
    status = "running" if before.status == "killed" else before.status  # "killed" is never stored
    update_manifest(folder, lambda m: replace(m, status=status, end=before.end, error=None))
    return f"the resume failed before its first step: the run is {before.status}, as before"
