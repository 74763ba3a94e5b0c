"""The true figure of a row, for the graders that draw it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vlmrl.errors import RewardError
from vlmrl.rewards.text_rewards import ground_truth
from vlmrl.svg.parse import SvgRefused
from vlmrl.types import RewardInput

Figure = TypeVar("Figure")


def true_figure(x: RewardInput, key: str | None, read: Callable[[str], Figure]) -> Figure:
    """Return what `read` makes of the true SVG code of a row.

    Args:
        key: truth field or column with the code; None = see `ground_truth`.
        read: function that draws code. It raises SvgRefused for code that cannot be drawn.
    Raises: RewardError for a row without code that can be drawn.
    """
    text = ground_truth(x, key)
    try:
        if not isinstance(text, str):
            raise SvgRefused("missing", f"it is a {type(text).__name__}, not a text")
        return read(text)
    except SvgRefused as error:
        raise RewardError(
            f"the row's true SVG cannot be drawn: {error.reason}",
            hint="leave the row out; `vlmrl prep figures` drops such rows",
        ) from None
