"""Search for runs by prefix, name, `last` or path, and lists of runs. It is fast with 10,000 runs.

A run's name in a command that vlmrl prints is the shortest that finds it: a user can copy and run the command.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError, format_error, shortened
from vlmrl.store import layout
from vlmrl.store.lock import owner_state, read_owner
from vlmrl.store.manifest import Status, read_raw
from vlmrl.untrusted import read_regular

MOST_CANDIDATES = 10


LISTED_KEYS = ("name", "kind", "recipe", "start", "end", "tags", "note", "labels", "best", "error", "parent", "origin")


@dataclass(frozen=True)
class ListedRun:
    """Run in a listing.

    `raw` has the manifest's values of LISTED_KEYS. `problem` is the reason why the manifest cannot be read, or None.
    """

    id: str
    dir: Path
    status: str
    raw: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    @property
    def name(self) -> str | None:
        return self.raw.get("name")


def status_of(run_dir: Path, stored: Status) -> Status:
    """Return the stored status, or "killed" if it is "running" but the owner is certainly dead or the lock is gone."""
    if stored != "running":
        return stored
    owner = read_owner(run_dir)
    return "killed" if owner is None or owner_state(owner) == "dead" else "running"


def run_ids(root: Path) -> list[str]:
    """Return the folder names of all runs under the root, newest first. Other folders are left out."""
    ids: list[str] = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                is_run = layout.RUN_ID.fullmatch(entry.name) or (
                    not entry.name.startswith(".") and os.path.isfile(os.path.join(entry.path, layout.MANIFEST))
                )
                if is_run and entry.is_dir():
                    ids.append(entry.name)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot read the runs folder: {error.strerror}", where=str(root)) from error
    return sorted(ids, reverse=True)


def read_listed(root: Path, run_id: str) -> ListedRun:
    """Return a run for a listing. A damaged run is returned with its `problem`; nothing is raised."""
    run_dir = root / run_id
    try:
        raw = read_raw(f"{root}/{run_id}")
    except StoreError as error:
        return ListedRun(run_id, run_dir, "damaged", problem=error.message)
    status = raw["status"]
    listed_values = {key: raw[key] for key in LISTED_KEYS if key in raw}
    return ListedRun(run_id, run_dir, status_of(run_dir, status) if status == "running" else status, listed_values)


def list_runs(
    root: Path | str, *, kind: str | None = None, tag: str | None = None, status: str | None = None, limit: int = 0
) -> list[ListedRun]:
    """Return runs under the root, newest first. Without a filter, only the manifests of returned runs are read.

    Args:
        kind, tag, status: return only runs with this kind, tag or status; "damaged" is a status, too.
        limit: maximum number of runs; 0 = all.
    """
    root = Path(root)
    runs: list[ListedRun] = []
    for run_id in run_ids(root):
        run = read_listed(root, run_id)
        if kind is not None and run.raw.get("kind") != kind:
            continue
        if tag is not None and tag not in run.raw.get("tags", ()):
            continue
        if status is not None and run.status != status:
            continue
        runs.append(run)
        if limit and len(runs) >= limit and run_id[:15] != runs[limit - 1].id[:15]:
            break
    # Ids contain the start in whole seconds. Runs that started in the same second are ordered by their manifests.
    runs.sort(key=lambda run: (run.id[:15], str(run.raw.get("start", ""))), reverse=True)
    return runs[:limit] if limit else runs


TRAINED = ("rl", "sft")
"""Kinds of runs that train, with a `train` line for every step. A `vlmrl try` does not."""
RUN_KINDS = (*TRAINED, "eval", "try")
"""Kinds of all runs."""


def find(root: Path | str, ref: str, *, trained: bool = False) -> Path:
    """Return the folder of the run that `ref` names.

    Args:
        ref: path, `last`, id, name, unique prefix of the id, or its last 4 letters.
        trained: `last` means the last run that trains, if there is one.
    Raises: StoreError that lists the matching runs if `ref` is ambiguous, and the newest runs if no run matches.
    """
    root = Path(root)
    path = Path(ref)
    # os.path returns False for a name that no file system allows; Path.is_file may raise.
    if os.path.isfile(path / layout.MANIFEST):
        return path.resolve() if path.name in ("", "..") else path
    if os.path.isdir(path) and os.sep in ref and layout.RUN_ID.fullmatch(path.name):
        return path
    if os.sep in ref and not os.path.isdir(path) and os.path.isdir(path.parent):
        root, ref = path.parent, path.name
    ids = run_ids(root)
    if not ids:
        raise StoreError(
            f"no run `{shortened(ref)}`: there are no runs in {root}",
            where=str(root),
            hint="give their folder: --runs DIR",
        )
    if ref == "last":
        return root / _latest(root, ids, trained)
    if ref in ids:
        return root / ref
    matches = [run_id for run_id in ids if run_id.startswith(ref)] if ref else []
    ids_with_name = named_ids(root, ids, ref)
    if len(ids_with_name) == 1:
        return root / ids_with_name[0]
    if not ids_with_name and len(matches) == 1:
        return root / matches[0]
    if not ids_with_name and not matches and len(ref) == 4:
        matches = [run_id for run_id in ids if run_id.endswith(f"-{ref}")]
        if len(matches) == 1:
            return root / matches[0]
    if ids_with_name or matches:
        what = "has the name" if ids_with_name else "matches"
        candidates = _show(root, ids_with_name or matches)
        raise StoreError(f"more than one run {what} `{ref}`", where=str(root), hint=f"give one of these:\n{candidates}")
    newest = _show(root, ids)
    raise StoreError(f"no run `{shortened(ref)}`", where=str(root), hint=f"runs here, newest first:\n{newest}")


def named_ids(root: Path, ids: list[str], name: str) -> list[str]:
    """Return the ids of the runs with this name, in the order of `ids`."""
    needle, named = name.encode(), []
    for run_id in ids:
        # For speed, a manifest is parsed only if its bytes contain the name.
        with suppress(OSError):
            if needle in read_regular(f"{root}/{run_id}/{layout.MANIFEST}") and read_listed(root, run_id).name == name:
                named.append(run_id)
    return named


def _latest(root: Path, ids: list[str], trained: bool) -> str:
    """Return the id of the run that started last; with `trained`, of the runs that train, if there are any.

    Ids contain the start in whole seconds. Runs that started in the same second are ordered by their manifests.
    """
    trains = lambda run_id: not trained or read_listed(root, run_id).raw.get("kind") in TRAINED  # noqa: E731
    second = next(filter(trains, ids), ids[0])[:15]
    same = [run_id for run_id in ids if run_id[:15] == second]
    same = list(filter(trains, same)) or same
    return max(same, key=lambda run_id: (read_listed(root, run_id).raw.get("start", ""), run_id))


def _show(root: Path, ids: list[str]) -> str:
    lines = []
    for run_id in ids[:MOST_CANDIDATES]:
        run = read_listed(root, run_id)
        name = f"  ({run.name})" if run.name else ""
        lines.append(f"  {run_id}{name}  {run.status}")
    if len(ids) > MOST_CANDIDATES:
        lines.append(f"  ... and {len(ids) - MOST_CANDIDATES} more: vlmrl runs list")
    return "\n".join(lines)


def reference(run_dir: Path, name: str | None) -> str:
    """Return the name of a run for commands: its own name if no other run has the same name, else its id.

    If a file or folder here has this name, the id is used, because several commands would use the file.
    """
    run_id = run_dir.name
    if name is None or os.path.exists(name):
        return run_id
    ids = run_ids(run_dir.parent)
    return name if name not in ids and named_ids(run_dir.parent, ids, name) == [run_id] else run_id


def namesake_warning(run_dir: Path, name: str) -> str:
    """Return a warning if other runs have the same name as a new run; "" if none has."""
    root = run_dir.parent
    others = [run_id for run_id in named_ids(root, run_ids(root), name) if run_id != run_dir.name]
    if not others:
        return ""
    more = f" and of {len(others) - 1} more" if len(others) > 1 else ""
    message = f"`{name}` is also the name of run {others[0]}{more}: commands cannot use this name now and need an id"
    rename = command_line(("runs", "note"), root / others[0], None, "--name", f"{name}-before")
    return format_error(message, str(run_dir), f"rename the other run: {rename}", "warning")


def command_line(verb: Sequence[str], run_dir: Path, name: str | None, *options: str) -> str:
    """Return a command about a run that works in the current folder. `--runs` is added if the run is not in ./runs.

    Args:
        verb: words of the command before the run, such as ("train", "--resume").
        options: words after the run.
    """
    return shlex.join(["vlmrl", *verb, reference(run_dir, name), *options, *runs_option(run_dir)])


def runs_option(run_dir: Path) -> tuple[str, ...]:
    is_default_root = run_dir.parent.resolve() == layout.runs_root().resolve()
    return () if is_default_root else ("--runs", str(run_dir.parent))
