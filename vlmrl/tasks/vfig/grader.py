"""Grader of the reward `svg`. Runs in workers: a response is hostile, and drawing it may take any time or memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vlmrl.svg.build import Images
from vlmrl.svg.draw import pixels_digest
from vlmrl.svg.parse import SvgRefused, find_svg
from vlmrl.tasks.vfig.pictures import shown_pictures
from vlmrl.tasks.vfig.scoring.compare import Figure, FigureScore, compare, load_fonts, read_figure, read_truth
from vlmrl.tasks.vfig.true_figure import true_figure
from vlmrl.types import RewardInput, RewardResult

RIGHT = 0.9
"""Least score of the elements, and of the picture, of a figure that counts as right."""
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
    except SvgRefused as error:
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
    return RewardResult(
        _parts(score, truth, response),
        "the picture is empty" if blank else "",
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
