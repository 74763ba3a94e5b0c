"""Columns of facts about saved responses (all but the texts), and the chunks in which an input is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vlmrl.reward_check.scores import Coded, Flags, Floats, Ints, Scores
from vlmrl.types import Media, RewardInput


@dataclass
class ResponseColumns:
    """Columns over N responses, in the order of the input.

    Args:
        rows_N: index of the row in the whole input.
        places_N: line in its text file, or row in its Parquet file.
        files_N: index of its file.
        steps_N: training step; 0 if it is not known.
        groups_N: number of the group: equal for all samples of one prompt in one step.
        samples_N: index of the response within its group.
        sources, prompts: name of its `[[data]]` entry, and its prompt id.
        cut_N: whether the token limit ended the response.
        tokens_N: length in tokens; 0 if it is not known.
        chars_N: length in characters.
        advantages_N: advantage that was saved with the response; NaN if none was saved.
    """

    rows_N: Ints
    places_N: Ints
    files_N: NDArray[np.int32]
    steps_N: NDArray[np.int32]
    groups_N: Ints
    samples_N: NDArray[np.int32]
    sources: Coded
    prompts: Coded
    cut_N: Flags
    tokens_N: NDArray[np.int32]
    chars_N: NDArray[np.int32]
    advantages_N: Floats

    def __len__(self) -> int:
        return len(self.rows_N)

    def at(self, rows: Any) -> ResponseColumns:
        """Return the columns of `rows` (indices or a mask), in that order."""
        return ResponseColumns(**{f.name: _at(getattr(self, f.name), rows) for f in fields(self)})

    @classmethod
    def concat(cls, pieces: Sequence[ResponseColumns]) -> ResponseColumns:
        return cls(**{f.name: _concat([getattr(piece, f.name) for piece in pieces]) for f in fields(cls)})

    def group_bounds(self) -> tuple[Ints, Ints]:
        """Return (order, starts): row indices sorted by group (stable), and the start of each group in `order`."""
        order = np.argsort(self.groups_N, kind="stable")
        change = np.diff(self.groups_N[order], prepend=self.groups_N[order[:1]] - 1) != 0
        return order, np.flatnonzero(change)


def _at(column: Any, rows: Any) -> Any:
    return Coded(column.codes_N[rows], column.words) if isinstance(column, Coded) else column[rows]


def _concat(columns: Sequence[Any]) -> Any:
    return Coded.concat(columns) if isinstance(columns[0], Coded) else np.concatenate(columns)


@dataclass(frozen=True)
class Chunk:
    """Part of the input, not yet decoded; sending it to another process costs little.

    Args:
        first: index of its first row in the whole input.
        rows: number of its rows.
        file, place: index of its file, and the line or row of that file at which the chunk begins.
        data: input of the decoder: an Arrow record batch, the bytes of whole lines, or rows with their line numbers.
    """

    first: int
    rows: int
    file: int
    place: int
    data: Any


@dataclass(frozen=True)
class Broken:
    """Row that cannot be read. `where`: its file and line; `why`: the reason."""

    where: str
    why: str


@dataclass
class Decoded:
    """Chunk as the inputs of a reward.

    Args:
        stored: scores that were saved with the responses; None = no scores were saved.
        media: references of each row's images, if they were requested.
        broken: rows that cannot be read; they are missing in all other fields.
        doubts: truths that are used unchanged although they break the task's form: (where, why).
    """

    inputs: list[RewardInput]
    facts: ResponseColumns
    stored: Scores | None
    broken: Sequence[Broken] = ()
    media: Sequence[tuple[Media, ...]] = ()
    doubts: Sequence[Broken] = ()


class PieceReader(Protocol):
    """Reader that yields the chunks of an input in order. Its decoder can be sent to another process."""

    @property
    def decoder(self) -> Decoder: ...

    def chunks(self, rows: Ints | None = None, /) -> Iterator[Chunk]:
        """Yield all chunks; with `rows` (sorted row indices) at least those that contain such rows."""
        ...


class Decoder(Protocol):
    """Reader of chunks as inputs."""

    def decode(
        self, chunk: Chunk, rows: Sequence[int] | None = None, *, media: bool = False, ids: bool = False
    ) -> Decoded:
        """Return the chunk's rows, or those at `rows` within it.

        Args:
            media, ids: also return the references of their images, and their token ids.
        """
        ...

    def where(self, facts: ResponseColumns, index: int) -> str:
        """Return the name of a row for messages, such as its file and line."""
        ...


@dataclass(frozen=True)
class Head:
    """Facts about a source that are read before scoring: its task, and the truth and columns of its first row."""

    task: str
    truth: Mapping[str, Any]
    columns: Mapping[str, Any]
