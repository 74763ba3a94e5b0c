"""The task `table`: rows bring their own prompt, the user brings the reward."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from vlmrl.errors import DataError
from vlmrl.tasks.base import Task
from vlmrl.types import Message, Row

SUMMARY = "a table of one's own: Parquet, JSONL, JSON, CSV or a hub dataset, with any reward function"


def table_task(info: Mapping[str, Any]) -> Task:
    """The task bound to a table; `info` is what the reader found out (`prompt_column`, `response_column`)."""
    has_response = bool(info.get("response_column"))
    return Task(
        name="table",
        summary=SUMMARY,
        template="",
        validate=lambda truth: [],
        messages=_messages,
        trace=_trace if has_response else None,
    )


def _messages(row: Row) -> tuple[Message, ...]:
    """The messages the reader made of the prompt column."""
    turns = row.columns.get("messages")
    if not isinstance(turns, list) or not turns:
        raise DataError(
            f"row {row.prompt_id} has no prompt", where=row.source,
            hint="name the prompt's column in `[[data]] columns = {prompt = ...}`, or give a template in `prompt`",
        )  # fmt: skip
    return tuple(Message(turn["role"], turn["content"]) for turn in turns)


def _trace(row: Row, rng: random.Random) -> str:
    """The answer the table gives for supervised training; a row without one is an error there."""
    response = row.columns.get("response")
    if not isinstance(response, str) or not response:
        raise DataError(f"row {row.prompt_id} has no response to learn from", where=row.source)
    return response
