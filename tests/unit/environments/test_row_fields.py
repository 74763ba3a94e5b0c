"""Columns that repeat the truth: decided for all rows of a source, by name and by value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tinyworld import image

from vlmrl.environments.row_fields import count_repeats, repeats_of, row_fields
from vlmrl.recipe.schema import Data, Environment, Reward
from vlmrl.tasks.source import open_rows_file, open_source

OPEN = {"row": True}


def rows(**columns: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [({name: make(i) for name, make in columns.items()}, {"answer": i % 9 + 1}) for i in range(90)]


def test_a_column_that_meets_the_truth_by_accident_is_in_every_row() -> None:
    table = rows(shelf=lambda i: i // 9 % 9 + 1, text=lambda i: f"{i % 9 + 1} of 9")
    repeats = repeats_of(table)
    assert any(columns["shelf"] == truth["answer"] for columns, truth in table) and repeats == {}
    for columns, truth in table:
        assert row_fields(columns, truth, OPEN, repeats) == (columns, {"answer": []})


def test_a_column_that_repeats_the_truth_is_in_no_row() -> None:
    table = rows(
        same=lambda i: i % 9 + 1,
        text=lambda i: f" {i % 9 + 1}",
        nested=lambda i: json.dumps({"a": [{"b": i % 9 + 1}]}),
        prices=lambda i: {"red": i % 9 + 1, "blue": 77},
        often=lambda i: i % 9 + 1 if i % 3 else 77,
        rare=lambda i: i % 9 + 1 if i > 80 else None,
        seldom=lambda i: i % 9 + 1 if i % 3 == 0 else 77,
    )
    repeats = repeats_of(table)
    assert set(repeats) == {"same", "text", "nested", "prices", "often", "rare"}
    for columns, truth in table:
        assert set(row_fields(columns, truth, None, repeats)[0]) == {"seldom"}, "the same columns in every row"
    count = count_repeats(table)
    assert (count["often"]["answer"].rows, count["rare"]["answer"].both) == (60, 9)


def test_reset_gets_what_it_names_and_a_name_of_the_truth_is_always_kept_back() -> None:
    columns, truth, repeats = {"prices": [3], "hint": 4, "answer": 9}, {"answer": 3, "hint": 5}, {"prices": ["answer"]}
    assert row_fields(columns, truth, OPEN, repeats)[0] == {}
    assert row_fields(columns, truth, {"prices": False, **OPEN}, repeats)[0] == {"prices": [3]}
    assert row_fields(columns, truth, {"answer": False, **OPEN}, repeats)[0] == {"answer": 3, "prices": [3]}
    assert row_fields(columns, truth, {"prices": False}, repeats)[1] == {"answer": [], "hint": []}


def test_rows_of_another_file_are_decided_on_the_training_rows(tmp_path: Path) -> None:
    image(1).save(tmp_path / "a.png")
    (tmp_path / "tools.py").write_text("def look():\n    'Look.'\n    return 'x'\n")
    for name, shelves in (("train.jsonl", range(1, 10)), ("small.jsonl", [5])):
        lines = [{"question": "q", "image": "a.png", "answer": 5, "shelf": s, "echo": "5"} for s in shelves]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "prompt.jinja").write_text("<image>{{ question }}")
    data = Data(path=str(tmp_path / "train.jsonl"), prompt=str(tmp_path / "prompt.jinja"), reward="exact_match")
    data._environment = Environment(name=f"{tmp_path}/tools.py:look")
    train = open_source(data, Reward())
    other = open_rows_file(data, Reward(), str(tmp_path / "small.jsonl"), "validation")
    assert train.repeats == other.repeats == {"echo": ["answer"]}
    assert train.prompt_record["environment"]["repeats"] == {"echo": ["answer"]}, "a run keeps the decision"
