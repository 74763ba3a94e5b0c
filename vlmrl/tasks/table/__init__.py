"""The task `table`: the rows have their own prompts, and the user provides the reward."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from vlmrl.data.table_values import missing_prompt, read_chat, read_messages
from vlmrl.errors import DataError
from vlmrl.tasks.base import Task
from vlmrl.types import Message, Row

SUMMARY = "your own table: Parquet, JSONL, JSON, CSV or a hub dataset, with any reward function"


def table_task(info: Mapping[str, Any]) -> Task:
    """Return the task of a table.

    Args:
        info: set by the table's reader: `columns` (role -> column), `response_column`.
    """
    columns: Mapping[str, str] = info.get("columns") or {}
    prompt, response = columns.get("prompt"), info.get("response_column")

    def messages(row: Row) -> tuple[Message, ...]:
        if prompt is None:
            raise missing_prompt(list(row.columns), row.source)
        return read_chat(row.columns, columns, f"row {row.prompt_id}, column `{prompt}`").prompt

    def trace(row: Row, rng: random.Random) -> str | Sequence[Message]:
        value = row.columns.get(str(response))
        if response == prompt:
            chat = read_messages(value, f"row {row.prompt_id}, column `{prompt}`")
            if len(chat.response) > 1 or any(turn.calls for turn in chat.response):
                return chat.response
            value = chat.answer
        if not isinstance(value, str) or not value.strip():
            raise DataError(
                f"row {row.prompt_id} has no response to learn from", where=f"{row.source}, column `{response}`"
            )
        return value

    return Task(
        name="table",
        summary=SUMMARY,
        template="",
        validate=_validate,
        messages=messages,
        trace=trace if response else None,
    )


def _validate(truth: Mapping[str, Any]) -> list[str]:
    """Return an error for an empty answer, because no response could be right. A missing answer field is no error."""
    return ["the answer is empty"] if "answer" in truth and truth["answer"] in (None, "", [], {}) else []
