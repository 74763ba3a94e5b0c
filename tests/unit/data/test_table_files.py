"""Rows of table files are the same, with the same places and errors, for training, `prep` and `reward-check`."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.data.table_dataset import open_tables
from vlmrl.data.table_files import in_portions, parsed_row, sound_rows, text_rows
from vlmrl.data.table_pieces import locate_rows, open_row_files, read_piece
from vlmrl.data.table_values import PAIRS, RESPONSES, TRAINING, match_columns
from vlmrl.errors import DataError
from vlmrl.recipe.explain import explain
from vlmrl.reward_check.response_tables import open_table
from vlmrl.reward_check.responses import ArrowCells

A, B = '{"response": "a", "n": 1}', '{"response": "b", "n": 22222222222222222222}'
ROWS = [{"response": "a", "n": 1}, {"response": "b", "n": 22222222222222222222}]
TEXTS = [{"response": "a", "n": "1"}, {"response": "b\nc", "n": "2"}, {"response": "d", "n": "3"}]
SOUND = {
    "byte order mark": ("a.jsonl", f"\ufeff{A}\n{B}", ROWS, [1, 2]),
    "empty lines": ("a.jsonl", f"\n{A}\n \n\n{B}\n", ROWS, [2, 5]),
    "lines end with CR LF": ("a.jsonl", f"{A}\r\n{B}\r\n", ROWS, [1, 2]),
    "lines end with CR": ("a.jsonl", f"{A}\r{B}\r", ROWS, [1, 2]),
    "list": ("a.json", f"[{A}, {B}]", ROWS, [0, 1]),
    "list in data": ("a.json", f'{{"data": [{A}, {B}]}}', ROWS, [0, 1]),
    "cells of several lines": ("a.csv", 'response,n\na,1\n"b\nc",2\n\nd,3\n', TEXTS, [2, 3, 6]),
    "a header of two lines": ("a.csv", 'response,"n\nn"\na,1\n', [{"response": "a", "n\nn": "1"}], [3]),
}


@pytest.mark.parametrize("name", SOUND)
def test_every_reader_has_the_same_rows_and_places(tmp_path: Path, name: str) -> None:
    file, text, rows, places = SOUND[name]
    path = tmp_path / file
    path.write_bytes(text.encode())
    (tmp_path / "work").mkdir()
    where = [f"{path} row {n}" if file == "a.json" else f"{path}:{n}" for n in places]

    training = open_tables(str(path))["train"]
    assert [training.row(i) for i in range(len(training))] == rows
    assert [training.where(i) for i in range(len(training))] == where

    pieces = open_row_files(locate_rows(str(path)), tmp_path / "work")
    assert [row for piece in pieces.pieces for row in read_piece(piece, pieces.columns)] == rows
    if file != "a.json":
        assert [number for piece in pieces.pieces for number in piece.numbers] == places

    saved = open_table(path)
    (chunk,) = saved.reader.chunks()
    decoded = saved.reader.decode(chunk)
    assert [x.response for x in decoded.inputs] == [row["response"] for row in rows]
    assert [saved.reader.where(decoded.facts, i) for i in range(len(rows))] == where


BROKEN = {
    "not UTF-8": ("a.jsonl", A.encode() + b'\n{"response": "\xff"}', "not UTF-8 text", ":2", "save the file as UTF-8"),
    "CSV that is not UTF-8": ("a.csv", b"response\na\n\xe9\n", "not UTF-8 text", ":3", "save the file as UTF-8"),
    "JSON that is not UTF-8": ("a.json", b'[\n"\xff"]', "not UTF-8 text", ":2", "save the file as UTF-8"),
    "half a line": ("a.jsonl", A.encode() + b"\n{", "not JSON", ":2", "JSONL has one JSON object per line"),
    "a number": ("a.json", f"[{A}, 3]".encode(), "a row is 3, not an object", " row 1", None),
    "an open quote": ("a.csv", b'response,n\na,1\n"b,2\n', "not CSV: unexpected end", ":3", None),
    "too many cells": ("a.csv", b'response,n\n"a\nb",1\nc,1,2\n', "3 cells, the header has 2", ":4", None),
    "a key twice": ("a.json", b'[{"response": "a", "response": "b"}]', "`response` occurs more than once", "", None),
    "nothing": ("a.csv", b"", "the header is empty", ":1", None),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_text_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    file, data, message, place, hint = BROKEN[name]
    path = tmp_path / file
    path.write_bytes(data)
    for read in (lambda: open_tables(str(path)), lambda: open_row_files(locate_rows(str(path)), tmp_path)):
        with pytest.raises(DataError, match=message) as caught:
            read()
        assert caught.value.where == f"{path}{place}"
        assert hint is None or caught.value.hint == hint


def test_a_damaged_row_does_not_end_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n[2]\n\xff\n{"n": 4}\n')
    parsed = [parsed_row(row) for _, row in text_rows(path)]
    assert parsed[0] == {"n": 1} and parsed[3] == {"n": 4}
    assert parsed[1] == "a row is [2], not an object" and str(parsed[2]).startswith("not UTF-8 text: ")


def test_portions_end_at_their_rows_and_bytes() -> None:
    lines = [(n, b"x" * 10) for n in range(7)]
    assert [len(one) for one in in_portions(lines, 3)] == [3, 3, 1]
    assert [len(one) for one in in_portions(lines, 5, 20)] == [2, 2, 2, 1]
    assert [row for one in in_portions(lines, 5, 20) for row in one] == lines


def test_a_table_of_responses_that_is_an_lfs_pointer_or_no_table_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(DataError, match="run git lfs pull"):
        open_table(tmp_path / "a.jsonl")
    (tmp_path / "a.txt").write_text(A)
    with pytest.raises(DataError, match="not a kind of table that can be read"):
        next(sound_rows(tmp_path / "a.txt"))


def test_a_row_with_a_date_that_python_cannot_hold_is_named_in_every_view(tmp_path: Path) -> None:
    when = pa.array([1, 2**62], pa.int64()).cast(pa.timestamp("us"))
    batch = pa.record_batch({"n": ["a", "b"], "when": when})
    cells = ArrowCells(batch, 40)
    assert cells.row(0)["n"] == "a"
    for read in (lambda: cells.row(1), lambda: cells.column("when")):
        with pytest.raises(DataError, match="a value of type timestamp") as caught:
            read()
        assert caught.value.where == "row 41, column `when`"


def test_the_columns_of_files_that_differ_are_those_of_the_first(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "train-0.parquet")
    pq.write_table(pa.table({"b": [3], "c": [4]}), tmp_path / "train-1.parquet")
    table = open_row_files(locate_rows(str(tmp_path)), tmp_path)
    assert table.columns == ("a", "b")
    assert [row for piece in table.pieces for row in read_piece(piece, table.columns)] == [{"a": 1, "b": 2}, {"b": 3}]


@pytest.mark.parametrize("spellings", [TRAINING, RESPONSES, PAIRS])
def test_no_spelling_stands_for_two_roles(spellings) -> None:
    names = [name for role in spellings.values() for name in role]
    assert len(names) == len(set(names))


def test_the_help_of_the_recipe_names_the_roles_of_a_training_table() -> None:
    assert f"keys {', '.join(TRAINING)};" in explain("data.columns").help


@given(st.lists(st.sampled_from([name for role in RESPONSES.values() for name in role]), unique=True), st.data())
def test_a_named_column_comes_first_and_no_column_has_two_roles(columns: list[str], data: st.DataObject) -> None:
    roles = data.draw(st.lists(st.sampled_from(list(RESPONSES)), unique=True, max_size=len(columns)))
    named = dict(zip(roles, data.draw(st.permutations(columns)), strict=False))
    matched = match_columns(RESPONSES, columns, named)
    assert {role: matched[role] for role in named} == named
    assert len(set(matched.values())) == len(matched)
    for role, names in RESPONSES.items():
        free = [name for name in names if name in columns and name not in named.values()]
        assert role in named or matched.get(role) == (free[0] if free else None)
