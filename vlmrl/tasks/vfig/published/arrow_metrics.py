"""Seven published metrics of arrows, and the matching of arrows by the shapes that they join."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlmrl.tasks.vfig.published.arrows import DrawnArrow, TruthHead
from vlmrl.tasks.vfig.published.colours import colour_score
from vlmrl.tasks.vfig.published.document import Work
from vlmrl.tasks.vfig.published.outlines import Box
from vlmrl.tasks.vfig.published.truth_arrows import TruthArrow, nearest

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
        work: counter of the comparisons.
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
