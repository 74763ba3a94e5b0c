"""Rewards for mathematical answers as recipes name them: `math`, and the published rules `maye` and `rllava_math`.

The policy of `math` says what counts as the same answer; each of its fields is an argument of the reward in a recipe.
math-verify is not imported here: these functions run in the trainer, the graders in workers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vlmrl.errors import RewardError, unknown
from vlmrl.rewards.base import RewardSpec, WorkerFunction
from vlmrl.rewards.math.latex import PLACES
from vlmrl.rewards.text_parsing import format_weights
from vlmrl.rewards.text_rewards import RANGES, check_lengths, check_min_tokens, check_script

SIGN_RULES = ("optional", "required", "ignored")
CHOICES: dict[str, tuple[str, ...]] = {
    "place": PLACES,
    "thought": ("skip", "read"),
    "units": SIGN_RULES,
    "degrees": SIGN_RULES,
    "percent": ("optional", "value", "ignored"),
    "money": SIGN_RULES,
    "sets": ("strict", "loose"),
    "intervals": ("ends_and_brackets", "ends"),
    "choices": ("letter", "exact"),
    "mixed": ("mixed", "product"),
}
"""Field -> its values."""
MOST_DIGITS = 15


@dataclass(frozen=True)
class Policy:
    r"""Rules by which two answers are the same.

    Args:
        place: where the answer stands. "box": the last box; "tag": the `<answer>` tag; "text": the last box, or the
            whole text where there is no box.
        thought: "skip": what stands before the last `</think>` is not read; "read": it is.
        units: "optional": a unit may be missing on one side, and 12 cm is 0.12 m; "required": both have one or none;
            "ignored".
        degrees: the same for degrees. A bare multiple of pi beside degrees is read as radians.
        percent: "optional": 20% is 0.2, and where only one side has the sign it is 20, too; "value": 20% is 0.2 only;
            "ignored": 20% is 20.
        money: as `units`. Two currencies never agree, unless "ignored".
        decimals: number of significant digits from which a decimal stands for a rounded value: with 3, 13.4 is
            6\sqrt{5}, and 13 is not. 0: a decimal is exactly what it says.
        sets: "strict": `{1, 2}` and `1, 2` are the same in any order, and never the tuple `(1, 2)`; "loose": brackets
            do not matter, order does for tuples alone.
        intervals: "ends_and_brackets": (1, 2] is not [1, 2]; "ends": brackets do not matter.
        choices: "letter": for the gold answer `B`, `B. 45` is right; "exact": the letter alone is.
        mixed: "mixed": `2\frac{1}{2}` is 2.5; "product": it is 1.
    """

    place: str = "box"
    thought: str = "skip"
    units: str = "optional"
    degrees: str = "optional"
    percent: str = "optional"
    money: str = "optional"
    decimals: int = 3
    sets: str = "strict"
    intervals: str = "ends_and_brackets"
    choices: str = "letter"
    mixed: str = "mixed"


def checked_policy(args: dict[str, Any]) -> Policy:
    """Return the policy of the recipe's arguments. Raises: RewardError for an unknown value."""
    for name, values in CHOICES.items():
        if name in args and args[name] not in values:
            raise unknown(name, str(args[name]), values, error=RewardError)
    decimals = args.get("decimals", 3)
    if type(decimals) is not int or not 0 <= decimals <= MOST_DIGITS:
        raise RewardError(f"decimals = {decimals!r} is not a number of digits from 0 to {MOST_DIGITS}")
    return Policy(**{field.name: args[field.name] for field in fields(Policy) if field.name in args})


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
    (see text_rewards.py), and `length` if its limits are given. The detail of the score has both answers as read, the
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
    on_timeout = {part: 0.0 for part in ranges if part not in lost} | lost
    worker = WorkerFunction(name, module, "make_grader", args)
    return worker.reward(ranges, weights, seconds=SECONDS, accuracy="accuracy", on_timeout=on_timeout)
