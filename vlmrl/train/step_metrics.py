"""Metrics of one step: the seconds of its parts and the memory; in reinforcement learning its rewards and rollouts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import numpy as np
import torch

from vlmrl.dist import world
from vlmrl.dist.world import World
from vlmrl.evaluate.estimates import Interval, mean_interval
from vlmrl.rewards.scoring_call import earned_on_timeout
from vlmrl.rewards.several import possible_values
from vlmrl.rewards.several_scorer import RewardScorer
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.sample import is_dead_group
from vlmrl.types import Group

LENGTH_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


def group_metrics(groups: Sequence[Group], scorers: Mapping[str, RewardScorer] | None = None) -> dict[str, Any]:
    """Return the metrics of a step's rollouts: rewards and their parts, shares, lengths in tokens.

    The mean reward comes with its 95% interval over prompts; a single prompt has no interval.

    Args:
        groups: the scored groups of the step.
        scorers: the scorers by source name; the interval stays within the range that they declare.
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
        **_length_quantiles(lengths),
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


def _length_quantiles(lengths: Sequence[int]) -> dict[str, float]:
    """Return LENGTH_QUANTILES of the lengths of responses, in tokens; between two lengths they are interpolated."""
    values = np.quantile(lengths, list(LENGTH_QUANTILES.values())).tolist()
    return {f"rollout/response_tokens_{name}": value for name, value in zip(LENGTH_QUANTILES, values, strict=True)}


def _reward_interval(groups: Sequence[Group], scorers: Mapping[str, RewardScorer]) -> Interval:
    """Return the mean reward of all samples with its interval.

    Samples of one prompt, or of prompts that share their images, are dependent: they form one cluster.
    """
    scored = [(g, x.score) for g in groups for x in g.samples if x.score.error is None]
    clusters = [tuple(m.sha256 for m in g.row.media) or (g.row.source, g.row.prompt_id) for g, _ in scored]
    ranges = [
        possible_values([score.parts for g, score in scored if g.row.source == name], scorer.spec, scorer.weights)
        for name, scorer in scorers.items()
        if any(g.row.source == name for g, _ in scored)
    ]
    declared_ranges = [r for r in ranges if r is not None]
    whole_range = (
        (min(low for low, _ in declared_ranges), max(high for _, high in declared_ranges))
        if declared_ranges == ranges and declared_ranges
        else None
    )
    return mean_interval([score.value for _, score in scored], clusters, whole_range)


def rollout_speed(groups: Sequence[Group], seconds: float) -> dict[str, float]:
    """Return `rollout/tokens_per_second`: the sampled tokens over the seconds of sampling."""
    tokens = sum(x.trajectory.num_sampled_tokens for g in groups for x in g.samples)
    return {"rollout/tokens_per_second": tokens / max(seconds, 1e-9)}


def sync_speed(generator: Generator) -> dict[str, float]:
    """Return `sync/bytes` and `sync/gb_per_second` of this rank's last weight sync; {} without one.

    The seconds are those of the transfer and of the engine's loader, without the check of the sync.
    """
    speed = generator.last_sync
    return {} if speed is None else {"sync/bytes": speed.bytes, "sync/gb_per_second": speed.gb_per_second}


class Clock:
    """Stopwatch of a step: adds up the seconds of each part, `with clock("rollout"): ...`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        world.phase(part)
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Return `time/<part>_seconds` of each part and `time/step_seconds`, the seconds since the clock was made."""
        parts = {f"time/{part}_seconds": seconds for part, seconds in self.seconds.items()}
        return parts | {"time/step_seconds": time.perf_counter() - self._start}


def memory_metrics(device: torch.device, world: World) -> dict[str, float]:
    """Return `memory/peak_bytes`, in bytes: the largest peak of all ranks.

    On a CUDA device it is the peak of the allocated memory, else that of the process's resident memory. If
    FlexAttention is used, `policy/attention_compilations` is the number of shapes that it was compiled for.
    """
    if device.type == "cuda":
        from vlmrl.model.attention import compiled_shapes

        peak = float(torch.cuda.max_memory_allocated())
        other_metrics = {"policy/attention_compilations": float(len(compiled_shapes))} if compiled_shapes else {}
    else:
        import resource
        import sys

        peak, other_metrics = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss), {}
        # ru_maxrss is in bytes on macOS, in KiB elsewhere.
        peak *= 1 if sys.platform == "darwin" else 1024
    return {"memory/peak_bytes": max(world.gather(peak))} | other_metrics
