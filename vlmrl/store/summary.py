"""Summary of a run as JSON values for commands and pages; observation of a run that another process writes."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.store import layout
from vlmrl.store.evaluated_rows import names_a_step, read_summary, refused_words, sampling_words
from vlmrl.store.kept_recipe import read_resolved
from vlmrl.store.layout import seconds_between
from vlmrl.store.listing import command_line
from vlmrl.store.metrics import current, parse_line, read_file
from vlmrl.store.runs import Run, open_run
from vlmrl.untrusted import number_of

ATTEMPT = ("number", "start", "end", "from_step", "status", "changes", "changes_text", "processes")
"""Facts of an attempt that `describe` returns."""
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
        "attempts": [{name: getattr(a, name) for name in ATTEMPT} for a in run.attempts],
        "last_train": train[-1] if train else None,
        "last_validation": validation[-1] if validation else None,
        "first_validation": validation[0] if validation else None,
        "last_event": events[-1] if events else None,
        "best": {"step": m.best.step, "metric": m.best.metric, "value": m.best.value} if m.best else None,
        "checkpoints": [path.name for path in checkpoints],
        "rollout_steps": list(rollouts),
        "evaluations": [path.name for path in layout.eval_dirs(run.dir)],
        "evaluated": evaluated(run.dir),
        "evaluations_during_training": [path.name for path in layout.eval_dirs(run.dir) if _was_during(path)],
        "report": str(report) if report.is_file() else None,
        "report_command": command_line(("report",), run.dir, m.name),
        "resume": resume_command(run, status),
        "problems": problems,
    }


def evaluated(run_dir: Path) -> list[dict[str, Any]]:
    """Return the main number of each evaluation that training did not make; "text" has it with n and sampling."""
    results = []
    for folder in layout.eval_dirs(run_dir):
        with suppress(StoreError):  # a damaged one is named where it is read
            summary = read_summary(folder)
            meta, metric = summary.get("meta") or {}, "accuracy" if "accuracy" in summary["metrics"] else "reward"
            value, n = (summary["metrics"].get(metric, {}).get(key) for key in ("value", "n"))
            if value is not None and not meta.get("during"):
                text = f"{folder.name}: {metric} {value:.4g}, {number_of(n, 'response')}, {sampling_words(meta)}"
                text = "; ".join(filter(None, (text, refused_words(summary))))
                results.append({"name": folder.name, "metric": metric, "value": value, "n": n, "text": text})
    return results


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
    times = [line.get("time") for line in read_file(run.dir).lines if line["attempt"] == attempt]
    last = times[-1] if times else None
    return last if isinstance(last, str) else next(a.start for a in run.manifest.attempts if a.number == attempt)


WAITS = "waiting for a service"
"""Name of the event that a run writes when it begins to wait for a service of a reward."""
ANSWERS = "service answers"
"""Name of the event at the end of such a wait."""
STEPS_FOR_SPEED = 20
"""Number of last steps from which the time to the end is estimated."""


@dataclass
class Followed:
    """Run that another process writes. Each call of `look` reads the new complete lines of metrics.jsonl."""

    run_dir: Path
    run: Run = field(init=False)
    steps: int | None = field(init=False)
    """Planned number of steps; None if no recipe of the run has it."""
    _lines: list[dict[str, Any]] = field(default_factory=list, repr=False)
    _offset: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        self.look()

    def look(self) -> bool:
        """Read the manifest and the new lines. Return whether the run is still being written.

        The status is read before the lines. So if the run has ended, all its lines have been read.
        """
        self.run, self.steps = open_run(self.run_dir.parent, str(self.run_dir)), _steps(self.run_dir)
        is_running = self.run.status == "running"
        try:
            with open(self.run_dir / layout.METRICS, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return is_running
        whole_lines = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole_lines)
        self._lines += [line for raw in whole_lines.split(b"\n") if (line := parse_line(raw)) is not None]
        return is_running

    def lines(self, kind: str = "train") -> list[dict[str, Any]]:
        """Return the valid lines of a kind that were read so far, one per step, sorted by step."""
        return current(self._lines, self.run.manifest.attempt_starts, kind)

    @property
    def waits_for(self) -> dict[str, Any] | None:
        """The event with which the run began to wait for a service; None if the service has answered since."""
        for line in reversed(self._lines):
            if line.get("event") == WAITS:
                return line
            if line.get("event") == ANSWERS or line.get("kind") != "event":
                return None
        return None

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the end of the run, from the speed of the last steps; None = unknown.

        Validations and saving are included.
        """
        train = self.lines()
        if not train or self.steps is None:
            return None
        attempt = train[-1]["attempt"]
        recent = [line for line in train[-STEPS_FOR_SPEED - 1 :] if line["attempt"] == attempt]
        if len(recent) > 1:
            span = seconds_between(recent[0].get("time"), recent[-1].get("time"))
            step_seconds = None if span is None else span / (len(recent) - 1)
        else:
            step_seconds = recent[0].get("time/step_seconds")
        return None if step_seconds is None else step_seconds * max(0, self.steps - 1 - train[-1]["step"])


def phase_seconds(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return phase of a step -> its mean seconds over these lines, longest first. The whole step is left out."""
    names = {name for line in lines for name in line if name.startswith("time/") and name != "time/step_seconds"}
    means = {n: fmean(float(line.get(n, 0.0)) for line in lines) for n in names}
    ordered = sorted(means.items(), key=lambda item: (-item[1], item[0]))
    return {name.removeprefix("time/").removesuffix("_seconds"): seconds for name, seconds in ordered}


def _steps(run_dir: Path) -> int | None:
    try:
        steps = read_resolved(run_dir)["recipe"].get("train", {}).get("steps")
    except StoreError:
        return None
    return steps if isinstance(steps, int) else None
