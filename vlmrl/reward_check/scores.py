"""Scores of many responses, stored as a few arrays instead of one object per response."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from vlmrl.types import Score, Status

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass
class Coded:
    """N texts, of which each distinct one is stored once: text i is `words[codes_N[i]]`, or None if the code is -1."""

    codes_N: NDArray[np.int32]
    words: list[str]

    @classmethod
    def of(cls, texts: Iterable[str | None]) -> Coded:
        known: dict[str | None, int] = {None: -1}
        codes = [known.setdefault(text, len(known) - 1) for text in texts]
        return cls(np.asarray(codes, dtype=np.int32), [word for word in known if word is not None])

    @classmethod
    def concat(cls, pieces: Sequence[Coded]) -> Coded:
        known: dict[str, int] = {}
        codes = [np.zeros(0, np.int32)]
        for piece in pieces:
            table = [known.setdefault(word, len(known)) for word in piece.words]
            codes.append(np.asarray([*table, -1], dtype=np.int32)[piece.codes_N])
        return cls(np.concatenate(codes), list(known))

    def __len__(self) -> int:
        return len(self.codes_N)

    def __getitem__(self, index: int) -> str | None:
        code = self.codes_N[index]
        return self.words[code] if code >= 0 else None

    @property
    def missing_N(self) -> Flags:
        return self.codes_N < 0

    def is_word(self, word: str) -> Flags:
        """Return [N]: True where the text equals `word`."""
        return self.codes_N == self.words.index(word) if word in self.words else np.zeros(len(self), dtype=bool)

    def counts(self) -> Ints:
        """Return the number of occurrences of each of `words`."""
        return np.bincount(self.codes_N[self.codes_N >= 0], minlength=len(self.words))


@dataclass
class Scores(Sequence[Score]):
    """Scores as columns. N responses; `scores[i]` is the i-th as a `Score`.

    Args:
        values_N: value of the score; NaN where the reward failed.
        parts: name -> [N] values of a part; NaN where the part is None or missing (a reward never returns NaN).
        notes: note of each score; "" = no note.
        errors: error of each score; None = no error.
        statuses: status of each score; None = the status is "failed" where there is an error, else "ok".
    """

    values_N: Floats
    parts: dict[str, Floats]
    notes: Coded
    errors: Coded
    statuses: Coded | None = None
    _names: list[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._names = list(self.parts)

    @classmethod
    def of(cls, scores: Sequence[Score]) -> Scores:
        all_parts = [s.parts for s in scores]
        names = dict.fromkeys(name for kind in dict.fromkeys(map(tuple, all_parts)) for name in kind)
        # numpy converts None to NaN here
        parts = {name: np.asarray([p.get(name) for p in all_parts], dtype=np.float64) for name in names}
        values = np.asarray([s.value for s in scores], dtype=np.float64)
        notes, errors = Coded.of(s.note for s in scores), Coded.of(s.error for s in scores)
        return cls(values, parts, notes, errors, Coded.of(s.status for s in scores))

    @classmethod
    def concat(cls, pieces: Sequence[Scores]) -> Scores:
        names = dict.fromkeys(name for piece in pieces for name in piece.parts)

        def column(name: str) -> Floats:
            columns = [p.parts[name] if name in p.parts else np.full(len(p), math.nan) for p in pieces]
            return np.concatenate(columns)

        values = np.concatenate([np.zeros(0), *(p.values_N for p in pieces)])
        notes, errors = (Coded.concat(c) for c in ([p.notes for p in pieces], [p.errors for p in pieces]))
        given = [p.statuses for p in pieces if p.statuses is not None]
        statuses = Coded.concat(given) if len(given) == len(pieces) else None
        return cls(values, {name: column(name) for name in names}, notes, errors, statuses)

    def at(self, rows: Any) -> Scores:
        """Return the scores of these rows (indices or a mask), in that order."""
        pick = lambda coded: Coded(coded.codes_N[rows], coded.words)  # noqa: E731
        parts = {name: column[rows] for name, column in self.parts.items()}
        statuses = None if self.statuses is None else pick(self.statuses)
        return Scores(self.values_N[rows], parts, pick(self.notes), pick(self.errors), statuses)

    @property
    def failed_N(self) -> Flags:
        return ~self.errors.missing_N

    @property
    def unavailable_N(self) -> Flags:
        """[N]: True where a service that the reward needs was down; such rows have an error, too."""
        return np.zeros(len(self), dtype=bool) if self.statuses is None else self.statuses.is_word("unavailable")

    def __len__(self) -> int:
        return len(self.values_N)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.at(index)
        parts = {name: None if math.isnan(v := float(self.parts[name][index])) else v for name in self._names}
        error = self.errors[index]
        status = "ok" if self.statuses is None else cast(Status, self.statuses[index])
        value, note = float(self.values_N[index]), self.notes[index] or ""
        return Score(value, parts if error is None else {}, note, error, status=status)

    def __iter__(self) -> Iterator[Score]:
        return (self[i] for i in range(len(self)))


def same_scores(a: Scores, b: Scores) -> Flags:
    """Return [N]: True where two scorings agree exactly: both failed, or value and all parts are equal."""
    equal_N = a.values_N == b.values_N
    for name in dict.fromkeys([*a.parts, *b.parts]):
        equal_N &= same_part(a.parts.get(name), b.parts.get(name), len(a))
    return np.where(a.failed_N | b.failed_N, a.failed_N & b.failed_N, equal_N)


def same_part(a: Floats | None, b: Floats | None, size: int) -> Flags:
    """Return [N]: True where a part is equal in two scorings, or applies in neither. a, b: None = it lacks the part."""
    nothing = np.full(size, math.nan)
    a, b = nothing if a is None else a, nothing if b is None else b
    return (a == b) | (np.isnan(a) & np.isnan(b))
