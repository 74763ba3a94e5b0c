"""Kinds of rows, found from the truth of a row, because single rollout files and tables of responses name no task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmrl.data.doctor import RowLabels, answer_labels
from vlmrl.errors import RewardError
from vlmrl.tasks.attack import Probe, ProbeRows
from vlmrl.tasks.positions import Mark
from vlmrl.types import Row

Truth = Mapping[str, Any]
CONTRADICTS = "contradicts itself"
"""Words in the message about a truth whose fields contradict each other."""


def problems_of(read: Callable[[Truth], object], truth: Truth) -> list[str]:
    """Return what is wrong with a truth, in words: why it cannot be read; [] if it can."""
    try:
        read(truth)
        return []
    except RewardError as error:
        return [error.message]


@dataclass(frozen=True)
class Drawn:
    """Rows whose responses are code of a picture.

    Args:
        language: what the code is written in, for pages.
        image: number of the prompt's image that shows the truth, from 0.
        render: name of the artifact of a score with the picture of the response.
        draw: (truths and responses) -> for each, name -> PNG file of the pictures that compare them, truth first; a
            text instead says why there are none. Drawing happens in processes of its own.
        legend: sentence for pages that says what the colours of these pictures mean.
    """

    language: str
    image: int
    render: str
    draw: Callable[[Sequence[tuple[Truth, str]]], list[Mapping[str, bytes] | str]]
    legend: str = ""


@dataclass(frozen=True)
class RowKind:
    """Kind of rows. All functions except `labels` need only the truth of a row, so saved responses are sufficient.

    Args:
        matches: truth -> whether it is of this kind.
        arguments: truth -> arguments for built-in rewards that accept them, such as the names of levels.
        probe: returns the answers and tricks for the probe of a reward; None = the answers are texts
            (reward_check/tricks.py).
        is_right: (truth, text of an answer) -> whether the answer is right; the result None = it decides nothing. If
            `is_right` is None, answers are compared as texts.
        labels: row -> the labels that the data doctor counts.
        marks: (truth, detail of a score) -> boxes over the images, for pages; None = rows of this kind have no boxes.
        drawn: facts about responses that are code of a picture, for pages; None = they are not.
        specificity: if several kinds match a truth, the one with the largest number is used.
    """

    matches: Callable[[Truth], bool]
    arguments: Callable[[Truth], Mapping[str, Any]] = lambda truth: {}
    probe: Callable[[ProbeRows], Probe] | None = None
    is_right: Callable[[Truth, str], bool | None] | None = None
    labels: Callable[[Row], RowLabels] = answer_labels
    specificity: int = 0
    marks: Callable[[Truth, Mapping[str, Any] | None], Sequence[Mark]] | None = None
    drawn: Drawn | None = None


TEXTS = RowKind(lambda truth: True)
"""Rows whose answer is a text or a number."""


def _same_info(truth: Truth, is_sure: bool) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class TruthForm:
    """Form of a task's truths in a table of responses.

    It is sent to other processes and must be picklable, so its functions must be defined at the level of a module.

    Args:
        fields: truth fields that may be columns of their own. A mapping that has the first of them is a truth.
        read: text of a cell -> truth (raises RewardError); None = a text is no truth.
        write: truth -> text of a cell, also if the truth is wrong (raises RewardError); required if `read` is set.
        settings: used in place of the dataset's dataset.json when a truth is validated.
        info: returns the fields that are used in place of dataset.json to make the task. Arguments: the truth of the
            first row, and whether this truth has all the fields that the other rows may have.
    """

    fields: tuple[str, ...] = ()
    read: Callable[[str], Truth] | None = None
    write: Callable[[Truth], str] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    info: Callable[[Truth, bool], Mapping[str, Any]] = _same_info
