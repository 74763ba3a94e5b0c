"""Files of evaluations: written whole, read back exactly, damage told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evaluation_builders import row

from vlmrl.errors import StoreError
from vlmrl.evaluate.metrics import summarise
from vlmrl.evaluate.records import Evaluation, read_evaluation, write_evaluation
from vlmrl.store.evaluated_rows import read_summary

ROWS = [
    row("p0"),
    row("p1", confidence=None, score=None, error="boom\nline", text="\u0000<b>\u202e \ud83d\ude00", parts={}),
    row("p2", images=(), level=None, note="half \ud800 a pair"),
]


def evaluation() -> Evaluation:
    return Evaluation([dict(r) for r in ROWS], summarise(ROWS))


def test_rows_and_summary_come_back_as_they_were_written(tmp_path: Path):
    write_evaluation(tmp_path / "eval" / "test", evaluation(), {"split": "test"})
    found = read_evaluation(tmp_path / "eval" / "test")
    expected = [dict(r) for r in ROWS]
    expected[1]["text"] = ROWS[1]["text"].encode("utf-8", "backslashreplace").decode()
    expected[2]["note"] = "half \\ud800 a pair"
    assert found.rows == expected
    assert found.summary == {"schema": 1, "meta": {"split": "test"}, **summarise(ROWS)}


def test_writing_again_replaces_the_evaluation_as_a_whole(tmp_path: Path):
    folder = tmp_path / "test"
    write_evaluation(folder, evaluation(), {"split": "test"})
    write_evaluation(folder, Evaluation(ROWS[:1], summarise(ROWS[:1])), {"split": "other"})
    assert len(read_evaluation(folder).rows) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["test"]


def test_nothing_appears_under_its_name_when_the_summary_cannot_be_written(tmp_path: Path):
    with pytest.raises(ValueError, match="JSON"):
        write_evaluation(tmp_path / "test", evaluation(), {"x": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_evaluation_is_told(tmp_path: Path):
    with pytest.raises(StoreError, match="no finished evaluation"):
        read_summary(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 1}'])
def test_a_damaged_summary_is_told(tmp_path: Path, content: str):
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(StoreError, match="summary"):
        read_summary(tmp_path)


def test_a_newer_schema_is_refused(tmp_path: Path):
    (tmp_path / "summary.json").write_text(json.dumps({"schema": 99, "metrics": {}}))
    with pytest.raises(StoreError, match="schema 99"):
        read_summary(tmp_path)


def test_damaged_rows_are_told(tmp_path: Path):
    write_evaluation(tmp_path / "test", evaluation(), {})
    (tmp_path / "test" / "rows.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(StoreError, match="rows of this evaluation cannot be read"):
        read_evaluation(tmp_path / "test")


def test_a_run_that_was_removed_is_not_made_again(tmp_path: Path):
    with pytest.raises(StoreError, match="the run was removed"):
        write_evaluation(tmp_path / "run" / "eval" / "test", evaluation(), {})
    assert list(tmp_path.iterdir()) == []
