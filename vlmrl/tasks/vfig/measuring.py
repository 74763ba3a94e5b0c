"""Measures of SVG code that need no model, in the worker processes: pictures, SSIM, cleanliness. Code is hostile."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
from PIL import Image

from vlmrl.svg.draw import DrawJob, draw_svg
from vlmrl.svg.parse import SvgRefused, find_svg
from vlmrl.tasks.vfig.grader import PART_DECIMALS
from vlmrl.tasks.vfig.published.cleanliness import published_cleanliness
from vlmrl.tasks.vfig.scoring.compare import fitting, load_fonts, read_figure, read_truth
from vlmrl.tasks.vfig.scoring.picture import WINDOW, ssim
from vlmrl.tasks.vfig.truth import code_of, size_of
from vlmrl.types import RewardInput, RewardResult

LONGEST_SIDE = 2048
"""Pixels to which the longer side of a larger figure is reduced before its picture is compared."""
TRUTH, DRAWN = "truth", "response"
"""Names of the pictures."""


def make_measurer(*, pictures: bool) -> Callable[[RewardInput], RewardResult]:
    """Return the function that measures a response, with the fonts loaded. `pictures`: whether it returns pictures."""
    load_fonts()
    return partial(_measured, pictures=pictures)


def _measured(x: RewardInput, *, pictures: bool) -> RewardResult:
    truth_code = code_of(x.truth)
    truth = _true_picture(truth_code, _size(x))
    figure = read_truth(truth_code)
    try:
        code = find_svg(x.response)
        drawn = _stretched(draw_svg(DrawJob(code)).pixels, truth.shape)
        response = read_figure(code, figure.size)
    except SvgRefused as error:
        return RewardResult({"rendered": 0.0}, f"not drawn: {error.reason}")
    parts: dict[str, float | None] = {
        "rendered": 1.0,
        "ssim": ssim(truth, drawn) if min(truth.shape[:2]) >= WINDOW else None,
        "ssim_ink": figure.true_picture.similarity(response.view.picture).structure,
        "clean": response.cleanliness,
        "clean_published": published_cleanliness(code),
    }
    # Processors differ in the last digits: equal responses have equal numbers everywhere.
    rounded = {name: None if value is None else round(value, PART_DECIMALS) for name, value in parts.items()}
    both = {TRUTH: Image.fromarray(truth), DRAWN: Image.fromarray(drawn)} if pictures else {}
    return RewardResult(rounded, artifacts=both)


def _size(x: RewardInput) -> tuple[int, int] | None:
    """Return the size at which the true figure is drawn; None = the one that it declares."""
    return fitting(*size_of(x.truth), LONGEST_SIDE) if "width" in x.truth else None


@lru_cache(maxsize=8)
def _true_picture(code: str, size: tuple[int, int] | None) -> np.ndarray:
    """Return the picture of a true figure. All responses to one prompt share it."""
    pixels = draw_svg(DrawJob(code, size)).pixels
    height, width = pixels.shape[:2]
    short = fitting(width, height, LONGEST_SIDE)
    return pixels if short == (width, height) else draw_svg(DrawJob(code, short)).pixels


def _stretched(pixels: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a picture in the size of the true one, bicubic, whatever its own shape is; as published."""
    if pixels.shape == shape:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((shape[1], shape[0]), Image.Resampling.BICUBIC))
