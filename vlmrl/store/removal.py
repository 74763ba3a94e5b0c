"""Removal of whole runs: those that a user names, and those that failed before their first step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from vlmrl.errors import StoreError
from vlmrl.store import layout
from vlmrl.store.files import remove_tree, sync_folder
from vlmrl.store.listing import find
from vlmrl.store.lock import RunLock, owner_state, read_owner
from vlmrl.store.manifest import Manifest, read_manifest
from vlmrl.store.metrics import read_file
from vlmrl.store.prune import children
from vlmrl.store.runs import rollout_files


def removable(root: Path, refs: Sequence[str]) -> list[Path]:
    """Return the folders of runs that may all be removed, in this order.

    Args:
        root: folder of the runs; a run elsewhere is never removed.
        refs: the runs, as for `find`, but not `last`: that name means another run after every removal.
    Raises: StoreError for `last`, a link, a run outside the root, one that a process writes, or one whose checkpoint
        another run began with, which stays.
    """
    folders: list[Path] = []
    for ref in refs:
        if ref == "last":
            hint = "`vlmrl runs list` shows it"
            raise StoreError("`last` is another run after each removal: name the run by its id or its name", hint=hint)
        folder = find(root, ref)
        if folder.is_symlink() or folder.resolve().parent != root.resolve():
            message, hint = (
                f"`{ref}` is no folder in {root}: only runs there are removed",
                "name their folder: --runs DIR",
            )
            raise StoreError(message, where=str(folder), hint=hint)
        owner = read_owner(folder)
        if owner is not None and owner_state(owner) != "dead":
            hint = "stop it first; `vlmrl runs unlock` removes the lock of a process that ended on another machine"
            message = f"run {folder.name} is being written by process {owner.pid} on {owner.host}"
            raise StoreError(message, where=str(folder), hint=hint)
        folders += [folder] if folder not in folders else []
    for folder in folders:
        if used := sorted(set(children(folder).values()) - {other.name for other in folders}):
            names, hint = " and ".join(used), f"remove them, too: vlmrl runs rm {folder.name} {' '.join(used)}"
            raise StoreError(f"{names} began with a checkpoint of run {folder.name}", where=str(folder), hint=hint)
    return folders


def remove_run(folder: Path) -> None:
    """Delete the folder of a run. Links in it are removed, and what they lead to stays.

    Raises: StoreError if a process writes the run now, or the folder cannot be removed.
    """
    lock = RunLock(folder)
    lock.acquire()
    try:
        remove_tree(folder)
    except OSError as error:
        raise StoreError(f"the run cannot be removed: {error.strerror or error}", where=str(folder)) from error
    finally:
        lock.release()


def set_aside(folder: Path) -> Path | None:
    """Move a run that failed before its first step to the folder `unfinished`: its name is then free.

    Nothing that was trained is lost: such a run has no step, no validation, no rollouts and no checkpoint.

    Returns: its new folder; None = the run began, or did not fail, and stays.
    """
    manifest = read_manifest(folder)
    if manifest.status != "failed" or _has_begun(folder, manifest):
        return None
    target = folder.parent / layout.UNFINISHED / folder.name
    target.parent.mkdir(exist_ok=True)
    os.replace(folder, target)
    sync_folder(folder.parent)
    return target


def describe_aside(folder: Path) -> str:
    """Return the line that tells the user of a run that was set aside. `folder`: its new folder."""
    return f"the run failed before its first step: its files are now in {folder}, and its name is free"


def _has_begun(folder: Path, manifest: Manifest) -> bool:
    measured = any(line.get("kind") != "event" for line in read_file(folder).lines)
    left = layout.complete_checkpoints(folder) or rollout_files(folder, manifest.attempt_starts)
    return measured or len(manifest.attempts) > 1 or bool(left)
