"""Responses of runs and evaluations, read as chunks with columns of facts. Texts are read when needed and are not kept.

A row of an evaluation has no tokens, no advantage and no step: its token ids are null, its advantage is NaN, and its
step is 0. Evaluations of older versions have no prompts and no columns of the dataset; these are empty then. The cells
of a chunk have one interface for all kinds of files.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vlmrl.data.table_files import TextRow, parsed_row
from vlmrl.data.table_values import UNREADABLE as UNREADABLE_CELL
from vlmrl.data.table_values import plain, python_rows, unreadable_cell
from vlmrl.errors import StoreError
from vlmrl.reward_check.scores import Coded, Flags, Floats, Ints, Scores
from vlmrl.store.evaluated_rows import SCHEMA, UNREADABLE, read_summary, row_groups, rows_schema
from vlmrl.store.layout import EVAL, EVAL_ROWS
from vlmrl.store.metrics import counted
from vlmrl.store.rollouts import arrow_schema, count_rows, read_batches, read_turns, seen_of
from vlmrl.store.table_reader import check_values, file_batches, known_columns, open_parquet, schema_number
from vlmrl.types import Media, RewardInput, Score, Size, is_cut, name_row
from vlmrl.untrusted import parse_json

if TYPE_CHECKING:
    import pyarrow as pa


NEEDED = (
    *("source", "task", "prompt_id", "sample", "truth", "text", "finish", "num_tokens", "parts", "score"),
    *("note", "error", "status", "images"),
)
"""Columns that the rows of every evaluation have."""
DEFAULTS = {"columns": "{}", "prompt_text": ""}
"""Columns that older versions lack, with their values for such files."""
OF_EPISODES = ("turns", "ending", "measured", "seed")
"""Columns whose values may be null."""


def is_evaluated(path: Path) -> bool:
    """Return whether a Parquet file has the columns of an evaluation's rows, and not those of rollouts."""
    names, _ = known_columns(path)
    return "segments" not in names and {"num_tokens", *NEEDED} <= {*names}


def evaluation_of(path: Path) -> str:
    """Return the name of the evaluation that a file of rows belongs to; "" for a file outside a run."""
    return path.parent.name if path.name == EVAL_ROWS and path.parent.parent.name == EVAL else ""


def run_dir_of(path: Path) -> Path:
    """Return the folder of the run that a file of responses would belong to: of an evaluation's rows, or rollouts."""
    return path.parent.parent.parent if evaluation_of(path) else path.parent.parent


def count_saved(path: Path) -> int:
    """Return the number of responses in a file of rollouts or of an evaluation. Raises: StoreError."""
    return sum(row_groups(path)) if is_evaluated(path) else count_rows(path)


def read_saved(path: Path, columns: Sequence[str], *, rows: int, repeated: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield a file of rollouts or of an evaluation in batches with columns of rollouts; see `read_batches`."""
    if is_evaluated(path):
        return _evaluated_batches(path, columns, rows, repeated)
    return read_batches(path, columns, rows=rows, repeated=repeated)


def _evaluated_batches(
    path: Path, columns: Sequence[str], rows: int, repeated: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    expected, source = rows_schema((), shown=True), None
    with suppress(StoreError):  # older rows of a file have the file's name, and the run's records this one
        source = (read_summary(path.parent).get("meta") or {}).get("source")
    numbers: dict[str, int] = {}
    with open_parquet(path, UNREADABLE) as file:
        if (number := schema_number(file)) != str(SCHEMA):
            message = f"this evaluation has schema {number!r}; this vlmrl reads {SCHEMA}"
            raise StoreError(message, where=str(path), hint="upgrade vlmrl")
        for batch in file_batches(file, rows, (*NEEDED, *DEFAULTS, *OF_EPISODES)):
            check_values(batch, expected)
            given = _as_rollouts(batch, numbers)
            given |= {"source": pa.array([source] * batch.num_rows, pa.string())} if source else {}
            arrays = [given[name].dictionary_encode() if name in repeated else given[name] for name in columns]
            yield pa.record_batch(arrays, names=list(columns))


def _as_rollouts(batch: pa.RecordBatch, numbers: dict[str, int]) -> dict[str, Any]:
    """Return column of rollouts -> its values for rows of an evaluation.

    Args:
        numbers: prompt id -> number of its group in the file; new ids are added.
    """
    import pyarrow as pa

    schema, size = arrow_schema(), batch.num_rows
    columns: dict[str, Any] = {name: batch.column(name) for name in batch.schema.names}

    def add(name: str, values: Any) -> None:
        columns[name] = pa.array(values, schema.field(name).type)

    for name, default in DEFAULTS.items():
        if name in columns:
            columns[name] = columns[name].fill_null(default)
        else:
            add(name, [default] * size)
    ids = batch.column("prompt_id").to_pylist()
    add("group", [numbers.setdefault(one, len(numbers)) for one in ids])
    add("step", [0] * size)
    add("advantage", [float("nan")] * size)
    add("token_ids", [None] * size)
    for name in OF_EPISODES:
        if name not in columns:
            add(name, [None] * size)
    add("num_row_images", batch.column("images").value_lengths().fill_null(0))
    lengths = batch.column("num_tokens").fill_null(0).to_pylist()
    whole = {"role": "assistant", "start": 0, "trained": False, "sampled": True, "author": "policy", "num_images": 0}
    add("segments", [[{**whole, "version": None, "end": length}] for length in lengths])
    columns["score"] = batch.column("score").fill_null(float("nan"))
    return columns


@dataclass
class ResponseColumns:
    """Columns over N responses, in the order of the input.

    Args:
        rows_N: index of the row in the whole input.
        places_N: line in its text file, or row in its Parquet file.
        files_N: index of its file.
        steps_N: training step; 0 if it is not known.
        groups_N: number of the group: equal for all samples of one prompt in one step.
        samples_N: index of the response within its group.
        sources, prompts: name of its `[[data]]` entry, and its prompt id.
        cut_N: whether the token limit ended the response.
        tokens_N: length in tokens; 0 if it is not known.
        chars_N: length in characters.
        advantages_N: advantage that was saved with the response; NaN if none was saved.
    """

    rows_N: Ints
    places_N: Ints
    files_N: NDArray[np.int32]
    steps_N: NDArray[np.int32]
    groups_N: Ints
    samples_N: NDArray[np.int32]
    sources: Coded
    prompts: Coded
    cut_N: Flags
    tokens_N: NDArray[np.int32]
    chars_N: NDArray[np.int32]
    advantages_N: Floats

    def __len__(self) -> int:
        return len(self.rows_N)

    def at(self, rows: Any) -> ResponseColumns:
        """Return the columns of `rows` (indices or a mask), in that order."""
        columns: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        picked: dict[str, Any] = {
            n: Coded(c.codes_N[rows], c.words) if isinstance(c, Coded) else c[rows] for n, c in columns.items()
        }
        return ResponseColumns(**picked)

    @classmethod
    def concat(cls, pieces: Sequence[ResponseColumns]) -> ResponseColumns:
        columns: dict[str, list[Any]] = {f.name: [getattr(piece, f.name) for piece in pieces] for f in fields(cls)}
        joined: dict[str, Any] = {
            n: Coded.concat(c) if isinstance(c[0], Coded) else np.concatenate(c) for n, c in columns.items()
        }
        return cls(**joined)

    def group_bounds(self) -> tuple[Ints, Ints]:
        """Return (order, starts): row indices sorted by group (stable), and the start of each group in `order`."""
        order = np.argsort(self.groups_N, kind="stable")
        change = np.diff(self.groups_N[order], prepend=self.groups_N[order[:1]] - 1) != 0
        return order, np.flatnonzero(change)


@dataclass(frozen=True)
class Chunk:
    """Part of the input, not yet decoded; sending it to another process costs little.

    Args:
        first: index of its first row in the whole input.
        file, place: index of its file, and the line or row of that file at which the chunk begins.
        data: what is decoded: an Arrow record batch, the bytes of whole lines, or rows with their line numbers.
    """

    first: int
    rows: int
    file: int
    place: int
    data: Any


@dataclass(frozen=True)
class Broken:
    """Row that cannot be read. `where`: its file and line; `why`: the reason."""

    where: str
    why: str


@dataclass
class Decoded:
    """Chunk as the inputs of a reward.

    Args:
        stored: scores that were saved with the responses; None = no scores were saved.
        media: references of each row's images, if they were requested.
        broken: rows that cannot be read; they are missing in all other fields.
        doubts: truths that are used unchanged although they break the task's form: (where, why).
    """

    inputs: list[RewardInput]
    facts: ResponseColumns
    stored: Scores | None
    broken: Sequence[Broken] = ()
    media: Sequence[tuple[Media, ...]] = ()
    doubts: Sequence[Broken] = ()


class Reader(Protocol):
    """Reader of an input. It can be sent to another process, which decodes the chunks there."""

    def chunks(self, rows: Ints | None = None, /) -> Iterator[Chunk]:
        """Yield all chunks in order; with `rows` (sorted row indices) at least those that contain such rows."""
        ...

    def decode(
        self, chunk: Chunk, rows: Sequence[int] | None = None, *, media: bool = False, ids: bool = False
    ) -> Decoded:
        """Return the chunk's rows as inputs, or those at `rows` within it.

        Args:
            media, ids: also return the references of their images, and their token ids.
        """
        ...

    def where(self, facts: ResponseColumns, index: int) -> str:
        """Return the name of a row for messages, such as its file and line."""
        ...


@dataclass(frozen=True)
class Head:
    """Facts about a source that are read before scoring: its task, and the truth and columns of its first row."""

    task: str
    truth: Mapping[str, Any]
    columns: Mapping[str, Any]


COLUMNS = (
    *("step", "group", "source", "task", "prompt_id", "sample", "truth", "columns", "prompt_text", "text", "token_ids"),
    *("finish", "parts", "score", "note", "error", "advantage", "images", "num_row_images", "segments", "status"),
    *("turns", "ending", "measured"),
)
REPEATED = ("source", "task", "prompt_id", "truth", "columns", "prompt_text", "finish", "note", "error", "status")
"""Columns in which a value repeats in many rows. Rows with equal values share one Python object."""
CHUNK_ROWS = 8192
GROUPS_OF_A_FILE = 1 << 32


@dataclass(frozen=True)
class RolloutReader:
    """Reader of rollout files, in the order of their steps, or of files with the rows of evaluations.

    Args:
        source: name of a `[[data]]` entry: only its rows are read; None = all rows.
    """

    paths: tuple[str, ...]
    source: str | None = None

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
                    try:
                        heads[words[code]] = Head(task, parse_json(truth), parse_json(columns))
                    except ValueError as error:
                        raise StoreError(f"rollouts have a value of the wrong kind: {error}", where=path) from error
        return heads

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
        tokens_N = sampled_tokens(batch)
        prompt_ids, samples = _repeated(batch.column("prompt_id")), batch.column("sample").to_pylist()
        pictures, turns = _pictures(batch), [read_turns(text) for text in batch.column("turns").to_pylist()]
        measured = [{} if text is None else parse_json(text) for text in batch.column("measured").to_pylist()]
        token_ids = batch.column("token_ids").to_pylist() if ids else itertools.repeat(None, len(texts))
        steps_N, endings = _numbers(batch, "step", np.int32), batch.column("ending").to_pylist()
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
                measured,
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
            cut_N=np.asarray(list(map(is_cut, finishes, endings)), dtype=bool),
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


def sampled_tokens(batch: Any) -> Any:
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


class Cells(Protocol):
    """Chunk of a table with N rows.

    Attributes:
        places: line number (text file) or row number (Parquet) of each row.
        bad: index of a row that cannot be read -> reason.
    """

    @property
    def places(self) -> Sequence[int]: ...

    @property
    def bad(self) -> Mapping[int, str]: ...

    def column(self, name: str) -> list[Any]:
        """Return the [N] cells of a column; None where a row lacks the column."""
        ...

    def others(self, taken: set[str]) -> list[Mapping[str, Any]]:
        """Return for each of the [N] rows the cells of all columns except `taken`, as JSON values."""
        ...

    def row(self, index: int) -> Mapping[str, Any]:
        """Return one row as column -> cell."""
        ...


class ArrowCells:
    """Rows of an Arrow batch."""

    def __init__(self, batch: Any, place: int) -> None:
        self._batch = batch
        self.places = range(place, place + batch.num_rows)
        self.bad: dict[int, str] = {}

    def column(self, name: str) -> list[Any]:
        """Return the cells. Raises: DataError that names column and row of a value that Python cannot represent."""
        column = self._batch.column(name)
        if str(column.type) not in ("string", "large_string"):
            try:
                return column.to_pylist()
            except UNREADABLE_CELL as error:
                raise unreadable_cell(self._batch.select([name]), self._place) from error
        # Rows with equal texts, such as the truth of a group, share one Python object.
        coded = column.dictionary_encode() if name not in _LONG else column
        if not hasattr(coded, "dictionary") or len(coded.dictionary) * 2 > len(column):
            return column.to_pylist()
        # None is appended as the last word, for empty cells.
        words = [*coded.dictionary.to_pylist(), None]
        return [words[i] for i in coded.indices.fill_null(len(words) - 1).to_pylist()]

    def others(self, taken: set[str]) -> list[Mapping[str, Any]]:
        names = [name for name in self._batch.schema.names if name not in taken]
        if not names:
            return [{}] * self._batch.num_rows
        columns = [self.column(name) for name in names]
        return [{n: clean(v) for n, v in zip(names, row, strict=True)} for row in zip(*columns, strict=True)]

    def row(self, index: int) -> Mapping[str, Any]:
        return python_rows(self._batch.slice(index, 1), lambda _: self._place(index))[0]

    def _place(self, index: int) -> str:
        return f"row {self.places[index]}"


class RowCells:
    """Rows of a text file with their line numbers; see `text_rows`."""

    def __init__(self, rows: Sequence[tuple[int, TextRow]]) -> None:
        self.places = [place for place, _ in rows]
        parsed = [parsed_row(row) for _, row in rows]
        self.bad = {i: row for i, row in enumerate(parsed) if isinstance(row, str)}
        self._rows: list[Mapping[str, Any]] = [{} if isinstance(row, str) else row for row in parsed]

    def column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self._rows]

    def others(self, taken: set[str]) -> list[Mapping[str, Any]]:
        return [{n: clean(v) for n, v in row.items() if n not in taken} for row in self._rows]

    def row(self, index: int) -> Mapping[str, Any]:
        return self._rows[index]


_LONG = ("response", "completion", "output")
"""Columns whose texts hardly ever repeat: sharing equal texts would cost more time than it saves memory."""


def clean(value: Any) -> Any:
    """Return a cell as a JSON value."""
    return value if value is None or isinstance(value, (str, int, bool)) else plain(value)
