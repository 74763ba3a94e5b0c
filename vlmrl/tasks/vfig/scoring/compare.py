"""Score of a drawing beside the true one: elements, picture, cleanliness of the code and its length.

How alike two elements are gives the best assignment of all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from vlmrl.svg.build import Images, build_scene
from vlmrl.svg.draw import FONT_SAMPLE, own_size
from vlmrl.svg.parse import SvgLimits, parse_svg
from vlmrl.svg.scene import Bitmap
from vlmrl.tasks.vfig.scoring.elements import Element, Point, View, elements_of, look
from vlmrl.tasks.vfig.scoring.picture import PictureScore, TruePicture

MOST_ELEMENTS = 400
"""Largest number of elements that are compared one by one: those that show most."""
REACH = 0.08
"""Distance, in diagonals of the picture, at which the share for the position has fallen to 1/e."""
DARKEST = 0.25
"""Distance of two colours (root mean square of the channels, in [0, 1]) at which the share for the colour is 0."""


class Correspondence(NamedTuple):
    """Correspondence of a truth and a response.

    Args:
        score: in [0, 1]; see `correspond`.
        kinds: kind of element -> the same score over the elements of that kind; only kinds that one side has.
        pairs: index in the truth, index in the response, likeness of the pairs that are alike at all.
    """

    score: float
    kinds: dict[str, float]
    pairs: list[tuple[int, int, float]]


def correspond(
    truth: Sequence[Element], response: Sequence[Element], diagonal: float, more: tuple[int, int] = (0, 0)
) -> Correspondence:
    """Return how well the elements of two drawings correspond, in [0, 1]; 1 for equal ones, and if both have none.

    It is 2 * the summed likeness of the assigned pairs / (elements of the truth + elements of the response): elements
    that are missing, and those that are too many, lower it alike. The assignment is the best one. It is symmetric.

    Args:
        diagonal: of the picture, in pixels.
        more: numbers of elements of the truth and of the response that were not looked at. They count as alike as the
            others are on average, as far as both sides have some.
    Source: the panoptic quality (Kirillov et al. 2019) with a likeness instead of the IoU.
    """
    first, second = _most_seen(truth), _most_seen(response)
    beyond = [len(truth) - len(first) + more[0], len(response) - len(second) + more[1]]
    matrix = likeness([truth[i] for i in first], [response[j] for j in second], diagonal)
    rows, columns = linear_sum_assignment(matrix, maximize=True)
    pairs = [(first[i], second[j], float(matrix[i, j])) for i, j in zip(rows, columns, strict=True) if matrix[i, j] > 0]
    total = sum(pair[2] for pair in pairs)
    both = len(first) + len(second)
    total += min(beyond) * (2 * total / both if both else 0.0)
    both += sum(beyond)
    kinds = {}
    for kind in ("shape", "line", "text"):
        count = sum(truth[i].kind == kind for i in first) + sum(response[j].kind == kind for j in second)
        if count:
            kinds[kind] = 2 * sum(value for i, _, value in pairs if truth[i].kind == kind) / count
    return Correspondence(min(1.0, 2 * total / both) if both else 1.0, kinds, pairs)


def _most_seen(elements: Sequence[Element]) -> list[int]:
    """Return the positions of the elements that show most, in order."""
    order = sorted(range(len(elements)), key=lambda i: (-elements[i].pixels, i))
    return sorted(order[:MOST_ELEMENTS])


def likeness(truth: Sequence[Element], response: Sequence[Element], diagonal: float) -> np.ndarray:
    """Return how alike elements are, (len(truth), len(response)) in [0, 1]; 0 for elements of different kinds."""
    matrix = np.zeros((len(truth), len(response)))
    for kind, alike in (("shape", _shapes), ("line", _lines), ("text", _texts)):
        rows = [i for i, element in enumerate(truth) if element.kind == kind]
        columns = [j for j, element in enumerate(response) if element.kind == kind]
        if rows and columns:
            values = alike([truth[i] for i in rows], [response[j] for j in columns], diagonal)
            matrix[np.ix_(rows, columns)] = values
    return np.clip(matrix * _shown(truth, response), 0.0, 1.0)


def _shown(truth: Sequence[Element], response: Sequence[Element]) -> np.ndarray:
    """Return 1 where at least half as much ink of one element shows as of the other, and twice the ratio otherwise."""
    a, b = (np.array([max(1.0, element.ink) for element in side]) for side in (truth, response))
    return np.minimum(1.0, 2 * np.minimum(a[:, None], b) / np.maximum(a[:, None], b))


def _shapes(truth: Sequence[Element], response: Sequence[Element], diagonal: float) -> np.ndarray:
    """Return the likeness of shapes: where they are and how large, times form, times colour."""
    a, b = _boxes(truth), _boxes(response)
    place = 0.5 * _overlaps(a, b) + 0.5 * _nearness(a, b, diagonal) * _sizes(a, b)
    forms = [np.array([element.form for element in side], float) for side in (truth, response)]
    inner = forms[0] @ forms[1].T
    union = forms[0].sum(axis=1)[:, None] + forms[1].sum(axis=1)[None, :] - inner
    form = np.where(union > 0, inner / np.maximum(union, 1), 1.0)
    return place * (0.2 + 0.8 * form) * (0.6 + 0.4 * _colours(truth, response))


def _lines(truth: Sequence[Element], response: Sequence[Element], diagonal: float) -> np.ndarray:
    """Return the likeness of lines: both ends and the middle, times heads and colour.

    The ends are compared in the direction of the line, if exactly one of its ends has a head.
    """
    ends = np.zeros((len(truth), len(response)))
    heads = np.zeros_like(ends)
    for i, one in enumerate(truth):
        for j, other in enumerate(response):
            ends[i, j], heads[i, j] = _line_pair(one, other, diagonal)
    return ends * (0.4 + 0.3 * heads + 0.3 * _colours(truth, response))


def _line_pair(one: Element, other: Element, diagonal: float) -> tuple[float, float]:
    """Return the likeness of the places of two lines, and of their heads."""
    points, heads = _directed(one)
    other_points, other_heads = _directed(other)
    ways = [(other_points, other_heads)]
    if heads[0] == heads[1] or other_heads[0] == other_heads[1]:
        begin, middle, end = other_points
        ways.append(((end, middle, begin), (other_heads[1], other_heads[0])))
    best = (0.0, 0.0)
    for points_there, heads_there in ways:
        distance = sum(math.dist(p, q) for p, q in zip(points, points_there, strict=True)) / 3
        right = (float(heads[0] == heads_there[0]) + float(heads[1] == heads_there[1])) / 2
        best = max(best, (math.exp(-distance / (REACH * diagonal)), right))
    return best


def _directed(line: Element) -> tuple[tuple[Point, Point, Point], tuple[bool, bool]]:
    """Return the points and the heads of a line, from its tail to its head if it has one head."""
    if line.heads == (True, False):
        return (line.points[2], line.points[1], line.points[0]), (False, True)
    return line.points, line.heads


def _texts(truth: Sequence[Element], response: Sequence[Element], diagonal: float) -> np.ndarray:
    """Return the likeness of texts: the characters, times where they are, how large and in which colour."""
    a, b = _boxes(truth), _boxes(response)
    words = np.zeros((len(truth), len(response)))
    pairs = [[_bigrams(element.text) for element in side] for side in (truth, response)]
    for i, one in enumerate(pairs[0]):
        for j, other in enumerate(pairs[1]):
            if truth[i].text == response[j].text:
                words[i, j] = 1.0
            else:
                words[i, j] = 2 * (one & other).total() / max(1, one.total() + other.total())
    return words * (0.2 + 0.5 * _nearness(a, b, diagonal) + 0.15 * _sizes(a, b) + 0.15 * _colours(truth, response))


def _bigrams(text: str) -> Counter[str]:
    text = f"\n{text[:500]}\n"
    return Counter(text[i : i + 2] for i in range(len(text) - 1))


def _boxes(elements: Sequence[Element]) -> np.ndarray:
    """Return the boxes as (number, 4): left, top, right, bottom."""
    return np.array([(e.box.x, e.box.y, e.box.right, e.box.bottom) for e in elements], float)


def _overlaps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the IoU of boxes. Each is taken as at least one pixel wide and high."""
    a, b = _at_least_a_pixel(a), _at_least_a_pixel(b)
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    inner = np.prod(np.maximum(0.0, high - low), axis=2)
    areas = [np.prod(side[:, 2:] - side[:, :2], axis=1) for side in (a, b)]
    return inner / (areas[0][:, None] + areas[1][None, :] - inner)


def _at_least_a_pixel(boxes: np.ndarray) -> np.ndarray:
    middle = (boxes[:, :2] + boxes[:, 2:]) / 2
    half = np.maximum(boxes[:, 2:] - boxes[:, :2], 1.0) / 2
    return np.concatenate((middle - half, middle + half), axis=1)


def _nearness(a: np.ndarray, b: np.ndarray, diagonal: float) -> np.ndarray:
    """Return 1 for equal middles, falling with their distance."""
    middles = [(side[:, :2] + side[:, 2:]) / 2 for side in (a, b)]
    distance = np.linalg.norm(middles[0][:, None] - middles[1][None, :], axis=2)
    return np.exp(-distance / (REACH * diagonal))


def _sizes(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return 1 for equal widths and heights, and the root of the product of their ratios otherwise."""
    sizes = [np.maximum(side[:, 2:] - side[:, :2], 1.0) for side in (a, b)]
    ratio = np.minimum(sizes[0][:, None], sizes[1][None, :]) / np.maximum(sizes[0][:, None], sizes[1][None, :])
    return np.sqrt(np.prod(ratio, axis=2))


def _colours(truth: Sequence[Element], response: Sequence[Element]) -> np.ndarray:
    """Return 1 for equal colours, falling to 0 at the distance DARKEST."""
    a, b = (np.array([element.colour for element in side]) for side in (truth, response))
    distance = np.sqrt(np.mean((a[:, None] - b[None, :]) ** 2, axis=2))
    return np.maximum(0.0, 1.0 - distance / DARKEST)


SIDE, LEAST_SIDE = 320, 64
"""Limits of the longer side of the pictures that are compared, in pixels. Icons declare sizes such as 16 pixels."""
BASIC = ("rect", "circle", "ellipse", "line", "polyline")
COMPLEX = ("path", "polygon")
LONG, TOO_LONG, SPARE = 1.5, 4.0, 200
"""Length of the code, in lengths of the truth, up to which it earns all, and from which on it earns nothing; and the
number of characters that are free."""


@dataclass(frozen=True, eq=False)
class Figure:
    """Drawing as it is compared.

    Args:
        elements: what can be seen of it.
        cleanliness: share of basic shapes and lines among all shapes that show, in [0, 1]; None without any.
        chars: length of its code.
    """

    view: View
    elements: list[Element]
    cleanliness: float | None
    chars: int

    @cached_property
    def true_picture(self) -> TruePicture:
        """The picture, if this is a truth."""
        return TruePicture(self.view.picture, self.view.page)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of its picture."""
        height, width = self.view.picture.shape[:2]
        return width, height


def read_figure(svg: str, size: tuple[int, int] | None = None, *, images: Images = "refuse") -> Figure:
    """Return a drawing as it is compared.

    Args:
        size: width and height of its picture; None = what it declares, with a longer side of LEAST_SIDE to SIDE.
    Raises: CodeRefused.
    """
    limits = SvgLimits()
    scene = build_scene(parse_svg(svg, limits), limits, images=images, size=size)
    width, height = size or compared_size(*own_size(scene, limits))
    view = look(scene, width, height)
    return Figure(view, elements_of(view), cleanliness(view), len(svg))


def load_fonts() -> None:
    """Load the fonts, before the time of a response is taken."""
    read_figure(FONT_SAMPLE)


@lru_cache(maxsize=64)
def read_truth(svg: str, images: Images = "refuse") -> Figure:
    """Return a true drawing; see `read_figure`. All responses to one prompt share it."""
    return read_figure(svg, images=images)


def compared_size(width: int, height: int) -> tuple[int, int]:
    """Return the size of the picture in which a truth of that size is compared."""
    return fitting(width, height, SIDE, LEAST_SIDE)


def fitting(width: int, height: int, side: int = SIDE, least: int = 1) -> tuple[int, int]:
    """Return a size of the same shape whose longer side is at least `least` and at most `side`."""
    longer = max(width, height)
    scale = min(side, max(least, longer)) / longer
    return max(1, round(width * scale)), max(1, round(height * scale))


def cleanliness(view: View) -> float | None:
    """Return (basic shapes + lines) / all shapes, over the elements that show; None if there is no shape.

    Markers and texts do not count. Hidden and empty elements do not show, and do not count.
    """
    tags = [one.leaf.tag for one in view.seen if not isinstance(one.leaf, Bitmap) and not one.leaf.marker]
    basic, rest = (sum(tag in group for tag in tags) for group in (BASIC, COMPLEX))
    return basic / (basic + rest) if basic + rest else None


@dataclass(frozen=True)
class FigureScore:
    """Scores of a drawing beside the true one, all in [0, 1]; all are 1 for the truth itself.

    Args:
        elements: see matching.correspond; if neither drawing has elements, the score of the picture.
        picture: see picture.TruePicture.
        clean: `content` times the cleanliness of the code beside that of the truth.
        length: `content` times how the length of the code is beside that of the truth.
        kinds: the score over shapes, lines and texts alone.
        matched: number of pairs of elements.
    """

    elements: float
    picture: PictureScore
    clean: float
    length: float
    kinds: Mapping[str, float] = field(default_factory=dict)
    matched: int = 0


def compare(truth: Figure, response: Figure) -> FigureScore:
    """Return the scores of a drawing. Both must have pictures of one size."""
    pairs = correspond(
        truth.elements, response.elements, math.hypot(*truth.size), (truth.view.more, response.view.more)
    )
    picture = truth.true_picture.similarity(response.view.picture)
    # Where neither has elements, their pages are all that there is.
    is_page = not (truth.elements or response.elements or truth.view.more or response.view.more)
    elements = picture.value if is_page else pairs.score
    content = (elements + picture.value) / 2
    tidy = 1.0
    if truth.cleanliness is not None:
        tidy = min(1.0, ((response.cleanliness or 0.0) + 0.05) / (truth.cleanliness + 0.05))
    short = length_share(response.chars, truth.chars)
    return FigureScore(elements, picture, content * tidy, content * short, pairs.kinds, len(pairs.pairs))


def length_share(chars: int, truth_chars: int) -> float:
    """Return 1 for code of up to LONG lengths of the truth, falling to 0 at TOO_LONG, after SPARE free characters."""
    ratio = max(0, chars - SPARE) / max(1, truth_chars)
    return float(np.clip((TOO_LONG - ratio) / (TOO_LONG - LONG), 0.0, 1.0))
