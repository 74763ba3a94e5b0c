"""What a task is: the one bundle that training, validation, `eval` and `reward-check` all use."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vlmrl.types import Message, Row

Outcome = Mapping[str, float | None]


@dataclass(frozen=True)
class Task:
    """A task bound to one dataset.

    Args:
        name: as in `[[data]] task`.
        summary: one line for `vlmrl recipe list --tasks`.
        template: Jinja source of the user message. Variables: the row's columns and `truth`-free task settings.
        variables: further template variables that come from the dataset (the level names, say).
        validate: truth of a row -> what is wrong with it, in words; empty when sound.
        reward: name in REWARDS of the task's own reward; None when the user must bring one.
        reward_args: arguments of that reward that come from the dataset.
        outcome: (truth, response) -> measured numbers of one answer, e.g. accuracy 0/1, brier, confidence, label,
            parse_failure 0/1; None = does not apply. A response that cannot be parsed counts as wrong, never as
            missing.
        messages: row -> the prompt when the rows bring their own (task `table`); None = `template` is rendered.
        trace: (row, rng) -> a correct response in the task's own format, for `vlmrl sft`; None when there is none.
    """

    name: str
    summary: str
    template: str
    validate: Callable[[Mapping[str, Any]], list[str]]
    variables: Mapping[str, Any] = field(default_factory=dict)
    reward: str | None = None
    reward_args: Mapping[str, Any] = field(default_factory=dict)
    outcome: Callable[[Mapping[str, Any], str], Outcome] = lambda truth, response: {}
    messages: Callable[[Row], tuple[Message, ...]] | None = None
    trace: Callable[[Row, random.Random], str] | None = None
