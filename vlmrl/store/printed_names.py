"""Run names in the commands that vlmrl prints. A user can copy and run each command unchanged."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vlmrl.errors import format_error
from vlmrl.store import layout
from vlmrl.store.listing import named_ids, run_ids

if TYPE_CHECKING:
    from vlmrl.store.runs import Run


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
    return shlex.join(["vlmrl", *verb, reference(run_dir, name), *options, *_runs_option(run_dir)])


def _runs_option(run_dir: Path) -> tuple[str, ...]:
    is_default_root = run_dir.parent.resolve() == layout.runs_root().resolve()
    return () if is_default_root else ("--runs", str(run_dir.parent))


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
    return shlex.join(["vlmrl", "eval", str(folder), *_runs_option(run.dir)]) if run.manifest.rewards else ""


def can_be_scored(run: Run) -> bool:
    """Return whether `vlmrl eval RUN` has weights to evaluate and, without another recipe, a reward to score by."""
    return bool(run.manifest.rewards and run.checkpoint_dirs())
