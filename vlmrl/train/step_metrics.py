"""Metrics of one step of reinforcement learning: its rewards, its rollouts and their speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from vlmrl.evaluate.estimates import mean_interval
from vlmrl.evaluate.interval import Interval
from vlmrl.rewards.base import value_range
from vlmrl.rewards.scorer import Scorer, earned_on_timeout
from vlmrl.rollout.sample import is_dead_group
from vlmrl.train.collect import Collected
from vlmrl.types import Group


def group_metrics(groups: Sequence[Group], scorers: Mapping[str, Scorer] | None = None) -> dict[str, Any]:
    """Numbers of a step's rollouts: reward with its 95% interval over prompts (of one there is none), parts, shares,
    lengths.

    Args: scorers: by source name; they declare the range that the interval stays in.
    """
    samples = [x for g in groups for x in g.samples]
    scored = [x for x in samples if x.score.error is None]
    lengths = [x.trajectory.num_sampled_tokens for x in samples]
    metrics: dict[str, Any] = {
        "reward/errors": sum(x.score.failed for x in samples),
        "rollout/dead_group_share": fmean(float(is_dead_group(g)) for g in groups),
        "rollout/truncated_share": fmean(float(x.trajectory.finish == "length") for x in samples),
        "rollout/response_tokens_mean": fmean(lengths),
        "rollout/response_tokens_max": max(lengths),
        "rollout/prompt_tokens_mean": fmean(len(g.samples[0].trajectory.prompt_ids) for g in groups),
        "rollout/samples": len(samples),
    }
    if unavailable := sum(x.score.status == "unavailable" for x in samples):
        metrics["reward/unavailable"] = unavailable
    if timeouts := sum(map(earned_on_timeout, (x.score for x in scored))):
        metrics["reward/timeouts"] = timeouts
    if left_out := len(samples) - len(scored) - metrics["reward/errors"] - unavailable:
        metrics["reward/inapplicable"] = left_out
    if not scored:
        return metrics
    interval = _reward_interval(groups, scorers or {})
    metrics["reward/mean"] = fmean(x.score.value for x in scored)
    if math.isfinite(interval.low):
        metrics |= {"reward/low": interval.low, "reward/high": interval.high}
    for name in sorted({n for x in scored for n in x.score.parts}):
        values = [v for x in scored if (v := x.score.parts.get(name)) is not None]
        if values:
            metrics[f"reward/part/{name}"] = fmean(values)
    sources = sorted({g.row.source for g in groups})
    if len(sources) > 1:
        for source in sources:
            values = [
                x.score.value for g in groups if g.row.source == source for x in g.samples if x.score.error is None
            ]
            if values:
                metrics[f"reward/source/{source}"] = fmean(values)
    return metrics


def _reward_interval(groups: Sequence[Group], scorers: Mapping[str, Scorer]) -> Interval:
    """The mean reward of all samples with its interval; samples of one prompt, or of prompts that share an image, are
    dependent.
    """
    scored = [(g, x.score) for g in groups for x in g.samples if x.score.error is None]
    clusters = [tuple(m.sha256 for m in g.row.media) or (g.row.source, g.row.prompt_id) for g, _ in scored]
    ranges = [
        value_range([score.parts for g, score in scored if g.row.source == name], scorer.weights, scorer.spec.ranges)
        for name, scorer in scorers.items()
        if any(g.row.source == name for g, _ in scored)
    ]
    known = [r for r in ranges if r is not None]
    declared = (min(low for low, _ in known), max(high for _, high in known)) if known == ranges and known else None
    return mean_interval([score.value for _, score in scored], clusters, declared)


def rollout_speed(made: Collected) -> dict[str, float]:
    """`rollout/tokens_per_second`: sampled tokens over the seconds of sampling."""
    tokens = sum(x.trajectory.num_sampled_tokens for g in made.groups for x in g.samples)
    return {"rollout/tokens_per_second": tokens / max(made.seconds, 1e-9)}
