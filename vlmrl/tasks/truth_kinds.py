"""Kinds of rows known by their truth: loose rollouts and tables of responses name no task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vlmrl.data.dataset_visit import RowLabels, answer_labels
from vlmrl.tasks.attack import Play, Stage
from vlmrl.types import Row

Truth = Mapping[str, Any]
CONTRADICTS = "contradicts itself"
"""Words in the message about a truth whose fields contradict each other."""


def _no_arguments(truth: Truth) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class RowKind:
    """Kind of rows. Every function takes the truth alone (`labels`: the row), so that saved responses suffice.

    Args:
        matches: whether a truth is of this kind.
        arguments: arguments for a built-in reward that accepts them, such as the names of levels.
        play: play of such rows in the probe of a reward; None = their answers are texts (reward_check/text_attacks.py).
        is_right: (truth, the text of an answer) -> whether it is right, None where it decides nothing; None = the
            answer is compared as a text.
        labels: what the data doctor counts.
        specificity: of the kinds that match a truth, the one with the largest number counts.
    """

    matches: Callable[[Truth], bool]
    arguments: Callable[[Truth], Mapping[str, Any]] = _no_arguments
    play: Callable[[Stage], Play] | None = None
    is_right: Callable[[Truth, str], bool | None] | None = None
    labels: Callable[[Row], RowLabels] = answer_labels
    specificity: int = 0


TEXTS = RowKind(lambda truth: True)
"""Rows whose answer is a text or a number."""


def _same_info(truth: Truth, is_sure: bool) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class TruthForm:
    """Form of a task's truths in a table of responses. It is sent to other processes: functions of modules only.

    Args:
        fields: truth fields that may be columns of their own; a mapping that has the first of them is a truth.
        read: text of a cell -> truth (raises RewardError); None = a text is no truth.
        write: truth -> text of a cell, sound or not (raises RewardError); needed where `read` is.
        settings: replaces the dataset's dataset.json when a truth is validated.
        info: (truth of the first row, whether it has all fields that rows may hold) -> the same for making the task.
    """

    fields: tuple[str, ...] = ()
    read: Callable[[str], Truth] | None = None
    write: Callable[[Truth], str] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    info: Callable[[Truth, bool], Mapping[str, Any]] = _same_info
