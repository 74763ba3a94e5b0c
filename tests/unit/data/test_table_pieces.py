from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlmrl.data.table_pieces import PIECE_ROWS, RowFiles, TablePiece, locate_rows, open_row_files, read_piece
from vlmrl.errors import DataError

ROWS = [{"problem": f"p{i}", "answer": str(i % 2), "n": str(i)} for i in range(300)]


def write(folder: Path, kind: str) -> str:
    """The same rows in one of the forms a table may have."""
    folder.mkdir()
    table = pa.Table.from_pylist(ROWS)
    if kind == "parquet":
        pq.write_table(table, folder / "rows.parquet", row_group_size=70)
    elif kind == "two parquet files":
        pq.write_table(table.slice(0, 90), folder / "train-00000.parquet", row_group_size=40)
        pq.write_table(table.slice(90), folder / "train-00001.parquet", row_group_size=100)
    elif kind == "jsonl":
        (folder / "rows.jsonl").write_text("\n\n".join(json.dumps(row) for row in ROWS))
    elif kind == "json":
        (folder / "rows.json").write_text(json.dumps(ROWS))
    elif kind == "csv":
        with (folder / "rows.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(ROWS[0]))
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        import datasets

        made = datasets.Dataset.from_list(ROWS)
        if kind == "a selection":  # held as indices into a larger table
            made = datasets.Dataset.from_list([{**ROWS[0], "n": "x"}, *ROWS]).select(range(1, len(ROWS) + 1))
        datasets.DatasetDict({"train": made}).save_to_disk(str(folder / "saved"))
        return str(folder / "saved")
    files = list(folder.iterdir())
    return str(files[0] if len(files) == 1 else folder)


def read(table: RowFiles, columns: list[str]) -> list[dict[str, Any]]:
    return [row for piece in table.pieces for row in read_piece(piece, columns)]


KINDS = ["parquet", "two parquet files", "jsonl", "json", "csv", "saved", "a selection"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_of_a_table_gives_the_same_rows_in_pieces(tmp_path: Path, kind: str) -> None:
    work = tmp_path / "work"
    work.mkdir()
    located = locate_rows(write(tmp_path / "in", kind))
    table = open_row_files(located, work)
    assert read(table, ["problem", "answer", "n"]) == ROWS
    assert read(table, ["n"]) == [{"n": row["n"]} for row in ROWS]
    assert table.splits == {"train": 300} and list(table.columns) == located.columns() == ["problem", "answer", "n"]
    assert [piece.first for piece in table.pieces] == [
        sum(other.rows for other in table.pieces[:i]) for i in range(len(table.pieces))
    ]
    assert max(piece.rows for piece in table.pieces) <= max(PIECE_ROWS, 100)


@pytest.mark.parametrize("form", ["file", "stream"])
def test_a_stretch_of_an_arrow_file_may_cross_its_batches(tmp_path: Path, form: str) -> None:
    table = pa.Table.from_pylist(ROWS)
    path = tmp_path / "rows.arrow"
    make = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
    with path.open("wb") as sink, make(sink, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=30):
            writer.write_batch(batch)
    for skip, rows in ((0, 300), (29, 2), (30, 30), (65, 120), (299, 1)):
        piece = TablePiece("train", skip, rows, "arrow", str(path), skip=skip)
        assert list(read_piece(piece, ["n"])) == [{"n": row["n"]} for row in ROWS[skip : skip + rows]]


def test_a_row_is_named_by_its_line_in_a_text_and_by_its_number_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    text = open_row_files(locate_rows(write(tmp_path / "a", "jsonl")), tmp_path / "work")
    assert text.where(text.pieces[1], 2) == "rows.jsonl:261"  # row 130 with an empty line before each: 2 x 130 + 1
    table = open_row_files(locate_rows(write(tmp_path / "b", "parquet")), tmp_path / "work")
    assert table.where(table.pieces[1], 2) == "train row 72"


def test_a_split_is_chosen_with_an_at_sign(tmp_path: Path) -> None:
    for split in ("test", "train", "validation"):
        pq.write_table(pa.table({"s": [split] * 3}), tmp_path / f"{split}-00000.parquet")
    (tmp_path / "work").mkdir()
    every = open_row_files(locate_rows(str(tmp_path)), tmp_path / "work")
    assert list(every.splits) == ["train", "validation", "test"]
    one = open_row_files(locate_rows(f"{tmp_path}@test"), tmp_path / "work")
    assert one.splits == {"test": 3} and read(one, ["s"]) == [{"s": "test"}] * 3
    with pytest.raises(DataError, match="no split `tset`") as caught:
        locate_rows(f"{tmp_path}@tset")
    assert caught.value.hint == "splits there: train, validation, test"


def test_what_cannot_be_read_says_so(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 no table")
    for call in (lambda located: located.columns(), lambda located: open_row_files(located, tmp_path / "work")):
        with pytest.raises(DataError, match="not a readable Parquet file"):
            call(locate_rows(str(tmp_path / "rows.parquet")))
    with pytest.raises(DataError, match="no dataset at"):
        locate_rows(str(tmp_path / "gone"))


@pytest.mark.parametrize("cells", ["image_path;order", "a\tb"])
def test_a_csv_whose_cells_are_not_parted_by_commas_is_told(tmp_path: Path, cells: str) -> None:
    (tmp_path / "a.csv").write_text(f"{cells}\n1;2\n")
    with pytest.raises(DataError, match="the header is one cell with") as caught:
        open_row_files(locate_rows(str(tmp_path / "a.csv")), tmp_path)
    assert caught.value.hint.endswith(": save it with commas") and str(caught.value.where).endswith("a.csv:1")


def test_a_value_that_is_nested_too_deep_is_told_with_its_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": ' + "[" * 60 + "]" * 60 + "}\n")
    with pytest.raises(DataError, match="nested more than 50 deep") as caught:
        open_row_files(locate_rows(str(tmp_path / "a.jsonl")), tmp_path)
    assert str(caught.value.where).endswith("a.jsonl:2")
