"""Scores of the reward `svg` for a response beside a truth."""

from __future__ import annotations

from vlmrl.tasks.vfig.rewards import WEIGHTS, svg_figure
from vlmrl.types import RewardInput, RewardResult

SPEC = svg_figure()


def result(truth: str, response: str, **args: object) -> RewardResult:
    spec = svg_figure(**args) if args else SPEC  # pyright: ignore[reportArgumentType]
    outcome = spec.fn(RewardInput(response=response, truth={"svg": truth}))
    assert isinstance(outcome, RewardResult)
    return outcome


def value(truth: str, response: str) -> float:
    parts = result(truth, response).parts
    return sum(weight * (parts[name] or 0.0) for name, weight in WEIGHTS.items())
