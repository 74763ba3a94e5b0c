"""Score of a response by the published rules: half of it for shapes, half for arrows; the grader of `vfig_rules`.

Nine metrics are about shapes, which are matched by their labels, and seven about arrows, which are matched by the
shapes that they join. The grader runs in workers, because a response may take long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from xml.etree.ElementTree import Element

from vlmrl.errors import RewardError
from vlmrl.rewards.text_rewards import ground_truth
from vlmrl.svg.parse import find_svg
from vlmrl.tasks.vfig.published.document import Unscorable, Work, colour_score, distance, normal, parse, refuse
from vlmrl.tasks.vfig.published.outlines import Box, Drawn, centre
from vlmrl.tasks.vfig.published.response import (
    LONG_LABEL,
    DrawnArrow,
    TruthHead,
    extracted_arrows,
    extracted_shapes,
    truth_heads,
)
from vlmrl.tasks.vfig.published.truth import (
    TruthArrow,
    TruthShape,
    nearest,
    read_metadata,
    reconstructed_arrows,
    reconstructed_shapes,
    with_written_colours,
)
from vlmrl.types import RewardInput, RewardResult
from vlmrl.untrusted import CodeRefused, parse_json

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


ARROW_METRICS = ("source", "dest", "head", "head_size", "curve", "color", "overlap")
"""Names of the metrics, as published; each has the weight 1/7."""
REACH = 100
"""Distance of an arrow's end from its shape, in pixels, exclusive."""
DEEP = 5
"""Distance from the edges of a shape beyond which an end lies in it, in pixels, exclusive."""
OVERLAP_SCORES = (1.0, 0.4, 0.0)
"""Score of 0, 1 and more wrong shapes in which the ends lie."""
NO_HEAD = TruthHead(10.0, 2.0, True)
"""Head of an arrow of the reference that has no polygon."""
SIZE_SCORES = ((1.3, 1.0), (1.8, 0.6), (2.5, 0.3))
"""Largest ratio of two widths of heads -> score."""
WORST_SIZE = 0.1
"""Score of a head whose width differs more."""


@dataclass(frozen=True)
class _Ends:
    """Arrow of a response with the labels of the shapes at its ends and of those in which its ends lie."""

    arrow: DrawnArrow
    source: str | None
    target: str | None
    around_start: frozenset[str]
    around_end: frozenset[str]


def arrow_means(
    truths: Sequence[tuple[TruthArrow, str, str]],
    heads: Sequence[TruthHead],
    arrows: Sequence[DrawnArrow],
    boxes: Mapping[str, Box],
    work: Work,
) -> tuple[dict[str, float], float, float]:
    """Return the means of the seven metrics over the arrows of the reference, the penalty for extras, the composite.

    Without arrows in the reference the metrics and the composite are 1, whatever the response has.

    Args:
        truths: arrows of the reference with the normal labels of their source and target.
        heads: heads of the reference; after a match the next but one belongs to the next arrow, and past
            the last one a head of their mean width on a stroke of 2 pixels.
        arrows: arrows of the response.
        boxes: normal label -> bounds of the response's shapes.
    """
    if not truths:
        return dict.fromkeys(ARROW_METRICS, 1.0), 0.0, 1.0
    left = [_ends(arrow, boxes, work) for arrow in arrows]
    mean_width = sum(head.width for head in heads) / len(heads) if heads else NO_HEAD.width
    spare = TruthHead(mean_width, NO_HEAD.stroke, True)
    totals: dict[str, float] = dict.fromkeys(ARROW_METRICS, 0.0)
    at = 0
    for truth, source, target in truths:
        head = heads[at] if at < len(heads) else spare
        at += 1
        work.spend(len(left))
        hits = [max(_hits(one, source, target), _hits(one, target, source)) for one in left]
        best = max(range(len(hits)), key=hits.__getitem__, default=-1)
        if best < 0 or not hits[best]:
            continue
        at += 1
        for name, score in _scores(left.pop(best), truth, source, target, head).items():
            totals[name] += score
    means = {name: total / len(truths) for name, total in totals.items()}
    penalty = len(left) / (len(truths) + len(left))
    return means, penalty, sum(means.values()) / len(means) * (1.0 - penalty)


def _ends(arrow: DrawnArrow, boxes: Mapping[str, Box], work: Work) -> _Ends:
    return _Ends(
        arrow,
        nearest(*arrow.start, boxes, REACH, work),
        nearest(*arrow.end, boxes, REACH, work),
        frozenset(label for label, box in boxes.items() if _is_deep(*arrow.start, box)),
        frozenset(label for label, box in boxes.items() if _is_deep(*arrow.end, box)),
    )


def _is_deep(x: float, y: float, box: Box) -> bool:
    return box[0] + DEEP < x < box[2] - DEEP and box[1] + DEEP < y < box[3] - DEEP


def _hits(one: _Ends, source: str, target: str) -> int:
    return (one.source == source) + (one.target == target)


def _scores(one: _Ends, truth: TruthArrow, source: str, target: str, head: TruthHead) -> dict[str, float]:
    """Return the seven metrics of a matched arrow; one that points the other way loses nothing."""
    is_reversed = _hits(one, target, source) > _hits(one, source, target)
    first, second = (one.target, one.source) if is_reversed else (one.source, one.target)
    wrong = len(one.around_start - {source}) + len(one.around_end - {target})
    scores = (
        float(first == source),
        float(second == target),
        float(one.arrow.has_head or not head.is_visible),
        size_score(one.arrow, head) if head.is_visible else 1.0,
        float(one.arrow.is_curved == truth.is_curved),
        colour_score(truth.colour, one.arrow.colour),
        OVERLAP_SCORES[min(wrong, 2)],
    )
    return dict(zip(ARROW_METRICS, scores, strict=True))


def size_score(arrow: DrawnArrow, head: TruthHead) -> float:
    """Return how alike the widths of two heads are, each in widths of its stroke; 0 without a head or its width."""
    if not arrow.has_head or not arrow.head:
        return 0.0
    width = head.width / (head.stroke if head.stroke > 0 else 1.0) or NO_HEAD.width / NO_HEAD.stroke
    ratio = arrow.head / width if arrow.head >= width else width / arrow.head
    return next((score for limit, score in SIZE_SCORES if ratio <= limit), WORST_SIZE)


@dataclass(frozen=True)
class RulesScore:
    """Result of the published rules.

    Args:
        overall: mean of the composites of shapes and arrows, in [0, 1].
        shapes: nine metrics, `extra_penalty` and `composite` by name, each in [0, 1].
        arrows: seven metrics, `extra_penalty` and `composite` by name, each in [0, 1].
        note: why all are 0; "" if they are not.
    """

    overall: float
    shapes: Mapping[str, float] = field(default_factory=dict)
    arrows: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


def published_rules(truth_svg: str, response_svg: str, metadata: Mapping[str, Any] | None = None) -> RulesScore:
    """Return the score of a response by VFig's rule-based evaluator.

    Where the published code stops with an error, and beyond the limits of `document.py`, all is 0 and `note` says why.

    Args:
        response_svg: SVG code of the response, without any text around it.
        metadata: published description of the reference, `{"entities": {...}}`; None: it is reconstructed from
            `truth_svg`.
    """
    try:
        return _score(truth_svg, response_svg, metadata)
    except Unscorable as error:
        note = str(error)
    except ArithmeticError as error:
        note = f"numbers are too large or too small: {error}"
    return RulesScore(0.0, _zeros(SHAPE_METRICS), _zeros(ARROW_METRICS), note)


def _zeros(names: Sequence[str]) -> dict[str, float]:
    return dict.fromkeys((*names, "extra_penalty", "composite"), 0.0)


def _score(truth_svg: str, response_svg: str, metadata: Mapping[str, Any] | None) -> RulesScore:
    work = Work()
    truth_root = _parsed(truth_svg, "reference")
    if metadata is None:
        truths = reconstructed_shapes(truth_root, work)
        boxes = {key: truth.box for key, truth in truths.items()}
        truth_arrows = reconstructed_arrows(truth_root, truth_svg, boxes, work)
    else:
        truths, truth_arrows = read_metadata(metadata)
    truths = with_written_colours(truths, truth_root)
    root = _parsed(response_svg, "response")
    drawn = extracted_shapes(root, work)
    if not all(math.isfinite(x) for one in drawn for x in centre(one.box)):
        refuse("a shape of the response has bounds that are not finite")
    shapes = _named(*shape_means(truths, drawn, work))
    if truth_arrows:
        heads = truth_heads(truth_root, [truth.box for truth in truths.values()], work)
        places = {normal(one.label): one.box for one in drawn}
        arrows = extracted_arrows(root, [one.box for one in drawn], work)
        joined = [(arrow, *_labels(arrow, truths)) for arrow in truth_arrows]
        arrow_parts = _named(*arrow_means(joined, heads, arrows, places, work))
    else:
        arrow_parts = _named(*arrow_means([], [], [], {}, work))
    return RulesScore((shapes["composite"] + arrow_parts["composite"]) / 2, shapes, arrow_parts)


def _parsed(svg: str, name: str) -> Element:
    try:
        return parse(svg)
    except Unscorable as error:
        raise Unscorable(f"the {name}: {error}") from None


def _named(means: Mapping[str, float], penalty: float, composite: float) -> dict[str, float]:
    """Return the parts by name; rounding does not lift the composite over 1."""
    return {**means, "extra_penalty": penalty, "composite": min(composite, 1.0)}


def _labels(arrow: TruthArrow, truths: Mapping[str, TruthShape]) -> tuple[str, str]:
    """Return the normal labels of the ends of an arrow. Raises: Unscorable for a shape that is not there."""
    for key in (arrow.source, arrow.target):
        if key not in truths:
            refuse(f"{arrow.key} of the reference joins {key}, which is not one of its shapes")
    return normal(truths[arrow.source].label), normal(truths[arrow.target].label)


def make_grader(*, key: str | None, metadata: str | None) -> Callable[[RewardInput], RewardResult]:
    """Return the grader for the arguments of `vfig_rules`."""
    return partial(_graded, key=key, metadata=metadata)


def _graded(x: RewardInput, *, key: str | None, metadata: str | None) -> RewardResult:
    truth = ground_truth(x, key)
    if not isinstance(truth, str):
        raise RewardError(f"the row's true SVG code is a {type(truth).__name__}, not a text")
    try:
        response = find_svg(x.response)
    except CodeRefused as error:
        return RewardResult({"overall": 0.0, "shapes": 0.0, "arrows": 0.0}, f"no code: {error.reason}")
    score = published_rules(truth, response, _metadata(x, metadata))
    parts = {"overall": score.overall, "shapes": score.shapes["composite"], "arrows": score.arrows["composite"]}
    detail = {"shapes": dict(score.shapes), "arrows": dict(score.arrows)}
    return RewardResult(parts, score.note, detail)


def _metadata(x: RewardInput, name: str | None) -> Mapping[str, Any] | None:
    if name is None:
        return None
    value = ground_truth(x, name)
    if isinstance(value, str):
        try:
            value = parse_json(value) if value.strip() else None
        except ValueError:
            raise RewardError(f"the row's `{name}` is not JSON text") from None
    if value is not None and not isinstance(value, Mapping):
        raise RewardError(f"the row's `{name}` is a {type(value).__name__}, not a mapping")
    return value
