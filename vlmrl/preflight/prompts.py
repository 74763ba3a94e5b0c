"""Checks of rendered prompts: the template, the images, and control tokens that are written in the text."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from vlmrl.errors import Problem, RecipeError, VlmrlError
from vlmrl.types import Message, Row

if TYPE_CHECKING:
    from vlmrl.data.encode import Encoder
    from vlmrl.tasks.source import Source

SHOWN = 3


def named(row: Row, error: VlmrlError) -> tuple[str, str]:
    """Return (place of the row, error message), for the list of examples in a problem."""
    inside = bool(error.where and row.origin and error.where.startswith(row.origin))
    words = f"{error.message} ({error.hint})" if error.hint and not inside else error.message
    return (error.where or row.place) if inside else row.place, words


def examples(bad: Sequence[tuple[str, str]]) -> str:
    """Return the first few failures, one per line."""
    lines = [f"{name}: {words}" for name, words in bad[:SHOWN]]
    return "first of them:\n  " + "\n  ".join(lines)


@dataclass
class PromptScan:
    """Scan of a source's prompts, row by row, without reading an image.

    Args:
        encoder: encoder of the model; None = only checks that need no model.
        learns: whether the rows' correct responses are trained on, as in `vlmrl sft`.
        stopped: True if the template fails for every row; further rows are then not checked.
    """

    source: Source
    encoder: Encoder | None = None
    learns: bool = False
    rows: int = 0
    stopped: bool = False
    failed: list[tuple[str, str]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    typed: list[tuple[str, Counter[str]]] = field(default_factory=list)
    _faults: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._size_problem = lru_cache(maxsize=100_000)(self.encoder.size_problem if self.encoder else _no_problem)

    def look(self, row: Row) -> None:
        """Check one row. Do nothing if the template has failed for every row (`stopped`)."""
        if self.stopped:
            return
        self.rows += 1
        try:
            messages = self.source.messages(row)
        except RecipeError as error:
            self.stopped = True
            self._faults.append(Problem(error.message, error.where, error.hint))
            return
        except VlmrlError as error:
            self.failed.append(named(row, error))
            return
        for number, media in enumerate(row.media, start=1):
            if problem := self._size_problem(media.width, media.height):
                self.refused.append((row.place, f"image {number} {problem}"))
                break
        if self.encoder is not None:
            self._look_at_text(row, messages, self.encoder)

    def _look_at_text(self, row: Row, messages: Sequence[Message], encoder: Encoder) -> None:
        from vlmrl.data.chat_template import IMAGE_SLOT

        texts = [piece for message in messages for piece in message.content.split(IMAGE_SLOT)]
        if self.learns and self.source.task.trace is not None:
            try:
                texts.append(self.source.task.correct_response(row, random.Random(0)))
            except VlmrlError as error:
                self.failed.append(named(row, error))
        token_counts = sum((encoder.control.found_in(text) for text in texts), Counter())
        if token_counts:
            self.typed.append((row.place, token_counts))

    @property
    def is_sound(self) -> bool:
        """Return whether every row so far gave a prompt and, if responses are trained on, a response."""
        return not (self.stopped or self.failed)

    def problems(self, where: str) -> list[Problem]:
        """Return the problems of the rows that were checked so far.

        Args:
            where: place of the source in the recipe, used if a problem names no place.
        """
        rows = f"{self.rows:,} rows of `{self.source.name}` ({self.source.split})"
        problems = list(self._faults)
        if self.failed:
            what = "no prompt, or no response to learn" if self.learns else "no prompt"
            message = f"{len(self.failed):,} of {rows} make {what}"
            problems.append(Problem(message, where, examples(self.failed)))
        if self.refused:
            message = f"{len(self.refused):,} of {rows} have an image that the model does not accept"
            problems.append(Problem(message, where, examples(self.refused)))
        if self.typed:
            total: Counter[str] = Counter()
            for _, tokens in self.typed:
                total.update(tokens.keys())
            listing = ", ".join(f"{token} in {count:,}" for token, count in total.most_common(SHOWN))
            message = f"{len(self.typed):,} of {rows} contain control tokens of the model: {listing}"
            lines = [(place, ", ".join(f"{n} x {name}" for name, n in tokens.items())) for place, tokens in self.typed]
            hint = (
                "they are read as plain text: they end no turn and are no image (an image is <image>); "
                f"{examples(lines)}"
            )
            problems.append(Problem(message, where, hint, "warning"))
        return problems


def _no_problem(width: int, height: int) -> None:
    return None
