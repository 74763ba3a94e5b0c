"""Policy of the math reward: what counts as the same answer. Each field is an argument of the reward in a recipe."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vlmrl.errors import RewardError, unknown
from vlmrl.rewards.math.answer_text import PLACES

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
        raise RewardError(f"decimals = {decimals!r} is no number of digits from 0 to {MOST_DIGITS}")
    return Policy(**{field.name: args[field.name] for field in fields(Policy) if field.name in args})
