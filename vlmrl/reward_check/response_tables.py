"""Tables of responses (JSONL, CSV, JSON, Parquet): one response and its truth per row. Input is untrusted.

The columns, the task and the form of the truths are found when the table is opened. The names that common trainers give
to columns are recognised; see data/table_values.py. Text files are read line by line and Parquet files batch by batch,
so memory does not grow with the file. Truths come from typed fields, or from a text in the task's form. Images are read
only for the rows that a report displays.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vlmrl.data.table_files import (
    SUFFIXES,
    in_portions,
    parquet_batches,
    parquet_columns,
    parquet_table,
    parsed_row,
    place_of,
    require_file,
    text_rows,
)
from vlmrl.data.table_values import (
    IMAGES,
    RESPONSES,
    UNREADABLE,
    image_bytes,
    match_columns,
    number_of,
    plain,
    python_rows,
    read_image,
    show,
    split_images,
    text_of,
    unreadable_cell,
)
from vlmrl.errors import DataError, RewardError
from vlmrl.redaction.redact import quoted
from vlmrl.reward_check.responses import ArrowCells, Broken, Cells, Chunk, Decoded, Head, ResponseColumns, RowCells
from vlmrl.reward_check.scores import Coded, Ints, Scores
from vlmrl.reward_check.scoring import SavedResponses, TaskRef
from vlmrl.store.layout import MANIFEST
from vlmrl.store.table_reader import file_batches, group_rows, known_columns
from vlmrl.tasks.truth_kinds import CONTRADICTS, TruthForm
from vlmrl.tasks.user_task import is_own
from vlmrl.types import RewardInput, Turn, hash64, is_cut
from vlmrl.untrusted import parse_json

PLAIN_FIELDS = ("answer", "ground_truth")
"""Truth fields for a ground truth that is a single value. Training sets the first field; a check sets both."""
TruthReading = tuple[Mapping[str, Any], str, str]
"""(truth, reason why it cannot be used or "", reason why it is doubtful or "")."""


@dataclass(frozen=True)
class TruthRule:
    """Rule for reading the ground truths of a table.

    Args:
        task: name of the task; "" = no task: a mapping is the whole truth, any other cell fills PLAIN_FIELDS.
        lenient: keep a truth that breaks its form unchanged and report it as doubtful; for rewards that accept any
            text.
    """

    task: str = ""
    form: TruthForm = field(default_factory=TruthForm)
    variant: str | None = None
    lenient: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the rule for another process, which creates the rule of a user's task again from the task's file."""
        if is_own(self.task):
            return _own_rule, (self.task, self.variant, self.lenient)
        return TruthRule, (self.task, self.form, self.variant, self.lenient)

    def fields_in(self, row: Mapping[str, Any]) -> bool:
        """Return whether at least one truth field is filled as a column of the row."""
        return any(row.get(name) is not None for name in self.form.fields)

    def read(self, cell: Any, row: Mapping[str, Any]) -> TruthReading:
        """Return the truth of a row from its ground-truth cell or, with a task, from columns named as truth fields."""
        if isinstance(cell, str) and cell.lstrip()[:1] == "{":
            try:
                cell = parse_json(cell)
            except ValueError as error:
                if self.task:  # without a task, any text is allowed, such as the set {1, 2}
                    return {}, f"the ground truth looks like JSON and is not: {error}", ""
        if isinstance(cell, Mapping):
            cell = plain(cell)
            inner = cell.get("ground_truth")
            is_truth = any(name in cell for name in self.form.fields[:1])
            nested = not is_truth and isinstance(inner, (str, int, float, Mapping))
            return self.read(inner, row) if nested and self.task else self._checked(cell)
        if self.fields_in(row):
            typed = {name: _typed(row[name]) for name in self.form.fields if row.get(name) is not None}
            return self._checked(typed)
        if self.form.read is not None:
            return self._from_text(cell, self.form.read)
        if self.task and not self.form.fields and cell is not None:
            return self._checked({"answer": plain(cell)})
        if self.task:
            return {}, f"the ground truth is {quoted(cell, 60)}, not a mapping of truth fields", ""
        return ({} if cell is None else dict.fromkeys(PLAIN_FIELDS, plain(cell))), "", ""

    def _from_text(self, cell: Any, read: Callable[[str], Mapping[str, Any]]) -> TruthReading:
        """Return the truth that `read`, the parser of the task's form, reads from the text of a cell."""
        text = str(int(cell)) if isinstance(cell, bool) else str(cell)
        try:
            if cell is None:
                raise RewardError("there is no ground truth")
            return {**read(text), "ground_truth": cell}, "", ""
        except RewardError as error:
            why = error.message + (f" ({error.hint})" if error.hint else "")
            return ({"ground_truth": cell}, "", why) if self.lenient else ({}, why, "")

    def _checked(self, truth: Mapping[str, Any]) -> TruthReading:
        """Check a typed truth against the task's schema, and return it."""
        if self.task:
            validate = _validator(self.task, json.dumps(self.form.settings), self.variant)
            if validate is not None and (faults := validate(truth)):
                problem = f"the ground truth breaks the task `{self.task}`: {'; '.join(faults)}"
                return self._as_text(truth, problem) if self.lenient else ({}, problem, "")
        return truth, "", ""

    def _as_text(self, truth: Mapping[str, Any], problem: str) -> TruthReading:
        """Return a typed truth that breaks the schema, with its text in the task's form, which lenient rewards score.

        If the truth cannot be written as a text, it cannot be used, and `problem` is the reason.
        """
        if self.form.write is None or self.form.read is None:
            return {}, problem, ""
        text = ""
        try:
            text = self.form.write(truth)
            self.form.read(text)
        except RewardError as error:
            if CONTRADICTS not in error.message:
                return {}, problem, ""
            return {**truth, "ground_truth": text}, "", error.message
        return {**truth, "ground_truth": text}, "", problem


def _own_rule(task: str, variant: str | None, lenient: bool) -> TruthRule:
    from vlmrl.tasks import find_task

    return TruthRule(task, find_task(task).truth_form({}, ()), variant, lenient)


@lru_cache(maxsize=8)
def _validator(task: str, settings: str, variant: str | None) -> Callable[[Mapping[str, Any]], list[str]] | None:
    from vlmrl.reward_check.scoring import TaskRef

    instance = TaskRef(task, {"name": task, **parse_json(settings)}, variant).make()
    return instance.validate if instance is not None else None


def _typed(cell: Any) -> Any:
    """Return the value of a typed cell. A text from CSV is parsed: `true`, `0`, `["a", "b"]`, or `a; b` for a list."""
    if not isinstance(cell, str):
        return plain(cell)
    text = cell.strip()
    if text.lower() in ("true", "false", "1", "0", "1.0", "0.0"):
        return text.lower() in ("true", "1", "1.0")
    if text.startswith("["):
        try:
            return parse_json(text)
        except ValueError:
            return text
    return [name.strip() or None for name in text.split(";")] if ";" in text else text


GIVEN = ("ground_truth", "prompt", "group", "token_ids")
"""Roles whose columns a reward also receives under the column's own name, as in training: `solution`, `problem` ..."""
EPISODE = ("turns", "measured")
"""Roles of what a reward sees of an episode."""
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
class TableReader:
    """Reader of a table's rows as reward inputs; see the docstring of this module.

    Args:
        paths: the files; `Chunk.file` is an index of them.
        kind: suffix of the file name.
        source: name of the table.
        roles: role -> column, see `map_roles`.
        typed: whether each truth field has a column of its own.
        rewards: columns that hold one stored reward each; used if no column holds the whole score.
    """

    paths: Sequence[str]
    kind: str
    source: str
    roles: Mapping[str, str]
    truth: TruthRule
    typed: bool = False
    rewards: Sequence[str] = ()
    columns: Sequence[str] = ()

    def chunks(self, rows_N: Ints | None = None) -> Iterator[Chunk]:
        """Yield all chunks; `rows_N` is ignored. Raises: DataError for a file that cannot be read."""
        first = 0
        if self.kind == ".parquet":
            left_out = {*IMAGES, self.roles.get("images")}
            names = [name for name in self.columns if name not in left_out]
            for batch in parquet_batches(self.paths[0], names, CHUNK_ROWS):
                yield Chunk(first, batch.num_rows, 0, first, batch)
                first += batch.num_rows
            return
        for number, path in enumerate(self.paths):
            for rows in in_portions(text_rows(path), CHUNK_ROWS, CHUNK_BYTES):
                yield Chunk(first, len(rows), number, rows[0][0], rows)
                first += len(rows)

    def decode(
        self, chunk: Chunk, rows: Sequence[int] | None = None, *, media: bool = False, ids: bool = False
    ) -> Decoded:
        """Return the rows of a chunk; rows that cannot be read are listed in `broken`, with their line."""
        cells = ArrowCells(chunk.data, chunk.place) if self.kind == ".parquet" else RowCells(chunk.data)
        indices = range(chunk.rows) if rows is None else sorted(rows)
        texts = cells.column(self.roles["response"])
        truths, episodes = self._truths(cells), self._episodes(cells)
        broken: list[Broken] = []
        doubts: list[Broken] = []
        readable: list[int] = []
        for i in indices:
            _, problem, doubt = truths[i]
            if type(texts[i]) is not str:
                cell, texts[i] = texts[i], text_of(texts[i])
                if texts[i] is None:
                    problem = f"`{self.roles['response']}` is {show(cell, 60)}, not text"
            if type(episodes[i]) is str:
                problem = episodes[i]
            if problem or i in cells.bad:
                broken.append(Broken(self.place(chunk.file, cells.places[i]), cells.bad.get(i, problem)))
                continue
            if doubt:
                doubts.append(Broken(self.place(chunk.file, cells.places[i]), doubt))
            readable.append(i)
        inputs = self._inputs(cells, readable, texts, truths, ids)
        inputs = [replace(x, **episodes[i]) if episodes[i] else x for i, x in zip(readable, inputs, strict=True)]
        images = [()] * len(inputs) if media else ()
        return Decoded(
            inputs, self._facts(chunk, cells, readable, inputs), self._stored(cells, readable), broken, images, doubts
        )

    def where(self, facts: ResponseColumns, index: int) -> str:
        return self.place(int(facts.files_N[index]), int(facts.places_N[index]))

    def place(self, file: int, place: int) -> str:
        return place_of(self.paths[file], place)

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

    def _episodes(self, cells: Cells) -> list[Any]:
        """Return for each row what its reward sees of an episode, {} for none, or why there is nothing to score."""
        if EPISODE[0] not in self.roles:
            return [{}] * len(cells.places)
        columns = [cells.column(self.roles[name]) if name in self.roles else None for name in EPISODE]
        has_faults = "fault" in self.columns or self.kind != ".parquet"
        columns.append(cells.column("fault") if has_faults else None)
        return [_episode(*(c and c[i] for c in columns)) for i in range(len(cells.places))]

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
        has_endings = EPISODE[0] in self.roles and "ending" in self.columns
        endings = cells.column("ending") if has_endings else [None] * len(cells.places)
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
            cut_N=np.asarray([is_cut(x.finish, endings[i]) for i, x in zip(readable, inputs, strict=True)], dtype=bool),
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


def _episode(turns: Any, measured: Any, fault: Any) -> dict[str, Any] | str:
    """Return `turns` and `measured` as a reward gets them, or why the row has no score; {} without turns."""
    if fault:
        return f"the environment failed: {fault}"
    try:
        return {"turns": tuple(map(Turn.of, turns)), "measured": dict(measured or {})} if turns else {}
    except (KeyError, TypeError, ValueError):
        return f"`turns` or `measured` is not as `vlmrl generate` writes them: {show(turns, 60)}"


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


def first_row(path: str, kind: str) -> tuple[list[str], dict[str, Any]]:
    """Return (names of a table's columns, its first readable row).

    Raises: DataError if no row can be read, or two columns of a Parquet file have one name.
    """
    columns: dict[str, None] = {}
    rows: list[dict[str, Any] | str] = []
    if kind == ".parquet":
        names = parquet_columns(path)
        if twice := [name for name in names if names.count(name) > 1]:
            raise DataError(f"the table has several columns `{twice[0]}`", where=path, hint="rename all but one")
        batch = next(parquet_batches(path, [name for name in names if name not in IMAGES], 1), None)
        columns = dict.fromkeys(names)
        rows += [] if batch is None else python_rows(batch, lambda index: place_of(path, index))
    else:
        rows += [parsed_row(row) for _, row in itertools.islice(text_rows(path), ROWS_FOR_COLUMNS)]
        columns = dict.fromkeys(name for row in rows if not isinstance(row, str) for name in row)
    first = next((row for row in rows if not isinstance(row, str)), None)
    if first is None:
        why = f"the table has no row that can be read; the first one: {rows[0]}" if rows else "the table has no rows"
        raise DataError(why, where=path)
    return list(columns), first


def is_table(path: Path) -> bool:
    """Return whether a path is a table: a text file, Parquet that is no rollout file, or a folder of N.jsonl."""
    if path.is_dir():
        return not (path / MANIFEST).exists() and bool(numbered_files(path))
    kind = path.suffix.lower()
    if kind == ".parquet":
        return path.is_file() and b"vlmrl.schema" not in known_columns(path)[1]
    return kind in SUFFIXES


def numbered_files(folder: Path) -> list[Path]:
    """Return the files N.jsonl of a folder, one per step, in the order of their numbers."""
    files = [p for p in folder.glob("*.jsonl") if p.stem.isascii() and p.stem.isdigit()]
    return sorted(files, key=lambda p: int(p.stem))


def open_table(
    path: Path,
    *,
    columns: Mapping[str, str] | None = None,
    task: str | None = None,
    variant: str | None = None,
    lenient: bool = False,
) -> SavedResponses:
    """Open a table of responses for scoring.

    Args:
        columns: role -> column, for column names that are not recognised; see data/table_values.py.
        task, variant: task whose prompts the responses answer. It determines how truths are read, the reward, and how
            accuracy is measured.
        lenient: see `TruthRule`.
    Raises: DataError for a file without rows or responses, or if the table lacks the truth that the task needs;
        RecipeError for a task or variant that does not exist.
    """
    files = numbered_files(path) if path.is_dir() else [path]
    for file in files:
        require_file(file, hint="name a table of responses, or a run")
    kind = files[0].suffix.lower()
    names, first = first_row(str(files[0]), kind)
    roles = map_roles(names, columns or {}, str(path))
    turns = first.get(roles.get(EPISODE[0], ""), ())
    is_episode = isinstance(turns, (list, tuple)) and all(isinstance(t, Mapping) and "media" in t for t in turns)
    if not (is_episode or turns is None):  # an own column of that name, such as a count
        roles = {role: name for role, name in roles.items() if role not in EPISODE}
    rule, ref = _task_rule(path, task, variant, lenient, names, first, roles)
    if "ground_truth" not in roles and not rule.fields_in(first) and ref is not None:
        raise DataError(
            f"no column of ground truths; the table has: {', '.join(names)}",
            where=str(path),
            hint="name the column: --columns ground_truth=...; or give the fields of the truth as columns",
        )
    texts, rewards, notes = tuple(map(str, files)), stored_rewards(names, first, roles), []
    reader = TableReader(texts, kind, path.stem, roles, rule, rule.fields_in(first), rewards, tuple(names))
    if reader.infers_groups:
        notes.append(
            f"rows of one step with equal `{roles['prompt']}` and truth are a group (else --columns group=...)"
        )
    if rewards:
        notes.append(f"the stored score is the sum of {', '.join(rewards)}; the table does not name their weights")
    truth, _, _ = rule.read(first.get(roles.get("ground_truth", "")), first)
    head = Head(ref.name if ref is not None else "", truth, {})
    return SavedResponses(
        path,
        reader,
        {path.stem: head},
        task=ref,
        grouped="group" in roles or reader.infers_groups,
        has_scores="score" in roles or bool(rewards),
        first_step=0,
        notes=notes,
    )


def stored_rewards(names: list[str], first: Mapping[str, Any], roles: Mapping[str, str]) -> tuple[str, ...]:
    """Return the columns of rewards in a table as TRL writes it: the numbers between `completion` and `advantage`."""
    if "score" in roles or not {"completion", "advantage"} <= set(names):
        return ()
    between = names[names.index("completion") + 1 : names.index("advantage")]
    return tuple(n for n in between if n not in roles.values() and isinstance(first.get(n), float))


def _task_rule(
    path: Path,
    task: str | None,
    variant: str | None,
    lenient: bool,
    names: list[str],
    first: Mapping[str, Any],
    roles: Mapping[str, str],
) -> tuple[TruthRule, TaskRef | None]:
    """Return (rule for reading truths, task); the task is None if the user named none."""
    from vlmrl.tasks import find_task, make_task

    if task is None:
        if variant is not None:
            raise DataError(f"--variant {variant} without a task", hint="name the task: --task NAME --variant ...")
        return TruthRule(), None
    cell = first.get(roles.get("ground_truth", ""))
    form = find_task(task).truth_form(TruthRule().read(cell, first)[0], [n for n in names if n not in roles.values()])
    rule = TruthRule(task, form, variant, lenient)
    truth, problem, _ = rule.read(cell, first)
    # If the first truth lacks the form's fields, it may not represent the truths of the other rows.
    is_sure = not problem and (any(n in truth for n in form.fields[:1]) or not (variant is None or lenient))
    info = {"name": path.stem, **form.info(truth, is_sure)}
    instance = make_task(task, info, variant)
    return rule, TaskRef(task, info, instance.variant or None)


MOST_A_ROW = 16
"""Largest number of images that are read per row."""
BATCH_ROWS = 16
"""Number of rows of a Parquet column of images that are read at a time: few, because images are large."""


def row_images(reader: TableReader, rows: Iterable[int]) -> Iterator[tuple[int, list[bytes | str]]]:
    """Yield (row, its images) for `rows`, in the order of the table; nothing if the table has no images.

    An image is the bytes of its file, unchecked, or a text with the reason why it cannot be read. After links are
    resolved, a path must lie in the table's folder. Nothing is fetched from the network. At most MOST_A_ROW images of a
    row are read; if there are more, a text states how many were left out.

    Raises: DataError if the table can no longer be read.
    """
    column = reader.roles.get("images")
    row_numbers = np.unique(np.asarray(list(rows), dtype=np.int64))
    if column is None or not len(row_numbers):
        return
    root = Path(reader.paths[0]).absolute().parent
    cells = _parquet_cells if reader.kind == ".parquet" else _text_cells
    for row, cell in cells(reader, column, row_numbers):
        values = split_images(cell)
        files = [_file(value, root) for value in values[:MOST_A_ROW]]
        more = len(values) - len(files)
        yield row, [*files, f"{more:,} more images"] if more > 0 else files


def _file(value: Any, root: Path) -> bytes | str:
    try:
        return image_bytes(read_image(value, root, ""), "")
    except DataError as error:
        return error.message


def _parquet_cells(reader: TableReader, column: str, row_numbers: Ints) -> Iterator[tuple[int, Any]]:
    place = 0
    with parquet_table(reader.paths[0]) as file:
        for group, rows in enumerate(group_rows(file)):
            end = place + rows
            if not np.any((row_numbers >= place) & (row_numbers < end)):
                place = end
                continue
            for batch in file_batches(file, BATCH_ROWS, [column], group):
                for row in row_numbers[(row_numbers >= place) & (row_numbers < place + batch.num_rows)].tolist():
                    yield row, _cell(batch, row - place, reader.place(0, row))
                place += batch.num_rows


def _cell(batch: Any, index: int, place: str) -> Any:
    try:
        return batch.column(0)[index].as_py()
    except UNREADABLE as error:
        raise unreadable_cell(batch.slice(index, 1), lambda _: place) from error


def _text_cells(reader: TableReader, column: str, row_numbers: Ints) -> Iterator[tuple[int, Any]]:
    for chunk in reader.chunks(row_numbers):
        here = row_numbers[(row_numbers >= chunk.first) & (row_numbers < chunk.first + chunk.rows)]
        lines = RowCells([chunk.data[row - chunk.first] for row in here.tolist()])
        yield from zip(here.tolist(), lines.column(column), strict=True)
