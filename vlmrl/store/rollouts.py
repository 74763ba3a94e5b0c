"""Rollouts in Parquet: every sample of a step, with all data that repeat the reward and the update.

The file has one row per sample. `read_rollouts` returns exactly the `types.Group` that `write_rollouts` wrote, with two
exceptions: sampler log-probs are stored as float32 (as engines return them), and a group without samples is lost. The
files are plain Parquet (zstd); their metadata have `vlmrl.schema`, `vlmrl.step` and `vlmrl.attempt`. The columns truth,
columns and parts hold JSON as Python's `json` writes it. In texts, secrets of the process are hidden; in notes and
errors, everything that looks like a secret. Token ids are never changed, so they may still contain a secret.

Columns that need an explanation: `group` is the index of the row's group in the step. `token_ids` are all tokens after
the prompt. `segments` has an entry per span of tokens: start and end index into `token_ids`, author, whether it is
trained, whether it was sampled and by which version (null: that of the row), and its number of images. `sampler_logp`
is NaN where no token was sampled. The first `num_row_images` of `images` belong to the prompt, the others to the
segments, in order; `seen_width` and `seen_height` are sizes after resizing for the model (null: not known). `artifacts`
are images that the reward made. `turns` is JSON, null if the response is a single turn of the assistant.

`ending` is the reason why an episode ended, `measured` JSON of what its environment measured; null for one turn.

`dependency` has a number for each trained token: how much it depends on the images, in nats; null if it was not
measured.

Schema 3 lacks `dependency`. Schema 2 lacks also `ending` and `measured`. Schema 1 lacks also `status`, `detail`,
`artifacts`, `turns`, the authors, versions and images of segments, and the seen sizes. Readers return defaults for
them: sampled tokens are the policy's, other tokens the environment's.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from vlmrl.errors import StoreError
from vlmrl.redaction.redact import hide_known, redact_text, redact_value
from vlmrl.store.checkpoints import hashes_of
from vlmrl.store.files import write_atomic
from vlmrl.store.layout import DEMONSTRATIONS, media_path, parse_rollout_name, rollout_format
from vlmrl.store.media import write_shard
from vlmrl.store.metrics import counted
from vlmrl.store.table_reader import arrow_fields, check_values, damage_told, file_batches, open_parquet, schema_number
from vlmrl.types import Group, Media, Row, Sample, Score, ScoredSample, Segment, Size, Status, Trajectory, Turn
from vlmrl.untrusted import encodable, parse_json, plural

if TYPE_CHECKING:
    import pyarrow as pa


def group_columns(group: Group) -> dict[str, Any]:
    row = group.row
    return {
        "source": row.source,
        "task": row.task,
        "prompt_id": row.prompt_id,
        "truth": _json(row.truth),
        "columns": _json(row.columns),
        "prompt_text": _text(group.prompt_text),
        "num_row_images": len(row.media),
    }


def sample_columns(row: Row, scored: ScoredSample) -> dict[str, Any]:
    t = scored.trajectory
    if (t.task, t.prompt_id) != (row.task, row.prompt_id) or t.media != row.media:
        raise ValueError(f"the trajectory of {t.task}/{t.prompt_id} is in the group of {row.task}/{row.prompt_id}")
    logp: list[float] = []
    for s in t.segments:
        if s.sampler_logp is not None and len(s.sampler_logp) != len(s.ids):
            raise ValueError(f"{len(s.ids)} tokens but {len(s.sampler_logp)} log-probs in a segment of {t.prompt_id}")
        logp.extend([math.nan] * len(s.ids) if s.sampler_logp is None else s.sampler_logp)
    return {
        "version": t.version,
        "occurrence": t.occurrence,
        "sample": t.sample,
        "seed": t.seed,
        "text": _text(scored.text),
        "prompt_ids": t.prompt_ids,
        "token_ids": t.response_ids,
        "sampler_logp": logp,
        "segments": _segment_fields(t.segments),
        "finish": t.finish,
        "parts": _json(scored.score.parts),
        "score": scored.score.value,
        "note": _remark(scored.score.note),
        "error": None if scored.score.error is None else _remark(scored.score.error),
        "advantage": scored.advantage,
        "masked": scored.masked,
        "images": [
            *image_fields(t.media, t.seen_sizes),
            *(i for s in t.segments for i in image_fields(s.media, s.seen_sizes)),
        ],
        "generate_seconds": scored.generate_seconds,
        "reward_seconds": scored.reward_seconds,
        "status": scored.score.status,
        "detail": None if scored.score.detail is None else _json(redact_value(scored.score.detail)),
        "artifacts": [{"name": _remark(name), **m.fields()} for name, m in sorted(scored.score.artifacts.items())],
        "turns": turns_text(scored.turns) if scored.turns else None,
        "ending": scored.ending,
        "measured": _json(scored.measured) if scored.measured else None,
        "dependency": scored.dependency,
    }


def _segment_fields(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    fields, start = [], 0
    for s in segments:
        end = start + len(s.ids)
        fields.append(
            {
                "role": s.role,
                "start": start,
                "end": end,
                "trained": s.trained,
                "sampled": s.sampler_logp is not None,
                "author": s.author,
                "version": s.version,
                "num_images": len(s.media),
            }
        )
        start = end
    return fields


def episode_fields(sample: Sample) -> dict[str, Any]:
    """Return what a response is besides its text and ids, as JSON values, images included; {} for a single turn."""
    if sample.ending is None:
        return {}
    return {
        "segments": _segment_fields(sample.segments),
        "images": [i for s in sample.segments for i in image_fields(s.media, s.seen_sizes)],
        "turns": turns_text(sample.turns),
        "files": {sha256: base64.b64encode(file).decode() for sha256, file in sample.files.items()},
        "ending": sample.ending,
        "measured": dict(sample.measured),
        "fault": sample.fault,
        "is_outage": sample.is_outage,
    }


def read_episode(fields: Mapping[str, Any], ids: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of a `Sample` from `episode_fields`, without log-probs; {} for a single turn.

    Raises: ValueError, KeyError or TypeError.
    """
    if fields.get("ending") is None:
        return {}
    row = {"token_ids": ids, "sampler_logp": [0.0] * len(ids), "num_row_images": 0, **fields}
    return {
        "segments": tuple(replace(s, sampler_logp=None) for s in _segments(row)),
        "turns": read_turns(fields["turns"]),
        "files": {sha256: base64.b64decode(file) for sha256, file in fields["files"].items()},
        "ending": fields["ending"],
        "measured": fields["measured"],
        "fault": fields["fault"],
        "is_outage": fields.get("is_outage", False),
    }


def image_fields(media: Sequence[Media], seen: Sequence[Size]) -> list[dict[str, Any]]:
    """Return images with `seen`, their sizes after resizing for the model; `seen` may be empty."""
    if seen and len(seen) != len(media):
        raise ValueError(f"{len(media)} images but {len(seen)} sizes that the model saw")
    sizes = seen or [(None, None)] * len(media)
    return [
        {**m.fields(), "seen_width": width, "seen_height": height}
        for m, (width, height) in zip(media, sizes, strict=True)
    ]


def turns_text(turns: Sequence[Turn]) -> str:
    """Return turns as JSON text."""
    content = [
        {
            "role": turn.role,
            "text": _text(turn.text),
            "media": [m.fields() for m in turn.media],
            "calls": [{"name": call.name, "arguments": dict(call.arguments)} for call in turn.calls],
            **({"errors": turn.errors} if turn.errors else {}),
            **({"seconds": turn.seconds} if turn.seconds else {}),
            **({"unfit": turn.unfit} if turn.unfit else {}),
            **({"seen_sizes": turn.seen_sizes} if turn.seen_sizes else {}),
        }
        for turn in turns
    ]
    return _json({"turns": content})


def read_turns(text: str | None) -> tuple[Turn, ...]:
    """Return the turns of a response, from the column `turns`; () for null.

    Raises: ValueError, KeyError or TypeError.
    """
    return () if text is None else tuple(map(Turn.of, parse_json(text)["turns"]))


def seen_of(images: Sequence[Mapping[str, Any]]) -> tuple[Size, ...]:
    """Return the sizes of images after resizing for the model, from the column `images`; () if one is not known."""
    sizes = [(image.get("seen_width"), image.get("seen_height")) for image in images]
    return () if any(None in size for size in sizes) else tuple(sizes)  # type: ignore[return-value]


def row_of(row: dict[str, Any]) -> Row:
    media = tuple(map(Media.of, row["images"][: row["num_row_images"]]))
    truth, columns = parse_json(row["truth"]), parse_json(row["columns"])
    return Row(row["prompt_id"], row["source"], row["task"], truth, media, columns)


def _segments(row: Mapping[str, Any]) -> tuple[Segment, ...]:
    ids, logp = tuple(row["token_ids"]), tuple(row["sampler_logp"])
    segments: list[Segment] = []
    first = row["num_row_images"]
    for s in row["segments"]:
        images = row["images"][first : first + s.get("num_images", 0)]
        first += len(images)
        segments.append(
            Segment(
                s["role"],
                ids[s["start"] : s["end"]],
                s["trained"],
                logp[s["start"] : s["end"]] if s["sampled"] else None,
                author=s.get("author", "policy" if s["sampled"] else "environment"),
                version=s.get("version"),
                media=tuple(map(Media.of, images)),
                seen_sizes=seen_of(images),
            )
        )
    return tuple(segments)


def sample_of(row: dict[str, Any]) -> ScoredSample:
    images = row["images"][: row["num_row_images"]]
    trajectory = Trajectory(
        task=row["task"],
        prompt_id=row["prompt_id"],
        occurrence=row["occurrence"],
        sample=row["sample"],
        version=row["version"],
        seed=row["seed"],
        prompt_ids=tuple(row["prompt_ids"]),
        segments=_segments(row),
        media=tuple(map(Media.of, images)),
        finish=row["finish"],
        seen_sizes=seen_of(images),
    )
    if row["status"] not in get_args(Status):
        raise ValueError(f"`{row['status']}` is not a status of a score")
    score = Score(
        row["score"],
        parse_json(row["parts"]),
        row["note"],
        row["error"],
        status=row["status"],
        detail=None if row["detail"] is None else parse_json(row["detail"]),
        artifacts={a["name"]: Media.of(a) for a in row["artifacts"]},
    )
    return ScoredSample(
        trajectory,
        row["text"],
        score,
        row["advantage"],
        row["masked"],
        row["generate_seconds"],
        row["reward_seconds"],
        turns=read_turns(row["turns"]),
        ending=row["ending"],
        measured={} if row["measured"] is None else parse_json(row["measured"]),
        dependency=None if row["dependency"] is None else tuple(row["dependency"]),
    )


def _json(value: Any) -> str:
    """Return JSON text that Parquet can store. Characters are escaped only if a string has half a surrogate pair."""
    text = json.dumps(dict(value), ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(dict(value))
    return hide_known(text)


def _text(text: str) -> str:
    """Return a text from which scores are computed. Only secrets of this process are hidden in it.

    See redaction/redact.py.
    """
    return hide_known(encodable(text))


@lru_cache(maxsize=256)
def _remark(text: str) -> str:
    """Return a note or error of a reward with all secrets hidden. No score is computed from such texts.

    The result is cached, because rewards return few different notes.
    """
    return encodable(redact_text(text))


SCHEMA = 4
ADDED = {
    2: {"status": "ok", "detail": None, "artifacts": (), "turns": None},
    3: {"ending": None, "measured": None},
    4: {"dependency": None},
}
"""Schema -> columns that it added, with their values for files of an older one."""
REQUIRED = (
    "step:int32 attempt:int32 group:int32 version:int64 source:string task:string prompt_id:string occurrence:int32 "
    "sample:int32 seed:int64 truth:string columns:string prompt_text:string text:string prompt_ids:[int32] "
    "token_ids:[int32] sampler_logp:[float32] segments:segments finish:string parts:string score:float64 note:string "
    "advantage:float64 masked:bool images:images num_row_images:int32 generate_seconds:float64 reward_seconds:float64 "
    "status:string artifacts:artifacts"
)
OPTIONAL = "error:string detail:string turns:string ending:string measured:string dependency:[float32]"
"""Columns of a rollout file (`arrow_fields`): those without a null, and the others."""


@cache
def arrow_schema() -> pa.Schema:
    """Return the Arrow schema of a rollout file: its columns and their types."""
    import pyarrow as pa

    required = [pa.field(*one, nullable=False) for one in arrow_fields(REQUIRED)]
    return pa.schema(required + [pa.field(*one) for one in arrow_fields(OPTIONAL)])


class RolloutFiles:
    """Files of the rollouts of one attempt."""

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self.run_dir, self.attempt = run_dir, attempt
        self._name = rollout_format(attempt)

    def write(self, step: int, groups: Sequence[Group]) -> dict[str, str]:
        """Write the images that were made in a step, then its groups, atomically.

        Returns: name of each file in the run's folder -> its sha256.
        """
        samples = [sample for group in groups for sample in group.samples]
        images = {sha: content for s in samples for sha, content in (*s.files.items(), *s.score.files.items())}
        hashes: dict[str, str] = {}
        if images:
            write_shard(shard := media_path(self.run_dir, step, self.attempt), sorted(images.items()))
            hashes = hashes_of(self.run_dir, [shard])
        name, shown = self._name.format(step + 1), [g for g in groups if g.demonstrations]
        if shown:  # in files of their own: nothing that counts responses of the policy reads them
            theirs = [replace(g, samples=g.demonstrations, demonstrations=()) for g in shown]
            path = f"{DEMONSTRATIONS}/{Path(name).name}"
            hashes[path] = write_rollouts(self.run_dir / path, theirs, step=step, attempt=self.attempt)
        return hashes | {name: write_rollouts(self.run_dir / name, groups, step=step, attempt=self.attempt)}


def write_rollouts(path: Path, groups: Sequence[Group], *, step: int, attempt: int = 1) -> str:
    """Write one step's groups, atomically, and return the file's sha256. The folder is created.

    Raises: ValueError when a trajectory does not belong to its group's row; StoreError when the write fails.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = arrow_schema()
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    for index, group in enumerate(groups):
        shared = group_columns(group)
        for sample in group.samples:
            row = {"step": step, "attempt": attempt, "group": index, **shared, **sample_columns(group.row, sample)}
            for name, values in columns.items():
                values.append(row[name])
    metadata = {"vlmrl.schema": str(SCHEMA), "vlmrl.step": str(step), "vlmrl.attempt": str(attempt)}
    table = pa.table(columns, schema=schema.with_metadata(metadata))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content := sink.getvalue().to_pybytes(), crash="mid-rollout")
    return hashlib.sha256(content).hexdigest()


def read_rollouts(path: Path) -> list[Group]:
    """Return the groups of one rollout file, as they were written.

    Raises: StoreError when the file is missing, damaged, not a rollout file, or of a newer schema.
    """
    table = read_table(path)
    with damage_told(path, "rollouts have a value of the wrong type"):
        groups = [list(rows) for _, rows in groupby(table.to_pylist(), lambda row: row["group"])]
        return [Group(row_of(rows[0]), rows[0]["prompt_text"], tuple(map(sample_of, rows))) for rows in groups]


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Return a rollout file, or some of its columns, as an Arrow table. Its schema number and columns are checked.

    Raises: StoreError as `read_rollouts`.
    """
    with _opened(path, columns) as (file, lacking):
        stored = None if columns is None else [name for name in columns if name not in lacking]
        table = file.read(columns=stored)
        check_values(table, arrow_schema())
        for name in lacking:
            table = table.append_column(name, _default(name, len(table)))
        return table if columns is None else table.select(list(columns))


def rollout_media(paths: Iterable[Path]) -> dict[str, Media]:
    """Return hash -> image for all images in rollout files, in order: of prompts, responses and rewards."""
    media_by_hash: dict[str, Media] = {}
    for path in paths:
        table = read_table(path, ["images", "artifacts"])
        for name in table.column_names:
            for images in table.column(name).to_pylist():
                for image in images:
                    media_by_hash.setdefault(image["sha256"], Media.of(image))
    return media_by_hash


def read_batches(
    path: Path, columns: Sequence[str], *, rows: int, repeated: Sequence[str] = ()
) -> Iterator[pa.RecordBatch]:
    """Yield a rollout file in batches of at most `rows` rows. Columns in `repeated` are dictionary-encoded.

    Raises: StoreError as `read_rollouts`.
    """
    with _opened(path, columns, repeated) as (file, lacking):
        stored = [name for name in columns if name not in lacking]
        for batch in file_batches(file, rows, stored):
            check_values(batch, arrow_schema())
            for name in lacking:
                values = _default(name, batch.num_rows)
                batch = batch.append_column(name, values.dictionary_encode() if name in repeated else values)
            yield batch


def count_rows(path: Path, columns: Sequence[str] | None = ()) -> int:
    """Return the number of samples in a rollout file.

    Args:
        columns: columns that the file must have; None = all columns that `write_rollouts` writes.
    Raises: StoreError as `read_rollouts`.
    """
    with _opened(path, columns) as (file, _):
        return file.metadata.num_rows


@contextmanager
def _opened(
    path: Path, columns: Sequence[str] | None, repeated: Sequence[str] = ()
) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Context manager: yield (open file, columns that it lacks), after a check that its step is the one in its name."""
    with open_parquet(path, "the rollout file is damaged", repeated=repeated) as file:
        schema, number = file.schema_arrow, schema_number(file)
        if not (number.isascii() and number.isdigit()):
            raise StoreError("this Parquet file has no rollouts of vlmrl", where=str(path))
        if int(number) > SCHEMA:
            message = f"these rollouts have schema {number}; this vlmrl reads schema {SCHEMA}"
            raise StoreError(message, where=str(path), hint="upgrade vlmrl")
        expected_columns = arrow_schema().names if columns is None else columns
        added = {name for schema, names in ADDED.items() if schema > int(number) for name in names}
        lacking = tuple(name for name in expected_columns if name in added)
        missing = [name for name in expected_columns if name not in schema.names and name not in lacking]
        if missing:
            raise StoreError(
                f"the rollouts lack the column{plural(len(missing))} {', '.join(missing)}", where=str(path)
            )
        name_step, file_step = parse_rollout_name(path.name), _made_at(schema.metadata)
        if name_step is not None and file_step is not None and file_step != name_step:
            actual, said = (f"step {counted(step)} (attempt {attempt})" for step, attempt in (file_step, name_step))
            message = f"the rollouts are of {actual}, the file's name says {said}"
            raise StoreError(message, where=str(path), hint="it was renamed or copied")
        yield file, lacking


def _default(name: str, rows: int) -> Any:
    import pyarrow as pa

    value = next(names[name] for names in ADDED.values() if name in names)
    return pa.array([value] * rows, type=arrow_schema().field(name).type)


def _made_at(metadata: Mapping[bytes, bytes]) -> tuple[int, int] | None:
    """Return (step, attempt) from a file's metadata, or None if they are not in it."""
    words = [metadata.get(key, b"").decode("ascii", "replace") for key in (b"vlmrl.step", b"vlmrl.attempt")]
    return (int(words[0]), int(words[1])) if all(w.isascii() and w.isdigit() for w in words) else None
