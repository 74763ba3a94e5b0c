"""Check of every weight sync: the trainer computes the log-probs of what the engine samples with its new weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median

import torch

from vlmrl.errors import EngineError
from vlmrl.model.packing import PromptTokens, TrainItem
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.sample import Prompt, Rollout, sample_rollouts
from vlmrl.train.forward_passes import fill_logps
from vlmrl.train.learner import Learner
from vlmrl.train.step_batch import StepBatch
from vlmrl.types import SamplingParams, hash64, name_row

SYNC_PROMPTS, SYNC_TOKENS = 4, 16
"""Size of the check per engine: number of prompts, and maximum number of tokens per response."""
FEWEST_TOKENS = 8
"""Minimum number of tokens to judge an engine by its own tokens: a single one may differ for a good reason."""


@dataclass(frozen=True)
class EngineGap:
    """Difference between one rank's engine and the trainer.

    Args:
        gaps: |trainer's - engine's log-prob| of each token, in nats.
        rows: names of the dataset rows that were answered.
    """

    gaps: tuple[float, ...]
    rows: tuple[str, ...] = ()


def check_sync(
    learner: Learner, generator: Generator, prompts: Sequence[Prompt], params: SamplingParams, version: int
) -> dict[str, float]:
    """Compare the engines' log-probs with the trainer's.

    All ranks call this, each with its own prompts (possibly none), and all reach the same verdict.

    Args:
        learner: the policy with the trainer's weights.
        generator: the engine of this rank.
        prompts: prompts of this rank; the first `SYNC_PROMPTS` are answered.
        params: sampling parameters of training; top-p and top-k are switched off here.
        version: the policy version of the weights.
    Returns: `policy/sync_gap_median`, `policy/sync_gap_mean` and `policy/sync_gap_max` over the tokens of all ranks, in
        nats; {} for an engine without weights of its own.
    Raises: EngineError, on all ranks, when an engine is off; see `engines_off`.
    """
    world, recipe = learner.world, learner.recipe
    if not generator.copies_weights:
        return {}
    params = replace(params, max_new_tokens=min(SYNC_TOKENS, params.max_new_tokens), top_p=1.0, top_k=0)
    answers = sample_rollouts(
        generator,
        prompts[:SYNC_PROMPTS],
        params,
        num_samples=1,
        run_seed=hash64(recipe.train.seed, "sync"),
        version=version,
    )
    engines = world.gather(_measure(learner, answers))
    off = engines_off(engines, recipe.rollout.max_sync_gap)
    metrics = gap_metrics(engines)
    if off:
        rank_text = "" if world.size == 1 else f" of process {', '.join(map(str, off))}"
        raise EngineError(
            f"after the sync of version {version} the log-probs of the engine{rank_text} differ from the trainer's"
            f" by {metrics['policy/sync_gap_median']:.3g} nats (median; mean {metrics['policy/sync_gap_mean']:.3g}, at"
            f" most {metrics['policy/sync_gap_max']:.3g}); rollout.max_sync_gap is {recipe.rollout.max_sync_gap}",
            where=", ".join(row for rank in off for row in engines[rank].rows),
            hint='try model.dtype = "float32", and look at policy/sampler_gap_mean of the steps before;'
            ' rollout.engine = "torch" continues from the last checkpoint',
        )
    return metrics


def engines_off(engines: Sequence[EngineGap], limit: float) -> list[int]:
    """Return the ranks whose engine has other weights than the trainer; [] = the run may go on.

    An engine is off when the median gap of its own tokens is above the limit. An engine with fewer than `FEWEST_TOKENS`
    tokens is off only if the median over the tokens of all engines is above the limit, too. If only that median is
    above it, all engines with tokens are off.

    The median is used because single tokens can dominate a mean: with routed experts, rounding changes the experts of a
    few tokens now and then.

    Example: limit 0.1, eight tokens each: gaps 0.01 and one of 5 -> []; the second rank 0.5 throughout -> [1].
    """
    gaps = [gap for engine in engines for gap in engine.gaps]
    all_off = bool(gaps) and median(gaps) > limit
    fewest = 1 if all_off else FEWEST_TOKENS
    off = [r for r, engine in enumerate(engines) if len(engine.gaps) >= fewest and median(engine.gaps) > limit]
    return off if off or not all_off else [r for r, engine in enumerate(engines) if engine.gaps]


def gap_metrics(engines: Sequence[EngineGap]) -> dict[str, float]:
    """Return the median, mean and largest gap over all tokens, in nats; all 0 without tokens."""
    gaps = [gap for engine in engines for gap in engine.gaps] or [0.0]
    return {
        "policy/sync_gap_median": median(gaps),
        "policy/sync_gap_mean": fmean(gaps),
        "policy/sync_gap_max": max(gaps),
    }


def _measure(learner: Learner, answers: Sequence[Rollout]) -> EngineGap:
    """Return the gap of this rank's engine: compute the log-probs of its answers under the trainer's weights."""
    batch, engine_logps = StepBatch([], [], [], world=learner.world, filler=learner.filler), []
    for index, answer in enumerate(answers):
        [sample] = answer.samples
        batch.items.append(TrainItem(PromptTokens.of(answer.prompt.encoded), index, sample.parts, index))
        batch.names_S.append(name_row(answer.prompt.source.name, answer.prompt.row.prompt_id))
        engine_logps.append(batch.sampler_logp_of(batch.items[-1]).double())
    trainer_logps: dict[int, torch.Tensor] = {}
    learner.in_rows(partial(fill_logps, learner.policy, batch, trainer_logps))
    gaps = [(trainer_logps[index].cpu() - engine_logp).abs() for index, engine_logp in enumerate(engine_logps)]
    # [tokens] per answer -> one list. NaN has no order: it counts as infinitely far off.
    flat = torch.cat(gaps).nan_to_num(nan=math.inf, posinf=math.inf).tolist() if gaps else []
    return EngineGap(tuple(flat), tuple(batch.names_S))
