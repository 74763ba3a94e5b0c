"""Evaluation: the prompts, sampling, parsing and reward of training, on a fixed set of rows. And its files.

<run>/eval/<name>/rows.parquet     one row a response: text, score, parts, outcome
                  summary.json     metrics with intervals, what was evaluated; written last
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmrl.data.encode import Encoder
from vlmrl.errors import DataError, StoreError
from vlmrl.evaluate.metrics import summarise
from vlmrl.rewards.scorer import Scorer
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.sample import encode_prompt, sample_rollouts, score_rollouts
from vlmrl.store.files import remove_tree, temp_path, write_atomic, write_json
from vlmrl.store.layout import EVAL_ROWS, EVAL_SUMMARY
from vlmrl.tasks.source import Source
from vlmrl.types import Group, SamplingParams

SCHEMA = 1
CHUNK_PROMPTS = 512
"""Prompts encoded at once: bounds memory, does not change results."""
NO_PROMPT_LIMIT = 2**31
JSON_COLUMNS = ("truth", "parts")
OUTCOME = "outcome/"
"""Prefix, in the Parquet file, of the columns that are the task's outcome."""


@dataclass(frozen=True)
class Evaluation:
    """Rows and summary of one evaluation.

    Args:
        rows: one mapping a response, see `records`; each outcome is also a key of its own (`row["accuracy"]`).
        summary: see `evaluate.metrics.summarise`; as read from disk it also has "schema" and "meta".
    """

    rows: list[dict[str, Any]]
    summary: dict[str, Any]


def evaluate(
    generator: Generator, encoder: Encoder, source: Source, scorer: Scorer, *, params: SamplingParams, seed: int = 0,
    max_rows: int | None = None, samples: int = 1, strict: bool = False, progress: Callable[[int], Any] | None = None,
) -> Evaluation:  # fmt: skip
    """Answer, parse and score the rows of a source.

    Args:
        params: temperature 0 = greedy.
        seed: of sampling, and of the intervals.
        max_rows: the first so many rows; None = all.
        samples: responses a prompt.
        strict: a bug in the reward stops with its row; else the row's score is None and it is counted.
        progress: called with the number of responses newly finished.
    Raises: DataError when the source has no rows; RewardError when strict, or when the reward failed for every row.
    """
    count = len(source.rows) if max_rows is None else min(max_rows, len(source.rows))
    if count == 0:
        raise DataError(f"split `{source.split}` of `{source.name}` has no rows to evaluate")
    groups: list[Group] = []
    for start in range(0, count, CHUNK_PROMPTS):
        rows = [source.rows[i] for i in range(start, min(start + CHUNK_PROMPTS, count))]
        prompts = [encode_prompt(source, row, 0, encoder, NO_PROMPT_LIMIT) for row in rows]
        rollouts = sample_rollouts(
            generator, prompts, params, num_samples=samples, run_seed=seed, version=generator.version, progress=progress
        )
        # A reward that fails on every row of the first chunk is a bug, not bad luck: strict shows the first row.
        scored = score_rollouts(rollouts, {source.name: scorer}, strict=strict)
        if start == 0 and all(s.score.error is not None for g in scored for s in g.samples):
            score_rollouts(rollouts[:1], {source.name: scorer}, strict=True)
        groups += scored
    found = records(groups, source)
    return Evaluation(found, summarise(found, seed=seed))


def records(groups: Sequence[Group], source: Source) -> list[dict[str, Any]]:
    """One mapping a response: prompt_id, sample, seed, source, task, truth, text, finish, num_tokens, score, parts,
    note, error, images, outcome, and each outcome under its own name.

    Raises: DataError when the task gives an outcome the name of another field.
    """
    found = []
    for group in groups:
        for s in group.samples:
            outcome = dict(source.task.outcome(group.row.truth, s.text))
            row: dict[str, Any] = {
                "prompt_id": group.row.prompt_id,
                "sample": s.trajectory.sample,
                "seed": s.trajectory.seed,
                "source": group.row.source,
                "task": group.row.task,
                "truth": dict(group.row.truth),
                "text": s.text,
                "finish": s.trajectory.finish,
                "num_tokens": len(s.trajectory.response_ids),
                "score": s.score.value if math.isfinite(s.score.value) else None,
                "parts": dict(s.score.parts),
                "note": s.score.note,
                "error": s.score.error,
                "images": [
                    {"sha256": m.sha256, "width": m.width, "height": m.height, "kind": m.kind} for m in group.row.media
                ],
                "outcome": outcome,
            }
            found.append(_with_outcome(row, source.task.name))
    return found


def write_evaluation(folder: Path, evaluation: Evaluation, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Write an evaluation; one that is there already is replaced as a whole. Returns the summary with `meta` in it.

    Args: meta: what was evaluated (model, checkpoint, split, sampling ...); JSON values.
    """
    summary = {"schema": SCHEMA, "meta": dict(meta), **evaluation.summary}
    making = temp_path(folder)
    making.mkdir(parents=True)
    write_atomic(making / EVAL_ROWS, _parquet(evaluation.rows))
    write_json(making / EVAL_SUMMARY, summary)
    if folder.exists():
        remove_tree(folder)
    making.rename(folder)
    return summary


def read_evaluation(folder: Path) -> Evaluation:
    """What `write_evaluation` wrote. Raises: StoreError when it is missing, damaged or of a newer schema."""
    return Evaluation(_read_rows(folder / EVAL_ROWS), read_summary(folder))


def read_summary(folder: Path) -> dict[str, Any]:
    """summary.json of an evaluation. Raises: StoreError as `read_evaluation`."""
    path = folder / EVAL_SUMMARY
    try:
        summary = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise StoreError("there is no finished evaluation", where=str(folder)) from None
    except (OSError, ValueError) as error:
        raise StoreError(f"the evaluation's summary is damaged: {error}", where=str(path)) from error
    if not isinstance(summary, dict) or not isinstance(summary.get("metrics"), dict):
        raise StoreError("this file is no summary of an evaluation", where=str(path))
    if summary.get("schema") != SCHEMA:
        message = f"this evaluation has schema {summary.get('schema')!r}; this vlmrl reads {SCHEMA}"
        raise StoreError(message, where=str(path), hint="upgrade vlmrl")
    return summary


def _with_outcome(row: dict[str, Any], task: str) -> dict[str, Any]:
    taken = sorted(set(row) & set(row["outcome"]))
    if taken:
        raise DataError(f"task `{task}` calls an outcome `{taken[0]}`, which is a field of every evaluation row")
    return row | row["outcome"]


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    image = pa.struct([("sha256", pa.string()), ("width", pa.int32()), ("height", pa.int32()), ("kind", pa.string())])
    kinds = {
        "prompt_id": pa.string(), "sample": pa.int32(), "seed": pa.int64(), "source": pa.string(), "task": pa.string(),
        "truth": pa.string(), "text": pa.string(), "finish": pa.string(), "num_tokens": pa.int32(),
        "score": pa.float64(), "parts": pa.string(), "note": pa.string(), "error": pa.string(),
        "images": pa.list_(image),
    }  # fmt: skip
    columns = {name: pa.array([_cell(row[name]) for row in rows], kind) for name, kind in kinds.items()}
    for name in dict.fromkeys(name for row in rows for name in row["outcome"]):
        columns[OUTCOME + name] = pa.array([row["outcome"].get(name) for row in rows], pa.float64())
    table = pa.table(columns).replace_schema_metadata({"vlmrl.schema": str(SCHEMA)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def _cell(value: Any) -> Any:
    """A value as Parquet holds it: mappings as JSON text, half surrogate pairs as their escapes."""
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _read_rows(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        raw = pq.read_table(path).to_pylist()
        rows = []
        for row in raw:
            outcome = {k.removeprefix(OUTCOME): v for k, v in row.items() if k.startswith(OUTCOME)}
            plain = {k: v for k, v in row.items() if not k.startswith(OUTCOME)}
            plain |= {k: json.loads(plain[k]) for k in JSON_COLUMNS}
            rows.append(plain | {"outcome": outcome} | outcome)
    except (OSError, pa.ArrowException, KeyError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StoreError(f"the evaluation's rows cannot be read: {reason}", where=str(path)) from error
    return rows
