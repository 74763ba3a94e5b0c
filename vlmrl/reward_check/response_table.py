"""Reader of tables of responses: JSONL, CSV, JSON or Parquet, with one response and its truth per row.

The names that common trainers give to the columns are recognised; see data/table_values.py. Text files are read line by
line and Parquet files batch by batch, so memory does not grow with the file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vlmrl.data.table_files import in_portions, parquet_batches, parquet_columns, parsed_row, place_of, text_rows
from vlmrl.data.table_values import IMAGES, RESPONSES, match_columns, number_of, python_rows, show, text_of
from vlmrl.errors import DataError
from vlmrl.reward_check.response_columns import Broken, Chunk, Decoded, ResponseColumns
from vlmrl.reward_check.scores import Coded, Ints, Scores
from vlmrl.reward_check.table_cells import ArrowCells, Cells, RowCells
from vlmrl.reward_check.table_truths import TruthReading, TruthRule
from vlmrl.types import RewardInput, hash64
from vlmrl.untrusted import parse_json

GIVEN = ("ground_truth", "prompt", "group", "token_ids")
"""Roles whose columns a reward also receives under the column's own name, as in training: `solution`, `problem` ..."""
MASK = (1 << 64) - 1
CUT = ("length", "max_tokens")
"""Values of the finish column that mean: the token limit ended the response. Trainers and servers differ."""
CHUNK_ROWS = 8192
"""Largest number of rows of a chunk."""
ROWS_FOR_COLUMNS = 100
"""Number of rows of a text table that are read to collect the names of its columns."""
CHUNK_BYTES = 8 << 20
"""Size of a chunk of JSONL lines, in bytes: the chunk ends when its lines reach this size."""


def map_roles(columns: Sequence[str], named: Mapping[str, str], where: str) -> dict[str, str]:
    """Return role -> column. A column that the user names has priority over one that is recognised.

    Args:
        columns: names of the table's columns.
        named: role -> column, from the user.
        where: name of the table, for error messages.
    Raises: DataError if no column holds responses; see also `match_columns`.
    """
    roles = match_columns(RESPONSES, columns, named, where=where, option="--columns")
    if "response" not in roles:
        raise DataError(
            f"no column of responses; the table has: {', '.join(columns)}",
            where=where,
            hint=f"recognised: {', '.join(RESPONSES['response'])}; name yours with --columns response=...",
        )
    return roles


@dataclass(frozen=True)
class TableDecoder:
    """Decoder of a table's rows as reward inputs.

    Args:
        files: names of the files for messages; `Chunk.file` is an index of them.
        kind: suffix of the file name.
        source: name of the table.
        roles: role -> column, see `map_roles`.
        truth: rule for reading a ground truth.
        typed: whether each truth field has a column of its own.
        rewards: columns that hold one stored reward each; used if no column holds the whole score.
    """

    files: Sequence[str]
    kind: str
    source: str
    roles: Mapping[str, str]
    truth: TruthRule
    typed: bool = False
    rewards: Sequence[str] = ()

    def decode(
        self, chunk: Chunk, rows: Sequence[int] | None = None, *, media: bool = False, ids: bool = False
    ) -> Decoded:
        """Return the rows of a chunk; rows that cannot be read are listed in `broken`, with their line."""
        cells = ArrowCells(chunk.data, chunk.place) if self.kind == ".parquet" else RowCells(chunk.data)
        indices = range(chunk.rows) if rows is None else sorted(rows)
        texts = cells.column(self.roles["response"])
        truths = self._truths(cells)
        broken: list[Broken] = []
        doubts: list[Broken] = []
        readable: list[int] = []
        for i in indices:
            _, problem, doubt = truths[i]
            if type(texts[i]) is not str:
                cell, texts[i] = texts[i], text_of(texts[i])
                if texts[i] is None:
                    problem = f"`{self.roles['response']}` is {show(cell, 60)}, not text"
            if problem or i in cells.bad:
                broken.append(Broken(self.place(chunk.file, cells.places[i]), cells.bad.get(i, problem)))
                continue
            if doubt:
                doubts.append(Broken(self.place(chunk.file, cells.places[i]), doubt))
            readable.append(i)
        inputs = self._inputs(cells, readable, texts, truths, ids)
        images = [()] * len(inputs) if media else ()
        return Decoded(
            inputs, self._facts(chunk, cells, readable, inputs), self._stored(cells, readable), broken, images, doubts
        )

    def where(self, facts: ResponseColumns, index: int) -> str:
        return self.place(int(facts.files_N[index]), int(facts.places_N[index]))

    def place(self, file: int, place: int) -> str:
        return place_of(self.files[file], place)

    def _truths(self, cells: Cells) -> list[TruthReading]:
        """Return the [N] truths of the rows; equal texts are read once."""
        name = self.roles.get("ground_truth")
        column = cells.column(name) if name is not None else [None] * len(cells.places)
        if self.typed:
            return [self.truth.read(cell, cells.row(i)) for i, cell in enumerate(column)]
        truth_by_cell: dict[Any, TruthReading] = {}
        result: list[TruthReading] = []
        for cell in column:
            key = (type(cell), cell) if isinstance(cell, (str, int, float)) else None
            truth = truth_by_cell.get(key) if key is not None else None
            if truth is None:
                truth = self.truth.read(cell, {})
                if key is not None:
                    truth_by_cell[key] = truth
            result.append(truth)
        return result

    def _inputs(
        self, cells: Cells, readable: Sequence[int], texts: Sequence[str], truths: Sequence[TruthReading], ids: bool
    ) -> list[RewardInput]:
        hidden = {name for role, name in self.roles.items() if role not in GIVEN}
        others = cells.others({*hidden, *self.rewards, *IMAGES, *self.truth.form.fields})
        finish, tokens, prompt, step, token_ids = (
            cells.column(self.roles[role]) if role in self.roles else None
            for role in ("finish", "num_tokens", "prompt", "step", "token_ids")
        )
        completion_ids = [None] * len(texts) if token_ids is None or not ids else [_ids(cell) for cell in token_ids]
        steps = [0] * len(texts) if step is None else [_count(cell) for cell in step]
        lengths = [0] * len(texts) if tokens is None else [_count(cell) for cell in tokens]
        prompts = [""] * len(texts) if prompt is None else [text_of(p) or "" for p in prompt]
        ends = ["stop"] * len(texts) if finish is None else ["length" if f in CUT else "stop" for f in finish]
        return [
            RewardInput(
                texts[i],
                truths[i][0],
                others[i],
                (),
                ends[i],  # type: ignore[arg-type]
                lengths[i],
                prompts[i],
                completion_ids[i],
                steps[i],
            )
            for i in readable
        ]

    def _facts(
        self, chunk: Chunk, cells: Cells, readable: Sequence[int], inputs: Sequence[RewardInput]
    ) -> ResponseColumns:
        """Return the columns of facts about the readable rows; N is the number of readable rows here."""
        size, at = len(readable), np.asarray(readable, dtype=np.int64)
        steps = np.zeros(size, np.int32)
        if (name := self.roles.get("step")) is not None:
            column = cells.column(name)
            steps = np.asarray([_count(column[i]) for i in readable], dtype=np.int32)
        prompts, groups_N = Coded(np.full(size, -1, np.int32), []), at + chunk.first
        if (column := self._group_names(cells)) is not None:
            # A row without a group is a group of its own.
            has_group = np.asarray([column[i] is not None for i in readable], dtype=bool)
            prompts = Coded.of(None if column[i] is None else str(column[i]) for i in readable)
            # [N] one 64-bit key per row: group code in the high 32 bits, step in the low. A group name that occurs in
            # two steps means two groups.
            keys = prompts.codes_N.astype(np.int64) << 32 | steps.astype(np.int64) & 0xFFFFFFFF
            # [rows with a group] -> [G] distinct keys, and for each of the rows the index of its key
            distinct, inverse = np.unique(keys[has_group], return_inverse=True)
            hashes = [hash64(prompts.words[key >> 32], key & 0xFFFFFFFF) for key in distinct.tolist()]
            groups_N[has_group] = np.asarray(hashes, dtype=np.int64)[inverse].reshape(-1)
        return ResponseColumns(
            rows_N=at + chunk.first,
            places_N=np.asarray(cells.places, dtype=np.int64)[at],
            files_N=np.full(size, chunk.file, np.int32),
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

    def _group_names(self, cells: Cells) -> list[Any] | None:
        """Return the group of each row; without a column of groups, rows of equal prompt and truth are a group."""
        if (name := self.roles.get("group")) is not None:
            return cells.column(name)
        if not self.infers_groups:
            return None
        truths = cells.column(self.roles["ground_truth"]) if "ground_truth" in self.roles else itertools.repeat(None)
        prompts = cells.column(self.roles["prompt"])
        return [f"{hash64(str(p), str(t)) & MASK:016x}" if p else None for p, t in zip(prompts, truths, strict=False)]

    @property
    def infers_groups(self) -> bool:
        """Return whether groups follow from the prompts. With images, equal prompts can be different questions."""
        return "prompt" in self.roles and not {"group", "images"} & set(self.roles)

    def _stored(self, cells: Cells, readable: Sequence[int]) -> Scores | None:
        score = self.roles.get("score")
        names = self.rewards if score is None else (score,)
        if not names:
            return None
        columns = {name: cells.column(name) for name in names}
        parts = {n: np.asarray([number_of(column[i]) for i in readable]) for n, column in columns.items()}
        values = np.asarray(list(parts.values()), dtype=np.float64).sum(axis=0)
        errors = Coded.of("no score was saved" if math.isnan(v) else None for v in values.tolist())
        return Scores(values, parts if score is None else {}, Coded.of([""] * len(readable)), errors)


def _ids(cell: Any) -> tuple[int, ...] | None:
    """Return a cell as token ids: it is a list of numbers, in CSV written as JSON. Return None for anything else."""
    if isinstance(cell, str):
        try:
            cell = parse_json(cell)
        except ValueError:
            return None
    is_list = isinstance(cell, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in cell)
    return tuple(cell) if is_list else None


def _count(cell: Any) -> int:
    """Return a cell as a step or a number of tokens; 0 if it is not a number or is impossibly large (2^31 or more)."""
    number = number_of(cell)
    return int(number) if abs(number) < 1 << 31 else 0


@dataclass(frozen=True)
class TableReader:
    """Reader of a table of responses as chunks; see the docstring of this module.

    Args:
        decoder: decodes the rows of the chunks.
        columns: names of the file's columns.
    """

    paths: Sequence[str]
    decoder: TableDecoder
    columns: Sequence[str] = field(default_factory=tuple)

    def chunks(self, rows_N: Ints | None = None) -> Iterator[Chunk]:
        """Yield all chunks; `rows_N` is ignored. Raises: DataError for a file that cannot be read."""
        first = 0
        if self.decoder.kind == ".parquet":
            left_out = {*IMAGES, self.decoder.roles.get("images")}
            names = [name for name in self.columns if name not in left_out]
            for batch in parquet_batches(self.paths[0], names, CHUNK_ROWS):
                yield Chunk(first, batch.num_rows, 0, first, batch)
                first += batch.num_rows
            return
        for number, path in enumerate(self.paths):
            for rows in in_portions(text_rows(path), CHUNK_ROWS, CHUNK_BYTES):
                yield Chunk(first, len(rows), number, rows[0][0], rows)
                first += len(rows)


def first_row(path: str, kind: str) -> tuple[list[str], dict[str, Any]]:
    """Return (names of a table's columns, its first readable row).

    Raises: DataError if no row can be read.
    """
    return _first_of_parquet(path) if kind == ".parquet" else _first_of_text(path)


def _first_of_parquet(path: str) -> tuple[list[str], dict[str, Any]]:
    names = parquet_columns(path)
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise DataError(f"the table has several columns `{twice[0]}`", where=path, hint="rename all but one")
    batch = next(parquet_batches(path, [name for name in names if name not in IMAGES], 1), None)
    if batch is None or not batch.num_rows:
        raise DataError("the table has no rows", where=path)
    return names, python_rows(batch, lambda index: place_of(path, index))[0]


def _first_of_text(path: str) -> tuple[list[str], dict[str, Any]]:
    first, columns, problem = None, {}, ""
    for _, unparsed in itertools.islice(text_rows(path), ROWS_FOR_COLUMNS):
        row = parsed_row(unparsed)
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
