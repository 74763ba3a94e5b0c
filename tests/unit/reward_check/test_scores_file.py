from __future__ import annotations

import csv
import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from vlmrl.errors import StoreError
from vlmrl.redaction.secrets import HIDDEN
from vlmrl.reward_check.responses import ResponseColumns
from vlmrl.reward_check.run import check_out, write_scores
from vlmrl.reward_check.scores import Coded, Scores
from vlmrl.types import Score

SCORES = [
    Score(0.5, {"format": 1.0, "score": 0.25, "level": None}, 'a "note", with\nlines'),
    Score(float("nan"), {}, error="ValueError: x"),
    Score(1.0, {"format": 1.0, "score": 1.0, "level": 0.1 + 0.2}, ""),
]
WANTED = [
    {"row": 4, "score": 0.5, "format": 1.0, "part_score": 0.25, "level": None, "note": 'a "note", with\nlines'},
    {"row": 6, "score": None, "format": None, "part_score": None, "level": None, "note": "failed: ValueError: x"},
    {"row": 7, "score": 1.0, "format": 1.0, "part_score": 1.0, "level": 0.1 + 0.2, "note": ""},
]


def facts(rows):
    zeros, names = np.zeros(len(rows), np.int32), Coded(np.zeros(len(rows), np.int32), ["s"])
    return ResponseColumns(
        np.array(rows),
        np.array(rows),
        zeros,
        zeros,
        np.array(rows),
        zeros,
        names,
        names,
        zeros > 0,
        zeros,
        zeros,
        np.zeros(len(rows)),
    )


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_every_form_holds_row_score_parts_and_note_in_input_order(kind, tmp_path):
    path = tmp_path / f"scores.{kind}"
    write_scores(path, facts([4, 6, 7]), Scores.of(SCORES))
    if kind == "parquet":
        found = pq.read_table(path).to_pylist()
    elif kind == "jsonl":
        found = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        with path.open(newline="") as file:
            found = [
                {k: v if k == "note" else int(v) if k == "row" else float(v) if v else None for k, v in row.items()}
                for row in csv.DictReader(file)
            ]
    assert found == WANTED and list(found[0]) == list(WANTED[0])


def test_a_place_that_cannot_be_written_is_told_first(tmp_path):
    with pytest.raises(StoreError, match="unknown ending"):
        check_out(tmp_path / "scores.xlsx")
    with pytest.raises(StoreError, match="there is no folder"):
        check_out(tmp_path / "none" / "scores.csv")


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_half_characters_in_stored_scores_are_written_as_escapes(kind, tmp_path):
    path = tmp_path / f"scores.{kind}"
    scores = [Score(0.5, {"part \ud800": 0.5}, "note \ud800"), Score(float("nan"), {}, error="error \ud800")]
    write_scores(path, facts([0, 1]), Scores.of(scores))
    text = str(pq.read_table(path).to_pydict()) if kind == "parquet" else path.read_text("utf-8")
    assert text.count("ud800") == (4 if kind == "jsonl" else 3)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_a_key_that_a_reward_returns_or_raises_is_hidden(kind, tmp_path, monkeypatch):
    key = "zq8Kd03nVb51xWm7TtR2cYpE64uJh9Lf"
    monkeypatch.setenv("SERVICE_API_KEY", key)
    scores = [Score(1.0, {}, f"called with {key}"), Score(float("nan"), {}, error=f"ValueError: no such key {key}")]
    path = tmp_path / f"scores.{kind}"
    write_scores(path, facts([0, 1]), Scores.of(scores))
    notes = pq.read_table(path)["note"].to_pylist() if kind == "parquet" else [path.read_text()]
    assert key not in "".join(notes) and "".join(notes).count(HIDDEN) == 2
