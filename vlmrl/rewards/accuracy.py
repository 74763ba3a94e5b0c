"""Which part of a reward is its accuracy: the one place that decides it.

In order: the part that the recipe names (`[reward] accuracy`), then the task's own measure (`Task.outcome`), then the
part that the reward declares (`RewardSpec.accuracy`), then a part called `accuracy`, `acc` or `correct`, as rewards
written for EasyR1 and verl have it. The part needs no weight. verl calls a bare number `acc`; so it is read here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from vlmrl.rewards.base import RewardSpec

NAMES = ("accuracy", "acc", "correct")
"""Names of a part that is an accuracy, the first that is there."""
FUNCTION = re.compile(rf"(?:.*_)?(?:{'|'.join(NAMES)})(?:_(?:reward|score|func|fn))*")
"""Names of functions whose one number is an accuracy: `accuracy_reward`."""
RIGHT = 1.0
"""An accuracy that says right; 0 or -1 says wrong, anything in between how nearly right."""


def accuracy_part(parts: Collection[str], spec: RewardSpec, named: str | None = None) -> str | None:
    """Return the part that is the accuracy, among the parts that a reward returned; None where there is none.

    Args: named: what the recipe says.
    """
    declared = named or spec.accuracy
    if declared is not None:
        return declared if declared in parts else None
    if spec.user is not None and spec.user.style == "verl" and set(parts) == {"score"}:
        return "score"
    return next((name for name in NAMES if name in parts), None)


def accuracy_of(parts: Mapping[str, float | None], spec: RewardSpec, named: str | None = None) -> float | None:
    """Return the accuracy of one response; None where the reward has none, or it does not apply."""
    name = accuracy_part(parts, spec, named)
    return None if name is None else parts[name]


def is_binary(values: Collection[float]) -> bool:
    """Return whether accuracies say right or wrong and nothing in between: all are 1, 0 or -1."""
    return {*values} <= {RIGHT, 0.0, -RIGHT}
