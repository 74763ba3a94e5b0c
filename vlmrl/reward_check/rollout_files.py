"""Reader of a run's rollout files, and of the rows of its evaluations, as chunks; see response_columns.py.

Texts are read when needed and are not kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlmrl.errors import StoreError
from vlmrl.reward_check.evaluated_files import count_saved, evaluation_of, read_saved
from vlmrl.reward_check.response_columns import Chunk, Decoded, Head, ResponseColumns
from vlmrl.reward_check.scores import Coded, Ints, Scores
from vlmrl.store.metrics import counted
from vlmrl.store.rollouts import read_turns, seen_of
from vlmrl.types import Media, RewardInput, Score, Size, name_row
from vlmrl.untrusted import parse_json

COLUMNS = (
    "step",
    "group",
    "source",
    "task",
    "prompt_id",
    "sample",
    "truth",
    "columns",
    "prompt_text",
    "text",
    "token_ids",
    "finish",
    "parts",
    "score",
    "note",
    "error",
    "advantage",
    "images",
    "num_row_images",
    "segments",
    "status",
    "turns",
)
REPEATED = ("source", "task", "prompt_id", "truth", "columns", "prompt_text", "finish", "note", "error", "status")
"""Columns in which a value repeats in many rows. Rows with equal values share one Python object."""
CHUNK_ROWS = 8192
GROUPS_OF_A_FILE = 1 << 32


@dataclass(frozen=True)
class RolloutReader:
    """Reader of rollout files, in the order of their steps, or of files with the rows of evaluations.

    Args:
        paths: the files.
        source: name of a `[[data]]` entry: only its rows are read; None = all rows.
    """

    paths: tuple[str, ...]
    source: str | None = None

    @property
    def decoder(self) -> RolloutDecoder:
        return RolloutDecoder(self.paths, self.source)

    def chunks(self, rows_N: Ints | None = None) -> Iterator[Chunk]:
        first = 0
        for number, name in enumerate(self.paths):
            path = Path(name)
            if rows_N is not None:
                rows = count_saved(path)
                if not np.any((rows_N >= first) & (rows_N < first + rows)):
                    first += rows
                    continue
            place = 0
            for batch in read_saved(path, COLUMNS, rows=CHUNK_ROWS, repeated=REPEATED):
                if batch.num_rows:
                    yield Chunk(first, batch.num_rows, number, place, batch)
                first, place = first + batch.num_rows, place + batch.num_rows

    def heads(self) -> dict[str, Head]:
        """Return source -> facts from its first row. Raises: StoreError for a file that cannot be read."""
        heads: dict[str, Head] = {}
        names = ("source", "task", "truth", "columns")
        for path in self.paths:
            for batch in read_saved(Path(path), names, rows=1 << 16, repeated=names):
                codes = batch.column("source").indices.to_numpy(zero_copy_only=False)
                words = batch.column("source").dictionary.to_pylist()
                for code, row in zip(*np.unique(codes, return_index=True), strict=True):
                    if words[code] in heads or self.source not in (None, words[code]):
                        continue
                    task, truth, columns = (batch.column(name)[int(row)].as_py() for name in names[1:])
                    heads[words[code]] = Head(task, *_loads(truth, columns, path))
        return heads


@dataclass(frozen=True)
class RolloutDecoder:
    """Decoder of the chunks of a `RolloutReader`."""

    paths: tuple[str, ...]
    source: str | None

    def decode(
        self, chunk: Chunk, rows: Sequence[int] | None = None, *, media: bool = False, ids: bool = False
    ) -> Decoded:
        """Return a chunk as reward inputs. Raises: StoreError for a value of the wrong type."""
        batch, at = chunk.data, np.arange(chunk.rows)
        if self.source is not None:
            codes = batch.column("source").indices.to_numpy(zero_copy_only=False)
            names = batch.column("source").dictionary.to_pylist()
            at = np.flatnonzero(codes == (names.index(self.source) if self.source in names else -1))
        if rows is not None:
            at = np.intersect1d(at, np.asarray(rows))
        if len(at) < chunk.rows:
            batch = batch.take(at)
        try:
            return self._decode(batch, chunk, at, media, ids)
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(
                f"rollouts have a value of the wrong kind: {error}", where=self.paths[chunk.file]
            ) from error

    def _decode(self, batch: Any, chunk: Chunk, at: Any, media: bool, ids: bool) -> Decoded:
        truths, columns = (_repeated(batch.column(name), parse_json) for name in ("truth", "columns"))
        finishes, prompts = (_repeated(batch.column(name)) for name in ("finish", "prompt_text"))
        texts = batch.column("text").to_pylist()
        tokens_N = _sampled_tokens(batch)
        prompt_ids, samples = _repeated(batch.column("prompt_id")), batch.column("sample").to_pylist()
        pictures, turns = _pictures(batch), [read_turns(text) for text in batch.column("turns").to_pylist()]
        token_ids = batch.column("token_ids").to_pylist() if ids else itertools.repeat(None, len(texts))
        steps_N = _numbers(batch, "step", np.int32)
        inputs = [
            RewardInput(*fields)
            for fields in zip(
                texts,
                truths,
                columns,
                itertools.repeat((), len(texts)),
                finishes,
                tokens_N.tolist(),
                prompts,
                token_ids,
                steps_N.tolist(),
                prompt_ids,
                samples,
                *zip(*pictures, strict=True),
                turns,
                strict=True,
            )
        ]
        facts = ResponseColumns(
            rows_N=at + chunk.first,
            places_N=at + chunk.place,
            files_N=np.full(len(at), chunk.file, np.int32),
            steps_N=steps_N,
            groups_N=_numbers(batch, "group", np.int64) + chunk.file * GROUPS_OF_A_FILE,
            samples_N=_numbers(batch, "sample", np.int32),
            sources=_coded(batch.column("source")),
            prompts=_coded(batch.column("prompt_id")),
            cut_N=np.asarray([finish == "length" for finish in finishes], dtype=bool),
            tokens_N=tokens_N.astype(np.int32),
            chars_N=np.asarray([len(text) for text in texts], dtype=np.int32),
            advantages_N=_numbers(batch, "advantage", np.float64),
        )
        values = batch.column("score").to_pylist()
        parts = [parse_json(text) for text in batch.column("parts").to_pylist()]
        notes, errors = (_repeated(batch.column(name)) for name in ("note", "error"))
        statuses = _repeated(batch.column("status"))
        stored = Scores.of(
            [Score(*row, status=status) for *row, status in zip(values, parts, notes, errors, statuses, strict=True)]
        )
        return Decoded(inputs, facts, stored, media=[x.media for x in inputs] if media else ())

    def where(self, facts: ResponseColumns, index: int) -> str:
        step, sample = facts.steps_N[index], facts.samples_N[index]
        row = name_row(facts.sources[index] or "", facts.prompts[index] or "", int(sample))
        if evaluation := evaluation_of(Path(self.paths[facts.files_N[index]])):
            return f"evaluation {evaluation}, {row}"
        return f"step {counted(int(step))}, {row}"


def _loads(truth: str, columns: str, path: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    try:
        return parse_json(truth), parse_json(columns)
    except ValueError as error:
        raise StoreError(f"rollouts have a value of the wrong kind: {error}", where=path) from error


def _repeated(column: Any, make: Any = None) -> list[Any]:
    """Return the values of a dictionary-encoded column; rows with equal values share one object."""
    words = column.dictionary.to_pylist()
    values = [*(words if make is None else [make(w) for w in words]), None]
    indices = column.indices.fill_null(len(words)) if column.null_count else column.indices
    return [values[i] for i in indices.to_pylist()]


def _coded(column: Any) -> Coded:
    codes = column.indices.fill_null(-1) if column.null_count else column.indices
    return Coded(codes.to_numpy(zero_copy_only=False).astype(np.int32), column.dictionary.to_pylist())


def _numbers(batch: Any, name: str, kind: Any) -> Any:
    return batch.column(name).to_numpy(zero_copy_only=False).astype(kind)


def _sampled_tokens(batch: Any) -> Any:
    """Return the number of tokens that the policy wrote in each row; int64 [rows]."""
    segments = batch.column("segments")
    flat = segments.flatten()
    lengths = (flat.field("end").to_numpy() - flat.field("start").to_numpy()).astype(np.int64)
    if "author" in (field.name for field in flat.type):
        own = np.asarray([author == "policy" for author in flat.field("author").to_pylist()], dtype=bool)
    else:
        own = flat.field("sampled").to_numpy(zero_copy_only=False)
    row_of = np.repeat(np.arange(len(segments)), segments.value_lengths().to_numpy(zero_copy_only=False))
    return np.bincount(row_of, lengths * own, minlength=len(segments)).astype(np.int64)


def _pictures(batch: Any) -> list[tuple[tuple[Media, ...], tuple[Size, ...]]]:
    """Return, for each row, the images of its prompt and their sizes after resizing for the model.

    Rows of a group share one object.
    """
    groups, counts = batch.column("group").to_pylist(), batch.column("num_row_images").to_pylist()
    images, pictures = batch.column("images"), []
    for row, (group, count) in enumerate(zip(groups, counts, strict=True)):
        if row and groups[row - 1] == group:
            pictures.append(pictures[-1])
            continue
        own = images[row].as_py()[:count]
        pictures.append((tuple(map(Media.of, own)), seen_of(own)))
    return pictures
