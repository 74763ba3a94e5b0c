"""Files of an evaluation, read and written without torch, for programs that compare or show evaluations.

<run>/eval/<name>/rows.parquet     one row per response: text, score, parts, outcome
                  media.arrow      images that rewards made for the responses, if any
                  summary.json     metrics with intervals, what was evaluated; written last
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.json_text import parse_json
from vlmrl.store.evaluated_rows import SCHEMA, read_summary, training_name
from vlmrl.store.files import remove_tree, sync_folder, temp_path, write_atomic, write_json
from vlmrl.store.layout import EVAL_MEDIA, EVAL_ROWS, EVAL_SUMMARY, eval_dir
from vlmrl.store.media import write_shard
from vlmrl.store.secrets.redact import hide_known, redact_text, redact_value
from vlmrl.types import Group, ScoredSample
from vlmrl.visible import encodable

COLUMNS: Mapping[str, str] = {
    "prompt_id": "string",
    "sample": "int32",
    "seed": "int64",
    "source": "string",
    "task": "string",
    "truth": "string",
    "text": "string",
    "finish": "string",
    "num_tokens": "int32",
    "score": "double",
    "parts": "string",
    "note": "string",
    "error": "string",
    "status": "string",
    "images": "list",
    "detail": "string",
    "artifacts": "list",
}
"""Columns of the rows of an evaluation -> their Arrow types; "list" is a list of images."""
JSON_COLUMNS = ("truth", "parts")
REMARKS = ("note", "error")
"""Columns that no score is computed from."""
OUTCOME = "outcome/"
"""Prefix of the columns with the task's outcome, in the Parquet file."""


@dataclass(frozen=True)
class Evaluation:
    """Rows and summary of one evaluation.

    Args:
        rows: one mapping per response, see `evaluate.run.make_records`; each outcome is also a key of its own
            (`row["accuracy"]`).
        summary: see `evaluate.metrics.summarise`; as read from disk it also has "schema" and "meta".
        files: sha256 -> image file that a reward made; not read from disk (store/media.py finds them).
    """

    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)


def write_evaluation(folder: Path, evaluation: Evaluation, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Write an evaluation, replacing an existing one as a whole. Return the summary with `meta` in it.

    Args:
        meta: what was evaluated (model, checkpoint, split, sampling ...); JSON values.
    """
    summary = {"schema": SCHEMA, "meta": redact_value(dict(meta)), **evaluation.summary}
    temp_dir = temp_path(folder)
    temp_dir.mkdir(parents=True)
    try:
        write_atomic(temp_dir / EVAL_ROWS, _parquet(evaluation.rows))
        if evaluation.files:
            write_shard(temp_dir / EVAL_MEDIA, sorted(evaluation.files.items()))
        write_json(temp_dir / EVAL_SUMMARY, summary)
        if folder.exists():
            remove_tree(folder)
        temp_dir.rename(folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temp_dir, ignore_errors=True)
        raise
    return summary


def read_evaluation(folder: Path) -> Evaluation:
    """Return what `write_evaluation` wrote. Raises: StoreError when it is missing, damaged or of a newer schema."""
    return Evaluation(_read_rows(folder / EVAL_ROWS), read_summary(folder))


def training_folder(run_dir: Path, split: str, source: str, step: int, setting: str = "") -> Path:
    """Return the folder for a validation during training. A user's own `vlmrl eval` of that name is not replaced."""
    folder = eval_dir(run_dir, training_name(split, source, step, setting))
    try:
        is_users = not read_summary(folder).get("meta", {}).get("during")
    except StoreError:  # it is missing or damaged
        return folder
    return eval_dir(run_dir, f"training-{folder.name}") if is_users else folder


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    media = [("sha256", pa.string()), ("width", pa.int32()), ("height", pa.int32()), ("kind", pa.string())]
    lists = {"images": pa.list_(pa.struct(media)), "artifacts": pa.list_(pa.struct([("name", pa.string()), *media]))}
    kinds = {name: lists[name] if kind == "list" else pa.type_for_alias(kind) for name, kind in COLUMNS.items()}
    columns = {name: pa.array([_cell(name, row.get(name)) for row in rows], kind) for name, kind in kinds.items()}
    for name in dict.fromkeys(name for row in rows for name in row["outcome"]):
        columns[OUTCOME + name] = pa.array([row["outcome"].get(name) for row in rows], pa.float64())
    table = pa.table(columns).replace_schema_metadata({"vlmrl.schema": str(SCHEMA)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def _cell(name: str, value: Any) -> Any:
    """Return a value as Parquet holds it: mappings as JSON text, half surrogate pairs as their escapes.

    Secrets are hidden as in rollouts.
    """
    if isinstance(value, Mapping):
        return hide_known(json.dumps(redact_value(dict(value)) if name == "detail" else dict(value)))
    if name == "artifacts" and value:
        return [{**artifact, "name": encodable(redact_text(artifact["name"]))} for artifact in value]
    if not isinstance(value, str):
        return value
    hide = redact_text if name in REMARKS else hide_known
    return encodable(hide(value))


def _read_rows(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        raw = pq.read_table(path).to_pylist()
        rows = []
        for row in raw:
            outcome = {k.removeprefix(OUTCOME): v for k, v in row.items() if k.startswith(OUTCOME)}
            plain = {k: v for k, v in row.items() if not k.startswith(OUTCOME)}
            plain |= {k: parse_json(plain[k]) for k in JSON_COLUMNS}
            plain |= {"detail": parse_json(plain.get("detail") or "null"), "artifacts": plain.get("artifacts") or []}
            rows.append(plain | {"outcome": outcome} | outcome)
    except (OSError, pa.ArrowException, KeyError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StoreError(f"the evaluation's rows cannot be read: {reason}", where=str(path)) from error
    return rows


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
