"""Grader of the reward `svg_models`: pictures as released models see them. Runs in workers, which load the models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from vlmrl.errors import RewardError
from vlmrl.svg.build import Images
from vlmrl.svg.draw import DrawJob, draw_svg
from vlmrl.svg.parse import SvgRefused, find_svg
from vlmrl.tasks.vfig.likeness import LPIPS, PictureModel, open_picture_model
from vlmrl.tasks.vfig.pictures import shown_pictures
from vlmrl.tasks.vfig.scoring.compare import fitting, load_fonts, read_figure
from vlmrl.tasks.vfig.true_figure import true_figure
from vlmrl.types import RewardInput, RewardResult

SIDE, LEAST_SIDE = 512, 64
"""Limits of the longer side of pictures, in pixels. LPIPS takes them whole; the others reduce them to 224 or 384."""
BLIND = 0.999
"""Likeness of a truth and its bare page from which a model does not tell them apart."""
DECIMALS = 4
"""Decimals of the parts: processors differ in the further ones."""


class Sight(NamedTuple):
    """View of a truth by a model, and how like the truth its page alone is."""

    truth: Any
    bare: float


class Truth(NamedTuple):
    """True figure: its picture, (height, width, 3) uint8 RGB, and model -> what it sees."""

    picture: np.ndarray
    sights: Mapping[str, Sight]


def make_grader(
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
    return partial(_graded, truth_of=true_figure, key=key, images=images, models=opened, pictures=pictures)


def _true_figure(code: str, *, models: Mapping[str, PictureModel], images: Images) -> Truth:
    """Return a true figure. All responses to one prompt share it. Raises: SvgRefused."""
    height, width = draw_svg(DrawJob(code), images=images).pixels.shape[:2]
    view = read_figure(code, fitting(width, height, SIDE, LEAST_SIDE), images=images).view
    sights = {}
    for name, model in models.items():
        truth, page = model.look([view.picture, view.page])
        sights[name] = Sight(truth, _likeness(name, model, truth, page))
    return Truth(view.picture, sights)


def _likeness(name: str, model: PictureModel, one: Any, other: Any) -> float:
    """Return how alike two pictures are, at most 1. Raises: RewardError if the model returns no number."""
    value = model.compare(one, other)
    if not math.isfinite(value):
        raise RewardError(f"the model `{name}` compares two pictures with {value}", hint="its weights are wrong")
    return 1.0 - value if name == LPIPS else value


def _graded(
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
    except SvgRefused as error:
        detail = {"refused": error.kind, "reason": error.reason}
        return RewardResult(dict.fromkeys(("render", *models), 0.0), f"not drawn: {error.reason}", detail)
    equal = bool((drawn == truth.picture).all())
    values = {name: _value(name, model, truth.sights[name], drawn, equal) for name, model in models.items()}
    detail = {
        "likeness": {name: round(likeness, DECIMALS) for name, (likeness, _) in values.items()},
        "page": {name: round(truth.sights[name].bare, DECIMALS) for name in models},
    }
    parts = {"render": 1.0, **{name: round(part, DECIMALS) for name, (_, part) in values.items()}}
    return RewardResult(parts, detail=detail, artifacts=shown_pictures(truth.picture, drawn) if pictures else {})


def _value(name: str, model: PictureModel, sight: Sight, drawn: np.ndarray, equal: bool) -> tuple[float, float]:
    """Return (likeness of a picture and the truth, its part of the score: how far it is above the bare page's)."""
    if equal:
        return 1.0, 1.0
    likeness = _likeness(name, model, sight.truth, model.look([drawn])[0])
    if sight.bare >= BLIND:
        return likeness, 0.0
    return likeness, min(1.0, max(0.0, (likeness - sight.bare) / (1.0 - sight.bare)))
