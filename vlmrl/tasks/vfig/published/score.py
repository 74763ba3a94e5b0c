"""Score of a response by the published rules: half of it for shapes, half for arrows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.etree.ElementTree import Element

from vlmrl.tasks.vfig.published.arrow_metrics import ARROW_METRICS, arrow_means
from vlmrl.tasks.vfig.published.arrows import extracted_arrows, truth_heads
from vlmrl.tasks.vfig.published.document import Unscorable, Work, parse, refuse
from vlmrl.tasks.vfig.published.metadata import read_metadata
from vlmrl.tasks.vfig.published.outlines import centre
from vlmrl.tasks.vfig.published.response_shapes import extracted_shapes
from vlmrl.tasks.vfig.published.shape_metrics import SHAPE_METRICS, shape_means
from vlmrl.tasks.vfig.published.styles import normal
from vlmrl.tasks.vfig.published.truth_arrows import TruthArrow, reconstructed_arrows
from vlmrl.tasks.vfig.published.truth_shapes import TruthShape, reconstructed_shapes, with_written_colours


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
        truth_svg: SVG code of the reference.
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
            refuse(f"{arrow.key} of the reference joins {key}, which is no shape of it")
    return normal(truths[arrow.source].label), normal(truths[arrow.target].label)
