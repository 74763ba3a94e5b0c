"""Run names in the commands that vlmrl prints: each command must work when it is typed as printed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from vlmrl.errors import format_error
from vlmrl.store import layout
from vlmrl.store.listing import named_ids, run_ids


def reference(run_dir: Path, name: str | None) -> str:
    """Return the text that names a run within its runs folder: its name if no other run has it, else its id.

    If the name is also a file or folder here, the id is used, because several commands would take the file.
    """
    run_id = run_dir.name
    if name is None or os.path.exists(name):
        return run_id
    ids = run_ids(run_dir.parent)
    return name if name not in ids and named_ids(run_dir.parent, ids, name) == [run_id] else run_id


def namesake_warning(run_dir: Path, name: str) -> str:
    """Return the warning for a new run name that other runs have too; "" if it is the only one."""
    root = run_dir.parent
    others = [run_id for run_id in named_ids(root, run_ids(root), name) if run_id != run_dir.name]
    if not others:
        return ""
    more = f" and of {len(others) - 1} more" if len(others) > 1 else ""
    message = f"`{name}` is also the name of run {others[0]}{more}: commands cannot use this name now and need an id"
    rename = command_line(("runs", "note"), root / others[0], None, "--name", f"{name}-before")
    return format_error(message, str(run_dir), f"rename the other run: {rename}", "warning")


def command_line(verb: Sequence[str], run_dir: Path, name: str | None, *options: str) -> str:
    """Return a command about a run, as one types it in this folder; with `--runs` if the runs are elsewhere.

    Args:
        verb: the words before the run, such as ("train", "--resume").
        options: the words after it.
    """
    is_default_root = run_dir.parent.resolve() == layout.runs_root().resolve()
    runs_option = () if is_default_root else ("--runs", str(run_dir.parent))
    return shlex.join(["vlmrl", *verb, reference(run_dir, name), *options, *runs_option])
