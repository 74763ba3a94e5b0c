"""Truths that fit the declared space and are in another one: named in the doctor's report, and only then."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from task_tables import checks_of, picture_table, prepare

from vlmrl.rewards.boxes.planes import Box, convert, plane_of
from vlmrl.tasks.perception.truth import space_doubts
from vlmrl.tasks.positions import SHARES
from vlmrl.types import Size


def boxes_of(spoken: str, declared: str, size: Size, count: int, seed: int = 0) -> list[Any]:
    """Boxes that are in one space, and declared in another."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        (x1, x2), (y1, y2) = (sorted(rng.sample(range(101), 2)) for _ in range(2))
        box = convert(Box(x1 / 100, y1 / 100, x2 / 100, y2 / 100), SHARES, plane_of(spoken, size))  # type: ignore[arg-type]
        rows.append((plane_of(declared, size), size, box))  # type: ignore[arg-type]
    return rows


@pytest.mark.parametrize(
    ("spoken", "declared", "size"),
    [
        ("unit", "pixels", (640, 480)),
        ("unit", "thousand", (640, 480)),
        ("pixels", "thousand", (640, 480)),
        ("pixels", "thousand", (100, 90)),
        ("thousand", "pixels", (2000, 1500)),
    ],
)
def test_another_space_is_named(spoken: str, declared: str, size: Size) -> None:
    (note,) = space_doubts(boxes_of(spoken, declared, size, 60)).values()
    assert note[0] == "bad" and f"--truth-space {spoken}" in note[1] and f"declared: {declared}" in note[1]


@pytest.mark.parametrize("space", ["pixels", "thousand", "unit"])
@pytest.mark.parametrize("size", [(640, 480), (100, 90), (24, 20), (1000, 1000), (4000, 3000)])
def test_the_declared_space_raises_no_doubt(space: str, size: Size) -> None:
    for count in (1, 4, 25, 400):
        assert space_doubts(boxes_of(space, space, size, count)) == {}


def test_few_boxes_are_not_doubted_unless_they_are_units() -> None:
    assert space_doubts(boxes_of("pixels", "thousand", (640, 480), 19)) == {}
    assert space_doubts(boxes_of("unit", "pixels", (640, 480), 3)) == {}
    assert space_doubts([]) == {}


def test_the_doctor_of_a_new_dataset_says_it(tmp_path: Path) -> None:
    rows = [{"normal_caption": f"the cat {n}", "solution": [0.1, 0.2, 0.5, 0.9]} for n in range(8)]
    made = prepare("grounding", tmp_path, picture_table(tmp_path, rows), truth_space="pixels", validation_rows=0)
    verdict, finding = checks_of(made.info)["space of the boxes"]
    assert verdict == "bad" and "Are they in the space unit (--truth-space unit)?" in finding
    right = prepare("grounding", tmp_path, picture_table(tmp_path, rows), truth_space="unit", out=tmp_path / "right")
    assert "space of the boxes" not in checks_of(right.info)
