"""Files of an evaluation, read and written without torch, for programs that compare or show evaluations.

<run>/eval/<name>/rows.parquet     one row per response: text, score, parts, outcome
                  media.arrow      images that rewards made for the responses, if any
                  summary.json     metrics with intervals, what was evaluated
                  SHA256SUMS       hashes of these files; written last
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.evaluate.graded_pieces import ChunkedRows
from vlmrl.evaluate.record_table import (
    group_sizes,
    has_shown,
    outcome_names,
    read_group,
    read_records,
    write_records,
)
from vlmrl.redaction.redact import redact_value
from vlmrl.store.checkpoints import hash_line
from vlmrl.store.evaluated_rows import SCHEMA, read_summary, training_name
from vlmrl.store.files import remove_tree, sync_file, sync_folder, temp_path, write_atomic, write_json
from vlmrl.store.layout import EVAL_HASHES, EVAL_MEDIA, EVAL_ROWS, EVAL_SUMMARY, eval_dir
from vlmrl.store.media import write_shard
from vlmrl.types import Group, ScoredSample


@dataclass(frozen=True)
class Evaluation:
    """Rows and summary of one evaluation.

    Args:
        rows: one mapping per response, see `evaluate.run.make_records`; each outcome is also a key of its own
            (`row["accuracy"]`). Those of a large evaluation that was just made are read from its pieces, one at a time.
        summary: see `evaluate.metrics.summarise`; as read from disk it also has "schema" and "meta".
        files: sha256 -> image file that a reward made; not read from disk (store/media.py finds them).
    """

    rows: Sequence[dict[str, Any]]
    summary: dict[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)


def write_evaluation(folder: Path, evaluation: Evaluation, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Write an evaluation, replacing an existing one as a whole. Return the summary with `meta` in it.

    Args:
        meta: what was evaluated (model, checkpoint, split, sampling ...); JSON values.
    Raises: StoreError if the run is gone: it is not made again.
    """
    summary = {"schema": SCHEMA, "meta": redact_value(dict(meta)), **evaluation.summary}
    temp_dir = temp_path(folder)
    try:
        folder.parent.mkdir(exist_ok=True)
        temp_dir.mkdir()
        write_rows(temp_dir / EVAL_ROWS, evaluation.rows)
        if evaluation.files:
            write_shard(temp_dir / EVAL_MEDIA, sorted(evaluation.files.items()))
        write_json(temp_dir / EVAL_SUMMARY, summary)
        lines = [hash_line(path) for path in sorted(temp_dir.iterdir())]
        write_atomic(temp_dir / EVAL_HASHES, b"\n".join(lines) + b"\n")
        if folder.exists():
            remove_tree(folder)
        temp_dir.rename(folder)
        sync_folder(folder.parent)
    except BaseException as error:
        shutil.rmtree(temp_dir, ignore_errors=True)
        if isinstance(error, (OSError, StoreError)) and not folder.parent.parent.is_dir():
            message = "the run was removed while it was evaluated, so the results have no place"
            hint = "its responses are kept in `unfinished` beside the runs; restore the run and repeat the command"
            raise StoreError(message, where=str(folder), hint=hint) from error
        raise
    return summary


def read_evaluation(folder: Path) -> Evaluation:
    """Return what `write_evaluation` wrote. Raises: StoreError when it is missing, damaged or of a newer schema."""
    return Evaluation(read_records(folder / EVAL_ROWS)[0], read_summary(folder))


def stored_rows(folder: Path) -> Sequence[dict[str, Any]]:
    """Return the rows of a written evaluation, read from the disk when they are looked at."""
    path = folder / EVAL_ROWS
    return ChunkedRows(group_sizes(path), lambda number: read_group(path, number))


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows of an evaluation to a new file. Raises: StoreError when it cannot be written."""
    if isinstance(rows, ChunkedRows):
        write_records(path, rows.chunks(), rows.outcomes, rows.shown)
    else:
        write_records(path, [rows], outcome_names(rows), has_shown(rows))
    sync_file(path)


def training_folder(run_dir: Path, split: str, source: str, step: int, setting: str = "") -> Path:
    """Return the folder for a validation during training. A user's own `vlmrl eval` of that name is not replaced."""
    folder = eval_dir(run_dir, training_name(split, source, step, setting))
    try:
        is_users = not read_summary(folder).get("meta", {}).get("during")
    except StoreError:  # it is missing or damaged
        return folder
    return eval_dir(run_dir, f"training-{folder.name}") if is_users else folder


KEPT_BYTES = 64 * 1024 * 1024
"""Maximum size of all images of an evaluation by `vlmrl eval`; a validation during training has an eighth of it."""


@dataclass
class ArtifactLimit:
    """Limit in bytes, used up response by response. A response that does not fit loses its images and is counted.

    Args:
        left: bytes that may still be kept.
        left_out: responses whose images were not kept.
    """

    left: int
    left_out: int = 0

    def keep(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with the images that fit."""
        return [replace(group, samples=tuple(map(self._kept, group.samples))) for group in groups]

    def _kept(self, sample: ScoredSample) -> ScoredSample:
        score = sample.score
        size = sum(map(len, score.files.values()))
        if size <= self.left:
            self.left -= size
            return sample
        self.left_out += 1
        return replace(sample, score=replace(score, artifacts={}, files={}))


def kept_files(groups: Sequence[Group]) -> dict[str, bytes]:
    """Return the images that rewards made: sha256 -> image file."""
    return {sha256: file for group in groups for s in group.samples for sha256, file in s.score.files.items()}
