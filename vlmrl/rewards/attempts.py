"""Inputs without a score: what is asked again, when, and what is final.

A call of a scorer keeps what is known of its groups. A response that hung, ended or filled its worker gets a second try
alone, and then earns `on_timeout`. In an outage of a service, the inputs without a score are asked again later.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from vlmrl.rewards.outcomes import LEFT_OUT, Failure, FileLimit, Outcome, Place, Result
from vlmrl.rewards.service_pool import ServicePool
from vlmrl.rewards.worker_pool import WorkerPool
from vlmrl.types import RewardInput, Score
from vlmrl.workers.frames import UNAVAILABLE

OnOutage = Literal["raise", "mask", "wait"]
"""Action of a scorer's call when a service is down. raise = it is like a bug: a strict call raises. mask = the input
has no score, and its status is "unavailable". wait = the call stays open, and the input is asked again."""
FIRST_SECONDS, MOST_SECONDS = 1.0, 15.0
"""Pause before the first new try, and the longest pause. It doubles with every try that gets no answer."""
JITTER = 0.5
"""Share of a pause that is random, so that many processes do not come back at the same moment."""
HOLD_AFTER = 8
"""After so many inputs in a row without an answer, the inputs that no worker has yet wait, too."""
_chance = random.Random()  # of its own: the random state of a run must not depend on outages


class Outage:
    """Outage that a call of a scorer has seen, from the first input without an answer until all are scored.

    New tries come in rounds. While the service gives no answer, a round asks a single input, each time another one.
    When it answers, the next round asks all that are missing.

    Attributes:
        reason: the reward's newest message.
        since: begin, in seconds since 1970.
        last_answer: time of the last answer, or of the begin, in seconds of `time.monotonic`.
    """

    def __init__(self, reason: str) -> None:
        self.reason, self.since, self.last_answer = reason, time.time(), time.monotonic()
        self._pause, self._asked, self._probes, self._answered = FIRST_SECONDS, set[Place](), True, False
        self._next = self.last_answer + _jittered(self._pause)

    @property
    def asked(self) -> int:
        """Number of inputs that are being asked again."""
        return len(self._asked)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the service answered for the last time."""
        return time.monotonic() - self.last_answer

    @property
    def seconds_left(self) -> float:
        """Seconds until the next round is due; infinite while one is under way."""
        return float("inf") if self._asked else max(0.0, self._next - time.monotonic())

    def begin_round(self, missing: Sequence[Place], *, at_once: bool) -> list[Place]:
        """Return the inputs to ask now.

        Args:
            missing: the inputs without an answer; the one that was asked last comes last.
            at_once: ask all of them in any case.
        """
        places = list(missing) if at_once or not self._probes else list(missing[:1])
        self._asked, self._answered = set(places), False
        return places

    def wait_longer(self) -> None:
        """Begin the next, longer pause."""
        self._pause = min(2 * self._pause, MOST_SECONDS)
        self._next = time.monotonic() + _jittered(self._pause)

    def take(self, place: Place, *, answered: bool, reason: str | None = None) -> None:
        """Note the outcome of an input. `reason`: the reward's message if the service is down."""
        self.reason = reason or self.reason
        if answered:
            self.last_answer = time.monotonic()
        if place not in self._asked:
            return
        self._answered |= answered
        self._asked.discard(place)
        if not self._asked:
            self._end_round()

    def _end_round(self) -> None:
        was_probe, self._probes = self._probes, not self._answered
        if not self._answered:
            self.wait_longer()
            return
        self._pause = FIRST_SECONDS
        self._next = time.monotonic() + (0.0 if was_probe else _jittered(self._pause))


def _jittered(seconds: float) -> float:
    return seconds * (1.0 - JITTER * _chance.random())


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


LOST_IN_A_ROW = 8
"""Without `on_timeout`: after so many rows in a row that hung or ended their worker, the rest of the call is not
scored, to save hours."""
ALONE_FAILURES = 3
"""Without `on_timeout`: after a failed batch call each row is scored alone, until this many rows in a row have
failed."""
FIRST_TRIES = 8
"""With `on_timeout`, if the reward has never answered: number of rows, spread over the call, that are tried alone
before the others. If they get no answer either, the reward hangs by itself."""


def settle(pool: WorkerPool | ServicePool, call: Call, on_timeout: Mapping[str, float]) -> None:
    """Score again what must be scored alone, and set the final outcome of every input.

    If a service is down meanwhile, nothing is final: it is called again when the missing inputs have been asked.

    Args:
        pool: the workers; none of them has work.
        call: the call; its outcomes are changed in place.
        on_timeout: parts of the score of an input that breaks its worker twice; empty = it has no score.
    """
    bugs = {place for place, o in call.outcomes.items() if is_bug(o, on_timeout, call.on_outage)}
    if call.strict and bugs:
        # A bug raises; inputs that would be tried again do not matter.
        call.outcomes = {p: o for p, o in call.outcomes.items() if isinstance(o, Result) or p in bugs}
        return
    if pool.runs.batched and not call.ran_alone and _batch_failed(call):
        call.ran_alone = True
        lost = {place for place, outcome in call.outcomes.items() if broke_worker(outcome)}
        _run_alone(pool, call, rest_matters=bool(on_timeout))
        call.retried |= lost
    if on_timeout and not call.missing:
        _try_again(pool, call)
    if call.missing and not call.stopped:
        return
    if on_timeout and call.answered:
        parts: dict[str, float | None] = {**on_timeout}
        for place in call.retried:
            if isinstance(failure := call.outcomes[place], Failure) and failure.broke_worker:
                call.outcomes[place] = Result(parts, f"{failure.text}; {EARNED}", 0.0)
    rest = Failure("", f"not scored: the worker had been lost {LOST_IN_A_ROW} times in a row")
    call.outcomes = {place: call.outcomes.get(place) or call.missing.get(place, rest) for place in call.inputs}


def is_bug(outcome: Outcome, on_timeout: Mapping[str, float], on_outage: OnOutage) -> bool:
    """Return whether the reward failed.

    With `on_timeout`, a response that breaks its worker is not a failure of the reward. An outage is one only in calls
    that raise.
    """
    if not isinstance(outcome, Failure) or (on_timeout and outcome.broke_worker):
        return False
    return not outcome.is_outage or on_outage == "raise"


def _batch_failed(call: Call) -> bool:
    """Return whether the one call for all inputs raised or was lost."""
    raised = sum(isinstance(o, Failure) and not o.is_contract and not o.is_outage for o in call.outcomes.values())
    return 1 < len(call.inputs) == raised


def _try_again(pool: WorkerPool | ServicePool, call: Call) -> None:
    """Score inputs that broke their worker again, each alone in a new worker."""
    before = dict(call.outcomes)
    lost = [place for place, outcome in before.items() if broke_worker(outcome) and place not in call.retried]
    for places in _portions(call, lost):
        outcomes = pool.run([[place] for place in places], call.inputs, fresh=True)
        for place, outcome in outcomes.items():
            call.keep_outcome(place, noted(outcome, before[place]))
        call.retried |= outcomes.keys() - call.missing.keys()


def _run_alone(pool: WorkerPool | ServicePool, call: Call, *, rest_matters: bool) -> None:
    """Score each input in a call of its own, after the call for all of them failed.

    Args:
        rest_matters: all inputs are tried. False = after too many failures in a row, the others keep the failure of the
            call for all.
    """
    failed, places = 0, sorted(call.inputs)
    for portion in _portions(call, places) if rest_matters else [[place] for place in places]:
        outcomes = pool.run([[place] for place in portion], call.inputs)
        for place, outcome in outcomes.items():
            if not (isinstance(outcome, Failure) and outcome.is_outage):  # an outage says nothing about the reward
                failed = failed + 1 if isinstance(outcome, Failure) else 0
            if isinstance(outcome, Result):
                note = "; ".join(filter(None, (outcome.note, "scored alone: the batch call failed")))
                outcome = replace(outcome, note=note)
            call.keep_outcome(place, outcome)
            if place in call.missing:
                del call.outcomes[place]  # asked again as any other input
        if failed >= ALONE_FAILURES and not rest_matters:
            return


def _portions(call: Call, places: Sequence[Place]) -> Iterator[Sequence[Place]]:
    """Yield the inputs to try: all at once; if the reward has never answered, a few of them and then the others."""
    first = [] if call.answered else places[:: max(1, len(places) // FIRST_TRIES)][:FIRST_TRIES]
    if first:
        yield first
    rest = [place for place in places if place not in first]
    if rest and (call.answered or call.missing):
        yield rest
