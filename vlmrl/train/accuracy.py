"""The accuracy of a step's rollouts, as the tasks or the rewards measure it (rewards/accuracy.py)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from vlmrl.rewards.accuracy import accuracy_words
from vlmrl.tasks.measure import outcome_of
from vlmrl.tasks.source import Source
from vlmrl.types import Group


def accuracies(groups: Sequence[Group], sources: Sequence[Source]) -> list[list[float | None]]:
    """Return the accuracy of every sample of every group; None where there is none."""
    by_name = {source.name: source for source in sources}
    return [
        [outcome_of(source.task, group, s, source.reward).get("accuracy") for s in group.samples]
        for group in groups
        for source in (by_name[group.row.source],)
    ]


def accuracy_metrics(groups: Sequence[Group], sources: Sequence[Source]) -> dict[str, float]:
    """Return `reward/accuracy`, the mean over the samples that have one; {} where none has."""
    found = [value for values in accuracies(groups, sources) for value in values if value is not None]
    return {"reward/accuracy": fmean(found)} if found else {}


def accuracy_told(groups: Sequence[Group], sources: Sequence[Source]) -> str:
    """Return in words what the accuracy is of those sources that take it from their reward; "" where none does."""
    told = []
    for source in sources:
        own = [g for g in groups if g.row.source == source.name]
        found = [a for values in accuracies(own, [source]) for a in values if a is not None]
        parts = dict.fromkeys(name for g in own for s in g.samples for name in s.score.parts)
        words = accuracy_words(source.task.measured(own[0].row.truth), parts, found, source.reward) if own else ""
        if words:
            told.append(f"{words} ({source.name})" if len(sources) > 1 else words)
    return f"accuracy is {'; '.join(told)}" if told else ""
