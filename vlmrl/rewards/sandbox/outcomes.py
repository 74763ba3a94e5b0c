"""Outcomes of a user's reward for one input: a result, or the reason why there is none."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vlmrl.errors import RewardError, RewardUnavailable, VlmrlError
from vlmrl.rewards.file_limit import LEFT_OUT
from vlmrl.rewards.sandbox.frames import CONTRACT, UNAVAILABLE
from vlmrl.types import Media, RewardInput

Place = tuple[int, int]
"""Input of a call: (key of its group, index within the group). Places sort in the order of the call's rows."""


@dataclass(frozen=True)
class Result:
    """Result of the function for one input.

    Args:
        parts: checked parts.
        seconds: time that the function took.
        detail: as a JSON value.
        artifacts: references by name.
        files: image files by sha256.
    """

    parts: dict[str, float | None]
    note: str
    seconds: float
    detail: Any = None
    artifacts: Mapping[str, Media] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of its images."""
        return sum(map(len, self.files.values()))

    def without_images(self) -> Result:
        """Return the result without its images, and with a note that says so."""
        note = "; ".join(filter(None, (self.note, LEFT_OUT)))
        return replace(self, note=note, artifacts={}, files={}) if self.files else self


@dataclass(frozen=True)
class Failure:
    """Reason why there is no result.

    Args:
        kind: the exception's class; CONTRACT if the result is not a score; UNAVAILABLE if a service is down; "" if the
            worker was lost.
        lines: the user's own lines of the traceback.
        output: text that the function printed during that call.
        is_final: asking a service again would not help.
        ends_run: no later input would get an answer either.
    """

    kind: str
    message: str
    lines: tuple[str, ...] = ()
    hint: str | None = None
    output: str = ""
    is_final: bool = False
    ends_run: bool = False
    size = 0

    def without_images(self) -> Failure:
        """Return itself: it has no images."""
        return self

    def __str__(self) -> str:
        line = f" ({self.lines[-1].partition(' in ')[0]})" if self.lines else ""
        return self.text + line

    @property
    def raised(self) -> str:
        if self.kind in ("", CONTRACT, UNAVAILABLE):
            return ""
        return f"{self.kind}: {self.message}".removesuffix(": ")

    @property
    def text(self) -> str:
        """The failure without its place: the exception, or the message."""
        return self.raised or self.message

    @property
    def is_lost(self) -> bool:
        """Return whether the response hung or ended its worker."""
        return self.kind == ""

    @property
    def broke_worker(self) -> bool:
        """Return whether the response hung or ended its worker, or filled its memory (see `RewardSpec.on_timeout`)."""
        return self.kind in ("", MemoryError.__name__)

    @property
    def is_outage(self) -> bool:
        """Return whether a service that the reward needs is down."""
        return self.kind == UNAVAILABLE

    @property
    def is_contract(self) -> bool:
        """Return whether nothing was raised, but the result is not a score."""
        return self.kind == CONTRACT


Outcome = Result | Failure


def failure_of(error: Exception) -> Failure:
    """Return the failure for an error that a reward raised in this process."""
    if isinstance(error, RewardUnavailable):
        return Failure(UNAVAILABLE, error.message, hint=error.hint, is_final=error.is_final, ends_run=error.ends_run)
    if isinstance(error, VlmrlError):
        return Failure(
            CONTRACT if isinstance(error, RewardError) else type(error).__name__, error.message, hint=error.hint
        )
    last = traceback.extract_tb(error.__traceback__)[-1:]
    lines = tuple(f"{Path(at.filename).name}:{at.lineno} in {at.name}: {at.line}" for at in last)
    return Failure(type(error).__name__, str(error), lines)


def advised(failure: Failure, x: RewardInput) -> Failure:
    """Return a failure; that of a key which the row lacks says what the row has, and how a column becomes its truth."""
    key = failure.message.strip("'\"")
    if failure.kind != KeyError.__name__ or key in x.truth:
        return failure
    has, names = ", ".join(x.truth) or "nothing", ", ".join(x.columns) or "none"
    hint = (
        f"the truth of this row has {has}, and no `{key}`; columns: {names}. Name the one with the answer in [[data]]: "
        'columns = { answer = "..." }; of a conversation, the last turn is the answer if it is that of gpt or assistant'
    )
    return replace(failure, hint=failure.hint or hint)


def as_error(failure: Failure, name: str, where: str | None = None) -> RewardError:
    """Return a failure as the error for the user: the exception, the user's lines, the output.

    If a service is down, it is the reward's own message.
    """
    if failure.kind == UNAVAILABLE:
        hint = failure.hint or "start the service that it needs, then begin again; this is not a bug of the reward"
        return RewardUnavailable(f"reward `{name}` is unavailable: {failure.message}", where=where, hint=hint)
    verb_phrase = f"raised {failure.raised}" if failure.raised else f"failed: {failure.message}"
    lines = "".join(f"\n    {line}" for line in failure.lines)
    printed = "".join(f"\n    {line}" for line in failure.output.strip().splitlines()[-5:])
    printed = f"\n  it had printed:{printed}" if printed else ""
    return RewardError(f"reward `{name}` {verb_phrase}{lines}{printed}", where=where, hint=failure.hint)
