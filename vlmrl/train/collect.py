"""The first half of a step of reinforcement learning: prompts -> rollouts -> scores -> advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np
import torch

from vlmrl.algo.family import Algorithm
from vlmrl.algo.kl import ESTIMATORS as KL_ESTIMATORS
from vlmrl.data.batch import TrainItem
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.sample import (
    Prompt,
    Rollout,
    add_advantages,
    encode_prompt,
    has_spread,
    sample_rollouts,
    score_rollouts,
)
from vlmrl.train.loop import Clock
from vlmrl.train.sft import prompt_tokens
from vlmrl.train.state import Session, draw_rows, sampling_params
from vlmrl.train.update import StepBatch, fill_logps
from vlmrl.types import Group


@dataclass
class Collected:
    """What a step has to learn from. `metrics`: numbers that only sampling knows."""

    rollouts: list[Rollout]
    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)


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
    penalties = None
    if kl_coef > 0:
        with clock("update"):
            penalties, kl = _kl_penalties(s, made, algorithm, kl_coef)
        made.metrics |= {"policy/kl_in_reward": kl}
    weights = {source.name: source.weights for source in s.sources}
    made.groups = add_advantages(
        made.groups, algorithm, max_tokens=limit, weights=weights, greedy=greedy, penalties=penalties
    )
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


def _kl_penalties(
    session: Session, made: Collected, algorithm: Algorithm, coef: float
) -> tuple[list[list[np.ndarray]], float]:
    """(coef * KL to the reference for each token of each sample; the mean KL per token of the step)."""
    assert session.reference is not None
    items: list[TrainItem] = []
    for index, (rollout, group) in enumerate(zip(made.rollouts, made.groups, strict=True)):
        tokens = prompt_tokens(rollout.prompt)
        items += [
            TrainItem(tokens, index, sample.trajectory.segments, len(items) + k)
            for k, sample in enumerate(group.samples)
        ]
    batch, budget = StepBatch(items, [], []), session.recipe.train.tokens_per_row
    ours: dict[int, torch.Tensor] = {}
    theirs: dict[int, torch.Tensor] = {}
    fill_logps(session.policy, batch, ours, budget)
    fill_logps(session.reference, batch, theirs, budget)
    kl = [KL_ESTIMATORS[algorithm.kl](ours[i], theirs[i]).double().cpu().numpy() for i in range(len(items))]
    each = iter(kl)
    penalties = [[coef * next(each) for _ in group.samples] for group in made.groups]
    return penalties, float(np.concatenate(kl).mean()) if kl else 0.0


def _progress(session: Session, total: int):
    done = 0

    def finished(count: int) -> None:
        nonlocal done
        done += count
        session.watcher.generated(done, total)

    return finished
