"""Is a run folder whole? Every file read, every claim checked; all that is wrong at once, nothing changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmrl.errors import Problem, StoreError
from vlmrl.store import layout, metrics
from vlmrl.store.files import leftovers
from vlmrl.store.kept import resolved_files
from vlmrl.store.listing import status_of
from vlmrl.store.manifest import Manifest, read_manifest
from vlmrl.store.media import RunImages, rollout_media
from vlmrl.store.prune import pruned_steps
from vlmrl.store.remote import read_remote
from vlmrl.store.rollouts import read_rollouts
from vlmrl.store.runs import rollout_files


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


def verify_run(run_dir: Path, images: RunImages | None = None) -> Verdict:
    """Check a run folder: manifest, recipe, metrics, rollouts, checkpoints, evaluations, images, leftovers.

    Args: images: how to find the images; default: the run's media/ and the prepared datasets its manifest names.
    """
    verdict = Verdict()
    try:
        manifest = read_manifest(run_dir)
    except StoreError as error:
        verdict.error(error.message, error.where or run_dir, error.hint)
        manifest = None
    starts = manifest.attempt_starts if manifest else {}
    if manifest is not None:
        _check_recipe(run_dir, manifest, verdict)
    alive = manifest is not None and status_of(run_dir, manifest.status) == "running"
    rollouts = _check_rollouts(run_dir, verdict)
    _check_metrics(run_dir, starts, verdict, rollouts)
    _check_checkpoints(run_dir, manifest, verdict, alive)
    _check_evaluations(run_dir, verdict)
    try:
        read_remote(run_dir)
    except StoreError as error:
        verdict.error(error.message, error.where or run_dir, error.hint)
    if images is None and manifest is not None:
        images = RunImages(run_dir, manifest.all_datasets, cwd=manifest.cwd)
    if images is not None:
        _check_images(run_dir, rollouts, images, verdict)
    if not alive:
        for path in leftovers(run_dir):
            verdict.warn("half written by a process that was cut short; ignored, removed at the next resume", path)
    return verdict


def _check_recipe(run_dir: Path, manifest: Manifest, verdict: Verdict) -> None:
    if manifest.recipe_sha256:
        path = run_dir / layout.RECIPE
        try:
            if hashlib.sha256(path.read_bytes()).hexdigest() != manifest.recipe_sha256:
                verdict.error("the recipe was changed after the run began", path)
        except OSError as error:
            verdict.error(f"the recipe cannot be read: {error.strerror}", path)
    first, *later = resolved_files(run_dir)
    for path in ([first] if first.exists() else []) + later:
        _read_json(path, verdict)
    if manifest.git and manifest.git.get("dirty") and not (run_dir / layout.CODE_DIFF).is_file():
        verdict.error("the code had changes that are not committed, but code.diff is missing", run_dir)
    if not manifest.attempts:
        verdict.error("the manifest names no attempt", run_dir / layout.MANIFEST)


def _check_rollouts(run_dir: Path, verdict: Verdict) -> dict[Path, tuple[int, int, int]]:
    """Readable rollout files -> (step, attempt, samples)."""
    sound: dict[Path, tuple[int, int, int]] = {}
    folder = run_dir / layout.ROLLOUTS
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        parsed = layout.parse_rollout_name(path.name)
        if parsed is None:
            continue
        try:
            groups = read_rollouts(path)
        except StoreError as error:
            verdict.error(error.message, path)
            continue
        stale = {t.version for g in groups for t in g.trajectories} - {parsed[0]}
        if stale:
            verdict.error(f"samples of policy version {min(stale)} in the rollouts of step {parsed[0]}", path)
        sound[path] = (*parsed, sum(len(g.samples) for g in groups))
    verdict.counts["rollout files"] = len(sound)
    verdict.counts["samples"] = sum(samples for _, _, samples in sound.values())
    return sound


def _check_metrics(run_dir: Path, starts: dict[int, int], verdict: Verdict, rollouts: Mapping[Path, Any]) -> None:
    path = run_dir / layout.METRICS
    try:
        content = metrics.read_file(run_dir)
    except StoreError as error:
        verdict.error(error.message, path)
        return
    verdict.counts["metrics lines"] = len(content.lines)
    by_number = dict(zip(content.numbers, content.lines, strict=True))
    for number in content.torn:
        before = next((by_number[n]["attempt"] for n in sorted(by_number, reverse=True) if n < number), 0)
        after = next((by_number[n]["attempt"] for n in sorted(by_number) if n > number), before + 1)
        if after == before:
            verdict.error("a line of metrics is damaged", f"{path}:{number}")
        else:
            verdict.warn("a line of metrics was cut by a kill; readers skip it", f"{path}:{number}")
    unknown = sorted({line["attempt"] for line in content.lines} - set(starts)) if starts else []
    if unknown:
        verdict.error(f"metrics of attempt {unknown[0]}, which the manifest does not know", path)
    steps = {line["step"] for line in metrics.current(content.lines, starts, "train")}
    files = rollout_files(run_dir, starts)
    lost = sorted(steps - set(files) - _pruned(run_dir, verdict)) if files else []
    if lost:
        shown = ", ".join(map(str, lost[:5])) + (" ..." if len(lost) > 5 else "")
        verdict.error(f"{len(lost)} step(s) have metrics but no rollouts: {shown}", run_dir / layout.ROLLOUTS)
    for step in sorted(steps & set(files)):
        line = next(n for n in metrics.current(content.lines, starts, "train") if n["step"] == step)
        told = line.get("rollout/samples")
        held = rollouts.get(files[step])
        if held is not None and isinstance(told, int) and told != held[2]:
            verdict.error(f"step {step}: metrics say {told} samples, the rollouts hold {held[2]}", files[step])


def _pruned(run_dir: Path, verdict: Verdict) -> set[int]:
    try:
        return pruned_steps(run_dir)
    except StoreError as error:
        verdict.error(error.message, error.where or run_dir)
        return set()


def _check_checkpoints(run_dir: Path, manifest: Manifest | None, verdict: Verdict, alive: bool) -> None:
    complete = layout.complete_checkpoints(run_dir)
    verdict.counts["checkpoints"] = len(complete)
    for path in complete:
        meta = _read_json(path / layout.META, verdict)
        if meta is not None:
            _check_hashes(path, meta, verdict)
    if not alive:
        for path in layout.incomplete_checkpoints(run_dir):
            verdict.warn("a checkpoint without COMPLETE: its saving was cut; ignored, removed at the next resume", path)
    packed = (run_dir / layout.PACKED).is_file()
    for attempt in manifest.attempts if manifest and not packed else ():
        if attempt.from_checkpoint and Path(attempt.from_checkpoint).is_absolute():
            verdict.error(f"attempt {attempt.number} names a checkpoint outside of the run", attempt.from_checkpoint)


def _check_hashes(checkpoint: Path, meta: Mapping[str, Any], verdict: Verdict) -> None:
    """meta.json `files`: relative path -> sha256, or {"sha256", "bytes"}. Names that leave the folder are refused."""
    listed = meta.get("files")
    if not isinstance(listed, dict):
        verdict.warn("this checkpoint lists no file hashes; its files were not compared", checkpoint / layout.META)
        return
    for name, told in sorted(listed.items()):
        path = checkpoint / name
        wanted = told.get("sha256") if isinstance(told, dict) else told
        if Path(name).is_absolute() or ".." in Path(name).parts:
            verdict.error(f"the checkpoint names a file outside of itself: {name}", checkpoint / layout.META)
            continue
        try:
            with open(path, "rb") as file:
                found = hashlib.sha256()
                while block := file.read(1 << 20):
                    found.update(block)
        except OSError as error:
            verdict.error(f"a file of this checkpoint cannot be read: {error.strerror}", path)
            continue
        if found.hexdigest() != wanted:
            verdict.error("a file of this checkpoint is not what was saved (hash differs)", path)


def _check_evaluations(run_dir: Path, verdict: Verdict) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = layout.eval_dirs(run_dir)
    verdict.counts["evaluations"] = len(found)
    for folder in found:
        _read_json(folder / layout.EVAL_SUMMARY, verdict)
        path = folder / layout.EVAL_ROWS
        try:
            pq.read_table(path)
        except (OSError, pa.ArrowException) as error:
            verdict.error(f"the rows of this evaluation cannot be read: {str(error).splitlines()[0]}", path)


def _check_images(run_dir: Path, rollouts: Mapping[Path, Any], images: RunImages, verdict: Verdict) -> None:
    named = rollout_media(rollouts)
    verdict.counts["images"] = len(named)
    try:
        missing = [media for media in named.values() if images.find(media) is None]
    except StoreError as error:
        verdict.error(error.message, error.where or run_dir)
        return
    if missing:
        why = "; ".join(images.notes) or "no media/ and no dataset holds them"
        verdict.error(
            f"{len(missing)} of {len(named)} images of the rollouts cannot be found: {why}",
            run_dir,
            "put the dataset back where it was, or open an archive made by `vlmrl runs pack`",
        )


def _read_json(path: Path, verdict: Verdict) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        verdict.error(f"cannot be read: {error.strerror}", path)
        return None
    except ValueError:
        verdict.error("is not whole JSON", path)
        return None
    if not isinstance(value, dict):
        verdict.error("does not hold a JSON object", path)
        return None
    return value
