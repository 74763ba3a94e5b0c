"""Rewards for mathematical answers as recipes name them: `math`, and the published rules `maye` and `rllava_math`.

Neither imports math-verify here: the functions below run in the trainer, the graders in workers.
"""

from __future__ import annotations

from typing import Any

from vlmrl.errors import RewardError
from vlmrl.rewards.answer_form import format_weights
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.math.policy import checked_policy
from vlmrl.rewards.response_parts import RANGES, check_lengths, check_min_tokens, check_script
from vlmrl.rewards.worker_code import WorkerFunction, in_this_process

SECONDS = 2.5
"""Time limit of one response, in seconds. Two tries of a response that never ends take 5 s."""
LOST = {"think_format": 0.0, "language": -1.0, "ending": -1.0}
"""Parts of a response that hangs its worker twice, besides its accuracy of 0: the lowest ones."""


def math(
    *,
    key: str | None = None,
    place: str = "box",
    thought: str = "skip",
    units: str = "optional",
    degrees: str = "optional",
    percent: str = "optional",
    money: str = "optional",
    decimals: int = 3,
    sets: str = "strict",
    intervals: str = "ends_and_brackets",
    choices: str = "letter",
    mixed: str = "mixed",
    script: str = "latin",
    min_tokens: int = 0,
    soft_tokens: int | None = None,
    max_tokens: int | None = None,
) -> RewardSpec:
    """Return a reward. Part `accuracy`: 1 if the last box of the response is the expected answer.

    Three more parts are reported, and count where the recipe gives them a weight: `think_format`, `language`, `ending`
    (see response_parts.py), and `length` if its limits are given. The detail of the score has both answers as read, the
    verdict and its reason.

    Args:
        key: truth field or column with the expected answer, or a list of accepted ones; default: see `ground_truth`.
            A solution counts by its last box.
        place, thought, units, degrees, percent, money, decimals, sets, intervals, choices, mixed: see `Policy`.
        script, min_tokens: see `language` and `ending`.
        soft_tokens, max_tokens: limits of the part `length`; both or none.
    Raises: RewardError for an unknown value.
    """
    policy: dict[str, Any] = {
        "place": place, "thought": thought, "units": units, "degrees": degrees, "percent": percent, "money": money,
        "decimals": decimals, "sets": sets, "intervals": intervals, "choices": choices, "mixed": mixed,
    }  # fmt: skip
    checked_policy(policy)
    check_script(script)
    check_min_tokens(min_tokens)
    parts: dict[str, Any] = {"script": script, "min_tokens": min_tokens}
    ranges = {"accuracy": (0.0, 1.0), **RANGES}
    if soft_tokens is not None or max_tokens is not None:
        check_lengths(soft_tokens or 0, max_tokens or 0)
        parts["lengths"] = [soft_tokens, max_tokens]
        ranges["length"] = (0.0, 1.0)
    args = {"key": key, "parts": parts, **policy}
    return in_worker("math", "vlmrl.rewards.math.grader", args, ranges, {"accuracy": 1.0}, LOST)


def maye(*, key: str | None = None, min_tokens: int = 1, penalty: float = -0.1) -> RewardSpec:
    """Return the published reward of MAYE: accuracy by its judge, plus format, plus language, all with weight 1.

    Part `penalty` replaces their sum by `penalty` for a response that the token limit cut, or that is shorter than
    `min_tokens`. maye.py lists the differences to the published code.

    Args:
        key: truth field or column with the solution; default: see `ground_truth`.
        min_tokens: minimum length in tokens, >= 0.
        penalty: score of a response that is cut or too short.
    Raises: RewardError for a number that is out of range.
    """
    check_min_tokens(min_tokens)
    if not (isinstance(penalty, (int, float)) and -1 <= penalty <= 1):
        raise RewardError(f"penalty = {penalty!r} is not a number from -1 to 1")
    ranges = {"accuracy": (0.0, 1.0), "format": (0.0, 1.0), "language": (-0.1, 0.0), "penalty": (-3.0, 1.1)}
    args = {"key": key, "min_tokens": min_tokens, "penalty": float(penalty)}
    lost = {"accuracy": 0.0, "format": 0.0, "language": 0.0, "penalty": float(penalty)}
    return in_worker("maye", "vlmrl.rewards.math.maye", args, ranges, dict.fromkeys(ranges, 1.0), lost)


def rllava_math(*, key: str | None = None, format_weight: float = 0.1) -> RewardSpec:
    """Return the published reward of RLLaVA for boxed answers: accuracy and format, each 0 or 1.

    rllava.py lists its flaws, and the differences to the published code.

    Args:
        key: truth field or column with the expected answer; default: see `ground_truth`.
        format_weight: weight of the format, in [0, 1]; the accuracy has the rest.
    Raises: RewardError for a weight that is out of range.
    """
    weights = format_weights(format_weight)
    ranges = dict.fromkeys(weights, (0.0, 1.0))
    return in_worker("rllava_math", "vlmrl.rewards.math.rllava", {"key": key}, ranges, weights, {})


def in_worker(
    name: str,
    module: str,
    args: dict[str, Any],
    ranges: dict[str, tuple[float, float]],
    weights: dict[str, float],
    lost: dict[str, float],
) -> RewardSpec:
    """Return a reward whose grader `module.make_grader(**args)` runs in workers.

    Args:
        lost: parts of a response that hangs its worker twice; the others are 0.
    """
    worker = WorkerFunction(name, module, "make_grader", args)
    return RewardSpec(
        name,
        in_this_process(worker),
        ranges,
        weights,
        accuracy="accuracy",
        on_timeout={part: 0.0 for part in ranges if part not in lost} | lost,
        worker=worker,
        timeout_seconds=SECONDS,
    )
