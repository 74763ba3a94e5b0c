"""Scorer of responses with several rewards, each in workers of its own; see several.py for the sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType

from vlmrl.errors import RewardError, listed
from vlmrl.rewards.attempts import Call, OnOutage, Outage
from vlmrl.rewards.base import NO_PLACE, RewardSpec, Service, ServicePlace, check_weight_sizes
from vlmrl.rewards.outcomes import Failure
from vlmrl.rewards.scorer import Scorer
from vlmrl.rewards.several import Member, check_gate, is_open, label_of, stages, total
from vlmrl.types import INAPPLICABLE, RewardInput, Score

LISTEN_SECONDS = 0.02
"""Time in seconds for which the workers of one reward are listened to, while those of others work."""


def open_scorer(
    spec: RewardSpec,
    weights: Mapping[str, float] | None = None,
    *,
    timeout_seconds: float = 10.0,
    memory_mb: int = 4096,
    workers: int = 1,
    place: ServicePlace = NO_PLACE,
) -> RewardScorer:
    """Return the scorer of a reward, or of several. Arguments and errors: see `Scorer` and `SeveralScorer`."""
    kind = SeveralScorer if spec.members else Scorer
    return kind(spec, weights, timeout_seconds=timeout_seconds, memory_mb=memory_mb, workers=workers, place=place)


class MemberScorer(Scorer):
    """Scorer of one of several rewards. It may return None for all responses of a call."""

    def no_more(self) -> None:
        """Call a function that gets lists now: no more groups will come."""
        call, pool = self._call, self._pool
        if call is not None and pool is not None and pool.runs.batched and not call.batch_sent:
            call.batch_sent = True
            pool.add([sorted(call.inputs)], call.inputs)

    def listen(self, timeout: float) -> bool:
        """Take the workers' outcomes of the next `timeout` seconds. Return whether workers have more to do.

        Raises: as `score`.
        """
        call, pool = self._call, self._pool
        if call is None or pool is None:
            return False
        self._listen(call, timeout)
        return pool.pending and not call.stopped

    def _check_call(self, call: Call, scores: Sequence[Score]) -> None:
        if any(score.error is None for score in scores):
            super()._check_call(call, scores)


@dataclass
class SeveralCall:
    """Groups of a call with several rewards.

    Args:
        strict: whether a failure raises.
        on_outage: what the call does when a service is down.
        inputs, rows: what to score, and its names in messages, by the group's key.
        places: label -> key -> positions of the inputs in the group that the reward scores; no key = not decided yet.
        scores: label -> key -> position -> score of the reward.
        totals: key -> final scores.
    """

    strict: bool
    on_outage: OnOutage = "raise"
    inputs: dict[int, Sequence[RewardInput]] = field(default_factory=dict)
    rows: dict[int, Sequence[str]] = field(default_factory=dict)
    places: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    scores: dict[str, dict[int, dict[int, Score]]] = field(default_factory=dict)
    totals: dict[int, list[Score]] = field(default_factory=dict)

    def has(self, label: str, key: int) -> bool:
        """Return whether the scores of a reward for a group are final."""
        return len(self.scores[label].get(key, ())) == len(self.places[label].get(key, [-1]))


class SeveralScorer:
    """Scorer of responses with several rewards: the same methods and attributes as `Scorer`.

    A group is returned when all its rewards are final. A reward with a gate is given the responses whose gate is open,
    as soon as the reward of the gate has scored the group; it never sees the others.

    Args:
        spec: several rewards (`several.compose`).
        weights: label -> weight of the reward; a reward that is left out is reported, not counted. None or empty: the
            rewards' own weights.
        timeout_seconds: as in `Scorer`; a reward's own limit has priority.
        memory_mb: as in `Scorer`.
        workers: number of worker processes of each reward.
        place: as in `Scorer`.
        failures, seconds, images_left_out, ended: (attributes) as in `Scorer`; the seconds of all rewards are added.
    Raises: RewardError for weights of unknown rewards, and as `Scorer`.
    """

    def __init__(
        self,
        spec: RewardSpec,
        weights: Mapping[str, float] | None = None,
        *,
        timeout_seconds: float = 10.0,
        memory_mb: int = 4096,
        workers: int = 1,
        place: ServicePlace = NO_PLACE,
    ) -> None:
        self.spec, self.weights = spec, dict(weights or spec.weights)
        check_weight_sizes(self.weights, spec.name)
        for label in self.weights:
            if label not in spec.weights:
                hint = listed(label, spec.weights, "the rewards") + "; parts have the weights of their reward"
                raise RewardError(f"no reward is called `{label}`: several rewards are weighted as wholes", hint=hint)
        self.failures = 0
        self.seconds: list[float] = []
        self.images_left_out = 0
        self._stages = stages(spec.members)
        self._members = [member for stage in self._stages for member in stage]
        self._known = {m.label: set(m.declared) for m in self._members}
        self._call: SeveralCall | None = None
        self._stack = ExitStack()
        self._scorers: dict[str, MemberScorer] = {}
        try:
            for m in self._members:
                seconds = m.timeout_seconds or timeout_seconds
                limits = {"timeout_seconds": seconds, "memory_mb": memory_mb, "workers": workers}
                scorer = MemberScorer(m.spec, m.weights, **limits, place=place)
                self._stack.enter_context(scorer)
                self._scorers[m.label] = scorer
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> SeveralScorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers of all rewards."""
        self._call = None
        self._stack.close()

    @property
    def services(self) -> list[Service]:
        """The open services of all rewards."""
        return [service for scorer in self._scorers.values() for service in scorer.services]

    @property
    def ended(self) -> Failure | None:
        """Failure of a reward that ends the work; None = there is none."""
        return next((scorer.ended for scorer in self._scorers.values() if scorer.ended is not None), None)

    def pids(self) -> list[int]:
        """Return the processes that run the rewards."""
        return list(dict.fromkeys(pid for scorer in self._scorers.values() for pid in scorer.pids()))

    def score(
        self, inputs: Sequence[RewardInput], *, strict: bool = False, rows: Sequence[str] | None = None
    ) -> list[Score]:
        """Return one score per input, in order; see `Scorer.score`."""
        if self._call is not None:
            raise ValueError("`score` was called while groups were submitted and not collected")
        self.submit(0, inputs, strict=strict, rows=rows)
        return self.collect()[0][1]

    @property
    def is_open(self) -> bool:
        """Return whether groups were submitted and their call has not ended."""
        return self._call is not None

    @property
    def is_busy(self) -> bool:
        """Return whether inputs of the open call are being scored, or wait for a service."""
        return any(scorer.is_busy for scorer in self._scorers.values())

    @property
    def outage(self) -> Outage | None:
        """The outage that has been silent for the longest time, of those for which inputs of the open call wait."""
        outages = [scorer.outage for scorer in self._scorers.values()]
        return max((o for o in outages if o is not None), key=lambda o: o.silent_seconds, default=None)

    @property
    def missing(self) -> int:
        """Number of inputs of the open call that wait for a service of any reward, or are being asked again."""
        return sum(scorer.missing for scorer in self._scorers.values())

    def submit(
        self,
        key: int,
        inputs: Sequence[RewardInput],
        *,
        strict: bool = False,
        rows: Sequence[str] | None = None,
        on_outage: OnOutage = "raise",
    ) -> None:
        """Begin to score a group with the rewards that have no gate; see `Scorer.submit`."""
        if self._call is None:
            self._call = SeveralCall(strict, on_outage)
            self._call.places = {label: {} for label in self._scorers}
            self._call.scores = {label: {} for label in self._scorers}
        call = self._call
        if key in call.inputs:
            raise ValueError(f"group {key} was submitted twice")
        call.inputs[key], call.rows[key] = inputs, rows or [f"row {k}" for k in range(len(inputs))]
        try:
            for member in self._members:
                if member.gate is None:
                    self._ask(call, member, key, list(range(len(inputs))))
        except BaseException:
            self.cancel()
            raise

    def collect(self, timeout: float | None = None) -> list[tuple[int, list[Score]]]:
        """Return groups whose scores are final: (key, scores), each once; see `Scorer.collect`."""
        call = self._call
        if call is None:
            return []
        try:
            if timeout is None:
                return self._end(call)
            for member in self._members:
                self._open_gates(call, member)
                self._take(call, member, timeout / len(self._members))
            return self._totals(call)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Forget all groups that were submitted, and end the workers that score them."""
        self._call = None
        for scorer in self._scorers.values():
            scorer.cancel()

    def _ask(self, call: SeveralCall, member: Member, key: int, places: list[int]) -> None:
        """Give a reward the responses of a group at these places."""
        call.places[member.label][key] = places
        if places:
            inputs, rows = call.inputs[key], call.rows[key]
            self._scorers[member.label].submit(
                key,
                [inputs[k] for k in places],
                strict=call.strict,
                rows=[rows[k] for k in places],
                on_outage=call.on_outage,
            )

    def _take(self, call: SeveralCall, member: Member, timeout: float | None) -> None:
        """Take the scores of a reward that are final; None = all."""
        for key, scores in self._scorers[member.label].collect(timeout):
            call.scores[member.label][key] = dict(zip(call.places[member.label][key], scores, strict=True))

    def _open_gates(self, call: SeveralCall, member: Member) -> None:
        """Give a reward with a gate the responses whose gate is open, of all groups where this is known by now."""
        if member.gate is None:
            return
        other = next(m for m in self._members if m.label == label_of(member.gate))
        for key in call.inputs:
            if key in call.places[member.label] or not call.has(other.label, key):
                continue
            open_places = []
            for place, score in sorted(call.scores[other.label].get(key, {}).items()):
                if score.error is not None:
                    continue
                parts = {other.name_of(part): number for part, number in score.parts.items()}
                self._known[other.label] |= parts.keys()
                if is_open(member.gate, parts):
                    open_places.append(place)
            self._ask(call, member, key, open_places)

    def _end(self, call: SeveralCall) -> list[tuple[int, list[Score]]]:
        """Wait for all scores, and return the groups that are final. The call ends unless inputs wait for a service."""
        waits: set[str] = set()  # rewards that wait for a service, and those whose gate they open
        for stage in self._stages:
            ready = [m for m in stage if m.gate is None or label_of(m.gate) not in waits]
            for member in stage:
                self._open_gates(call, member)
            for member in ready:
                self._scorers[member.label].no_more()
            # Each pool is served in turn, so that the workers of all rewards have work until the last response.
            busy = [m.label for m in ready]
            while busy:
                busy = [label for label in busy if self._scorers[label].listen(LISTEN_SECONDS)]
            for member in stage:
                self._take(call, member, None if member in ready else 0.0)
            waits |= {m.label for m in stage if m not in ready or self._scorers[m.label].is_open}
        totals = self._totals(call)
        if waits:
            return totals
        self._check(call)
        self.seconds = self._added_seconds(call)
        self.images_left_out = sum(scorer.images_left_out for scorer in self._asked(call).values())
        self._call = None
        return totals

    def _asked(self, call: SeveralCall) -> dict[str, MemberScorer]:
        """Return the scorers that had a response to score in this call."""
        return {label: scorer for label, scorer in self._scorers.items() if any(call.places[label].values())}

    def _totals(self, call: SeveralCall) -> list[tuple[int, list[Score]]]:
        """Return the groups whose scores are final now."""
        finished = []
        for key, inputs in call.inputs.items():
            if key in call.totals or not all(call.has(label, key) for label in self._scorers):
                continue
            of_rewards = {label: call.scores[label].get(key, {}) for label in self._scorers}
            call.totals[key] = [
                self._total(call, key, place, {label: scores.get(place) for label, scores in of_rewards.items()})
                for place in range(len(inputs))
            ]
            finished.append((key, call.totals[key]))
        return finished

    def _total(self, call: SeveralCall, key: int, place: int, scores: Mapping[str, Score | None]) -> Score:
        score = total(self.spec.members, self.weights, scores)
        if score.failed:
            self.failures += 1
            if call.strict:
                raise RewardError(str(score.error), where=call.rows[key][place], hint="lower the parts, or the weights")
        return score

    def _check(self, call: SeveralCall) -> None:
        """Check a strict call at its end.

        A gate is checked here, not at each response: a reward may return a part for some responses alone.

        Raises: RewardError for no score, and for an accuracy or a gate that no response of the call has.
        """
        scores = [score for of_group in call.totals.values() for score in of_group]
        accuracy = self.spec.accuracy
        known = {*self.spec.ranges, *(name for score in scores for name in score.parts)}
        scores = [score for score in scores if score.status != "unavailable"]
        if not call.strict or not scores:
            return
        if all(score.error == INAPPLICABLE for score in scores):
            first = next(row for of_group in call.rows.values() for row in of_group)
            raise RewardError(
                f"no reward applies to any of the {len(scores)} responses of a call: all returned None", where=first
            )
        for member in self._members:
            other = next((m for m in self._members if member.gate and m.label == label_of(member.gate)), None)
            groups = [] if other is None else call.scores[other.label].values()
            if other is not None and any(score.error is None for group in groups for score in group.values()):
                check_gate(member, other, self._known[other.label])
        if self.spec.accuracy_named and accuracy not in known:
            raise RewardError(
                f"[reward] accuracy names the part `{accuracy}`, which none of the rewards returns",
                hint=f"their parts: {', '.join(sorted(known))}",
            )

    def _added_seconds(self, call: SeveralCall) -> list[float]:
        """Return the seconds that the rewards took for each response of the call, in the order of the groups' keys."""
        seconds = {(key, place): 0.0 for key in sorted(call.inputs) for place in range(len(call.inputs[key]))}
        for label, scorer in self._asked(call).items():
            places = [(key, place) for key in sorted(call.places[label]) for place in call.places[label][key]]
            for where, spent in zip(places, scorer.seconds, strict=True):
                seconds[where] += spent
        return list(seconds.values())


RewardScorer = Scorer | SeveralScorer
"""Scorer of one reward or of several."""
