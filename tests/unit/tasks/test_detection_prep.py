"""Data of the task detection: drawn rows with exact boxes, and rows of published tables, read leniently but safely."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from shape_regions import regions
from task_tables import picture_table, prepare, rows_of, sizes_of

from vlmrl.errors import DataError, VlmrlError
from vlmrl.recipe.schema import Data, Reward
from vlmrl.tasks.perception.rows import CATEGORY_KINDS, Drawing, drawn_rows, read_category
from vlmrl.tasks.source import open_source

PROBLEM = (
    "Detect all objects belonging to the category '{0}' in the image.\n"
    "If no object belonging to the category '{0}' in the image, return 'No Objects'."
)
"""Beginning of a published problem, shortened."""


def test_a_drawn_row_has_the_boxes_of_all_shapes_of_its_category_and_of_no_other() -> None:
    rows = drawn_rows("detection", Drawing(224, 4, tuple(CATEGORY_KINDS), 0.2), 5, {"train": 80})["train"]
    for row in rows:
        kind_of = {"shape": lambda c, k: f"{c} shape"}
        category = row.columns["category"]
        words = category.split()
        name = kind_of.get(words[-1], (lambda c, k: k) if len(words) == 1 else (lambda c, k: f"{c} {k}"))
        boxes = [
            list(map(float, box))
            for c, k, box in regions(Image.open(io.BytesIO(row.images[0])))
            if name(c, k) == category
        ]
        assert sorted(row.truth["boxes"]) == sorted(boxes), category
        assert row.truth["count"] == len(boxes) and row.truth["category"] == category
    counts = [row.truth["count"] for row in rows]
    assert counts.count(0) == 16 and max(counts) >= 3  # a fifth of the rows
    assert {len(row.columns["category"].split()) for row in rows} == {1, 2}
    again = drawn_rows("detection", Drawing(224, 4, tuple(CATEGORY_KINDS), 0.2), 5, {"train": 80})["train"]
    assert [row.images for row in rows] == [row.images for row in again]
    assert len({row.images[0] for row in rows}) == 80


@pytest.mark.parametrize("asks", list(CATEGORY_KINDS))
def test_settings_of_a_drawing(asks: str) -> None:
    rows = drawn_rows("detection", Drawing(224, 0, (asks,), 1.0), 1, {"train": 12})["train"]
    assert all(row.truth["boxes"] == [] for row in rows)
    rows = drawn_rows("detection", Drawing(224, 0, (asks,), 0.0), 1, {"train": 12})["train"]
    assert all(row.truth["count"] == 1 for row in rows)
    with pytest.raises(DataError, match="gave no new image"):  # a shape has one place here: 54 images
        drawn_rows("detection", Drawing(9, 0, tuple(CATEGORY_KINDS), 0.2), 1, {"train": 60})


def test_a_drawn_dataset_is_sound(tmp_path: Path) -> None:
    made = prepare("detection", tmp_path, synthetic=20, side=168)
    assert sizes_of(made.info) == {"train": 20, "validation": 20, "test": 40}
    source = open_source(Data(path=str(made.path), variant="thousand"), Reward())
    row = source.rows[0]
    (message,) = source.messages(row)
    assert message.content.count(str(row.columns["category"])) == 3 and message.content.count("<image>") == 1
    assert '{"Position": BOX, "Confidence": C}' in message.content and "<answer>[]</answer>" in message.content


BOXES = [[100.0, 100.0, 300.0, 300.0], [500.0, 500.0, 700.0, 900.0]]


@pytest.mark.parametrize(
    ("solution", "boxes"),
    [
        ("<answer>[{'Position': [100, 100, 300, 300], 'Confidence': 1}, "
         "{'Position': [500, 500, 700, 900], 'Confidence': 1}]</answer>", BOXES),
        ("[{'Position': [100, 100, 300, 300], 'Confidence': 1.0}]", BOXES[:1]),  # without tags
        ('<think>a</think><answer>[{"bbox_2d": [100, 100, 300, 300], "label": "Traffic  light"}]</answer>', BOXES[:1]),
        ("[[100, 100, 300, 300], [500, 500, 700, 900]]", BOXES),
        ([[100, 100, 300, 300], [500, 500, 700, 900]], BOXES),
        ([{"Position": [100, 100, 300, 300], "Confidence": 1.0}], BOXES[:1]),
        ([100, 100, 300, 300], BOXES[:1]),
        ("[{'Position': [100, 100, 300, 300]}, {'Position': [100, 100, 300, 300]}]", BOXES[:1]),  # annotated twice
        ("<answer>No Objects</answer>", []),
        ("<answer>[]</answer>", []),
        ([], []),
        ("[{'Position': [100, 100, 300, 300]}, {'Position': [500, 500, 700, 900.0]}]", BOXES),
    ],
)  # fmt: skip
def test_rows_of_published_tables(tmp_path: Path, solution: Any, boxes: list[list[float]]) -> None:
    source = picture_table(tmp_path, [{"problem": PROBLEM.format("traffic light"), "solution": solution}])
    (row,) = rows_of(prepare("detection", tmp_path, source, validation_rows=0, truth_space="thousand"))
    assert row.columns["category"] == "traffic light"
    assert row.truth == {
        "boxes": boxes, "space": "thousand", "width": 640, "height": 480, "category": "traffic light",
        "count": len(boxes),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ("__import__('os').abort()", "not a list of boxes"),
        ("[__import__('os').abort()]", "not a list of boxes"),
        ("<answer>there is one</answer>", "not a list of boxes"),
        ("[{'Position': 5}]", "no box"),
        ("[{'Position': [1, null, 3, 4]}]", "no box"),
        ("[{'Position': [100, 100, 300, 300]}, {'Position': [1, null, 3, 4]}]", "no box"),
        ("['cat']", "no box"),
        ("[{'bbox': [1, 2, 30, 40], 'label': 'cat'}, {'bbox': [5, 2, 30, 40], 'label': 'dog'}]", "has the label 'dog'"),
        ("[[]]", "no box"),
        ("{}", "no box"),
        ("[{'Position': [100, 100, 300, 300]}", "not a list of boxes"),
        ("[{'Position': [100, 100, 100, 300]}]", "without area"),
        ("[{'Position': [300, 300, 100, 100]}]", "corners in reverse order"),
        ("[{'Position': [100, 100, 1300, 300]}]", "cut at the edge of the image"),
        ("[{'Position': [NaN, 100, 300, 300]}]", "not a number"),
        ("[" * 5000, "not a list of boxes"),
        (json.dumps([[1, 2, 3, 4]] * 301), "301 boxes; the limit is 300"),
        (None, "no boxes"),
        (5, "not a list of boxes"),
    ],
)
def test_a_wrong_row_is_an_error_with_its_place(tmp_path: Path, solution: Any, reason: str) -> None:
    source = picture_table(tmp_path, [{"problem": PROBLEM.format("cat"), "solution": solution}])
    with pytest.raises(DataError) as error:
        prepare("detection", tmp_path, source, validation_rows=0, truth_space="thousand")
    assert reason in error.value.message and "row 0" in error.value.message
    assert not (tmp_path / "out").exists()


def test_wrong_rows_are_reported_and_left_out_if_they_are_few(tmp_path: Path) -> None:
    good = {"category": "cat", "solution": "[[1, 2, 30, 40]]"}
    source = picture_table(tmp_path, [dict(good), {**good, "solution": "[5]"}, dict(good)])
    made = prepare("detection", tmp_path, source, validation_rows=0, truth_space="pixels", max_bad=0.5)
    assert len(rows_of(made)) == 2
    (dropped,) = [json.loads(line) for line in (made.path / "dropped.jsonl").read_text().splitlines()]
    assert "row 1" in dropped["origin"] and "the box is" in dropped["reason"]


@pytest.mark.parametrize(
    ("category", "problem", "name"),
    [
        (None, PROBLEM.format("dog"), "dog"),
        (None, 'Detect all objects of the category "hot dog".', "hot dog"),
        (None, "<image> hot dog", "hot dog"),
        (None, PROBLEM.format("shepherd's dog"), "shepherd's dog"),
        ("cat", PROBLEM.format("dog"), "cat"),
    ],
)
def test_the_category_of_a_row(category: Any, problem: Any, name: str) -> None:
    assert read_category(category, problem) == name


@pytest.mark.parametrize(
    ("category", "problem", "reason"),
    [
        (None, "Detect the category 'dog' and the category 'cat'.", "several categories: 'dog, cat'"),
        (None, "Please find everything that you can see in here", "names no category"),
        (None, " <image> ", "names no category"),
        (None, None, "not a text"),
        (7, "dog", "not a text"),
        ("<image>", "dog", "not a text"),
        ("x" * 101, "dog", "101 characters"),
    ],
)
def test_a_row_without_one_category_is_wrong(category: Any, problem: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        read_category(category, problem)


def test_options_that_cannot_be_used(tmp_path: Path) -> None:
    for options in ({"truth_space": "seen"}, {"asks": "size"}, {"box_order": "xxyy"}):
        with pytest.raises(VlmrlError, match=next(iter(options.values()))):
            prepare("detection", tmp_path, synthetic=20, **options)
    source = picture_table(tmp_path, [{"category": "cat", "boxes": [[1, 2, 3, 4]]}])
    with pytest.raises(DataError, match="give --truth-space"):
        prepare("detection", tmp_path, source)
