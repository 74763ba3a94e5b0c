"""State of one call of a scorer: the groups that were submitted, and what is known of them so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vlmrl.rewards.file_limit import LEFT_OUT, FileLimit
from vlmrl.rewards.outage import HOLD_AFTER, OnOutage, Outage
from vlmrl.rewards.sandbox.frames import UNAVAILABLE
from vlmrl.rewards.sandbox.outcomes import Failure, Outcome, Place, Result
from vlmrl.types import RewardInput, Score

EARNED = "alone too: it earns `on_timeout`"
"""End of the note of a score that is `on_timeout`."""
CHUNK = 32
"""Maximum number of inputs in one request to a worker."""
IMAGE_SETS = 4
"""Maximum number of different sets of images in one request to a worker: a megapixel is three megabytes."""
Scored = tuple[Score | Failure, float]
"""Score or failure of an input, and the seconds that the function took."""


@dataclass
class Call:
    """Groups of a call. Places sort by the groups' keys, whatever the order in which the groups come.

    Args:
        strict: whether a failure raises.
        limit: limit of the images of all scores.
        on_outage: what the call does when a service is down.
        groups: the places of each group, by key.
        inputs, rows: what to score, and its name in messages.
        outcomes: the workers' outcomes.
        here: results of a built-in reward, which this process computes.
        scores: final scores.
        returned: keys of the groups that the caller has.
        stopped: whether the inputs without an outcome will not be scored.
        lost_in_a_row: number of newest outcomes that are lost workers.
        answered: whether the reward has ever answered.
        batch_sent: whether a function that gets lists was called for all inputs.
        ran_alone: whether that call failed, and each input was then scored alone.
        retried: inputs that broke their worker and were scored again alone.
        missing: inputs that wait for a service, with its newest failure.
        outage: the outage for which they wait; None = there is none.
        silent_in_a_row: number of newest outcomes for which the service was down.
    """

    strict: bool
    limit: FileLimit[Place]
    on_outage: OnOutage = "raise"
    groups: dict[int, list[Place]] = field(default_factory=dict)
    inputs: dict[Place, RewardInput] = field(default_factory=dict)
    rows: dict[Place, str] = field(default_factory=dict)
    outcomes: dict[Place, Outcome] = field(default_factory=dict)
    here: dict[Place, Scored] = field(default_factory=dict)
    scores: dict[Place, tuple[Score, float]] = field(default_factory=dict)
    returned: set[int] = field(default_factory=set)
    stopped: bool = False
    lost_in_a_row: int = 0
    answered: bool = False
    batch_sent: bool = False
    ran_alone: bool = False
    retried: set[Place] = field(default_factory=set)
    missing: dict[Place, Failure] = field(default_factory=dict)
    outage: Outage | None = None
    silent_in_a_row: int = 0

    def add(self, key: int, inputs: Iterable[RewardInput], rows: Sequence[str]) -> None:
        """Add a group. Raises: ValueError for a second group of the same key."""
        if key in self.groups:
            raise ValueError(f"group {key} was submitted twice")
        self.groups[key] = [(key, k) for k in range(len(rows))]
        self.inputs |= dict(zip(self.groups[key], inputs, strict=True))
        self.rows |= dict(zip(self.groups[key], rows, strict=True))

    def keep_outcome(self, place: Place, outcome: Outcome) -> None:
        """Keep an outcome of a worker, and drop the images that are beyond the limit.

        If the call waits for services, an input whose service is down becomes missing instead.
        """
        self.answered = self.answered or isinstance(outcome, Result)
        if self._waits(place, outcome):
            return
        self.outcomes[place] = outcome
        self._drop_images(place, outcome.size)

    def keep_here(self, place: Place, scored: Scored) -> None:
        """Keep a result that this process computed, and drop the images beyond the limit, see `keep_outcome`."""
        if self._waits(place, scored[0]):
            return
        self.here[place] = scored
        if isinstance(scored[0], Score):
            self._drop_images(place, sum(map(len, scored[0].files.values())))

    def _waits(self, place: Place, outcome: Outcome | Score) -> bool:
        """Note what an outcome says about a service. Return whether its input waits for the service."""
        failure = outcome if isinstance(outcome, Failure) and outcome.is_outage and not outcome.is_final else None
        self.silent_in_a_row = self.silent_in_a_row + 1 if failure else 0
        if self.on_outage != "wait":
            return False
        if failure and self.outage is None:
            self.outage = Outage(failure.message)
        if self.outage is not None:
            answered = isinstance(outcome, Result | Score)
            self.outage.take(place, answered=answered, reason=failure.message if failure else None)
        self.missing.pop(place, None)
        if failure:
            self.missing[place] = failure  # comes last, so that the next try asks another one
        return failure is not None

    @property
    def is_silent(self) -> bool:
        """Return whether the call waits for a service that many inputs in a row got no answer from."""
        return self.outage is not None and self.silent_in_a_row >= HOLD_AFTER

    def hold(self, places: Iterable[Place]) -> None:
        """Let inputs wait for the service that is down, without asking it."""
        for place in places:
            assert self.outage is not None
            self.keep_outcome(place, Failure(UNAVAILABLE, self.outage.reason))

    def next_round(self, *, at_once: bool) -> list[Place]:
        """Return the missing inputs that are to be asked now; they are no longer missing. [] while none is due.

        Inputs that broke their worker before are asked by `second_tries.settle`, when no other is missing.

        Args:
            at_once: ask all of them in any case.
        """
        if self.outage is None or not self.missing or self.outage.seconds_left > 0:
            return []
        places = [place for place in self.missing if place not in self.outcomes]
        if places:
            places = self.outage.begin_round(places, at_once=at_once)
        else:
            self.outage.wait_longer()
        for place in places or list(self.missing):
            del self.missing[place]
        return places

    def complete(self, *, again: bool) -> list[int]:
        """Return the keys of groups whose scores are final and that the caller does not have.

        Images are final at the end of the call: a group before them may still displace them.

        Args:
            again: inputs that broke their worker will be scored again.
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
        return outcome is not None and not outcome.size and not (again and broke_worker(outcome))

    def _drop_images(self, place: Place, size: int) -> None:
        for dropped in self.limit.add(place, size):
            if dropped in self.outcomes:
                self.outcomes[dropped] = self.outcomes[dropped].without_images()
            elif isinstance(score := self.here[dropped][0], Score):
                note = "; ".join(filter(None, (score.note, LEFT_OUT)))
                self.here[dropped] = replace(score, note=note, artifacts={}, files={}), self.here[dropped][1]


def requests_of(places: Sequence[Place], inputs: Mapping[Place, RewardInput], workers: int) -> list[list[Place]]:
    """Return the inputs of each request, so that all workers share them. Responses to one prompt share their images."""
    size = max(1, min(CHUNK, -(-len(places) // workers)))
    requests: list[list[Place]] = [[]]
    sets: set[tuple[int, ...]] = set()
    for place in places:
        images = tuple(map(id, inputs[place].images))
        if len(requests[-1]) == size or (images and images not in sets and len(sets) == IMAGE_SETS):
            requests.append([])
            sets = set()
        requests[-1].append(place)
        sets |= {images} if images else set()
    return requests


def is_lost(outcome: Outcome) -> bool:
    """Return whether the input hung or ended its worker."""
    return isinstance(outcome, Failure) and outcome.is_lost


def broke_worker(outcome: Outcome) -> bool:
    """Return whether the input hung, ended or filled its worker."""
    return isinstance(outcome, Failure) and outcome.broke_worker


def noted(outcome: Outcome, before: Outcome) -> Outcome:
    """Return the result of a row that was scored again alone, with a note that says why."""
    if not isinstance(outcome, Result) or not isinstance(before, Failure):
        return outcome
    return replace(outcome, note="; ".join(filter(None, (outcome.note, f"asked again alone: {before.text}"))))


def earned_on_timeout(score: Score) -> bool:
    """Return whether a score is `on_timeout`: the response hung or killed the worker twice."""
    return score.note.endswith(EARNED)
