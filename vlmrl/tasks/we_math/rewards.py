"""Built-in rewards of the task we_math, by name. Their graders run in workers; nothing here loads them."""

from __future__ import annotations

from collections.abc import Mapping

from vlmrl.metric import SHARE
from vlmrl.rewards import Builtin
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.math.rules import in_worker
from vlmrl.rewards.text_parsing import REQUIRED, check_thought, format_weights

WEIGHTS = {"accuracy": 0.9, "format": 0.1}
"""Weights of the parts. `share` counts only where the recipe gives it a weight."""


def we_math(*, thought: str = REQUIRED) -> RewardSpec:
    """Return a reward with three parts. `accuracy`: 1 for the right option, or the right answer with all its values.

    `format`: 1 for a whole response in the form that the prompt asks for, with an answer, right or wrong. `share`: of
    an answer with several values, the share that is right at its own place, if their number is right; else the
    accuracy. It has no weight by default.

    Args:
        thought: whether the form needs a `<think>` thought before the answer: "required" or "optional".
    """
    check_thought(thought)
    ranges = dict.fromkeys((*WEIGHTS, "share"), SHARE)
    return in_worker("we_math", "vlmrl.tasks.we_math.grader", {"thought": thought}, ranges, WEIGHTS, {})


def rllava_we_math(*, format_weight: float = 0.0) -> RewardSpec:
    """Return the reward that RLLaVA published. Its scripts train on the accuracy alone.

    Args:
        format_weight: weight of the format, in [0, 1]; the accuracy has the rest. The published function with a format
            has 0.5.
    Raises: RewardError for a weight that is out of range.
    """
    weights = format_weights(format_weight)
    ranges = dict.fromkeys(weights, SHARE)
    return in_worker("rllava_we_math", "vlmrl.tasks.we_math.published", {}, ranges, weights, {})


REWARDS: Mapping[str, Builtin] = {
    "we_math": Builtin(
        we_math, "We-Math: the right option, or the answer with all its values, and the form", version=5
    ),
    "rllava_we_math": Builtin(
        rllava_we_math, "We-Math: the reward that RLLaVA published, to reproduce its runs", version=1
    ),
}
