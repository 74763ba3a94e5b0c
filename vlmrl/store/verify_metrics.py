"""metrics.jsonl against itself, and against the rollouts and checkpoints of its run: is a line or a file lost?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmrl.errors import Problem, StoreError
from vlmrl.store import layout, metrics
from vlmrl.store.manifest import Manifest
from vlmrl.store.prune import pruned_steps
from vlmrl.store.runs import rollout_files

TRAINED = ("rl", "sft")
"""Kinds of runs that write a `train` line every step."""
MOST_STEPS = 5


@dataclass
class Verdict:
    """What `verify_run` looked at and found. Errors: something was lost or changed. Warnings: harmless traces."""

    problems: list[Problem] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def errors(self) -> list[Problem]:
        return [p for p in self.problems if p.level == "error"]

    @property
    def warnings(self) -> list[Problem]:
        return [p for p in self.problems if p.level == "warning"]

    def error(self, message: str, where: Path | str, hint: str | None = None) -> None:
        self.problems.append(Problem(message, str(where), hint))

    def warn(self, message: str, where: Path | str, hint: str | None = None) -> None:
        self.problems.append(Problem(message, str(where), hint, "warning"))


@dataclass(frozen=True)
class Held:
    """What a rollout file holds. `versions`: of the policies that sampled; empty when they were not read."""

    step: int
    attempt: int
    samples: int
    versions: frozenset[int] = frozenset()


def check_metrics(
    run_dir: Path, manifest: Manifest | None, alive: bool, rollouts: Mapping[Path, Held], verdict: Verdict
) -> None:
    """Check the lines of metrics.jsonl, and that no step's line or rollouts are missing.

    Args: alive: whether a process writes the run now: its last step may be half done.    rollouts: readable files.
    """
    starts = manifest.attempt_starts if manifest else {}
    path = run_dir / layout.METRICS
    try:
        content = metrics.read_file(run_dir)
        pruned = pruned_steps(run_dir)
    except StoreError as error:
        verdict.error(error.message, error.where or path)
        return
    verdict.counts["metrics lines"] = len(content.lines)
    _check_lines(content, starts, path, verdict)
    train = {line["step"]: line for line in metrics.current(content.lines, starts, "train")}
    files = rollout_files(run_dir, starts)
    lost = sorted(step for step, line in train.items() if "rollout/samples" in line and step not in {*files, *pruned})
    if lost:
        verdict.error(f"{len(lost)} step(s) have metrics but no rollouts: {_shown(lost)}", run_dir / layout.ROLLOUTS)
    for step in sorted(train.keys() & files.keys()):
        _check_step(train[step], files[step], rollouts.get(files[step]), verdict)
    if manifest is not None and manifest.kind in TRAINED:
        _check_no_step_is_missing(run_dir, manifest, content, sorted(train), sorted(files), alive, verdict)


def _check_lines(content: metrics.MetricsFile, starts: Mapping[int, int], path: Path, verdict: Verdict) -> None:
    """Each line that is not whole: one may be left by a kill where an attempt ended, any other was damaged."""
    attempts = dict(zip(content.numbers, (line["attempt"] for line in content.lines), strict=True))
    for number in content.torn:
        before = next((attempts[n] for n in sorted(attempts, reverse=True) if n < number), min(starts, default=1))
        after = next((attempts[n] for n in sorted(attempts) if n > number), before + 1)
        if number in content.foreign or after == before:
            verdict.error("a line of metrics is damaged", f"{path}:{number}")
        else:
            verdict.warn("a line of metrics was cut by a kill; readers skip it", f"{path}:{number}")
    unknown = sorted(set(attempts.values()) - set(starts)) if starts else []
    if unknown:
        verdict.error(f"metrics of attempt {unknown[0]}, which the manifest does not know", path)


def _check_step(line: Mapping[str, Any], path: Path, held: Held | None, verdict: Verdict) -> None:
    """A step's line against its rollouts; None = they cannot be read, which was told."""
    if held is None:
        return
    step, told, lag = line["step"], line.get("rollout/samples"), line.get("rollout/version_lag", 0)
    if isinstance(told, int) and told != held.samples:
        verdict.error(f"step {step}: metrics say {told} samples, the rollouts hold {held.samples}", path)
    stale = held.versions - {step - lag}
    if stale:
        verdict.error(f"samples of policy version {min(stale)} in the rollouts of step {step}", path)


def _check_no_step_is_missing(
    run_dir: Path, manifest: Manifest, content: metrics.MetricsFile, steps: Sequence[int], sampled: Sequence[int],
    alive: bool, verdict: Verdict,
) -> None:  # fmt: skip
    """Steps have a line each, from the first on, as far as rollouts, checkpoints and the end of the run say it went."""
    path, first = run_dir / layout.METRICS, manifest.forked_at or 0
    ended = [line["step"] for line in content.lines if line.get("event") == "ended"] if not alive else []
    last_start = manifest.attempts[-1].from_step if manifest.attempts else 0
    saved = [layout.parse_checkpoint_name(p.name) or 0 for p in layout.complete_checkpoints(run_dir)]
    # Of a run that went back to an older checkpoint, newer ones say nothing about the lines that count.
    saved = saved if len(manifest.attempts) == 1 else [step for step in saved if step <= last_start]
    reached = max([*sampled[-1:], *saved, *ended[-1:], *(step + 1 for step in steps[-1:])], default=first)
    missing = sorted(set(range(first, reached)) - set(steps))
    if missing:
        verdict.error(f"{len(missing)} step(s) have no line of metrics: {_shown(missing)}", path)


def _shown(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:MOST_STEPS])) + (" ..." if len(steps) > MOST_STEPS else "")
