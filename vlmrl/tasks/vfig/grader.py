"""Graders of the rewards `svg` and `svg_models`, and the measures that need no model (pictures, SSIM, cleanliness).

They run in workers: a response is hostile, and drawing it may take any time or memory. Workers load the models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vlmrl.errors import RewardError
from vlmrl.svg.build import Images
from vlmrl.svg.draw import DrawJob, draw_svg, pixels_digest
from vlmrl.svg.parse import find_svg
from vlmrl.tasks.vfig.measures import LPIPS, PictureModel, open_picture_model
from vlmrl.tasks.vfig.pictures import shown_pictures
from vlmrl.tasks.vfig.published.document import published_cleanliness
from vlmrl.tasks.vfig.scoring.compare import Figure, FigureScore, compare, fitting, load_fonts, read_figure, read_truth
from vlmrl.tasks.vfig.scoring.picture import WINDOW, ssim
from vlmrl.tasks.vfig.truth import code_of, size_of, true_figure
from vlmrl.types import RewardInput, RewardResult
from vlmrl.untrusted import CodeRefused

RIGHT = 0.9
"""Least score of the elements, and of the picture, of a figure that counts as right."""
ALIKE = 0.01
"""Score of the elements, or of the picture, below which a note says that there is next to nothing of the truth."""
DECIMALS, PART_DECIMALS = 4, 6
"""Decimals of numbers in the detail, and of the parts."""
KINDS = {"shape": "shapes", "line": "lines", "text": "texts"}
"""Kind of elements -> the part with their score."""


def make_grader(*, key: str | None, images: Images, pictures: bool) -> Callable[[RewardInput], RewardResult]:
    """Return the grader for the arguments of `svg_figure`, with the fonts loaded."""
    load_fonts()
    return partial(_graded, key=key, images=images, pictures=pictures)


def _graded(x: RewardInput, *, key: str | None, images: Images, pictures: bool) -> RewardResult:
    truth = true_figure(x, key, partial(read_truth, images=images))
    try:
        response = read_figure(find_svg(x.response), truth.size, images=images)
    except CodeRefused as error:
        parts: dict[str, float | None] = dict.fromkeys(("render", "elements", "picture", "clean", "length"), 0.0)
        parts |= {part: 0.0 if _has(truth, kind) else None for kind, part in KINDS.items()}
        detail = {"refused": error.kind, "reason": error.reason}
        return RewardResult(parts | {"accuracy": 0.0}, f"not drawn: {error.reason}", detail)
    score = compare(truth, response)
    picture = response.view.picture
    detail = {
        "elements": [len(truth.elements), len(response.elements)],
        "matched": score.matched,
        "ink": round(score.picture.ink, DECIMALS),
        "edges": round(score.picture.edges, DECIMALS),
        "structure": round(score.picture.structure, DECIMALS),
        "cleanliness": [_rounded(figure.cleanliness) for figure in (truth, response)],
        "chars": [truth.chars, response.chars],
        "digest": pixels_digest(picture)[:16],
    }
    blank = bool((picture == picture[0, 0]).all())
    is_alike = max(score.elements, score.picture.value) >= ALIKE
    return RewardResult(
        _parts(score, truth, response),
        "the picture is empty" if blank else "" if is_alike else "hardly anything in it is like the truth",
        detail,
        shown_pictures(truth.view.picture, picture) if pictures else {},
    )


def _has(figure: Figure, kind: str) -> bool:
    return any(element.kind == kind for element in figure.elements)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DECIMALS)


def _parts(score: FigureScore, truth: Figure, response: Figure) -> dict[str, float | None]:
    right = score.elements >= RIGHT and score.picture.value >= RIGHT
    parts = {
        "render": 1.0,
        "elements": score.elements,
        "picture": score.picture.value,
        "clean": score.clean,
        "length": score.length,
        **{part: score.kinds.get(kind) for kind, part in KINDS.items()},
        "accuracy": float(right),
    }
    # Processors differ in the last digits of exponentials and sums: equal responses have equal scores everywhere.
    return {name: None if value is None else round(value, PART_DECIMALS) for name, value in parts.items()}


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
    except CodeRefused as error:
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


SIDE, LEAST_SIDE = 512, 64
"""Limits of the longer side of pictures, in pixels. LPIPS takes them whole; the others reduce them to 224 or 384."""
BLIND = 0.999
"""Likeness of a truth and its bare page from which a model does not tell them apart."""
MODEL_DECIMALS = 4
"""Decimals of the parts: processors differ in the further ones."""


class Sight(NamedTuple):
    """View of a truth by a model, and how like the truth its page alone is."""

    truth: Any
    bare: float


class Truth(NamedTuple):
    """True figure: its picture, (height, width, 3) uint8 RGB, and model -> what it sees."""

    picture: np.ndarray
    sights: Mapping[str, Sight]


def make_models_grader(
    *, key: str | None, images: Images, models: Mapping[str, str], device: str, pictures: bool
) -> Callable[[RewardInput], RewardResult]:
    """Return the grader for the arguments of `svg_models`, with the models and the fonts loaded.

    Args:
        models: name -> its weights, as `open_picture_model` takes them.
    Raises: CheckpointError for a model that cannot be loaded.
    """
    from vlmrl.model.picture_models import use_one_thread

    use_one_thread()  # there may be as many workers as cores
    opened = {name: open_picture_model(name, source, device) for name, source in models.items()}
    load_fonts()
    true_figure = lru_cache(maxsize=64)(partial(_true_figure, models=opened, images=images))
    return partial(_graded_by_models, truth_of=true_figure, key=key, images=images, models=opened, pictures=pictures)


def _true_figure(code: str, *, models: Mapping[str, PictureModel], images: Images) -> Truth:
    """Return a true figure. All responses to one prompt share it. Raises: CodeRefused."""
    height, width = draw_svg(DrawJob(code), images=images).pixels.shape[:2]
    view = read_figure(code, fitting(width, height, SIDE, LEAST_SIDE), images=images).view
    sights = {}
    for name, model in models.items():
        truth, page = model.look([view.picture, view.page])
        sights[name] = Sight(truth, image_similarity(name, model, truth, page))
    return Truth(view.picture, sights)


def image_similarity(name: str, model: PictureModel, one: Any, other: Any) -> float:
    """Return how alike two pictures are, at most 1. Raises: RewardError if the model returns no number."""
    value = model.compare(one, other)
    if not math.isfinite(value):
        raise RewardError(f"the model `{name}` compares two pictures with {value}", hint="its weights are wrong")
    return 1.0 - value if name == LPIPS else value


def _graded_by_models(
    x: RewardInput,
    *,
    truth_of: Callable[[str], Truth],
    key: str | None,
    images: Images,
    models: Mapping[str, PictureModel],
    pictures: bool,
) -> RewardResult:
    truth = true_figure(x, key, truth_of)
    height, width = truth.picture.shape[:2]
    try:
        drawn = draw_svg(DrawJob(find_svg(x.response), (width, height)), images=images).pixels
    except CodeRefused as error:
        detail = {"refused": error.kind, "reason": error.reason}
        return RewardResult(dict.fromkeys(("render", *models), 0.0), f"not drawn: {error.reason}", detail)
    equal = bool((drawn == truth.picture).all())
    values = {name: _value(name, model, truth.sights[name], drawn, equal) for name, model in models.items()}
    detail = {
        "likeness": {name: round(likeness, MODEL_DECIMALS) for name, (likeness, _) in values.items()},
        "page": {name: round(truth.sights[name].bare, MODEL_DECIMALS) for name in models},
    }
    parts = {"render": 1.0, **{name: round(part, MODEL_DECIMALS) for name, (_, part) in values.items()}}
    return RewardResult(parts, detail=detail, artifacts=shown_pictures(truth.picture, drawn) if pictures else {})


def _value(name: str, model: PictureModel, sight: Sight, drawn: np.ndarray, equal: bool) -> tuple[float, float]:
    """Return (likeness of a picture and the truth, its part of the score: how far it is above the bare page's)."""
    if equal:
        return 1.0, 1.0
    likeness = image_similarity(name, model, sight.truth, model.look([drawn])[0])
    if sight.bare >= BLIND:
        return likeness, 0.0
    return likeness, min(1.0, max(0.0, (likeness - sight.bare) / (1.0 - sight.bare)))
