"""State of one call of a scorer: the groups that were submitted, and what is known of them so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from vlmrl.rewards.file_limit import LEFT_OUT, FileLimit
from vlmrl.rewards.sandbox.outcomes import Failure, Outcome, Place, Result
from vlmrl.types import RewardInput, Score

EARNED = "alone too: it earns `on_timeout`"
"""End of the note of a score that is `on_timeout`."""
Scored = tuple[Score | Failure, float]
"""Score or failure of an input, and the seconds that the function took."""


@dataclass
class Call:
    """Groups of a call. Places sort by the groups' keys, whatever the order in which the groups come.

    Args:
        strict: whether a failure raises.
        limit: limit of the images of all scores.
        groups: the places of each group, by key.
        inputs, rows: what to score, and its name in messages.
        outcomes: the workers' outcomes.
        here: results of a built-in reward, which this process computes.
        scores: final scores.
        returned: keys of the groups that the caller has.
        is_whole: whether a function that gets lists has been given all groups.
        stopped: whether the inputs without an outcome will not be scored.
        lost_in_a_row: number of newest outcomes that are lost workers.
    """

    strict: bool
    limit: FileLimit[Place]
    groups: dict[int, list[Place]] = field(default_factory=dict)
    inputs: dict[Place, RewardInput] = field(default_factory=dict)
    rows: dict[Place, str] = field(default_factory=dict)
    outcomes: dict[Place, Outcome] = field(default_factory=dict)
    here: dict[Place, Scored] = field(default_factory=dict)
    scores: dict[Place, tuple[Score, float]] = field(default_factory=dict)
    returned: set[int] = field(default_factory=set)
    is_whole: bool = False
    stopped: bool = False
    lost_in_a_row: int = 0

    def add(self, key: int, inputs: Iterable[RewardInput], rows: Sequence[str]) -> None:
        """Add a group. Raises: ValueError for a second group of the same key."""
        if key in self.groups:
            raise ValueError(f"group {key} was submitted twice")
        self.groups[key] = [(key, k) for k in range(len(rows))]
        self.inputs |= dict(zip(self.groups[key], inputs, strict=True))
        self.rows |= dict(zip(self.groups[key], rows, strict=True))

    def keep_outcome(self, place: Place, outcome: Outcome) -> None:
        """Keep an outcome of a worker, and drop the images that are beyond the limit."""
        self.outcomes[place] = outcome
        self._drop_images(place, outcome.size)

    def keep_here(self, place: Place, scored: Scored) -> None:
        """Keep a result that this process computed, and drop the images that are beyond the limit."""
        self.here[place] = scored
        if isinstance(scored[0], Score):
            self._drop_images(place, sum(map(len, scored[0].files.values())))

    def complete(self, *, again: bool) -> list[int]:
        """Return the keys of groups whose scores are final and that the caller does not have.

        Images are final at the end of the call: a group before them may still displace them.

        Args:
            again: inputs that lost their worker will be scored again.
        """
        return [
            key
            for key, places in self.groups.items()
            if key not in self.returned and all(self._is_final(place, again) for place in places)
        ]

    def _is_final(self, place: Place, again: bool) -> bool:
        if place in self.here:
            score = self.here[place][0]
            return not (isinstance(score, Score) and score.files)
        outcome = self.outcomes.get(place)
        return outcome is not None and not outcome.size and not (again and is_lost(outcome))

    def _drop_images(self, place: Place, size: int) -> None:
        for dropped in self.limit.add(place, size):
            if dropped in self.outcomes:
                self.outcomes[dropped] = self.outcomes[dropped].without_images()
            elif isinstance(score := self.here[dropped][0], Score):
                note = "; ".join(filter(None, (score.note, LEFT_OUT)))
                self.here[dropped] = replace(score, note=note, artifacts={}, files={}), self.here[dropped][1]


def is_lost(outcome: Outcome) -> bool:
    """Return whether the input hung or ended its worker."""
    return isinstance(outcome, Failure) and outcome.is_lost


def noted(outcome: Outcome, before: Outcome) -> Outcome:
    """Return the result of a row that was scored again alone, with a note that says why."""
    if not isinstance(outcome, Result) or not isinstance(before, Failure):
        return outcome
    return replace(outcome, note="; ".join(filter(None, (outcome.note, f"asked again alone: {before.message}"))))


def earned_on_timeout(score: Score) -> bool:
    """Return whether a score is `on_timeout`: the response hung or killed the worker twice."""
    return score.note.endswith(EARNED)
