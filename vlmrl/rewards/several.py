"""Several rewards as one: the names of their parts, their gates, and the sum of their scores.

The score of a response is the sum of weight * score over the rewards that count in it. A reward does not count where it
returned None (TRL's "does not apply"), and where its gate is closed. A response in which none counts has no score.

Source: the sum and None are those of TRL's GRPOTrainer with several `reward_funcs` and `reward_weights`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from vlmrl.errors import RewardError, listed
from vlmrl.rewards.base import (
    EARNED,
    GATE_PART,
    LARGEST,
    Member,
    Parts,
    RewardSpec,
    check_weight_sizes,
    combine,
    counting_weights,
    label_of,
    value_range,
)
from vlmrl.types import INAPPLICABLE, Media, RewardInput, Score

LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
"""Pattern of a reward's label. It has no dot, so that `label.part` is read in one way only."""
JOIN = " + "
"""Text between the labels in the name of several rewards."""


def label_from(name: str) -> str:
    """Return the label of a reward that is given none: the function of `file.py:function`, else the reward's name."""
    return name.rpartition(":")[2] if ".py:" in name else name


class Fault(NamedTuple):
    """Mistake in a list of rewards: the position of the reward, its key, and the message with a hint."""

    index: int
    key: str
    message: str
    hint: str


def faults(labels: Sequence[str], gates: Sequence[str | None]) -> Iterator[Fault]:
    """Yield the mistakes in the labels and gates of a list of rewards that show without loading a reward."""
    first: dict[str, int] = {}
    for i, label in enumerate(labels):
        if not LABEL.fullmatch(label):
            hint = 'use letters, digits, _ and -: label = "grade"'
            yield Fault(i, "label", f"{label!a:.60} cannot be the label of a reward", hint)
        elif label in first:
            message = f"rewards {first[label]} and {i} are both called `{label}`"
            yield Fault(i, "label", message, f'give one of them another name: label = "{label}_2"')
        first.setdefault(label, i)
    opened_by = {label: label_of(gate) for label, gate in zip(labels, gates, strict=True) if gate is not None}
    for i, (label, gate) in enumerate(zip(labels, gates, strict=True)):
        if gate is None or first[label] != i:
            continue
        if (other := label_of(gate)) not in first:
            message = f"the gate of `{label}` is `{gate}`, and no reward is called `{other}`"
            yield Fault(i, "gate", message, listed(other, first, "rewards") + '; a gate is "LABEL.PART"')
        elif (ring := _ring(label, opened_by)) and i == min(first[one] for one in ring):
            message = f"the gates go round in a circle: {' -> '.join(ring)}"
            yield Fault(i, "gate", message, "a gate is a part of a reward that counts before this one")


def _ring(label: str, opened_by: Mapping[str, str]) -> list[str]:
    """Return the labels from a reward over its gates back to itself; [] if its gates do not lead back to it."""
    path = [label]
    while (following := opened_by.get(path[-1])) is not None and following not in path:
        path.append(following)
    return [*path, label] if following == label else []


def compose(members: Sequence[Member]) -> RewardSpec:
    """Return several rewards as one.

    Raises: RewardError for a label that is invalid or that two rewards have, a weight that is not finite or too large,
        or a gate that names an unknown reward or an unknown part of a built-in, or that leads back to its own reward.
    """
    for fault in faults([m.label for m in members], [m.gate for m in members]):
        raise RewardError(fault.message, where=f"reward `{members[fault.index].label}`", hint=fault.hint)
    weights = {m.label: m.weight for m in members}
    for member in members:
        check_weight_sizes({member.label: member.weight}, "the list of rewards")
        other = next((m for m in members if member.gate and m.label == label_of(member.gate)), None)
        if other is not None and other.spec.is_builtin and other.spec.ranges:
            check_gate(member, other, other.declared)
    return RewardSpec(
        JOIN.join(weights),
        _only_as_members,
        {name: ends for m in members for name, ends in _ranges(m).items()},
        weights,
        pure=all(m.spec.pure for m in members),
        needs_images=any(m.spec.needs_images for m in members),
        needs_token_ids=any(m.spec.needs_token_ids for m in members),
        members=tuple(members),
    )


def _ranges(member: Member) -> dict[str, tuple[float, float]]:
    """Return the ranges of a reward's parts as they are named in the sum, with that of its gate."""
    gate = {member.gate_part: (0.0, 1.0)} if member.gate is not None else {}
    return {member.name_of(part): ends for part, ends in member.spec.ranges.items()} | gate


def _only_as_members(x: RewardInput) -> Parts:
    raise RuntimeError("several rewards are scored by vlmrl.rewards.scoring.Scorer")


def check_gate(member: Member, other: Member, known: Collection[str]) -> None:
    """Raise a RewardError if the gate of `member` is none of the parts of `other` that are `known`."""
    if member.gate not in known:
        raise RewardError(
            f"the gate of `{member.label}` is the part `{member.gate}`, which reward `{other.label}` does not return",
            where=f"reward `{member.label}`",
            hint=listed(str(member.gate), sorted(known), "its parts")
            + "; a part of few responses is declared in RANGES of the reward's file",
        )


def is_open(gate: str, other: Member, score: Score) -> bool:
    """Return whether a gate is open by the score of its reward, `other`: the part is above 0.

    A part that does not apply, or is missing, closes it, and so does a failure.
    """
    value = {other.name_of(part): number for part, number in score.parts.items()}.get(gate)
    return score.error is None and value is not None and value > 0


def check_sums(
    spec: RewardSpec,
    scores: Sequence[Score],
    own: Mapping[str, Sequence[Score]],
    known: Mapping[str, set[str]],
    first: str | None,
    place: str | None,
) -> None:
    """Check all scores of a strict session.

    A gate is checked here, not at each response: a reward may return a part for some responses alone.

    Args:
        scores: the sums.
        own: label -> scores of the reward.
        known: label -> names of its parts in all sessions so far, as they are named in the sum; new ones are added.
        first: name of the first row.
        place: name of the source.
    Raises: RewardError for no score, and for an accuracy or a gate that no response of the session has.
    """
    judged = [score for score in scores if score.status != "unavailable"]
    if not judged:
        return
    if all(score.error == INAPPLICABLE for score in judged):
        message = f"no reward applies to any of the {len(judged)} responses of a call: all returned None"
        raise RewardError(message, where=first)
    of_label = {member.label: member for member in spec.members}
    for member in spec.members:
        other = None if member.gate is None else of_label[label_of(member.gate)]
        if other is not None and any(score.error is None for score in own[other.label]):
            known[other.label].update(other.name_of(part) for score in own[other.label] for part in score.parts)
            check_gate(member, other, known[other.label])
    parts = {*spec.ranges, *(name for score in scores for name in score.parts)}
    if spec.accuracy_named and spec.accuracy not in parts:
        raise RewardError(
            f"[reward] accuracy names the part `{spec.accuracy}`, which none of the rewards returns",
            where=place,
            hint=f"their parts: {', '.join(sorted(parts))}",
        )


def stages(members: Sequence[Member]) -> list[list[Member]]:
    """Return the members in stages: the reward of a gate stands in an earlier stage than the rewards that it opens."""
    result: list[list[Member]] = []
    waiting = list(members)
    while waiting:
        labels = {m.label for m in waiting}
        result.append([m for m in waiting if m.gate is None or label_of(m.gate) not in labels])
        waiting = [m for m in waiting if m not in result[-1]]
    return result


def total(members: Sequence[Member], weights: Mapping[str, float], scores: Mapping[str, Score | None]) -> Score:
    """Return the score of one response from those of the rewards.

    A response on which a reward failed has no score, and neither has one for which a service was unavailable. A failure
    goes first: to ask the service again would not help the response.

    Args:
        weights: label -> weight; a reward without one is reported and not counted.
        scores: label -> score of the reward; None = its gate is closed, and it was not asked.
    Returns: the score. It is INAPPLICABLE if no reward counts. The parts of a reward that does not count are None; one
        with a gate has the part `label.gate`, too.
    Example: weights {a: 1, b: 0.5}, scores 1 and -1 -> 0.5; b does not apply -> 1; neither applies -> INAPPLICABLE.
    """
    for status in ("failed", "unavailable"):
        errors = [f"{m.label}: {s.error}" for m in members if (s := scores[m.label]) is not None and s.status == status]
        if errors:
            return Score(math.nan, {}, error="; ".join(errors), status=status)
    counted = {label: score for label, score in scores.items() if score is not None and score.error is None}
    note = _notes(members, scores)
    if not counted:
        return Score(math.nan, {}, note, INAPPLICABLE)
    value = math.fsum(weights.get(label, 0.0) * score.value for label, score in counted.items())
    if not -LARGEST <= value <= LARGEST:
        terms = JOIN.join(f"{weights.get(label, 0.0):g} x {score.value:g}" for label, score in counted.items())
        return Score(math.nan, {}, error=f"the score {terms} is beyond {LARGEST:g}", status="failed")
    parts: dict[str, float | None] = {}
    detail: dict[str, Any] = {}
    artifacts: dict[str, Media] = {}
    files: dict[str, bytes] = {}
    for member in members:
        score = scores[member.label]
        if member.gate is not None:
            parts[member.gate_part] = float(score is not None)
        if score is None or score.error is not None:
            parts |= dict.fromkeys(member.declared)
            continue
        if member.gate is not None and GATE_PART in score.parts:
            error = f"{member.label}: a reward with a gate cannot return a part that is called `{GATE_PART}`"
            return Score(math.nan, {}, error=error, status="failed")
        parts |= {member.name_of(part): number for part, number in score.parts.items()}
        if score.detail:
            (detail[member.label],) = score.detail.values()
        artifacts |= {f"{member.label}.{name}": media for name, media in score.artifacts.items()}
        files |= score.files
    return Score(value, parts, note, detail=detail or None, artifacts=artifacts, files=files)


def _notes(members: Sequence[Member], scores: Mapping[str, Score | None]) -> str:
    """Return the notes with their labels; a note of `on_timeout` comes last, because such a score is known by its end.

    See `earned_on_timeout`.
    """
    notes = [f"{m.label}: {s.note}" for m in members if (s := scores[m.label]) is not None and s.note]
    return "; ".join(sorted(notes, key=lambda note: note.endswith(EARNED)))


def score_of(score: Score, member: Member) -> Score:
    """Return the score of one of the rewards from the score of all, as it would be alone.

    If the reward did not count in the response, or there is no score, the result has no parts, and the value is NaN.
    """
    if not score.parts:
        return score
    own = member.own(score.parts)
    if all(number is None for number in own.values()):
        return Score(math.nan, {}, score.note, INAPPLICABLE)
    weights = counting_weights(own, member.weights)
    value, _ = combine({**dict.fromkeys(weights), **own}, weights)
    own_detail = (score.detail or {}).get(member.label)
    return Score(value, own, score.note, detail=None if own_detail is None else {member.spec.key: own_detail})


def score_for_task(score: Score, spec: RewardSpec) -> Score:
    """Return the score that a task's measures read: that of the task's reward if it is one of several, else `score`."""
    member = task_member(spec)
    return score if member is None else score_of(score, member)


def task_member(spec: RewardSpec) -> Member | None:
    """Return the reward of the task among several rewards; None if there is none, or for a single reward."""
    return next((member for member in spec.members if member.of_task), None)


def declared_parts(spec: RewardSpec, weights: Mapping[str, float]) -> list[str]:
    """Return the parts of a reward that are known before it has run."""
    if spec.members:
        return [n for m in spec.members for n in ([*m.declared, m.gate_part] if m.gate_part else m.declared)]
    return list(dict.fromkeys([*spec.ranges, *weights]))


def weights_of_parts(spec: RewardSpec, weights: Mapping[str, float]) -> dict[str, float]:
    """Return part -> its weight in the score, for the parts whose weights are known before the reward has run.

    Args:
        weights: of the parts of a single reward; of several rewards, label -> weight of the reward.
    """
    if not spec.members:
        return dict(weights)
    pairs = [(m, weights.get(m.label, 0.0)) for m in spec.members]
    return {m.name_of(part): weight * own for m, weight in pairs for part, own in m.weights.items()}


def without_on_timeout(spec: RewardSpec) -> RewardSpec:
    """Return the reward without `on_timeout`: a response that hangs it then has an error."""
    members = tuple(replace(m, spec=replace(m.spec, on_timeout={})) for m in spec.members)
    return replace(spec, on_timeout={}, members=members)


def possible_values(
    all_parts: Iterable[Parts], spec: RewardSpec, weights: Mapping[str, float]
) -> tuple[float, float] | None:
    """Return the least and the largest sum of responses with such parts; None if a part has no declared range.

    It is the sum of the rewards' ranges (`value_range`); one that does not count adds 0.
    """
    responses = list(all_parts)
    low = high = 0.0
    for member in spec.members:
        weight = weights.get(member.label, 0.0)
        own = [member.own(parts) for parts in responses]
        counting = [parts for parts in own if any(value is not None for value in parts.values())]
        ends = value_range(counting, member.weights, member.spec.ranges) if counting else (0.0, 0.0)
        if weight and ends is None:
            return None
        sides = [weight * end for end in (ends or (0.0, 0.0))] + [0.0] * (len(counting) < len(own))
        low, high = low + min(sides), high + max(sides)
    return (low, high) if responses else None
