"""Nine published metrics of shapes, and the matching of shapes by their labels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set

from vlmrl.tasks.vfig.published.colours import colour_score
from vlmrl.tasks.vfig.published.document import Work, refuse
from vlmrl.tasks.vfig.published.outlines import Box, centre
from vlmrl.tasks.vfig.published.response_shapes import LONG_LABEL, Drawn
from vlmrl.tasks.vfig.published.styles import normal
from vlmrl.tasks.vfig.published.transforms import distance
from vlmrl.tasks.vfig.published.truth_shapes import TruthShape

SHAPE_METRICS = (
    "label", "type", "fill_color", "fill_style", "stroke_color", "border_style", "position", "font", "aspect_ratio",
)  # fmt: skip
"""Names of the metrics, as published; each has the weight 1/9."""
TAGS = {
    "circle": {"circle"},
    "ellipse": {"ellipse", "circle"},
    "rectangle": {"rect"},
    "square": {"rect"},
    "polygon": {"polygon", "path"},
    "cloud": {"path"},
    "3d-cylinder": {"g", "ellipse", "path"},
    "3d-prism": {"g", "rect", "path", "polygon"},
    "3d-cube": {"g", "rect", "polygon"},
    "3d-diamond": {"g", "polygon"},
    "3d-hexagon": {"g", "polygon"},
    "3d-trapezoid": {"g", "polygon"},
}
"""Kind of a reference -> elements of a response that are right."""
FONT_CLASSES = (
    ("times", "georgia", "palatino", "garamond"),
    ("arial", "helvetica", "verdana", "tahoma", "trebuchet"),
    ("courier", "consolas", "monaco"),
)
"""Serif, sans-serif and monospaced families, by a part of their names."""
LEAST_LABEL = 0.5
"""Smallest similarity of labels that are matched."""
UNKNOWN = 0.5
"""Score of a property that the reference does not give."""
EQUAL_RATIO = 1.2
"""Largest ratio of two aspect ratios that counts as equal."""
WORST_RATIO = 3.0
"""Ratio of two aspect ratios from which the score is 0."""


def match_shapes(truths: Mapping[str, TruthShape], drawn: Sequence[Drawn], work: Work) -> dict[str, Drawn]:
    """Return key -> shape of the response, by labels only: each in its turn takes the best that is left."""
    left = [(label := normal(one.label), frozenset(label.split()), one) for one in drawn]
    cost = len(left) + sum(len(label) for label, _, _ in left) // LONG_LABEL
    matches: dict[str, Drawn] = {}
    for key, truth in truths.items():
        label = normal(truth.label)
        words = frozenset(label.split())
        work.spend(cost)
        best, best_score = -1, 0.0
        for i, (other, other_words, _) in enumerate(left):
            score = _likeness(label, words, other, other_words)
            if score > best_score:
                best, best_score = i, score
        if best_score >= LEAST_LABEL:
            matches[key] = left.pop(best)[2]
    return matches


def _likeness(label: str, words: Set[str], other: str, other_words: Set[str]) -> float:
    """Return how much two normal labels have in common for the matching, in [0, 1]; 2 if they are equal."""
    if label == other:
        return 2.0
    if not words or not other_words:
        return 0.0
    if words <= other_words or other_words <= words:
        return min(len(words), len(other_words)) / max(len(words), len(other_words))
    return _part(label, other)


def _part(one: str, other: str) -> float:
    """Return the ratio of the lengths if one text contains the other, else 0."""
    if one in other or other in one:
        return min(len(one), len(other)) / max(len(one), len(other))
    return 0.0


def label_score(label: str, other: str) -> float:
    """Return how alike two labels are: 1 if equal, the ratio of lengths if one contains the other, else of words."""
    label, other = normal(label), normal(other)
    if label == other:
        return 1.0
    if not label or not other:
        return 0.0
    if part := _part(label, other):
        return part
    words, other_words = set(label.split()), set(other.split())
    return len(words & other_words) / max(len(words), len(other_words))


def type_score(kind: str, tag: str, tags: set[str]) -> float:
    """Return whether an element can be a shape of a kind: 1, 0.4 for any pseudo-3D shape, 0.3 or 0."""
    accepted = TAGS.get(kind, set())
    is_solid = kind.startswith("3d-")
    if kind == "3d-cylinder" and tag == "g":
        return 1.0 if "ellipse" in tags else 0.4
    if tag in accepted:
        return 1.0
    if is_solid:
        return 0.4
    if tag == "g" and tags & accepted:
        return 1.0
    if (kind == "polygon" and tag == "rect") or (kind in ("rectangle", "square") and tag in ("polygon", "path")):
        return 0.3
    return 0.0


def paint_score(truth: str, drawn: str) -> float:
    """Return how near two colours are; 0.5 if the reference has none."""
    return colour_score(truth, drawn) if truth else UNKNOWN


def fill_style_score(truth: str, drawn: str) -> float:
    """Return 1 for the same style, 0.5 for two that are not solid, else 0."""
    return 1.0 if truth == drawn else 0.0 if "solid" in (truth, drawn) else 0.5


def font_score(truth: str, drawn: str) -> float:
    """Return 1 for the same first family, 0.5 for families of the same class, else 0; 0.5 without one to compare."""
    if not truth:
        return UNKNOWN
    one, other = (normal(font).split(",")[0] for font in (truth, drawn))
    if not one or not other:
        return 0.0
    if one == other:
        return 1.0
    return 0.5 if _font_class(one) is not None and _font_class(one) == _font_class(other) else 0.0


def _font_class(family: str) -> int | None:
    for i, names in enumerate(FONT_CLASSES):
        if any(name in family for name in names):
            return i
    return None


def aspect_ratio_score(truth: Box, drawn: Box) -> float:
    """Return how alike the ratios of width and height are: 1 up to a ratio of 1.2, 0 from 3, linear between."""
    sides = [truth[2] - truth[0], truth[3] - truth[1], drawn[2] - drawn[0], drawn[3] - drawn[1]]
    if any(side < 1 for side in sides):
        return 0.0
    one, other = sides[0] / sides[1], sides[2] / sides[3]
    ratio = one / other if one > other else other / one
    if ratio <= EQUAL_RATIO:
        return 1.0
    return max(0.0, 1.0 - (ratio - EQUAL_RATIO) / (WORST_RATIO - EQUAL_RATIO))


Point = tuple[float, float]


def position_score(truth_anchor: Point, truth: Point, drawn_anchor: Point, drawn: Point) -> float:
    """Return how alike the directions from the anchor are, in [0, 1]; the distance does not matter."""
    truth_x, truth_y = truth[0] - truth_anchor[0], truth[1] - truth_anchor[1]
    drawn_x, drawn_y = drawn[0] - drawn_anchor[0], drawn[1] - drawn_anchor[1]
    away = distance(drawn_x, drawn_y)
    if distance(truth_x, truth_y) < 1:
        return 1.0
    turn = abs(math.atan2(truth_y, truth_x) - math.atan2(drawn_y, drawn_x))
    turn = 2 * math.pi - turn if turn > math.pi else turn
    direction = 0.0 if math.isnan(turn) else 1.0 - turn / math.pi
    offset = 1.0 - math.sin(turn / 2) if 1 <= away < math.inf else 0.0
    return 0.5 * direction + 0.5 * offset


def positions(truths: Mapping[str, TruthShape], matches: Mapping[str, Drawn], work: Work) -> dict[str, float]:
    """Return the position scores of the matched shapes from the anchor with the highest mean score; its own is 1."""
    work.spend(len(matches) ** 2)
    pairs = {key: (centre(truths[key].box), centre(one.box)) for key, one in matches.items()}
    best: dict[str, float] = {}
    best_mean = -1.0
    for anchor, (truth_anchor, drawn_anchor) in pairs.items():
        scores = {
            key: 1.0 if key == anchor else position_score(truth_anchor, truth, drawn_anchor, drawn)
            for key, (truth, drawn) in pairs.items()
        }
        mean = sum(scores.values()) / len(scores)
        if mean > best_mean:
            best, best_mean = scores, mean
    return best


def shape_scores(truth: TruthShape, drawn: Drawn, position: float) -> dict[str, float]:
    """Return the nine metrics of a matched shape by name, each in [0, 1]. Raises: Unscorable without a kind."""
    if truth.kind is None:
        refuse(f"{truth.key} of the metadata has no `type`")
    scores = (
        label_score(truth.label, drawn.label),
        type_score(truth.kind, drawn.tag, drawn.tags),
        paint_score(truth.fill, drawn.fill),
        fill_style_score(truth.fill_style, drawn.fill_style),
        paint_score(truth.stroke, drawn.stroke),
        fill_style_score(truth.border, drawn.border),
        position,
        font_score(truth.font, drawn.font),
        aspect_ratio_score(truth.box, drawn.box),
    )
    return dict(zip(SHAPE_METRICS, scores, strict=True))


def extra_shapes(matches: Mapping[str, Drawn], drawn: Sequence[Drawn]) -> int:
    """Return the number of shapes whose label is that of no matched shape: a repeated label is no extra."""
    labels = {normal(one.label) for one in matches.values()}
    return sum(normal(one.label) not in labels for one in drawn)


def shape_means(
    truths: Mapping[str, TruthShape], drawn: Sequence[Drawn], work: Work
) -> tuple[dict[str, float], float, float]:
    """Return the means of the nine metrics over the shapes of the reference, the penalty for extras, and the composite.

    The composite is the mean of the nine, times 1 - extras / (shapes of the reference + extras). Without shapes in
    the reference the nine and the composite are 0.
    """
    matches = match_shapes(truths, drawn, work)
    extras = extra_shapes(matches, drawn)
    penalty = extras / (len(truths) + extras) if extras else 0.0
    if not truths:
        return dict.fromkeys(SHAPE_METRICS, 0.0), penalty, 0.0
    places = positions(truths, matches, work)
    totals: dict[str, float] = dict.fromkeys(SHAPE_METRICS, 0.0)
    for key, one in matches.items():
        for name, score in shape_scores(truths[key], one, places[key]).items():
            totals[name] += score
    means = {name: total / len(truths) for name, total in totals.items()}
    return means, penalty, sum(means.values()) / len(means) * (1.0 - penalty)
