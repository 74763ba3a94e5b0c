"""Check of a whole run folder: every file is read and compared. All faults are listed and nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from vlmrl.errors import Problem, StoreError
from vlmrl.redaction.redact import HIDDEN
from vlmrl.regular_file import entry_problems, read_regular
from vlmrl.store import layout
from vlmrl.store.checkpoints import faults, hash_line, sha256_of
from vlmrl.store.evaluated_rows import UNREADABLE, read_rows, read_summary
from vlmrl.store.files import ENTRY_HINT, leftovers
from vlmrl.store.kept_recipe import read_resolved_file, resolved_files
from vlmrl.store.listing import status_of
from vlmrl.store.logger_ids import read_remote
from vlmrl.store.manifest import Manifest, manifest_fault, read_manifest, read_raw
from vlmrl.store.media import RunImages, rollout_media
from vlmrl.store.metrics import read_file
from vlmrl.store.parquet import damage_told
from vlmrl.store.rollouts import count_rows, read_rollouts
from vlmrl.store.verify_metrics import Held, MetricsVerdict, check_metrics
from vlmrl.types import policy_versions


def verify_run(run_dir: Path, images: RunImages | None = None, *, quick: bool = False) -> MetricsVerdict:
    """Check a run folder: manifest, recipe, metrics, rollouts, checkpoints, evaluations, images, leftovers.

    Args:
        images: images of the run; default: those in the run's media/ and the prepared datasets in its manifest.
        quick: find only missing, incomplete or misplaced files. Only the metadata of rollouts and evaluations and the
            names of a checkpoint's files are read, and no images. A changed byte in a file is not found.
    """
    verdict = MetricsVerdict()
    for path, problem in entry_problems(run_dir, layout.LOGGER_FOLDERS):
        verdict.error(f"this {problem}; no command opens it", path, ENTRY_HINT)
    if verdict.errors:
        return verdict  # the other checks would open these entries
    try:
        manifest = read_manifest(run_dir)
    except StoreError as error:
        verdict.error(error.message, error.where or run_dir, error.hint)
        manifest = None
    if manifest is not None:
        if fault := manifest_fault(run_dir):
            verdict.error(fault, run_dir / layout.MANIFEST)
        _check_texts(run_dir, manifest, verdict, quick)
    _check_places(run_dir, verdict)
    alive = manifest is not None and status_of(run_dir, manifest.status) == "running"
    rollouts = _check_rollouts(run_dir, verdict, quick)
    check_metrics(run_dir, manifest, alive, rollouts, verdict)
    _check_checkpoints(run_dir, manifest, verdict, alive, quick)
    _check_evaluations(run_dir, verdict, quick)
    try:
        read_remote(run_dir)
    except StoreError as error:
        verdict.error(error.message, error.where or run_dir, error.hint)
    if images is None and manifest is not None and not quick:
        images = RunImages(run_dir, manifest.all_datasets, cwd=manifest.cwd)
    if images is not None:
        _check_images(run_dir, rollouts, images, verdict)
    if not alive:
        for path in leftovers(run_dir):
            verdict.warn(
                "half written by a process that was killed; readers ignore it, and the next resume removes it", path
            )
    return verdict


FOLDERS = (layout.ROLLOUTS, layout.EVAL, layout.CHECKPOINTS, layout.LOGS, layout.MEDIA, layout.KEPT)
"""Possible folders of a run. Each is created only when it is needed."""


def _check_places(run_dir: Path, verdict: MetricsVerdict) -> None:
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
                verdict.error("this is not the name of a step, so nothing reads it", path, hint)
    for path in paths:
        if path.exists() and not path.is_dir():
            verdict.error("this is a file, but should be a folder", path)


def _named(folder: Path) -> list[Path]:
    """Return the entries of a folder, without hidden and half-written ones; [] if the folder is missing."""
    return sorted(p for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []


def _check_texts(run_dir: Path, manifest: Manifest, verdict: MetricsVerdict, quick: bool) -> None:
    """Check the files that were written once against their hashes: recipes, code.diff, kept texts, rollouts, images."""
    later = {} if quick else _written_later(run_dir)
    for name, sha256 in {**_written_once(run_dir, manifest), **later}.items():
        path = run_dir / name
        try:
            if not path.is_file():
                verdict.error("a file that the manifest names is missing", path)
            elif sha256 and sha256_of(path) != sha256:
                verdict.error("this file was changed after the run had written it", path)
        except OSError as error:
            verdict.error(f"a file that the manifest names cannot be read: {error.strerror}", path)
    first, *later = resolved_files(run_dir)
    for path in ([first] if first.exists() else []) + later:
        try:
            read_resolved_file(path)
        except StoreError as error:
            verdict.error(error.message, path)
    dirty = manifest.git is not None and manifest.git.get("dirty")
    if dirty and layout.CODE_DIFF not in manifest.files and not (run_dir / layout.CODE_DIFF).is_file():
        verdict.error("the code had changes that are not committed, but code.diff is missing", run_dir)
    if not manifest.attempts:
        verdict.error("the manifest has no attempt", run_dir / layout.MANIFEST)


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


def _check_rollouts(run_dir: Path, verdict: MetricsVerdict, quick: bool) -> dict[Path, Held]:
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
            verdict.error(error.message, path)
            continue
        samples = [sample for group in groups for sample in group.samples]
        scores = [sample.score.value for sample in samples if sample.score.error is None]
        trajectories = [sample.trajectory for sample in samples]
        versions = frozenset[int]().union(*(policy_versions(t.version, t.segments) for t in trajectories))
        sound[path] = Held(*parsed, len(samples), versions, fmean(scores) if scores else None)
    verdict.counts["rollout files"] = len(sound)
    verdict.counts["samples"] = sum(held.samples for held in sound.values())
    return sound


def _check_checkpoints(
    run_dir: Path, manifest: Manifest | None, verdict: MetricsVerdict, alive: bool, quick: bool
) -> None:
    complete = layout.complete_checkpoints(run_dir)
    verdict.counts["checkpoints"] = len(complete)
    for path in complete:
        for fault in faults(path, read=not quick):
            verdict.error(fault.message, path, fault.hint)
    if not alive:
        for path in layout.incomplete_checkpoints(run_dir):
            verdict.warn(
                "this checkpoint has no COMPLETE: its save was cut; readers ignore it, and the next resume removes it",
                path,
            )
    packed = (run_dir / layout.PACKED).is_file()
    for attempt in manifest.attempts if manifest and not packed else ():
        if attempt.from_checkpoint and Path(attempt.from_checkpoint).is_absolute():
            verdict.error(f"attempt {attempt.number} has a checkpoint outside of the run", attempt.from_checkpoint)


def _check_evaluations(run_dir: Path, verdict: MetricsVerdict, quick: bool) -> None:
    """Check every folder in eval/.

    An evaluation gets its final name only when it is complete. So an incomplete one is damaged.
    """
    import pyarrow.parquet as pq

    folders = layout.eval_folders(run_dir)
    verdict.counts["evaluations"] = len(folders)
    for folder in folders:
        if not (folder / layout.EVAL_SUMMARY).is_file():
            verdict.error("this evaluation has no summary.json, so no command shows it", folder)
            continue
        try:
            summary = read_summary(folder)
        except StoreError as error:
            verdict.error(error.message, error.where or folder, error.hint)
            summary = {}
        path = folder / layout.EVAL_ROWS
        try:
            with damage_told(path, UNREADABLE):
                rows = pq.read_metadata(path).num_rows if quick else read_rows(path).num_rows
        except StoreError as error:
            verdict.error(error.message, path)
            continue
        if not quick and (folder / layout.EVAL_HASHES).is_file():
            _check_hashes(folder, verdict)
        summary_rows = summary.get("rows")
        if isinstance(summary_rows, int) and summary_rows != rows:
            verdict.error(f"the summary has {summary_rows} rows, but the file has {rows}", path)


def _check_hashes(folder: Path, verdict: MetricsVerdict) -> None:
    """Check the files of an evaluation against its table of hashes, in the form of the program `sha256sum`."""
    table = read_regular(folder / layout.EVAL_HASHES)
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != layout.EVAL_HASHES)
    for path in paths:
        if hash_line(path) not in table.splitlines():
            verdict.error("this file of an evaluation, or its hash, was changed after it was written", path)
    if len(table.splitlines()) != len(paths):
        verdict.error("the evaluation has files without a hash, or hashes without a file", folder / layout.EVAL_HASHES)


def _check_images(run_dir: Path, rollouts: Mapping[Path, Any], images: RunImages, verdict: MetricsVerdict) -> None:
    named = rollout_media(rollouts)
    verdict.counts["images"] = len(named)
    try:
        missing = [media for media in named.values() if images.find(media) is None]
    except StoreError as error:
        verdict.error(error.message, error.where or run_dir)
        return
    if missing:
        why = "; ".join(images.notes) or "no media/ and no dataset has them"
        verdict.error(
            f"{len(missing)} of {len(named)} images of the rollouts cannot be found: {why}",
            run_dir,
            "put the dataset back where it was, or open an archive made by `vlmrl runs pack`",
        )


MOST_LINES = 20


def damage_of(run_dir: Path) -> list[str]:
    """Return one sentence for each file of a run that is missing, incomplete or wrong.

    All files are checked, but only the parts that are needed for this are read.
    """
    return [_sentence(problem, run_dir) for problem in verify_run(run_dir, quick=True).errors]


def shortened(lines: list[str], run_id: str) -> list[str]:
    """Return the first MOST_LINES lines; if there are more, add a line with the command that prints all."""
    if len(lines) <= MOST_LINES:
        return lines
    return [*lines[:MOST_LINES], f"... and {len(lines) - MOST_LINES} more: vlmrl runs verify {run_id}"]


def _sentence(problem: Problem, run_dir: Path) -> str:
    where = problem.where or ""
    inside = where.removeprefix(f"{run_dir}/") if where != str(run_dir) else ""
    return f"{inside}: {problem.message}" if inside else problem.message
