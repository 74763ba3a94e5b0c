"""Truth of the task figures: the figure's code, its size in pixels, its source, what is known of its content.

Graders draw the true figure of a row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import quoted
from vlmrl.rewards.text_rewards import ground_truth
from vlmrl.svg.parse import SvgLimits
from vlmrl.tasks.truth_kinds import Truth, TruthForm, problems_of
from vlmrl.types import RewardInput
from vlmrl.untrusted import CodeRefused, parse_json

CODE = "svg"
"""Truth field with the code of the row's figure."""
SOURCE = "data_source"
"""Truth field with the label of the row's source."""
MOST_LABEL_CHARS = 60
NO_LABEL = re.compile(r"[^A-Za-z0-9._-]+", re.ASCII)


def make_truth(
    svg: str, width: int, height: int, source: str, metadata: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the truth of a row.

    Args:
        width, height: size in pixels at which the code is drawn to be compared.
        source: label of the row's source.
        metadata: entities of a drawn figure (drawn/figure.py); None = not known. It is stored as JSON text, because
            each figure has entities of its own.
    """
    text = "" if metadata is None else json.dumps(metadata, ensure_ascii=False, separators=(",", ":"))
    return {CODE: svg, "width": width, "height": height, SOURCE: source, "metadata": text}


def code_of(truth: Mapping[str, Any]) -> str:
    """Return the code of a row's figure. Raises: RewardError for a row without it."""
    code = truth.get(CODE)
    if not isinstance(code, str) or not code.strip():
        raise RewardError(f"the row's `svg` is {quoted(code, 60)}, not the code of a figure")
    return code


def size_of(truth: Mapping[str, Any]) -> tuple[int, int]:
    """Return the width and height at which a row's figure is drawn. Raises: RewardError for a row without them."""
    sides = (truth.get("width"), truth.get("height"))
    width, height = (side if type(side) is int and side > 0 else 0 for side in sides)
    if not 0 < width * height <= SvgLimits.pixels:
        raise RewardError(f"the row's width and height are {quoted(sides, 60)}, not the size of a picture in pixels")
    return width, height


def metadata_of(truth: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what is known of the entities of a row's figure; None = nothing is. Raises: RewardError if it is no JSON.

    Returns: `entities`: id -> shape or arrow; `layouts`: names.
    """
    text = truth.get("metadata")
    if text is None or text == "":
        return None
    try:
        value = parse_json(text) if isinstance(text, str) else text
    except ValueError as error:
        raise RewardError(f"the row's `metadata` is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RewardError(f"the row's `metadata` is {quoted(value, 60)}, not an object")
    return value


def truth_problems(truth: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a truth, in words. The truths of a table of responses may lack all but the code."""
    has_size = "width" in truth or "height" in truth
    reads = (code_of, *([size_of] if has_size else []), metadata_of)
    problems = [problem for read in reads for problem in problems_of(read, truth)]
    label = truth.get(SOURCE, "_")
    if not isinstance(label, str) or label != as_label(label):
        problems.append(f"`{SOURCE}` is {quoted(label, 60)}, not a name of letters, digits, `.`, `_` and `-`")
    return problems


def truth_form(truth: Truth, columns: Sequence[str]) -> TruthForm:
    """Return the form of truths in a table of responses: the code as a text, or columns named as the truth fields."""
    return TruthForm((CODE, SOURCE), read_code, code_of)


def read_code(text: str) -> Truth:
    """Return the truth of a cell that holds the code. Raises: RewardError for an empty one."""
    return {CODE: code_of({CODE: text})}


def as_label(name: str) -> str:
    """Return a name as the label of a source: letters, digits, `.`, `_` and `-`, at most 60; `_` replaces the rest."""
    return NO_LABEL.sub("_", name)[:MOST_LABEL_CHARS] or "_"


Figure = TypeVar("Figure")


def true_figure(x: RewardInput, key: str | None, read: Callable[[str], Figure]) -> Figure:
    """Return what `read` makes of the true SVG code of a row.

    Args:
        key: truth field or column with the code; None = see `ground_truth`.
        read: function that draws code. It raises CodeRefused for code that cannot be drawn.
    Raises: RewardError for a row without code that can be drawn.
    """
    text = ground_truth(x, key)
    try:
        if not isinstance(text, str):
            raise CodeRefused("missing", f"it is a {type(text).__name__}, not a text")
        return read(text)
    except CodeRefused as error:
        raise RewardError(
            f"the row's true SVG cannot be drawn: {error.reason}",
            hint="leave the row out; `vlmrl prep figures` drops such rows",
        ) from None
