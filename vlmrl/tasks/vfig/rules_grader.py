"""Grader of the reward `vfig_rules`. Runs in workers, because a response may take long."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.rewards.text_rewards import ground_truth
from vlmrl.svg.parse import SvgRefused, find_svg
from vlmrl.tasks.vfig.published.score import published_rules
from vlmrl.types import RewardInput, RewardResult
from vlmrl.untrusted import parse_json


def make_grader(*, key: str | None, metadata: str | None) -> Callable[[RewardInput], RewardResult]:
    """Return the grader for the arguments of `vfig_rules`."""
    return partial(_graded, key=key, metadata=metadata)


def _graded(x: RewardInput, *, key: str | None, metadata: str | None) -> RewardResult:
    truth = ground_truth(x, key)
    if not isinstance(truth, str):
        raise RewardError(f"the row's true SVG code is a {type(truth).__name__}, not a text")
    try:
        response = find_svg(x.response)
    except SvgRefused as error:
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
            raise RewardError(f"the row's `{name}` is no JSON text") from None
    if value is not None and not isinstance(value, Mapping):
        raise RewardError(f"the row's `{name}` is a {type(value).__name__}, not a mapping")
    return value
