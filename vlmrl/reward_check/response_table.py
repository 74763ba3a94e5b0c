"""Any table of responses as pieces and inputs: JSONL, CSV, JSON or Parquet with a response and a ground truth a row.

Columns are recognised in the spellings of the trainers that write such files; see SPELLINGS. Text files are read line
by line and Parquet batch by batch, so memory does not grow with the file.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from vlmrl.data.unreadable import unreadable_cell
from vlmrl.errors import DataError
from vlmrl.json_text import parse_json
from vlmrl.reward_check.response_columns import Broken, Chunk, Decoded, ResponseColumns
from vlmrl.reward_check.scores import Coded, Ints, Scores
from vlmrl.reward_check.table_cells import ArrowCells, Cells, RowCells, json_row, number_of, show, text_of
from vlmrl.reward_check.table_truths import Found, TruthRule
from vlmrl.types import RewardInput, hash64

SUFFIXES = (".jsonl", ".csv", ".json", ".parquet")
SPELLINGS: dict[str, tuple[str, ...]] = {
    "response": (
        "response", "completion", "output", "prediction", "predict", "generated_text", "generation", "model_output",
        "solution_str", "text",
    ),
    "ground_truth": (
        "ground_truth", "truth", "answer_im", "gts", "ground_truths", "reward_model", "solution", "label", "answer",
        "target", "reference",
    ),
    "prompt": ("prompt", "problem", "question", "query", "input"),
    "group": ("group", "group_id", "prompt_id", "uid", "problem_id", "question_id"),
    "step": ("step", "global_step", "training_step"),
    "finish": ("finish", "finish_reason"),
    "num_tokens": ("num_tokens", "response_length", "completion_length", "num_completion_tokens"),
    "score": ("score", "reward", "overall"),
    "token_ids": ("completion_ids", "token_ids", "response_ids"),
    "images": ("images", "image", "image_path", "image_paths"),
}  # fmt: skip
"""Role -> column names that are recognised, in order of preference."""
IMAGES = SPELLINGS["images"]
"""Columns that no reward is given; they are read for the rows that are shown, see table_images.py."""
GIVEN = ("ground_truth", "prompt", "group", "token_ids")
"""Roles whose columns a reward is given under their own names too, as in training: `solution`, `problem` ..."""
CUT = ("length", "max_tokens")
"""What trainers and servers call the end at the token limit."""
CHUNK_ROWS = 8192
CHUNK_BYTES = 8 << 20


def map_roles(columns: Sequence[str], named: Mapping[str, str], where: str) -> dict[str, str]:
    """Role -> column. `named` comes first. Raises: DataError for a role or column that does not exist."""
    for role, column in named.items():
        if role not in SPELLINGS:
            raise DataError(f"--columns names `{role}`", where=where, hint=_nearest(role, tuple(SPELLINGS), "roles"))
        if column not in columns:
            raise DataError(
                f"no column `{column}` (named as {role})", where=where, hint=_nearest(column, columns, "columns")
            )
    found = dict(named)
    for role, names in SPELLINGS.items():
        if role not in found:
            free = [name for name in names if name in columns and name not in found.values()]
            found |= {role: free[0]} if free else {}
    if "response" not in found:
        raise DataError(
            f"no column of responses; the table has: {', '.join(columns)}", where=where,
            hint=_other_separator(columns)
            or f"recognised: {', '.join(SPELLINGS['response'])}; name yours with --columns response=...",
        )  # fmt: skip
    return found


def _other_separator(columns: Sequence[str]) -> str:
    """What to do with a CSV file whose cells are not separated by commas; "" for other tables."""
    marks = {";": "semicolons", "\t": "tabs", "|": "bars"}
    mark = next((name for sign, name in marks.items() if len(columns) == 1 and sign in columns[0]), "")
    return f"its cells are separated by {mark}: save it with commas" if mark else ""


def _nearest(name: str, known: Sequence[str], what: str) -> str:
    close = get_close_matches(name, known, 1)
    return (f"did you mean `{close[0]}`?  " if close else "") + f"{what}: {', '.join(known)}"


@dataclass(frozen=True)
class TableDecoder:
    """Rows of a table as inputs.

    Args:
        file: as shown to people.     kind: the file's ending.
        source: name of the table.    roles: see `map_roles`.    truth: how a ground truth is read.
        typed: whether truth fields are columns of their own.
    """

    file: str
    kind: str
    source: str
    roles: Mapping[str, str]
    truth: TruthRule
    typed: bool = False

    def decode(
        self, chunk: Chunk, rows: Sequence[int] | None = None, *, media: bool = False, ids: bool = False
    ) -> Decoded:
        """Rows that cannot be read are among `broken`, with their line."""
        cells = ArrowCells(chunk.data, chunk.place) if self.kind == ".parquet" else RowCells(chunk.data)
        wanted = range(chunk.rows) if rows is None else sorted(rows)
        texts = cells.column(self.roles["response"])
        truths = self._truths(cells)
        broken: list[Broken] = []
        doubts: list[Broken] = []
        kept: list[int] = []
        for i in wanted:
            _, problem, doubt = truths[i]
            if type(texts[i]) is not str:
                cell, texts[i] = texts[i], text_of(texts[i])
                if texts[i] is None:
                    problem = f"`{self.roles['response']}` is {show(cell)}, not text"
            if problem or i in cells.bad:
                broken.append(Broken(self.place(cells.places[i]), cells.bad.get(i, problem)))
                continue
            if doubt:
                doubts.append(Broken(self.place(cells.places[i]), doubt))
            kept.append(i)
        inputs = self._inputs(cells, kept, texts, truths, ids)
        images = [()] * len(inputs) if media else ()
        return Decoded(
            inputs, self._facts(chunk, cells, kept, inputs), self._stored(cells, kept), broken, images, doubts
        )

    def where(self, facts: ResponseColumns, index: int) -> str:
        return self.place(int(facts.places_N[index]))

    def place(self, place: int) -> str:
        return f"{self.file} row {place}" if self.kind in (".parquet", ".json") else f"{self.file}:{place}"

    def _truths(self, cells: Cells) -> list[Found]:
        """[N] the truth of every row; equal texts are read once."""
        name = self.roles.get("ground_truth")
        column = cells.column(name) if name is not None else [None] * len(cells.places)
        if self.typed:
            return [self.truth.read(cell, cells.row(i)) for i, cell in enumerate(column)]
        known: dict[Any, Found] = {}
        found: list[Found] = []
        for cell in column:
            key = (type(cell), cell) if isinstance(cell, (str, int, float)) else None
            one = known.get(key) if key is not None else None
            if one is None:
                one = self.truth.read(cell, {})
                if key is not None:
                    known[key] = one
            found.append(one)
        return found

    def _inputs(
        self, cells: Cells, kept: Sequence[int], texts: Sequence[str], truths: Sequence[Found], ids: bool
    ) -> list[RewardInput]:
        hidden = {name for role, name in self.roles.items() if role not in GIVEN}
        others = cells.others({*hidden, *IMAGES, *self.truth.form.fields})
        finish, tokens, prompt, step, token_ids = (
            cells.column(self.roles[role]) if role in self.roles else None
            for role in ("finish", "num_tokens", "prompt", "step", "token_ids")
        )
        given = [None] * len(texts) if token_ids is None or not ids else [_ids(cell) for cell in token_ids]
        steps = [0] * len(texts) if step is None else [_count(cell) for cell in step]
        lengths = [0] * len(texts) if tokens is None else [_count(cell) for cell in tokens]
        prompts = [""] * len(texts) if prompt is None else [text_of(p) or "" for p in prompt]
        ends = ["stop"] * len(texts) if finish is None else ["length" if f in CUT else "stop" for f in finish]
        return [
            RewardInput(texts[i], truths[i][0], others[i], (), ends[i], lengths[i], prompts[i], given[i], steps[i])  # type: ignore[arg-type]
            for i in kept
        ]

    def _facts(self, chunk: Chunk, cells: Cells, kept: Sequence[int], inputs: Sequence[RewardInput]) -> ResponseColumns:
        size, at = len(kept), np.asarray(kept, dtype=np.int64)
        steps = np.zeros(size, np.int32)
        if (name := self.roles.get("step")) is not None:
            column = cells.column(name)
            steps = np.asarray([_count(column[i]) for i in kept], dtype=np.int32)
        prompts, groups_N = Coded(np.full(size, -1, np.int32), []), at + chunk.first
        if (name := self.roles.get("group")) is not None:
            column = cells.column(name)
            named = np.asarray([column[i] is not None for i in kept], dtype=bool)  # a row without one is a group alone
            prompts = Coded.of(None if column[i] is None else str(column[i]) for i in kept)
            keys = prompts.codes_N.astype(np.int64) << 32 | steps.astype(np.int64) & 0xFFFFFFFF
            distinct, inverse = np.unique(keys[named], return_inverse=True)
            hashes = [hash64(prompts.words[key >> 32], key & 0xFFFFFFFF) for key in distinct.tolist()]
            groups_N[named] = np.asarray(hashes, dtype=np.int64)[inverse].reshape(-1)
        return ResponseColumns(
            rows_N=at + chunk.first,
            places_N=np.asarray(cells.places, dtype=np.int64)[at],
            files_N=np.zeros(size, np.int32),
            steps_N=steps,
            groups_N=groups_N,
            samples_N=np.zeros(size, np.int32),
            sources=Coded(np.zeros(size, np.int32), [self.source]),
            prompts=prompts,
            cut_N=np.asarray([x.finish == "length" for x in inputs], dtype=bool),
            tokens_N=np.asarray([x.num_tokens for x in inputs], dtype=np.int32),
            chars_N=np.asarray([len(x.response) for x in inputs], dtype=np.int32),
            advantages_N=np.full(size, math.nan),
        )

    def _stored(self, cells: Cells, kept: Sequence[int]) -> Scores | None:
        if (name := self.roles.get("score")) is None:
            return None
        column = cells.column(name)
        values = np.asarray([number_of(column[i]) for i in kept], dtype=np.float64)
        errors = Coded.of("no score was saved" if math.isnan(v) else None for v in values.tolist())
        return Scores(values, {}, Coded.of([""] * len(kept)), errors)


def _ids(cell: Any) -> tuple[int, ...] | None:
    """A cell as token ids: a list of numbers, in CSV as JSON; None for anything else."""
    if isinstance(cell, str):
        try:
            cell = parse_json(cell)
        except ValueError:
            return None
    is_list = isinstance(cell, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in cell)
    return tuple(cell) if is_list else None


def _count(cell: Any) -> int:
    """A cell as a step or a number of tokens; 0 for what is none, or is no number that any run has."""
    number = number_of(cell)
    return int(number) if abs(number) < 1 << 31 else 0


@dataclass(frozen=True)
class TableReader:
    """A table of responses; see the module. `columns` are those of the file, `form` reads its rows."""

    path: str
    decoder: TableDecoder
    columns: Sequence[str] = field(default_factory=tuple)

    def chunks(self, wanted: Ints | None = None) -> Iterator[Chunk]:
        """Raises: DataError for a file that cannot be read."""
        readers = {".parquet": self._parquet, ".jsonl": self._jsonl, ".csv": self._csv, ".json": self._json}
        first = 0
        for rows, place, data in readers[self.decoder.kind]():
            yield Chunk(first, rows, 0, place, data)
            first += rows

    def _parquet(self) -> Iterator[tuple[int, int, Any]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        left_out = {*IMAGES, self.decoder.roles.get("images")}
        names = [name for name in self.columns if name not in left_out]
        try:
            with pq.ParquetFile(self.path, pre_buffer=False) as file:
                place = 0
                for batch in file.iter_batches(CHUNK_ROWS, columns=names, use_threads=False):
                    yield batch.num_rows, place, batch
                    place += batch.num_rows
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"not a readable Parquet file: {error}", where=self.path) from error

    def _jsonl(self) -> Iterator[tuple[int, int, Any]]:
        lines: list[tuple[int, bytes]] = []
        size = 0
        with Path(self.path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                lines.append((number, line))
                size += len(line)
                if size >= CHUNK_BYTES or len(lines) == CHUNK_ROWS:
                    yield len(lines), lines[0][0], lines
                    lines, size = [], 0
        if lines:
            yield len(lines), lines[0][0], lines

    def _csv(self) -> Iterator[tuple[int, int, Any]]:
        for rows in _pieces(read_csv(self.path)):
            yield len(rows), rows[0][0], rows

    def _json(self) -> Iterator[tuple[int, int, Any]]:
        for rows in _pieces(enumerate(read_json(self.path))):
            yield len(rows), rows[0][0], rows


def read_csv(path: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(line, row) of each row of a CSV file; a text in place of a row says why it is not one.

    Raises: DataError for a header that cannot be used, and for what ends the reading.
    """
    old_limit = csv.field_size_limit(min(sys.maxsize, 1 << 30))
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            if len(set(header)) < len(header) or not header or not all(name.strip() for name in header):
                raise DataError("the header is empty, or has an empty or repeated column name", where=f"{path}:1")
            start = reader.line_num + 1
            for cells in reader:
                if len(cells) == len(header):
                    yield start, dict(zip(header, cells, strict=True))
                elif cells:
                    yield start, f"{len(cells)} cells, the header has {len(header)}"
                start = reader.line_num + 1
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text: {error.reason}", where=path, hint="save the file as UTF-8") from error
    except csv.Error as error:
        raise DataError(f"not CSV: {error}", where=path) from error
    finally:
        csv.field_size_limit(old_limit)


def read_json(path: str) -> list[dict[str, Any] | str]:
    """The rows of a JSON file: a list of objects, or an object with such a list as `data`."""
    try:
        value = parse_json(Path(path).read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise DataError(f"not JSON: {error}", where=path, hint="one object a line is JSONL: use that ending") from error
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    if not isinstance(value, list):
        raise DataError("expected a list of objects (or an object with such a list as `data`)", where=path)
    return [row if isinstance(row, dict) else f"a row is {show(row)}, not an object" for row in value]


def _pieces(rows: Any) -> Iterator[list[Any]]:
    piece: list[Any] = []
    for row in rows:
        piece.append(row)
        if len(piece) == CHUNK_ROWS:
            yield piece
            piece = []
    if piece:
        yield piece


def _lines(path: str) -> Iterator[bytes]:
    with Path(path).open("rb") as file:
        yield from (line for line in file if line.strip())


def first_row(path: str, kind: str) -> tuple[list[str], dict[str, Any]]:
    """(columns, a row) of a table: those of the first row that can be read. Raises: DataError when there is none."""
    if kind == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(path, pre_buffer=False) as file:
                names = file.schema_arrow.names
                if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
                    raise DataError(
                        f"the table has several columns `{twice[0]}`", where=path, hint="rename all but one"
                    )
                batch = next(file.iter_batches(1, columns=[n for n in names if n not in IMAGES]), None)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"not a readable Parquet file: {error}", where=path) from error
        if batch is None or not batch.num_rows:
            raise DataError("the table has no rows", where=path)
        try:
            return list(names), batch.to_pylist()[0]
        except (ValueError, OverflowError, KeyError) as error:
            raise unreadable_cell(batch, [f"{path} row 0"]) from error
    rows: Iterator[Any]
    if kind == ".jsonl":
        rows = (json_row(line) for line in _lines(path))
    else:
        rows = (row for _, row in read_csv(path)) if kind == ".csv" else iter(read_json(path))
    first, columns, problem = None, {}, ""
    for row, _ in zip(rows, range(100), strict=False):
        if isinstance(row, dict):
            first = row if first is None else first
            columns |= dict.fromkeys(row)
        else:
            problem = problem or row
    if first is None and problem:
        raise DataError(f"the table has no row that can be read; the first one: {problem}", where=path)
    if first is None:
        raise DataError("the table has no rows", where=path)
    return list(columns), first
