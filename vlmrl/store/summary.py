"""Summary of a run as JSON values that commands and pages print."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.store import layout
from vlmrl.store.clock import seconds_between
from vlmrl.store.evaluated_rows import names_a_step, read_summary
from vlmrl.store.printed_names import command_line
from vlmrl.store.runs import Run

COMMANDS = {"rl": "train", "sft": "sft"}
"""Kind of a run that can be resumed -> the command that resumes it."""


def describe(run: Run) -> dict[str, Any]:
    """Return all facts that `vlmrl runs show` prints, as JSON values.

    Damaged parts are listed under "problems"; all other parts are returned.
    """
    m = run.manifest
    problems: list[str] = []
    train, validation, events = [], [], []
    try:
        train, validation, events = (run.metrics(kind) for kind in ("train", "validation", "event"))
    except StoreError as error:
        problems.append(error.message)
    checkpoints = run.checkpoint_dirs()
    rollouts = run.rollout_files()
    status = run.status
    report = run.dir / layout.REPORT
    seconds = sum(seconds_between(a.start, a.end or _last_sign(run, a.number)) or 0.0 for a in m.attempts)
    return {
        "id": run.id,
        "name": m.name,
        "path": str(run.dir),
        "kind": m.kind,
        "recipe": m.recipe,
        "status": status,
        "error": m.error,
        "labels": list(m.labels),
        "tags": list(m.tags),
        "note": m.note,
        "start": m.start,
        "end": m.end,
        "seconds": round(seconds, 1),
        "command": shlex.join(m.argv),
        "parent": m.parent,
        "parent_text": m.parent_text,
        "datasets": [dict(d) for d in m.datasets],
        "seeds": dict(m.seeds),
        "git": m.git,
        "vlmrl": m.vlmrl,
        "hardware": dict(m.hardware),
        "host": m.attempts[-1].host if m.attempts else None,
        "attempts": [
            {
                "number": a.number,
                "start": a.start,
                "end": a.end,
                "from_step": a.from_step,
                "status": a.status,
                "changes": [dict(c) for c in a.changes],
                "changes_text": a.changes_text,
                "processes": a.processes,
            }
            for a in m.attempts
        ],
        "last_train": train[-1] if train else None,
        "last_validation": validation[-1] if validation else None,
        "first_validation": validation[0] if validation else None,
        "last_event": events[-1] if events else None,
        "best": {"step": m.best.step, "metric": m.best.metric, "value": m.best.value} if m.best else None,
        "checkpoints": [path.name for path in checkpoints],
        "rollout_steps": list(rollouts),
        "evaluations": [path.name for path in layout.eval_dirs(run.dir)],
        "evaluations_during_training": [path.name for path in layout.eval_dirs(run.dir) if _was_during(path)],
        "report": str(report) if report.is_file() else None,
        "report_command": command_line(("report",), run.dir, m.name),
        "resume": resume_command(run, status),
        "problems": problems,
    }


def _was_during(folder: Path) -> bool:
    """Return whether an evaluation is a validation during training. If its summary is damaged, its name decides."""
    try:
        return bool((read_summary(folder).get("meta") or {}).get("during"))
    except StoreError:
        return names_a_step(folder.name)


USAGE = (layout.CHECKPOINTS, layout.ROLLOUTS, layout.MEDIA, layout.EVAL, layout.LOGS)


def disk_usage(run_dir: Path) -> dict[str, int]:
    """Return the bytes of a run: for each folder in USAGE, merged (models written by `vlmrl merge`), other, total."""
    parts = {name: tree_bytes(run_dir / name) for name in USAGE}
    parts["merged"] = sum(map(tree_bytes, layout.merged_dirs(run_dir)))
    total = tree_bytes(run_dir)
    return {**parts, "other": total - sum(parts.values()), "total": total}


def tree_bytes(folder: Path) -> int:
    """Return the bytes of all files under a folder. Links are not followed; files that vanish meanwhile count 0."""
    total = 0
    for base, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(base, name)).st_size
            except FileNotFoundError:
                continue
    return total


def resume_command(run: Run, status: str) -> str | None:
    """Return the command that resumes the run; None if it is done, running, or of a kind that cannot be resumed."""
    command = COMMANDS.get(run.manifest.kind)
    if command is None or status in ("done", "running"):
        return None
    return command_line((command, "--resume"), run.dir, run.manifest.name)


def _last_sign(run: Run, attempt: int) -> str | None:
    """Return the time of the last line that an attempt wrote, as an estimate of the time when it was killed."""
    if run.status == "running" and attempt == run.attempt:
        return None
    from vlmrl.store.metrics import read_file

    times = [line.get("time") for line in read_file(run.dir).lines if line["attempt"] == attempt]
    last = times[-1] if times else None
    return last if isinstance(last, str) else next(a.start for a in run.manifest.attempts if a.number == attempt)
