"""Drawn scenes: boxes are exact, shapes keep the declared distance, and a crowd that does not fit is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest

from vlmrl.rewards.boxes.planes import area, shared_area
from vlmrl.tasks.drawing import COLOURS, KINDS, Look, lay_out, paint


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_a_box_is_the_extent_of_the_pixels(kind: str, seed: int) -> None:
    scene = lay_out(random.Random(seed), [Look(kind, "red")], 112 + seed)
    assert scene is not None
    pixels = np.asarray(paint(scene)).astype(int)
    rows, columns = np.nonzero((pixels == COLOURS["red"]).all(axis=2))
    assert scene.shapes[0].box == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)


@pytest.mark.parametrize("max_overlap", [0.0, 0.2])
def test_shapes_overlap_no_more_than_declared(max_overlap: float) -> None:
    rng, shares = random.Random(0), []
    for _ in range(20):
        scene = lay_out(rng, [Look("square", "red")] * 8, 160, max_overlap=max_overlap)
        assert scene is not None
        boxes = [shape.box for shape in scene.shapes]
        shares += [shared_area(a, b) / min(area(a), area(b)) for i, a in enumerate(boxes) for b in boxes[:i]]
    assert max(shares) <= max_overlap
    assert (max(shares) > 0) == (max_overlap > 0)


def test_a_crowd_does_not_fit() -> None:
    assert lay_out(random.Random(0), [Look("square", "red")] * 200, 56) is None
