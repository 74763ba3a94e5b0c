"""Deletion of parts of a run: old checkpoints, old rollouts, images that nothing refers to.

The newest complete checkpoint, the best one, and those from which another run started are never deleted. Before
rollouts are deleted, their steps are written to rollouts/pruned.json, so that `verify` does not report them as lost.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from vlmrl.store import layout
from vlmrl.store.evaluated_rows import read_rows
from vlmrl.store.files import remove_tree, require_ordinary, sweep, write_json
from vlmrl.store.listing import list_runs
from vlmrl.store.lock import RunLock
from vlmrl.store.manifest import read_record
from vlmrl.store.media import ShardFolder
from vlmrl.store.rollouts import rollout_media


@dataclass(frozen=True)
class RolloutRule:
    """Rule for rollouts: the newest `keep` steps are kept, and every `every`-th step; `every` = 0: no other steps."""

    keep: int  # at least 1
    every: int = 0

    def doomed(self, steps: Iterable[int]) -> list[int]:
        """Return those of `steps` whose rollouts the rule deletes, in order."""
        ordered = sorted(set(steps))
        return [s for s in ordered[: -self.keep] if not (self.every and s % self.every == 0)]


@dataclass(frozen=True)
class Rules:
    """Rules for deleting parts of a run; None or False = delete nothing of this part.

    Args:
        keep_last: number of newest checkpoints to keep, at least 1.
        media: delete image shards to which no rollout or evaluation refers.
    """

    keep_last: int | None = None
    rollouts: RolloutRule | None = None
    media: bool = False


def prunable(run_dir: Path, keep_last: int, keep_steps: Iterable[int] = ()) -> list[Path]:
    """Return complete checkpoints except the newest `keep_last` (at least 1) and those of `keep_steps`, oldest first.

    Raises: ValueError for `keep_last` below 1.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, not {keep_last}")
    kept_steps = set(keep_steps)
    older = layout.complete_checkpoints(run_dir)[:-keep_last]
    return [path for path in older if layout.parse_checkpoint_name(path.name) not in kept_steps]


def plan_prune(run_dir: Path, rules: Rules, keep_steps: Iterable[int] = ()) -> list[Path]:
    """Return the files and folders that `prune_run` would delete. `keep_steps`: checkpoints to keep too (the best)."""
    require_ordinary(run_dir)
    doomed = [] if rules.keep_last is None else prunable(run_dir, rules.keep_last, keep_steps)
    files = rollout_steps(run_dir)
    deleted_steps = [] if rules.rollouts is None else rules.rollouts.doomed(step for step, _ in files)
    old_rollouts = [path for step, path in files if step in set(deleted_steps)]
    doomed += old_rollouts
    if rules.media:
        doomed += _unnamed_shards(run_dir, [path for _, path in files if path not in old_rollouts])
    return doomed


def prune_run(run_dir: Path, rules: Rules, keep_steps: Iterable[int] = ()) -> list[Path]:
    """Delete the files and folders that `plan_prune` returns, and return them.

    Raises: StoreError if a process is writing the run.
    """
    lock = RunLock(run_dir)
    lock.acquire()
    try:
        sweep(run_dir / layout.CHECKPOINTS)
        doomed = plan_prune(run_dir, rules, keep_steps)
        for path in (p for p in doomed if p.is_dir()):
            remove_tree(path)
        delete_rollouts(run_dir, [p for p in doomed if p.parent.name == layout.ROLLOUTS])
        for path in (p for p in doomed if p.parent.name == layout.MEDIA):
            path.unlink()
    finally:
        lock.release()
    return doomed


def rollout_steps(run_dir: Path) -> list[tuple[int, Path]]:
    """Return (step, file) of every rollout file, of all attempts, in order of steps."""
    folder = run_dir / layout.ROLLOUTS
    names = [(layout.parse_rollout_name(p.name), p) for p in folder.iterdir()] if folder.is_dir() else []
    return sorted((parsed[0], path) for parsed, path in names if parsed is not None)


def delete_rollouts(run_dir: Path, files: Sequence[Path]) -> None:
    """Record the steps as pruned, then delete the files and the demonstrations of their steps.

    In this order, a kill leaves no files that seem to be lost.
    """
    steps = {parsed[0] for path in files if (parsed := layout.parse_rollout_name(path.name)) is not None}
    if not steps:
        return
    ranges = [range(step, step + 1) for step in steps] + pruned_ranges(run_dir)
    record = {"schema": 1, "steps": [[r.start, r.stop - 1] for r in _joined(ranges)]}
    write_json(run_dir / layout.ROLLOUTS / layout.PRUNED, record)
    for path in files:
        (run_dir / layout.DEMONSTRATIONS / path.name).unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def pruned_ranges(run_dir: Path) -> list[range]:
    """Return the steps whose rollouts were deleted on purpose, as ranges.

    They are not expanded, because a damaged record may contain a huge range.

    Raises: StoreError if the record is damaged.
    """
    path = run_dir / layout.ROLLOUTS / layout.PRUNED
    if not os.path.lexists(path):
        return []
    steps = read_record(path, _model(), "the record of deleted rollouts is damaged: it")["steps"]
    return [range(first, last + 1) for first, last in steps]


@cache
def _model() -> Any:
    """Return the model of pruned.json: `steps` has the first and the last step of each range."""
    from pydantic import Field, TypeAdapter, create_model  # at the first use: importing it is slow

    span: Any = Annotated[list[int], Field(min_length=2, max_length=2)]
    fields: Any = {"schema_": (Literal[1], Field(alias="schema")), "steps": (list[span], ...)}
    return TypeAdapter(create_model("Pruned", **fields))


def children(run_dir: Path) -> dict[int, str]:
    """Return step -> id of a run in the same folder whose first weights are this run's checkpoint of that step."""
    run_ids: dict[int, str] = {}
    for run in list_runs(run_dir.absolute().parent):
        for parent in (run.raw.get("parent"), run.raw.get("origin")):
            if isinstance(parent, Mapping) and parent.get("run") == run_dir.name:
                step = layout.parse_checkpoint_name(str(parent.get("checkpoint")).rpartition("/")[2])
                if step is not None:
                    run_ids[step] = run.id
    return run_ids


def _joined(ranges: Iterable[range]) -> list[range]:
    """Return the ranges sorted, with adjacent ones joined. Example: 1-2, 3-3, 7-7 -> 1-3, 7-7."""
    joined: list[range] = []
    for steps in sorted(ranges, key=lambda r: (r.start, r.stop)):
        if joined and steps.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, steps.stop))
        else:
            joined.append(steps)
    return joined


def _unnamed_shards(run_dir: Path, rollouts: Sequence[Path]) -> list[Path]:
    """Return the image shards of which no image is used by a rollout file in `rollouts` or by an evaluation."""
    named = set(rollout_media(rollouts))
    for folder in layout.eval_dirs(run_dir):
        named |= _evaluated_images(folder / layout.EVAL_ROWS)
    shards = sorted((run_dir / layout.MEDIA).glob("*.arrow"))
    return [p for p in shards if not named & set(ShardFolder(p.parent, p.name).hashes())]


def _evaluated_images(path: Path) -> set[str]:
    rows = read_rows(path, ["images"]).column("images").to_pylist()
    return {image["sha256"] for images in rows for image in images or ()}
