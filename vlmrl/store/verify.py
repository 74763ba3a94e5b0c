"""Check of a whole run folder: every file is read and compared. All faults are listed and nothing is changed.

metrics.jsonl is compared with rollouts and checkpoints, so that lost lines and files are found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import Any

from vlmrl.errors import Problem, StoreError
from vlmrl.redaction.redact import HIDDEN
from vlmrl.store import layout, metrics
from vlmrl.store.checkpoints import faults, hash_line, sha256_of
from vlmrl.store.evaluated_rows import read_rows, read_summary, row_groups
from vlmrl.store.files import ENTRY_HINT, leftovers
from vlmrl.store.kept_recipe import planned_steps, read_resolved_file, resolved_files
from vlmrl.store.listing import TRAINED, status_of
from vlmrl.store.manifest import Manifest, manifest_fault, read_manifest, read_raw, read_remote
from vlmrl.store.media import RunImages
from vlmrl.store.metrics import read_file
from vlmrl.store.prune import pruned_ranges
from vlmrl.store.rollouts import count_rows, read_rollouts, rollout_media
from vlmrl.store.runs import rollout_files
from vlmrl.types import policy_versions
from vlmrl.untrusted import entry_problems, number_of, read_regular

MOST_STEPS = 5
SAME_MEAN = 1e-9
"""Relative tolerance of a mean score. Other versions may have added the scores in another order."""


@dataclass
class VerifyResult:
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
    run_dir: Path, manifest: Manifest | None, alive: bool, rollouts: Mapping[Path, Held], result: VerifyResult
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
        result.error(error.message, error.where or path)
        return
    result.counts["metrics lines"] = len(content.lines)
    _check_lines(content, manifest, path, result)
    train = {line["step"]: line for line in metrics.current(content.lines, starts, "train")}
    files = rollout_files(run_dir, starts)
    sampled = sorted(step for step, line in train.items() if "rollout/samples" in line and step not in files)
    lost = [step for step in sampled if not any(step in steps for steps in pruned)]
    if lost:
        shown = _shown(map(metrics.counted, lost), len(lost))
        message = f"{number_of(len(lost), 'step')} with metrics, but without rollouts: {shown}"
        result.error(message, run_dir / layout.ROLLOUTS)
    for step in sorted(train.keys() & files.keys()):
        _check_step(train[step], files[step], rollouts.get(files[step]), result)
    if manifest is not None and manifest.kind in TRAINED:
        planned = planned_steps(run_dir)
        if planned is not None:
            _check_no_step_is_beyond(run_dir, planned, content, files, result)
        within = [step for step in train if planned is None or step < planned]
        _check_no_step_is_missing(run_dir, manifest, content, sorted(within), sorted(files), planned, alive, result)


def _check_lines(content: metrics.MetricsFile, manifest: Manifest | None, path: Path, result: VerifyResult) -> None:
    """Check each incomplete line. A kill may leave one at the end of an attempt; any other one is damage."""
    starts = manifest.attempt_starts if manifest else {}
    ended = {a.number for a in manifest.attempts if a.status in ("done", "interrupted")} if manifest else set()
    attempts = dict(zip(content.numbers, (line["attempt"] for line in content.lines), strict=True))
    for number in content.torn:
        before = next((attempts[n] for n in sorted(attempts, reverse=True) if n < number), min(starts, default=1))
        after = next((attempts[n] for n in sorted(attempts) if n > number), before + 1)
        if number in content.foreign or after == before or before in ended:
            result.error("a line of metrics is damaged", f"{path}:{number}")
        else:
            result.warn("a line of metrics was cut by a kill; readers skip it", f"{path}:{number}")
    _check_order(content, path, result)
    checked = {attempts[number] for number in attempts.keys() - content.unsealed}
    if lost := [number for number in sorted(content.unsealed) if attempts[number] in checked]:
        result.error("a line of metrics has no checksum, but other lines of its attempt have", f"{path}:{lost[0]}")
    unknown = sorted(set(attempts.values()) - set(starts)) if starts else []
    if unknown:
        result.error(f"metrics of attempt {unknown[0]}, which is not in the manifest", path)


def _check_order(content: metrics.MetricsFile, path: Path, result: VerifyResult) -> None:
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
        message = f"{number_of(len(wrong), 'line')} of metrics repeated or out of order; the first is of step {step}"
        result.error(message, f"{path}:{number}", "the file was edited: a run only appends to it")


def _check_step(line: Mapping[str, Any], path: Path, held: Held | None, result: VerifyResult) -> None:
    """Compare a step's line with its rollouts. `held`: None = they cannot be read, which was already reported."""
    if held is None:
        return
    step, num_samples, lag = line["step"], line.get("rollout/samples"), line.get("rollout/version_lag", 0)
    if isinstance(num_samples, int) and num_samples != held.samples:
        result.error(
            f"step {_number(line)}: metrics say {num_samples} samples, but the rollouts have {held.samples}", path
        )
    mean, stored = line.get("reward/mean"), held.mean_score
    if (
        isinstance(mean, int | float)
        and stored is not None
        and not math.isclose(mean, stored, rel_tol=SAME_MEAN, abs_tol=SAME_MEAN)
    ):
        scores = f"but the scores of the rollouts have the mean {stored:.6g}"
        result.error(f"step {_number(line)}: metrics say a mean reward of {mean:.6g}, {scores}", path)
    stale = held.versions - {step - lag}
    if stale:
        result.error(f"the rollouts of step {_number(line)} have samples of policy version {min(stale)}", path)


def _check_no_step_is_beyond(
    run_dir: Path, planned: int, content: metrics.MetricsFile, files: Mapping[int, Path], result: VerifyResult
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
        result.error(f"step {step} is {side}", where)
    if len(placed) > MOST_STEPS:
        result.error(f"{len(placed) - MOST_STEPS} more lines and files are of steps beyond the run", run_dir)


def _check_no_step_is_missing(
    run_dir: Path,
    manifest: Manifest,
    content: metrics.MetricsFile,
    steps: Sequence[int],
    sampled: Sequence[int],
    planned: int | None,
    alive: bool,
    result: VerifyResult,
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
        shown = _shown(map(metrics.counted, chain(*gaps)), number)
        result.error(f"{number_of(number, 'step')} without a line of metrics: {shown}", path)


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


def verify_run(run_dir: Path, images: RunImages | None = None, *, quick: bool = False) -> VerifyResult:
    """Check a run folder: manifest, recipe, metrics, rollouts, checkpoints, evaluations, images, leftovers.

    Args:
        images: images of the run; default: those in the run's media/ and the prepared datasets in its manifest.
        quick: find only missing, incomplete or misplaced files. Only the metadata of rollouts and evaluations and the
            names of a checkpoint's files are read, and no images. A changed byte in a file is not found.
    """
    result = VerifyResult()
    for path, problem in entry_problems(run_dir, layout.LOGGER_FOLDERS):
        result.error(f"this {problem}; no command opens it", path, ENTRY_HINT)
    if result.errors:
        return result  # the other checks would open these entries
    try:
        manifest = read_manifest(run_dir)
    except StoreError as error:
        result.error(error.message, error.where or run_dir, error.hint)
        manifest = None
    if manifest is not None:
        if fault := manifest_fault(run_dir):
            result.error(fault, run_dir / layout.MANIFEST)
        _check_texts(run_dir, manifest, result, quick)
    _check_places(run_dir, result)
    alive = manifest is not None and status_of(run_dir, manifest.status) == "running"
    rollouts = _check_rollouts(run_dir, result, quick)
    check_metrics(run_dir, manifest, alive, rollouts, result)
    _check_checkpoints(run_dir, manifest, result, alive, quick)
    _check_evaluations(run_dir, result, quick)
    try:
        read_remote(run_dir)
    except StoreError as error:
        result.error(error.message, error.where or run_dir, error.hint)
    if images is None and manifest is not None and not quick:
        images = RunImages(run_dir, manifest.all_datasets, cwd=manifest.cwd)
    if images is not None:
        _check_images(run_dir, rollouts, images, result)
    if not alive:
        for path in leftovers(run_dir):
            result.warn(
                "half written by a process that was killed; readers ignore it, and the next resume removes it", path
            )
    return result


FOLDERS = (layout.ROLLOUTS, layout.EVAL, layout.CHECKPOINTS, layout.LOGS, layout.MEDIA, layout.KEPT)
"""Possible folders of a run. Each is created only when it is needed."""


def _check_places(run_dir: Path, result: VerifyResult) -> None:
    """Report files in the place of folders, and names that look like the name of a step but are not valid.

    Readers ignore such names, so their content would be lost.
    """
    paths = [run_dir / name for name in FOLDERS]
    paths += _named(run_dir / layout.EVAL)
    for folder, parse in (
        (run_dir / layout.CHECKPOINTS, layout.parse_checkpoint_name),
        (run_dir / layout.ROLLOUTS, layout.parse_rollout_name),
    ):
        for path in _named(folder):
            if parse(path.name) is not None:
                paths += [path] if folder.name == layout.CHECKPOINTS else []
            elif path.name.removeprefix(layout.STEP_PREFIX)[:1].isdigit():
                hint = "it was renamed or copied: restore its name, or move it out of the run"
                result.error("this is not the name of a step, so nothing reads it", path, hint)
    for path in paths:
        if path.exists() and not path.is_dir():
            result.error("this is a file, but should be a folder", path)


def _named(folder: Path) -> list[Path]:
    """Return the entries of a folder, without hidden and half-written ones; [] if the folder is missing."""
    return sorted(p for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []


def _check_texts(run_dir: Path, manifest: Manifest, result: VerifyResult, quick: bool) -> None:
    """Check the files that were written once against their hashes: recipes, code.diff, kept texts, rollouts, images."""
    later = {} if quick else _written_later(run_dir)
    for name, sha256 in {**_written_once(run_dir, manifest), **later}.items():
        path = run_dir / name
        try:
            if not path.is_file():
                result.error("a file that the manifest names is missing", path)
            elif sha256 and sha256_of(path) != sha256:
                result.error("this file was changed after the run had written it", path)
        except OSError as error:
            result.error(f"a file that the manifest names cannot be read: {error.strerror}", path)
    first, *later = resolved_files(run_dir)
    for path in ([first] if first.exists() else []) + later:
        try:
            read_resolved_file(path)
        except StoreError as error:
            result.error(error.message, path)
    dirty = manifest.git is not None and manifest.git.get("dirty")
    if dirty and layout.CODE_DIFF not in manifest.files and not (run_dir / layout.CODE_DIFF).is_file():
        result.error("the code had changes that are not committed, but code.diff is missing", run_dir)
    if not manifest.attempts:
        result.error("the manifest has no attempt", run_dir / layout.MANIFEST)


def _written_once(run_dir: Path, manifest: Manifest) -> dict[str, str]:
    """Return file -> its sha256, or "" if the sha256 is unknown, for files that are written once.

    They come from the manifest's table. If an older run has no table, they are the recipe and the reward files; prompts
    are left out, because a prompt's hash is not the hash of its file.
    """
    if manifest.files:
        return dict(manifest.files)
    sha256_by_file = {layout.RECIPE: manifest.recipe_sha256} if manifest.recipe_sha256 else {}
    if not all("changes" in attempt for attempt in read_raw(run_dir).get("attempts", ())):
        return sha256_by_file  # run of a version without the folder kept/
    for record in (single for reward in manifest.rewards for single in reward.get("rewards") or [reward]):
        if ".py" in str(record.get("name")):
            path = layout.kept_path(run_dir, "reward", str(record.get("sha256")))
            text = path.read_bytes() if path.is_file() else b""
            known = HIDDEN.encode() not in text
            sha256_by_file[path.relative_to(run_dir).as_posix()] = str(record.get("sha256")) if known else ""
    return sha256_by_file


def _written_later(run_dir: Path) -> dict[str, str]:
    """Return file -> its sha256 for rollouts and images, from the lines of metrics, without those that were deleted."""
    try:
        tables = [line["files"] for line in read_file(run_dir).lines if isinstance(line.get("files"), dict)]
    except StoreError:
        return {}  # `check_metrics` reports it
    return {name: str(sha256) for table in tables for name, sha256 in table.items() if (run_dir / name).is_file()}


def _check_rollouts(run_dir: Path, result: VerifyResult, quick: bool) -> dict[Path, Held]:
    """Check the rollout files. Return a `Held` for each readable file."""
    sound: dict[Path, Held] = {}
    folder = run_dir / layout.ROLLOUTS
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        parsed = layout.parse_rollout_name(path.name)
        if parsed is None:
            continue
        try:
            if quick:
                sound[path] = Held(*parsed, count_rows(path, None))
                continue
            groups = read_rollouts(path)
        except StoreError as error:
            result.error(error.message, path)
            continue
        samples = [sample for group in groups for sample in group.samples]
        scores = [sample.score.value for sample in samples if sample.score.error is None]
        trajectories = [sample.trajectory for sample in samples]
        versions = frozenset[int]().union(*(policy_versions(t.version, t.segments) for t in trajectories))
        sound[path] = Held(*parsed, len(samples), versions, fmean(scores) if scores else None)
    result.counts["rollout files"] = len(sound)
    result.counts["samples"] = sum(held.samples for held in sound.values())
    return sound


def _check_checkpoints(
    run_dir: Path, manifest: Manifest | None, result: VerifyResult, alive: bool, quick: bool
) -> None:
    complete = layout.complete_checkpoints(run_dir)
    result.counts["checkpoints"] = len(complete)
    for path in complete:
        for fault in faults(path, read=not quick):
            result.error(fault.message, path, fault.hint)
    if not alive:
        for path in layout.incomplete_checkpoints(run_dir):
            result.warn(
                "this checkpoint has no COMPLETE: its save was cut; readers ignore it, and the next resume removes it",
                path,
            )
    packed = (run_dir / layout.PACKED).is_file()
    for attempt in manifest.attempts if manifest and not packed else ():
        if attempt.from_checkpoint and Path(attempt.from_checkpoint).is_absolute():
            result.error(f"attempt {attempt.number} has a checkpoint outside of the run", attempt.from_checkpoint)


def _check_evaluations(run_dir: Path, result: VerifyResult, quick: bool) -> None:
    """Check every folder in eval/.

    An evaluation gets its final name only when it is complete. So an incomplete one is damaged.
    """
    folders = layout.eval_folders(run_dir)
    result.counts["evaluations"] = len(folders)
    for folder in folders:
        if not (folder / layout.EVAL_SUMMARY).is_file():
            result.error("this evaluation has no summary.json, so no command shows it", folder)
            continue
        try:
            summary = read_summary(folder)
        except StoreError as error:
            result.error(error.message, error.where or folder, error.hint)
            summary = {}
        path = folder / layout.EVAL_ROWS
        try:
            rows = sum(row_groups(path)) if quick else read_rows(path).num_rows
        except StoreError as error:
            result.error(error.message, path)
            continue
        if not quick and (folder / layout.EVAL_HASHES).is_file():
            _check_hashes(folder, result)
        summary_rows = summary.get("rows")
        if isinstance(summary_rows, int) and summary_rows != rows:
            result.error(f"the summary has {summary_rows} rows, but the file has {rows}", path)


def _check_hashes(folder: Path, result: VerifyResult) -> None:
    """Check the files of an evaluation against its table of hashes, in the form of the program `sha256sum`."""
    table = read_regular(folder / layout.EVAL_HASHES)
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != layout.EVAL_HASHES)
    for path in paths:
        if hash_line(path) not in table.splitlines():
            result.error("this file of an evaluation, or its hash, was changed after it was written", path)
    if len(table.splitlines()) != len(paths):
        result.error("the evaluation has files without a hash, or hashes without a file", folder / layout.EVAL_HASHES)


def _check_images(run_dir: Path, rollouts: Mapping[Path, Any], images: RunImages, result: VerifyResult) -> None:
    named = rollout_media(rollouts)
    result.counts["images"] = len(named)
    try:
        missing = [media for media in named.values() if images.find(media) is None]
    except StoreError as error:
        result.error(error.message, error.where or run_dir)
        return
    if missing:
        why = "; ".join(images.notes) or "no media/ and no dataset has them"
        result.error(
            f"{len(missing)} of {len(named)} images of the rollouts cannot be found: {why}",
            run_dir,
            "put the dataset back where it was, or open an archive made by `vlmrl runs pack`",
        )


MOST_LINES = 20


def damage_of(run_dir: Path) -> list[str]:
    """Return one sentence for each file of a run that is missing, incomplete or wrong.

    All files are checked, but only the parts that are needed for this are read.
    """
    sentences = []
    for problem in verify_run(run_dir, quick=True).errors:
        where = problem.where or ""
        inside = where.removeprefix(f"{run_dir}/") if where != str(run_dir) else ""
        sentences.append(f"{inside}: {problem.message}" if inside else problem.message)
    return sentences


def shortened(lines: list[str], run_id: str) -> list[str]:
    """Return the first MOST_LINES lines; if there are more, add a line with the command that prints all."""
    if len(lines) <= MOST_LINES:
        return lines
    return [*lines[:MOST_LINES], f"... and {len(lines) - MOST_LINES} more: vlmrl runs verify {run_id}"]
