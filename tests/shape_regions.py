"""Shapes of a drawn image, found again in its pixels."""

from __future__ import annotations

import numpy as np
from PIL import Image
from scipy import ndimage

from vlmrl.tasks.drawing import COLOURS


def regions(image: Image.Image) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return (colour, kind, box) of every shape: the share of its box that it fills tells its kind."""
    pixels = np.asarray(image.convert("RGB")).astype(int)
    shapes = []
    for colour, value in COLOURS.items():
        labels, _ = ndimage.label((pixels == value).all(axis=2), np.ones((3, 3)))
        for number, (rows, columns) in enumerate(ndimage.find_objects(labels), start=1):
            share = (labels[rows, columns] == number).mean()
            kind = "square" if share > 0.95 else "circle" if share > 0.68 else "triangle"
            shapes.append((colour, kind, (columns.start, rows.start, columns.stop, rows.stop)))
    return shapes


def extent_of(pixels: np.ndarray, colour: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Return the smallest box around all pixels of a colour: left, upper, right and lower edge."""
    rows, columns = np.nonzero((pixels == colour).all(axis=2))
    return int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1
