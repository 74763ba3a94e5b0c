"""The first half of a step of reinforcement learning: prompts -> rollouts -> scores -> advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean

import numpy as np
import torch

from vlmrl.algo.advantages import Array
from vlmrl.algo.family import Algorithm
from vlmrl.algo.kl import ESTIMATORS as KL_ESTIMATORS
from vlmrl.algo.returns import explained_variance
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.sample import (
    Prompt,
    Rollout,
    add_advantages,
    encode_prompt,
    has_spread,
    mark_masked,
    sample_rollouts,
    score_rollouts,
)
from vlmrl.train.batches import split_groups, step_batch
from vlmrl.train.loop import Clock
from vlmrl.train.memory import in_rows
from vlmrl.train.state import Session, draw_rows, sampling_params
from vlmrl.train.update import fill_logps, fill_reference, fill_stats
from vlmrl.types import Group


@dataclass
class Before:
    """What the models said before the first update. By trajectory of the step, one value a trained token; {} = unasked.

    Args: logp, value: the policy's.      kl: the policy to the reference, by the row's estimator.
    """

    logp: dict[int, torch.Tensor] = field(default_factory=dict)
    value: dict[int, torch.Tensor] = field(default_factory=dict)
    kl: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Collected:
    """What a step has to learn from. `metrics`: numbers that only sampling knows."""

    rollouts: list[Rollout]
    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)
    before: Before = field(default_factory=Before)


def collect(
    session: Session, generator: Generator, algorithm: Algorithm, kl_coef: float, clock: Clock, *, strict: bool
) -> Collected:
    """Sample and score the prompts of a step, and turn the scores into advantages.

    With the filter "spread", prompts whose scores are too close are replaced by new ones, in at most `filter_tries`
    draws; the refused groups are kept among the results (recorded, in the metrics) with zero advantage.

    Args: kl_coef: weight of the KL in the reward; 0 = it is in the loss, or off. strict: as `score_rollouts`.
    """
    s, wanted, limit = session, session.recipe.rollout.prompts_per_step, session.recipe.rollout.max_new_tokens
    made = Collected([], [])
    draws = passed = 0
    while passed < wanted and draws < (algorithm.filter_tries if algorithm.filter != "none" else 1):
        with clock("encode"):
            prompts = [
                encode_prompt(source, row, occurrence, s.encoder, s.recipe.rollout.max_prompt_tokens)
                for source, row, occurrence in draw_rows(s, wanted - passed)
            ]
        with clock("rollout"):
            made.rollouts += (rollouts := _sample(s, generator, prompts))
        with clock("reward"):
            made.groups += (groups := score_rollouts(rollouts, s.scorers, strict=strict))
        passed += sum(has_spread(g, algorithm, limit) for g in groups)
        draws += 1
    if algorithm.filter != "none":
        made.metrics |= {"rollout/draws": draws, "rollout/prompts_passed": passed}
    greedy = None
    if algorithm.advantage == "greedy":
        greedy = _greedy_scores(s, generator, made.rollouts, clock, strict)
        found = [g for g in greedy if g is not None]
        made.metrics |= {"reward/greedy_mean": fmean(found)} if found else {}
    penalties = values = None
    if kl_coef > 0 or algorithm.needs_critic:
        with clock("update"):
            made.before = in_rows(s, partial(_before, s, made, algorithm, kl_coef > 0))
        if kl_coef > 0:
            penalties = _by_sample(made.groups, made.before.kl, kl_coef)
            made.metrics |= {"policy/kl_in_reward": float(_joined(made.before.kl).mean())} if made.before.kl else {}
        if algorithm.needs_critic:
            values = _by_sample(made.groups, made.before.value)
    weights = {source.name: source.weights for source in s.sources}
    made.groups = add_advantages(
        made.groups, algorithm, max_tokens=limit, weights=weights, greedy=greedy, penalties=penalties, values=values
    )
    if algorithm.needs_critic:
        made.metrics |= _critic_metrics(made)
    return made


def _sample(session: Session, generator: Generator, prompts: Sequence[Prompt]) -> list[Rollout]:
    s, recipe = session, session.recipe
    count = recipe.rollout.samples_per_prompt
    return sample_rollouts(
        generator, prompts, sampling_params(recipe, s.policy, s.processor.tokenizer), num_samples=count,
        run_seed=recipe.train.seed, version=s.progress.step, progress=_progress(s, len(prompts) * count),
    )  # fmt: skip


def _greedy_scores(
    session: Session, generator: Generator, rollouts: Sequence[Rollout], clock: Clock, strict: bool
) -> list[float | None]:
    """The score of one greedy answer to each prompt; None where its reward failed. It is not trained on, nor kept."""
    s, recipe = session, session.recipe
    params = replace(sampling_params(recipe, s.policy, s.processor.tokenizer), temperature=0.0, top_p=1.0, top_k=0)
    with clock("rollout"):
        answers = sample_rollouts(
            generator, [r.prompt for r in rollouts], params, num_samples=1, run_seed=recipe.train.seed,
            version=s.progress.step,
        )  # fmt: skip
    with clock("reward"):
        scores = [g.samples[0].score for g in score_rollouts(answers, s.scorers, strict=strict)]
    return [None if score.error is not None else score.value for score in scores]


def _before(session: Session, made: Collected, algorithm: Algorithm, with_kl: bool, tokens_per_row: int) -> Before:
    """One pass of the policy over the step's trajectories for all that is asked of it, and one of the reference.

    With a critic the rows are those that the updates will have (a filter's refused groups aside): the first of several
    then has ratios of exactly 1, in bfloat16 too.
    """
    s, before = session, Before()
    groups = mark_masked(made.groups, algorithm) if algorithm.needs_critic else made.groups
    whole = step_batch(made.rollouts, groups, keep_dead=True)
    wanted = {"logp": before.logp} | ({"value": before.value} if algorithm.needs_critic else {})
    for batch in split_groups(whole, s.recipe.train.updates_per_step if algorithm.needs_critic else 1):
        if not with_kl:
            fill_stats(s.policy, batch, wanted, tokens_per_row)
            continue
        assert s.reference is not None
        if algorithm.kl == "full":
            fill_reference(s.reference, batch, tokens_per_row)
            fill_stats(s.policy, batch, wanted | {"kl": before.kl}, tokens_per_row)
            batch.ref_hidden.clear()
        else:
            fill_stats(s.policy, batch, wanted, tokens_per_row)
            fill_logps(s.reference, batch, batch.ref_logp, tokens_per_row)
            estimate = KL_ESTIMATORS[algorithm.kl]
            before.kl |= {i: estimate(before.logp[i], theirs) for i, theirs in batch.ref_logp.items()}
    return before


def _by_sample(groups: Sequence[Group], found: dict[int, torch.Tensor], factor: float = 1.0) -> list[list[Array]]:
    """`factor` times what was said of each sample of each group, float64 [tokens]; zeros where nothing was."""
    starts = np.cumsum([0] + [len(g.samples) for g in groups])[:-1]
    return [
        [
            factor * found[first + k].double().cpu().numpy()
            if first + k in found
            else np.zeros(sample.trajectory.num_trained_tokens)
            for k, sample in enumerate(group.samples)
        ]
        for first, group in zip(starts.tolist(), groups, strict=True)
    ]


def _critic_metrics(made: Collected) -> dict[str, float]:
    """Over all trained tokens: the mean value, and how well the values foretold their targets (if these differ)."""
    samples = [s for g in made.groups for s in g.samples]
    targets = {i: torch.tensor(s.value_targets) for i, s in enumerate(samples) if s.value_targets is not None}
    if not targets:
        return {}
    values = _joined({i: made.before.value[i] for i in targets})
    explained = explained_variance(values, _joined(targets))
    metrics = {"value/mean": float(values.mean())}
    return metrics if explained is None else metrics | {"value/explained_variance": explained}


def _joined(found: dict[int, torch.Tensor]) -> Array:
    return torch.cat(list(found.values())).double().cpu().numpy()


def _progress(session: Session, total: int):
    done = 0

    def finished(count: int) -> None:
        nonlocal done
        done += count
        session.watcher.generated(done, total)

    return finished
