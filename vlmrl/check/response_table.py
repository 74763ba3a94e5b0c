"""Any table of responses as pieces and inputs: JSONL, CSV, JSON or Parquet with a response and a ground truth a row.

Columns are recognised in the spellings of the trainers that write such files; see SPELLINGS. Text files are read line
by line and Parquet batch by batch, so memory does not grow with the file.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from vlmrl.check.facts import Broken, Chunk, Decoded, Facts
from vlmrl.check.scores import Coded, Ints, Scores
from vlmrl.check.truths import TruthRule
from vlmrl.data.columns import plain
from vlmrl.errors import DataError
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
}  # fmt: skip
"""Role -> column names that are recognised, in order of preference."""
IMAGES = ("images", "image", "image_path", "image_paths")
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
            hint=f"recognised: {', '.join(SPELLINGS['response'])}; name yours with --columns response=...",
        )  # fmt: skip
    return found


def _nearest(name: str, known: Sequence[str], what: str) -> str:
    close = get_close_matches(name, known, 1)
    return (f"did you mean `{close[0]}`?  " if close else "") + f"{what}: {', '.join(known)}"


@dataclass(frozen=True)
class TableDecoder:
    """Rows of a table as inputs.

    Args:
        file: as shown to people.     kind: the file's ending.
        source: name of the table.    roles: see `map_roles`.    truth: how a ground truth is read.
    """

    file: str
    kind: str
    source: str
    roles: Mapping[str, str]
    truth: TruthRule

    def decode(self, chunk: Chunk, rows: Sequence[int] | None = None, *, media: bool = False) -> Decoded:
        """Rows that cannot be read are among `broken`, with their line."""
        wanted = None if rows is None else set(rows)
        used = {c for r, c in self.roles.items() if r != "ground_truth"} | set(IMAGES)
        broken: list[Broken] = []
        doubts: list[Broken] = []
        kept: list[tuple[int, int, dict[str, Any]]] = []
        inputs: list[RewardInput] = []
        truths: dict[Any, Any] = {}
        for number, (place, row) in enumerate(self._rows(chunk)):
            if wanted is not None and number not in wanted:
                continue
            where = self.place(place)
            if isinstance(row, str):
                broken.append(Broken(where, row))
                continue
            made = self._input(row, used, truths)
            if isinstance(made, str):
                broken.append(Broken(where, made))
                continue
            x, doubt = made
            if doubt:
                doubts.append(Broken(where, doubt))
            inputs.append(x)
            kept.append((chunk.first + number, place, row))
        return Decoded(
            inputs, self._facts(chunk, kept, inputs), self._stored([row for *_, row in kept]), broken,
            [()] * len(inputs) if media else (), doubts,
        )  # fmt: skip

    def where(self, facts: Facts, index: int) -> str:
        return self.place(int(facts.places_N[index]))

    def place(self, place: int) -> str:
        return f"{self.file} row {place}" if self.kind in (".parquet", ".json") else f"{self.file}:{place}"

    def _rows(self, chunk: Chunk) -> Iterator[tuple[int, dict[str, Any] | str]]:
        """(place, row) of each row of the piece; a text in place of a row says why it cannot be read."""
        if self.kind == ".parquet":
            names = chunk.data.schema.names
            columns = [chunk.data.column(name).to_pylist() for name in names]
            for number, values in enumerate(zip(*columns, strict=True)):
                yield chunk.place + number, dict(zip(names, values, strict=True))
        elif self.kind == ".jsonl":
            for place, line in chunk.data:
                yield place, _json_row(line)
        else:
            yield from chunk.data

    def _input(self, row: Mapping[str, Any], used: set[str], truths: dict[Any, Any]) -> tuple[RewardInput, str] | str:
        """(input, what is doubtful about its truth), or why it cannot be read. `truths` remembers what it has read."""
        roles = self.roles
        response = _text(row.get(roles["response"]))
        if response is None:
            return f"`{roles['response']}` is {_show(row.get(roles['response']))}, not text"
        cell = row.get(roles.get("ground_truth", ""))
        key = (type(cell), cell) if isinstance(cell, (str, int, float)) and not self.truth.fields_in(row) else None
        found = truths.get(key) if key is not None else None
        if found is None:
            found = self.truth.read(cell, row)
            if key is not None:
                truths[key] = found
        truth, problem, doubt = found
        if problem:
            return problem
        taken = {*used, *self.truth.fields}
        more = {name: _plain(value) for name, value in row.items() if name not in taken}
        finish = "length" if row.get(roles.get("finish", "")) in ("length", "max_tokens") else "stop"
        tokens = _number(row.get(roles.get("num_tokens", "")))
        prompt = _text(row.get(roles.get("prompt", "")))
        tokens = 0 if math.isnan(tokens) else int(tokens)
        return RewardInput(response, truth, more, (), finish, tokens, prompt or ""), doubt

    def _facts(self, chunk: Chunk, kept: Sequence[tuple[int, int, Any]], inputs: Sequence[RewardInput]) -> Facts:
        size = len(kept)
        rows_N, places_N = (np.asarray([k[i] for k in kept], dtype=np.int64).reshape(size) for i in (0, 1))
        column = self.roles.get("group")
        groups, groups_N = [None] * size, rows_N
        steps = np.zeros(size, np.int32)
        if (name := self.roles.get("step")) is not None:
            numbers = np.asarray([_number(row.get(name)) for *_, row in kept]).reshape(size)
            steps = np.nan_to_num(numbers, nan=0.0).astype(np.int32)
        if column is not None:
            groups = [str(row.get(column)) for *_, row in kept]
            known = {key: hash64(*key) for key in set(zip(steps.tolist(), groups, strict=True))}
            groups_N = np.asarray([known[key] for key in zip(steps.tolist(), groups, strict=True)], dtype=np.int64)
        return Facts(
            rows_N=rows_N,
            places_N=places_N,
            files_N=np.zeros(size, np.int32),
            steps_N=steps,
            groups_N=groups_N,
            samples_N=np.zeros(size, np.int32),
            sources=Coded(np.zeros(size, np.int32), [self.source]),
            prompts=Coded.of(groups),
            cut_N=np.asarray([x.finish == "length" for x in inputs], dtype=bool),
            tokens_N=np.asarray([x.num_tokens for x in inputs], dtype=np.int32),
            chars_N=np.asarray([len(x.response) for x in inputs], dtype=np.int32),
            advantages_N=np.full(size, math.nan),
        )

    def _stored(self, rows: Sequence[Mapping[str, Any]]) -> Scores | None:
        column = self.roles.get("score")
        if column is None:
            return None
        values = np.asarray([_number(row.get(column)) for row in rows], dtype=np.float64)
        errors = Coded.of("no score was saved" if math.isnan(v) else None for v in values.tolist())
        return Scores(values, {}, Coded.of([""] * len(rows)), errors)


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

        names = [name for name in self.columns if name not in IMAGES]
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
        value = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}", where=path, hint="one object a line is JSONL: use that ending") from error
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    if not isinstance(value, list):
        raise DataError("expected a list of objects (or an object with such a list as `data`)", where=path)
    return [row if isinstance(row, dict) else f"a row is {_show(row)}, not an object" for row in value]


def _pieces(rows: Any) -> Iterator[list[Any]]:
    piece: list[Any] = []
    for row in rows:
        piece.append(row)
        if len(piece) == CHUNK_ROWS:
            yield piece
            piece = []
    if piece:
        yield piece


def _json_row(line: bytes) -> dict[str, Any] | str:
    try:
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    return row if isinstance(row, dict) else f"a row is {_show(row)}, not an object"


def _text(value: Any) -> str | None:
    """A cell as text: itself, or the last turn of a chat."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        content = value[-1].get("content")
        return content if isinstance(content, str) else None
    return None


def _number(value: Any) -> float:
    """A cell as a number; NaN for what is none."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (str, int, float, bool)) else plain(value)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


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
                batch = next(file.iter_batches(1, columns=[n for n in names if n not in IMAGES]), None)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"not a readable Parquet file: {error}", where=path) from error
        if batch is None or not batch.num_rows:
            raise DataError("the table has no rows", where=path)
        return list(names), batch.to_pylist()[0]
    rows: Iterator[Any]
    if kind == ".jsonl":
        rows = (_json_row(line) for line in _lines(path))
    else:
        rows = (row for _, row in read_csv(path)) if kind == ".csv" else iter(read_json(path))
    first, columns = None, {}
    for row, _ in zip(rows, range(100), strict=False):
        if isinstance(row, dict):
            first = row if first is None else first
            columns |= dict.fromkeys(row)
    if first is None:
        raise DataError("the table has no row that can be read", where=path, hint=f"endings: {', '.join(SUFFIXES)}")
    return list(columns), first
