"""Names of columns that are recognised for each role, in training tables, saved responses and tables of image pairs.

The names are those of TRL, verl, EasyR1 and ms-swift, and other common ones. cells.py reads the cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmrl.data.cells import structured
from vlmrl.errors import DataError, listed

Spellings = Mapping[str, Sequence[str]]
"""Role -> column names that are recognised, in order of preference."""

IMAGES = ("images", "image", "image_path", "image_paths")
_ANSWER = ("solution", "answer", "ground_truth", "reward_model")
TRAINING: Spellings = {
    "prompt": ("prompt", "problem", "messages", "question", "query", "conversations"),
    "images": IMAGES,
    "answer": _ANSWER,
    "response": ("response", "completion"),
}
"""Columns of a table to train on."""
STYLES: Mapping[str, str] = {
    "TRL": "`prompt`, `image` or `images`, `solution`; prompts are texts or lists of {role, content}",
    "verl": "`prompt`, `images`, `reward_model` with {style, ground_truth}",
    "EasyR1": "`problem`, `images`, `answer`",
    "ms-swift": "`messages` of {role, content}, `images`, `solution`",
    "LLaVA, ShareGPT": "`conversations` of {from, value}, from human and gpt, `image`: a path below the table's folder "
    "or `images_root`; the last turn of gpt is the truth `answer`, and what `vlmrl sft` learns",
}
"""Library whose tables are read as they are -> the columns of these, as Markdown."""
RESPONSES: Spellings = {
    "response": (
        "response",
        "completion",
        "output",
        "prediction",
        "predict",
        "generated_text",
        "generation",
        "model_output",
        "solution_str",
        "text",
    ),
    # The order differs from that of TRAINING: existing reports rely on both orders.
    "ground_truth": (
        "ground_truth",
        "truth",
        "answer_im",
        "gts",
        "ground_truths",
        "reward_model",
        "solution",
        "label",
        "answer",
        "target",
        "reference",
    ),
    "prompt": ("prompt", "problem", "question", "query", "input"),
    "group": ("group", "group_id", "prompt_id", "uid", "problem_id", "question_id"),
    "step": ("step", "global_step", "training_step"),
    "finish": ("finish", "finish_reason"),
    "num_tokens": ("num_tokens", "response_length", "completion_length", "num_completion_tokens"),
    "score": ("score", "reward", "overall"),
    "token_ids": ("completion_ids", "token_ids", "response_ids"),
    "images": IMAGES,
}
"""Columns of a table of saved responses."""
PAIRS: Spellings = {
    "images": IMAGES,
    "problem": ("problem",),
    "answer": ("answer", *(name for name in _ANSWER if name != "answer")),
    "composite": ("answer_im",),
}
"""Columns of a table of image pairs. `composite` holds the answer together with the names of the two images."""


@dataclass(frozen=True)
class Mapped:
    """Column of each role of a training table; None = the table has no such column.

    `style` is the name of the trainer that uses these column names; "own" = no known trainer.
    """

    prompt: str | None
    images: str | None
    answer: str | None
    response: str | None
    style: str

    def named(self) -> dict[str, str]:
        """Return role -> column, without the roles that have no column."""
        return {key: getattr(self, key) for key in TRAINING if getattr(self, key)}


def match_columns(
    spellings: Spellings,
    columns: Sequence[str],
    named: Mapping[str, str] | None = None,
    *,
    where: str = "",
    option: str = "",
) -> dict[str, str]:
    """Return role -> column; a role without a column is left out, and no column has two roles.

    Args:
        spellings: role -> column names that are recognised.
        columns: the table's columns.
        named: role -> column that the user chose; these take precedence.
        where: the table, for messages.
        option: the option or recipe key with which the user chooses columns, for messages.
    Raises: DataError for an unknown role, or a named column that the table lacks, with the nearest name.
    """
    matched = dict(named or {})
    for role, column in matched.items():
        if role not in spellings:
            raise DataError(f"{option} names `{role}`", where=where, hint=listed(role, tuple(spellings), "roles"))
        if column not in columns:
            raise DataError(
                f"no column `{column}` (named as {role})", where=where, hint=listed(column, columns, "columns")
            )
    for role, names in spellings.items():
        if role not in matched:
            free = [name for name in names if name in columns and name not in matched.values()]
            matched |= {role: free[0]} if free else {}
    return matched


def map_columns(columns: Sequence[str], named: Mapping[str, str], first: Mapping[str, Any], where: str) -> Mapped:
    """Find the column of each role of a training table.

    Args:
        columns: the table's columns.
        named: `[[data]] columns` of the recipe: role -> column; these take precedence.
        first: a row of the table. If its column `reward_model` holds a `ground_truth`, as in verl's tables, that column
            is preferred for the answer; otherwise `reward_model` is not used for the answer.
        where: the table, for messages.
    Raises: DataError; see `match_columns`.
    """
    cell = structured(first.get("reward_model"), f"{where}, column `reward_model`")
    is_verl = isinstance(cell, Mapping) and "ground_truth" in cell
    others = tuple(name for name in _ANSWER if name != "reward_model")
    spellings = {**TRAINING, "answer": ("reward_model", *others) if is_verl else others}
    matched = match_columns(spellings, columns, named, where=where, option="`columns`")
    return Mapped(**{role: matched.get(role) for role in TRAINING}, style=_style(matched))


def missing_prompt(columns: Sequence[str], where: str) -> DataError:
    """Return the error for a table whose prompt column is not recognised."""
    return DataError(
        f"no prompt column; the table has: {', '.join(columns)}",
        where=where,
        hint=f'recognised names: {", ".join(TRAINING["prompt"])}; name yours with `columns = {{prompt = "..."}}`, '
        "or give a Jinja template in `prompt`",
    )


def _style(matched: Mapping[str, str]) -> str:
    if matched.get("answer") == "reward_model":
        return "verl"
    by_prompt = {"problem": "EasyR1", "messages": "ms-swift", "prompt": "TRL"}
    return by_prompt.get(matched.get("prompt", ""), "own")
