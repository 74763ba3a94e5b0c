"""Grading of responses while others are still generated: chunk by chunk, in order, in bounded memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from vlmrl.rewards.several_scorer import RewardScorer
from vlmrl.rollout.sample import Rollout
from vlmrl.rollout.scoring import Outages, Scoring
from vlmrl.types import Group, Row

CHUNK_PROMPTS = 512
"""Number of prompts of all processes that are graded and kept together. It bounds memory; a reward that gets lists sees
the responses of a chunk at once."""
MEETING_CHUNKS = 32
"""Number of chunks after which processes wait for each other, so that none is far ahead at the end."""
PAUSE_SECONDS = 0.01
"""Least time between two looks at the workers of the reward: each look goes through all groups of the chunk."""
NumberedRow = tuple[int, Row]
"""(number of a row in its source, the row)."""
Responses = Iterator[tuple[int, Rollout] | None]
"""(number of a row, its responses) as they are complete; None = nothing is complete at the moment."""
Respond = Callable[[Iterator[Sequence[NumberedRow]]], Responses]
"""Chunks of rows -> their responses, in any order. Chunks are taken when there is room for their prompts."""


@dataclass
class _Chunk:
    """Rows of a chunk. `rollouts`: responses that are not being graded yet, by position in the chunk."""

    place_of: dict[int, int]
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    num_submitted: int = 0

    @property
    def all_submitted(self) -> bool:
        return self.num_submitted == len(self.place_of)


class Grader:
    """Grader of chunks: it scores the responses of the first open chunk as they come, and keeps those of later ones.

    A reward's workers get the next chunk as soon as they have nothing more to do of the present one. If responses come
    faster than they are graded, generation waits: at most about a chunk of responses is kept.

    Args:
        strict: as of `Scoring`.
        outages: what happens when a service is down; its processes all grade every chunk, in order. None = the row has
            no score, or with `strict` it is an error.
    """

    def __init__(self, source_name: str, scorer: RewardScorer, *, strict: bool, outages: Outages | None = None) -> None:
        self._scorers, self._strict, self._outages = {source_name: scorer}, strict, outages
        self._chunks: dict[int, _Chunk] = {}
        self._chunk_of: dict[int, int] = {}
        self._scoring: Scoring | None = None

    def grade(
        self, respond: Respond, chunks: Iterator[tuple[int, Sequence[NumberedRow]]]
    ) -> Iterator[tuple[int, list[Group]]]:
        """Yield (number of a chunk, its groups), in the order of the chunks.

        Args:
            chunks: (number of a chunk, its rows); they are read when their turn comes.
        Raises: the errors of `respond` and of the reward.
        """
        try:
            listened = 0.0
            for response in respond(self._opened(chunks)):
                if response is not None:
                    self._take(*response)
                if self._scoring is not None and time.monotonic() - listened > PAUSE_SECONDS:
                    self._scoring.listen()
                    listened = time.monotonic()
                yield from self._finished(wait=False)
                while sum(len(chunk.rollouts) for chunk in self._chunks.values()) > CHUNK_PROMPTS:
                    before = len(self._chunks)
                    yield from self._finished(wait=True)
                    if len(self._chunks) == before:  # the first chunk still lacks responses
                        break
            while self._chunks:
                yield from self._finished(wait=True)
        finally:
            for scorer in self._scorers.values() if self._scoring is not None else ():
                scorer.cancel()

    def _opened(self, chunks: Iterator[tuple[int, Sequence[NumberedRow]]]) -> Iterator[Sequence[NumberedRow]]:
        for number, rows in chunks:
            self._chunks[number] = _Chunk({row: place for place, (row, _) in enumerate(rows)})
            self._chunk_of |= {row: number for row, _ in rows}
            yield rows

    def _take(self, row: int, rollout: Rollout) -> None:
        number = self._chunk_of.pop(row)
        chunk = self._chunks[number]
        chunk.rollouts[chunk.place_of[row]] = rollout
        self._submit()

    def _submit(self) -> None:
        """Let the reward score what is there of the first open chunk."""
        if not self._chunks:
            return
        chunk = self._chunks[min(self._chunks)]
        if self._scoring is None:
            make = Scoring if self._outages is None else self._outages.scoring
            self._scoring = make(self._scorers, strict=self._strict)
        for place, rollout in sorted(chunk.rollouts.items()):
            self._scoring.submit(place, rollout)
            chunk.num_submitted += 1
        chunk.rollouts = {}

    def _finished(self, *, wait: bool) -> Iterator[tuple[int, list[Group]]]:
        """Yield the first chunks whose responses are all graded. `wait`: until the first one is, if it is submitted."""
        while self._chunks:
            number = min(self._chunks)
            if self._scoring is None:
                self._submit()
            assert self._scoring is not None
            if not self._chunks[number].all_submitted or not (wait or self._scoring.is_idle):
                return
            finish = Scoring.finish if self._outages is None else self._outages.finish
            groups = finish(self._scoring)
            self._scoring = None
            del self._chunks[number]
            yield number, groups
            wait = False
