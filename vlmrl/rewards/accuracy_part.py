"""Choice of the part of a reward that is its accuracy. No other module decides it.

The order is: the part that the recipe names (`[reward] accuracy`); the task's own measure (`Task.outcome`); the part
that the reward declares (`RewardSpec.accuracy`); a part called `accuracy`, `acc` or `correct`, as rewards written for
EasyR1 and verl have it; the single number of a function in verl's form, which verl calls `acc`. The part needs no
weight. Of several rewards, the first one without a gate that has such a part decides.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from vlmrl.rewards.base import RewardSpec

NAMES = ("accuracy", "acc", "correct")
"""Names of a part that is an accuracy; the first that is present is used."""
FUNCTION = re.compile(rf"(?:.*_)?(?:{'|'.join(NAMES)})(?:_(?:reward|score|func|fn))*")
"""Names of functions whose single number is an accuracy: `accuracy_reward`."""
RIGHT = 1.0
"""Accuracy of a right answer. 0 or -1 is a wrong answer; a number between is a partly right answer."""


def accuracy_part(parts: Collection[str], spec: RewardSpec) -> str | None:
    """Return the part that is the accuracy, among the parts that a reward returned; None if there is none."""
    if spec.accuracy is not None:
        return spec.accuracy if spec.accuracy in parts else None
    if spec.members:
        return next(iter(accuracy_parts(parts, spec)), None)
    if spec.user is not None and spec.user.style == "verl" and set(parts) == {"score"}:
        return "score"
    return next((name for name in NAMES if name in parts), None)


def accuracy_parts(parts: Collection[str], spec: RewardSpec) -> list[str]:
    """Return the parts of several rewards that could be the accuracy; the first one is used.

    A reward with a gate is left out: its part is missing wherever the gate is closed, so a mean over it is no accuracy.
    """
    choices = []
    for member in spec.members:
        own = accuracy_part(member.own(dict.fromkeys(parts)), member.spec) if member.gate is None else None
        choices += [] if own is None else [member.name_of(own)]
    return choices


def other_choices(parts: Collection[str], spec: RewardSpec) -> str:
    """Return in words which of several accuracies of the rewards is used; "" if there is only one, or one is named."""
    choices = [] if spec.accuracy_named else accuracy_parts(parts, spec)
    if len(choices) < 2:
        return ""
    others = ", ".join(f"`{name}`" for name in choices[1:])
    return f'the accuracy is `{choices[0]}`, not {others}: [reward] accuracy = "PART" names another'


def with_accuracy(
    outcome: Mapping[str, float | None], parts: Mapping[str, float | None], spec: RewardSpec
) -> dict[str, float | None]:
    """Return the task's outcome of a response, with the reward's accuracy if that one is used (see the module)."""
    if "accuracy" in outcome and not spec.accuracy_named:
        return dict(outcome)
    name = accuracy_part(parts, spec)
    return dict(outcome) if name is None else {**outcome, "accuracy": parts[name]}


def is_binary(values: Collection[float]) -> bool:
    """Return whether accuracies are only right or wrong: all are 1, 0 or -1."""
    return {*values} <= {RIGHT, 0.0, -RIGHT}


def accuracy_words(
    measured: Collection[str], parts: Collection[str], values: Collection[float], spec: RewardSpec
) -> str:
    """Return the source of the accuracy in words; "" if the task itself measures it, or there is none.

    Args:
        measured: names of the numbers that the task measures.
        parts: names of the parts that the reward returned.
        values: accuracies of the responses.
    """
    name = None if "accuracy" in measured and not spec.accuracy_named else accuracy_part(parts, spec)
    if name is None:
        return ""
    addition = "" if is_binary(values) else ", which is not only right or wrong: the mean is shown"
    return f"the part `{name}` of {spec.name}{addition}"
