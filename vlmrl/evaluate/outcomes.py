"""Outcomes of scored responses: those of their task, and the part of the reward that is an accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from vlmrl.errors import VlmrlError
from vlmrl.rewards.accuracy_part import accuracy_words, with_accuracy
from vlmrl.rewards.base import RewardSpec
from vlmrl.tasks.base import Outcome, Task
from vlmrl.tasks.pooled import PooledMetrics
from vlmrl.tasks.source import Source
from vlmrl.types import Group, RewardInput, ScoredSample


def outcome_of(task: Task, group: Group, sample: ScoredSample, spec: RewardSpec) -> tuple[Outcome, str]:
    """Return the outcome of a response of a group, and the reason why it is incomplete, or "".

    If a task fails on one response, only the numbers of that response are lost.

    Args:
        spec: the reward that gave the score.
    """
    try:
        outcome, problem = task.outcome(response_input(group, sample), sample.score), ""
    except VlmrlError as error:
        outcome, problem = {}, str(error)
    return with_accuracy(outcome, sample.score.parts, spec), problem


def response_input(group: Group, sample: ScoredSample) -> RewardInput:
    """Return the reward's input for a scored response, without the pixels."""
    row, trajectory = group.row, sample.trajectory
    return RewardInput(
        sample.text,
        row.truth,
        row.columns,
        finish=trajectory.finish,
        num_tokens=trajectory.num_sampled_tokens,
        prompt=group.prompt_text,
        token_ids=trajectory.response_ids or None,
        step=trajectory.version,
        prompt_id=row.prompt_id,
        sample=trajectory.sample,
        media=row.media,
        seen_sizes=trajectory.seen_sizes,
        turns=sample.turns,
    )


def accuracies(groups: Sequence[Group], sources: Sequence[Source]) -> list[list[float | None]]:
    """Return the accuracy of every sample of every group; None if it has none."""
    return [[outcome.get("accuracy") for outcome, _ in measured] for measured in _outcomes(groups, sources)]


def accuracy_metrics(groups: Sequence[Group], sources: Sequence[Source]) -> dict[str, float]:
    """Return `reward/accuracy` and `reward/outcome_errors`, each only if there is one.

    The first is the mean over the samples that have an accuracy, the second the number of samples on which the task
    failed.
    """
    measured = [one for of_group in _outcomes(groups, sources) for one in of_group]
    values = [value for outcome, _ in measured if (value := outcome.get("accuracy")) is not None]
    failed = sum(bool(problem) for _, problem in measured)
    errors = {"reward/outcome_errors": float(failed)} if failed else {}
    return ({"reward/accuracy": fmean(values)} if values else {}) | errors


def _outcomes(groups: Sequence[Group], sources: Sequence[Source]) -> list[list[tuple[Outcome, str]]]:
    """Return `outcome_of` every sample of every group."""
    by_name = {source.name: source for source in sources}
    return [
        [outcome_of(source.task, group, s, source.reward) for s in group.samples]
        for group in groups
        for source in (by_name[group.row.source],)
    ]


def pooled_metrics(groups: Sequence[Group], sources: Sequence[Source]) -> dict[str, float | None]:
    """Return the PooledMetrics of the sources' tasks and their sums, over all responses of a step.

    Sources whose tasks have the same metrics are pooled. A metric that is not defined is None. If a task fails,
    `reward/set_metrics_errors` is the number of the responses that it was to measure, and its metrics are missing.
    """
    by_metrics: dict[PooledMetrics, list[Source]] = {}
    for source in sources:
        if isinstance(source.task.set_metrics, PooledMetrics):
            by_metrics.setdefault(source.task.set_metrics, []).append(source)
    measured: dict[str, float | None] = {}
    failed = 0
    for pooled, own_sources in by_metrics.items():
        names = {source.name for source in own_sources}
        own = [group for group in groups if group.row.source in names]
        outcomes = _outcomes(own, own_sources)
        verdicts = [
            (response_input(group, s), s.score, outcome)
            for group, of_group in zip(own, outcomes, strict=True)
            for s, (outcome, _) in zip(group.samples, of_group, strict=True)
        ]
        if not verdicts:
            continue
        try:
            sums = pooled.sums(verdicts)
            measured |= {name: float(number) for name, number in sums.items()} | dict(pooled.metrics(sums))
        except VlmrlError:
            failed += len(verdicts)
    return measured | ({"reward/set_metrics_errors": float(failed)} if failed else {})


def accuracy_text(groups: Sequence[Group], sources: Sequence[Source]) -> str:
    """Return in words where sources get their accuracy from, if it is their reward; "" if none does."""
    texts = []
    for source in sources:
        own = [g for g in groups if g.row.source == source.name]
        values = [a for values_of_group in accuracies(own, [source]) for a in values_of_group if a is not None]
        parts = dict.fromkeys(name for g in own for s in g.samples for name in s.score.parts)
        words = accuracy_words(source.task.measured(own[0].row.truth), parts, values, source.reward) if own else ""
        if words:
            texts.append(f"{words} ({source.name})" if len(sources) > 1 else words)
    return f"accuracy is {'; '.join(texts)}" if texts else ""
