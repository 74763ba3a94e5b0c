"""Check of metrics.jsonl, and comparison with rollouts and checkpoints, to find lost lines and files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from vlmrl.errors import Problem, StoreError
from vlmrl.store import layout, metrics
from vlmrl.store.kept_recipe import planned_steps
from vlmrl.store.manifest import Manifest
from vlmrl.store.prune import pruned_ranges
from vlmrl.store.runs import rollout_files

TRAINED = ("rl", "sft")
"""Kinds of runs that write a `train` line every step."""
MOST_STEPS = 5
SAME_MEAN = 1e-9
"""Relative tolerance of a mean score. Other versions may have added the scores in another order."""


@dataclass
class MetricsVerdict:
    """Result of `verify_run`. An error means lost or changed data; a warning means harmless traces."""

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
    """Numbers that describe the content of a rollout file.

    Args:
        versions: policy versions that sampled; empty if they were not read.
        mean_score: mean score of the samples whose reward did not fail; None if there are none or it was not read.
    """

    step: int
    attempt: int
    samples: int
    versions: frozenset[int] = frozenset()
    mean_score: float | None = None


def check_metrics(
    run_dir: Path, manifest: Manifest | None, alive: bool, rollouts: Mapping[Path, Held], verdict: MetricsVerdict
) -> None:
    """Check the lines of metrics.jsonl, and that no step's line or rollouts are missing.

    Args:
        alive: whether a process is writing the run; its last step may then be incomplete.
        rollouts: readable rollout files.
    """
    starts = manifest.attempt_starts if manifest else {}
    path = run_dir / layout.METRICS
    try:
        content = metrics.read_file(run_dir)
        pruned = pruned_ranges(run_dir)
    except StoreError as error:
        verdict.error(error.message, error.where or path)
        return
    verdict.counts["metrics lines"] = len(content.lines)
    _check_lines(content, manifest, path, verdict)
    train = {line["step"]: line for line in metrics.current(content.lines, starts, "train")}
    files = rollout_files(run_dir, starts)
    sampled = sorted(step for step, line in train.items() if "rollout/samples" in line and step not in files)
    lost = [step for step in sampled if not any(step in steps for steps in pruned)]
    if lost:
        message = f"{len(lost)} step(s) have metrics but no rollouts: {_shown(map(metrics.counted, lost), len(lost))}"
        verdict.error(message, run_dir / layout.ROLLOUTS)
    for step in sorted(train.keys() & files.keys()):
        _check_step(train[step], files[step], rollouts.get(files[step]), verdict)
    if manifest is not None and manifest.kind in TRAINED:
        planned = planned_steps(run_dir)
        if planned is not None:
            _check_no_step_is_beyond(run_dir, planned, content, files, verdict)
        within = [step for step in train if planned is None or step < planned]
        _check_no_step_is_missing(run_dir, manifest, content, sorted(within), sorted(files), planned, alive, verdict)


def _check_lines(content: metrics.MetricsFile, manifest: Manifest | None, path: Path, verdict: MetricsVerdict) -> None:
    """Check each incomplete line. A kill may leave one at the end of an attempt; any other one is damage."""
    starts = manifest.attempt_starts if manifest else {}
    ended = {a.number for a in manifest.attempts if a.status in ("done", "interrupted")} if manifest else set()
    attempts = dict(zip(content.numbers, (line["attempt"] for line in content.lines), strict=True))
    for number in content.torn:
        before = next((attempts[n] for n in sorted(attempts, reverse=True) if n < number), min(starts, default=1))
        after = next((attempts[n] for n in sorted(attempts) if n > number), before + 1)
        if number in content.foreign or after == before or before in ended:
            verdict.error("a line of metrics is damaged", f"{path}:{number}")
        else:
            verdict.warn("a line of metrics was cut by a kill; readers skip it", f"{path}:{number}")
    _check_order(content, path, verdict)
    checked = {attempts[number] for number in attempts.keys() - content.unsealed}
    if lost := [number for number in sorted(content.unsealed) if attempts[number] in checked]:
        verdict.error("a line of metrics has no checksum, but other lines of its attempt have", f"{path}:{lost[0]}")
    unknown = sorted(set(attempts.values()) - set(starts)) if starts else []
    if unknown:
        verdict.error(f"metrics of attempt {unknown[0]}, which is not in the manifest", path)


def _check_order(content: metrics.MetricsFile, path: Path, verdict: MetricsVerdict) -> None:
    """Check the order of the lines: attempts in order, and in each attempt one `train` line per step."""
    attempt, last, wrong = 0, -1, []
    for number, line in zip(content.numbers, content.lines, strict=True):
        if line["attempt"] > attempt:
            attempt, last = line["attempt"], -1
        trained = line["kind"] == "train"
        if line["attempt"] < attempt or (trained and line["step"] <= last):
            wrong.append((number, line))
        elif trained:
            last = line["step"]
    if wrong:
        number, line = wrong[0]
        step = _number(line)
        message = f"{len(wrong)} line(s) of metrics are repeated or out of order; the first is of step {step}"
        verdict.error(message, f"{path}:{number}", "the file was edited: a run only appends to it")


def _check_step(line: Mapping[str, Any], path: Path, held: Held | None, verdict: MetricsVerdict) -> None:
    """Compare a step's line with its rollouts. `held`: None = they cannot be read, which was already reported."""
    if held is None:
        return
    step, num_samples, lag = line["step"], line.get("rollout/samples"), line.get("rollout/version_lag", 0)
    if isinstance(num_samples, int) and num_samples != held.samples:
        verdict.error(
            f"step {_number(line)}: metrics say {num_samples} samples, but the rollouts have {held.samples}", path
        )
    mean = line.get("reward/mean")
    stored = held.mean_score
    if (
        isinstance(mean, int | float)
        and stored is not None
        and not math.isclose(mean, stored, rel_tol=SAME_MEAN, abs_tol=SAME_MEAN)
    ):
        scores = f"but the scores of the rollouts have the mean {stored:.6g}"
        verdict.error(f"step {_number(line)}: metrics say a mean reward of {mean:.6g}, {scores}", path)
    stale = held.versions - {step - lag}
    if stale:
        verdict.error(f"the rollouts of step {_number(line)} have samples of policy version {min(stale)}", path)


def _check_no_step_is_beyond(
    run_dir: Path, planned: int, content: metrics.MetricsFile, files: Mapping[int, Path], verdict: MetricsVerdict
) -> None:
    """Check that no line, rollout file or checkpoint has a step beyond the planned end of the run.

    Args:
        planned: planned number of steps. The last step samples with version `planned - 1` and makes version `planned`.
    """
    ends = {"train": planned - 1}
    placed = [
        (_number(line), f"{run_dir / layout.METRICS}:{number}")
        for number, line in zip(content.numbers, content.lines, strict=True)
        if not 0 <= line["step"] <= ends.get(line["kind"], planned)
    ]
    placed += [(metrics.counted(step), str(path)) for step, path in files.items() if step >= planned]
    saved = [(layout.parse_checkpoint_name(path.name) or 0, path) for path in layout.complete_checkpoints(run_dir)]
    placed += [(step, str(path)) for step, path in saved if step > planned]
    for step, where in placed[:MOST_STEPS]:
        side = "before the first" if step < 1 else f"beyond the run, which has {planned} steps"
        verdict.error(f"step {step} is {side}", where)
    if len(placed) > MOST_STEPS:
        verdict.error(f"{len(placed) - MOST_STEPS} more lines and files are of steps beyond the run", run_dir)


def _check_no_step_is_missing(
    run_dir: Path,
    manifest: Manifest,
    content: metrics.MetricsFile,
    steps: Sequence[int],
    sampled: Sequence[int],
    planned: int | None,
    alive: bool,
    verdict: MetricsVerdict,
) -> None:
    """Check that each step from the first to the last has a line.

    The last step is derived from the rollouts, the checkpoints and the end of the run. A damaged file may contain any
    step number. So numbers beyond the plan are ignored, and missing steps are listed as ranges.
    """
    path, first = run_dir / layout.METRICS, manifest.forked_at or 0
    ended = [line["step"] for line in content.lines if line.get("event") == "ended"] if not alive else []
    last_start = manifest.attempts[-1].from_step if manifest.attempts else 0
    saved = [layout.parse_checkpoint_name(p.name) or 0 for p in layout.complete_checkpoints(run_dir)]
    # After a resume from an older checkpoint, newer checkpoints do not show which steps must have valid lines.
    saved = saved if len(manifest.attempts) == 1 else [step for step in saved if step <= last_start]
    marks = [*sampled, *saved, *ended[-1:], *(step + 1 for step in steps[-1:])]
    reached = max((mark for mark in marks if planned is None or mark <= planned), default=first)
    gaps = list(_gaps(first, reached, steps))
    if gaps:
        number = sum(gap.stop - gap.start for gap in gaps)
        verdict.error(
            f"{number} step(s) have no line of metrics: {_shown(map(metrics.counted, chain(*gaps)), number)}", path
        )


def _gaps(first: int, end: int, steps: Iterable[int]) -> Iterator[range]:
    """Yield ranges of the steps from `first` to `end` (not included) that are missing in `steps`, which are sorted."""
    for step in (*(step for step in steps if first <= step < end), end):
        if step > first:
            yield range(first, step)
        first = step + 1


def _number(line: Mapping[str, Any]) -> int:
    """Return the number of a line's step as users count it."""
    return metrics.counted(line["step"]) if line["kind"] == "train" else line["step"]


def _shown(steps: Iterable[int], number: int) -> str:
    return ", ".join(map(str, islice(steps, MOST_STEPS))) + (" ..." if number > MOST_STEPS else "")
