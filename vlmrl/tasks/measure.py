"""Outcomes of scored responses: those of their task, with the part of the reward that is an accuracy."""

from __future__ import annotations

from vlmrl.errors import VlmrlError
from vlmrl.rewards.accuracy import with_accuracy
from vlmrl.rewards.base import RewardSpec
from vlmrl.tasks.base import Outcome, Task
from vlmrl.types import Group, RewardInput, ScoredSample


def outcome_of(task: Task, group: Group, sample: ScoredSample, spec: RewardSpec) -> tuple[Outcome, str]:
    """Return the outcome of a response of a group, and why it is incomplete, or "".

    A task that fails on one response costs the numbers of that response, not the run.

    Args: spec: the reward that gave the score.
    """
    try:
        outcome, problem = task.outcome(response_input(group, sample), sample.score), ""
    except VlmrlError as error:
        outcome, problem = {}, str(error)
    return with_accuracy(outcome, sample.score.parts, spec), problem


def response_input(group: Group, sample: ScoredSample) -> RewardInput:
    """Return the input of the reward that a scored response had, without the pixels."""
    row, trajectory = group.row, sample.trajectory
    return RewardInput(
        sample.text, row.truth, row.columns, finish=trajectory.finish, num_tokens=trajectory.num_sampled_tokens,
        prompt=group.prompt_text, token_ids=trajectory.response_ids, step=trajectory.version, prompt_id=row.prompt_id,
        sample=trajectory.sample, media=row.media, seen_sizes=trajectory.seen_sizes, turns=sample.turns,
    )  # fmt: skip
