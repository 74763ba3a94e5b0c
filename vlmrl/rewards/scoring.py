"""Scoring of inputs. Training, validation, `try`, `check`, `eval` and `reward-check` all use this code.

A `Scorer` has the rewards of a source, each with its workers, and lives as long as the run. A `ScoringSession` scores
the groups of one draw, of all sources, while others are still generated. attempts.py has the rule for waiting and
asking again, several.py the sum of several rewards.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from vlmrl.errors import RewardError, listed
from vlmrl.rewards.attempts import HINT, AttemptRule, Attempts, OutageError, Ranks, Waiting, outage_words
from vlmrl.rewards.base import (
    NO_PLACE,
    NOT_FINITE,
    Member,
    Parts,
    RewardFn,
    RewardSpec,
    Service,
    ServicePlace,
    absent_parts,
    check_parts,
    check_weight_sizes,
    combine,
    counting_weights,
    value_range,
)
from vlmrl.rewards.outcomes import (
    LEFT_OUT,
    MOST_CALL_BYTES,
    Failure,
    FileLimit,
    Outcome,
    Place,
    Result,
    advised,
    as_error,
    failure_of,
    result_of,
)
from vlmrl.rewards.service_pool import ServicePool
from vlmrl.rewards.several import check_sums, is_open, label_of, possible_values, stages, total
from vlmrl.rewards.worker_pool import WorkerPool
from vlmrl.types import INAPPLICABLE, RewardInput, Score
from vlmrl.untrusted import encodable
from vlmrl.workers.frames import CONTRACT

CHUNK = 32
"""Maximum number of inputs in one request to a worker."""
IMAGE_SETS = 4
"""Maximum number of different sets of images in one request to a worker: a megapixel is three megabytes."""
MESSAGE_SECONDS = 0.05
"""Additional time for listening while a message is being sent or received, in seconds."""
LISTEN_SECONDS = 0.02
"""Time in seconds for which the workers of one reward are listened to, while those of others work."""
TICK_SECONDS = 0.5
"""Time between two agreements of the ranks while they wait, in seconds: an interruption is seen after this time."""


class InProcess:
    """Built-in reward that runs in this process: `advance` scores one input."""

    size, transfers = 1, False

    def __init__(self, fn: RewardFn) -> None:
        self._fn, self._queue = fn, deque[tuple[Place, RewardInput]]()

    @property
    def pending(self) -> bool:
        """Return whether an input has not been scored yet."""
        return bool(self._queue)

    def begin(self, *, fresh: bool = False) -> None:
        """Begin with an empty queue."""
        self._queue.clear()

    def add(self, batches: Sequence[Sequence[Place]], inputs: Mapping[Place, RewardInput]) -> None:
        """Queue inputs."""
        self._queue += [(place, inputs[place]) for batch in batches for place in batch]

    def advance(self, seconds: float | None = None) -> list[tuple[Place, Outcome]]:
        """Score the next input."""
        place, x = self._queue.popleft()
        start = time.perf_counter()
        try:
            returned = self._fn(x)
            return [(place, result_of(returned, time.perf_counter() - start))]
        except Exception as error:
            return [(place, replace(failure_of(error), seconds=time.perf_counter() - start))]

    def hold(self) -> list[Place]:
        """Return []: every input is scored at once."""
        return []

    def pids(self) -> list[int]:
        """Return this process."""
        return [os.getpid()]

    close = begin


Backend = WorkerPool | ServicePool | InProcess
"""Place of a reward: a built-in of this process, workers or a service. Nothing else differs between them."""


class _Reward:
    """Reward of a scorer: where it runs, and the value of what it returns. `answered`: whether it ever has."""

    def __init__(self, member: Member, *, timeout_seconds: float, memory_mb: int, workers: int, place: ServicePlace):
        self.member, self.spec, spec = member, member.spec, member.spec
        self.weights = dict(member.weights or spec.weights)
        check_weight_sizes(self.weights, spec.name)
        self.answered, self.batched = spec.is_builtin, spec.user is not None and spec.user.batched
        self.on_timeout: dict[str, float | None] = {**spec.on_timeout}
        self.backend: Backend
        if spec.in_worker is not None:
            if self.on_timeout and isinstance(price := self._valued(Result(self.on_timeout, "", 0.0)), Failure):
                raise RewardError(f"on_timeout cannot be used: {price.message}", where=spec.name, hint=price.hint)
            seconds = member.timeout_seconds or timeout_seconds
            seconds = spec.timeout_seconds if spec.counts_work else min(seconds, spec.timeout_seconds)
            self.backend = WorkerPool(spec.in_worker, size=workers, memory_mb=memory_mb, timeout_seconds=seconds)
        elif spec.service is not None:
            self.backend = ServicePool(spec.service, place)
        else:
            self.on_timeout = {}
            self.backend = InProcess(spec.fn)

    def needed(self, x: RewardInput) -> RewardInput:
        """Return an input without images and ids that the reward does not need: they are most of what would be sent."""
        if isinstance(self.backend, InProcess):
            return x
        if x.images and not self.spec.needs_images:
            x = replace(x, images=())
        return replace(x, token_ids=None) if x.token_ids is not None and not self.spec.needs_token_ids else x

    def value(self, result: Result) -> Score | Failure:
        """Return the score of a result, or why it is none."""
        if self.spec.user and self.spec.user.style == "trl" and result.parts.get("reward") is None:
            return Score(math.nan, {}, encodable(result.note), INAPPLICABLE)
        return self._valued(result)

    def _valued(self, result: Result) -> Score | Failure:
        """Return the score: parts checked against their ranges and combined with the weights; all else unchanged."""
        note = result.note and encodable(result.note)
        if NOT_FINITE in note and (bad := next((n for n in self.weights if f"`{n}` {NOT_FINITE}" in note), None)):
            return Failure(CONTRACT, f"reward part `{bad}` {NOT_FINITE}, and it has a weight")
        detail = None if result.detail is None else {self.spec.key: result.detail}
        try:
            parts = check_parts(result.parts, self.spec.ranges)
            weights = counting_weights(parts, self.weights)
            if absent := absent_parts(parts, weights):
                note = f"{note}; {absent}" if note else absent
            value = combine({**dict.fromkeys(weights), **parts}, weights)[0]
            return Score(value, parts, note, detail=detail, artifacts=result.artifacts, files=result.files)
        except RewardError as error:
            return Failure(CONTRACT, error.message, hint=error.hint)

    def check(self, scores: Sequence[Score], first: str, place: str | None) -> None:
        """Check all scores of a strict session. `first`: name of the first row; `place`: of the source.

        Raises: RewardError if there is none, and for a part that the recipe names (weights, the accuracy) if none of
            the scores has it and the reward does not declare it.
        """
        if all(score.error is not None for score in scores):
            failure = Failure(CONTRACT, f"it returned None for all {len(scores)} responses of a call")
            raise as_error(failure, self.spec.name, first)
        known = {name for score in scores for name in score.parts} | set(self.spec.ranges)
        table = "WEIGHTS" if self.spec.user is not None and self.weights == self.spec.weights else "[reward.weights]"
        named = [(table, name) for name in self.weights]
        if self.spec.accuracy_named:
            named.append(("[reward] accuracy", str(self.spec.accuracy)))
        for table, name in named:
            if name not in known:
                raise RewardError(
                    f"{table} names the part `{name}`, which reward `{self.spec.name}` does not return",
                    where=place,
                    hint=f"its parts: {', '.join(sorted(known))}",
                )


class Scorer:
    """Scorer of responses with one reward or several. As a context manager it ends the rewards' worker processes.

    Args:
        spec: the reward, or several (`several.compose`).
        weights: part -> weight, used as given; of several rewards, label -> weight of the reward: one that is left out
            is reported, not counted. None or empty: the reward's own (see `RewardSpec.weights`).
        timeout_seconds: wall clock limit for one call in a worker; then the worker is ended and another one started.
            The own limit of one of several rewards has priority; a built-in's own holds where it is shorter.
        memory_mb: address space of one worker, in MiB.
        workers: number of worker processes of each reward.
        ended: (attribute) failure that ends the work, such as a spent budget; None = there is none.
        failures: (attribute) rows so far on which the reward failed, without those where a service was unavailable.
        seconds: (attribute) time the reward took for each row of the last call of `score`.
        images_left_out: (attribute) rows of the last session whose images were dropped; see `FileLimit`.
        session: (attribute) the open session that it scores for; None = there is none.
    Raises: RewardError for a weight that no reward can use, a weight of an unknown reward, or an `on_timeout` that
        makes no score.
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
        for label in self.weights if spec.members else ():
            if label not in spec.weights:
                hint = listed(label, spec.weights, "the rewards") + "; parts have the weights of their reward"
                raise RewardError(f"no reward is called `{label}`: several rewards are weighted as wholes", hint=hint)
        self.failures, self.images_left_out = 0, 0
        self.seconds: list[float] = []
        self.ended: Failure | None = None
        self.session: ScoringSession | None = None
        members = (
            [m for stage in stages(spec.members) for m in stage] if spec.members else [Member("", spec, self.weights)]
        )
        limits = {"timeout_seconds": timeout_seconds, "memory_mb": memory_mb, "workers": workers}
        self.rewards = [_Reward(member, **limits, place=place) for member in members]
        self.known = {m.label: set(m.declared) for m in spec.members}

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        for reward in self.rewards:
            reward.backend.close()

    @property
    def services(self) -> list[Service]:
        """The services that score, if they are open."""
        return [s for r in self.rewards if (s := getattr(r.backend, "service", None)) is not None]

    def pids(self) -> list[int]:
        """Return the processes that run the rewards: their workers, or this one."""
        return list(dict.fromkeys(pid for reward in self.rewards for pid in reward.backend.pids()))

    def possible_values(self, all_parts: Iterable[Parts]) -> tuple[float, float] | None:
        """Return the least and the largest score of responses with such parts, as `value_range`."""
        if self.spec.members:
            return possible_values(all_parts, self.spec, self.weights)
        return value_range(all_parts, self.weights, self.spec.ranges)

    def score(
        self,
        inputs: Sequence[RewardInput],
        *,
        strict: bool = False,
        rows: Sequence[str] = (),
        rule: AttemptRule = AttemptRule(),
    ) -> list[Score]:
        """Return one score per input, in order.

        A function that gets lists (TRL, EasyR1 batch) gets all inputs in one call. If that call raises or hangs and not
        strict, each row is scored alone, so that one bad row does not affect the others; its score carries a note.

        Args:
            strict: a failure raises, with the row, the exception and the user's lines of the traceback. Otherwise the
                row's Score has value NaN, no parts, and `error`. If a reward in TRL's form returns None, the error is
                INAPPLICABLE; with strict, that raises only if it happens for every input.
            rows: names of the rows for messages; default `row 0`, `row 1`, ...
            rule: what happens when a service is down.
        Raises: RewardError (strict); RewardError when the user's file cannot be loaded (always).
        """
        with ScoringSession({"": self}, rule, strict=strict) as session:
            session.submit(0, "", inputs, rows)
            (group,) = session.collect()
        self.seconds = list(group.seconds)
        return list(group.scores)


@dataclass(frozen=True)
class GroupScores:
    """Scores of a group. `seconds`: time the reward took for each of its inputs."""

    key: int
    scores: Sequence[Score]
    seconds: Sequence[float]


class _Part:
    """Inputs and scores of one reward in a session.

    Attributes:
        gate: the part whose scores decide which inputs this one gets; None = it gets all.
        groups: the places of each group that it scores, by key; no key = not decided yet.
        outcomes: those so far. scores: those that are final.
        attempts: what is known since the first failure; None = there was none.
        sent: whether a function that gets lists was called.
        all_final: whether all outcomes are final.
    """

    def __init__(self, reward: _Reward, source: _Source, gate: _Part | None) -> None:
        self.reward, self.source, self.gate = reward, source, gate
        self.groups: dict[int, list[Place]] = {}
        self.inputs: dict[Place, RewardInput] = {}
        self.outcomes: dict[Place, Outcome] = {}
        self.scores: dict[Place, Score] = {}
        self.attempts: Attempts | None = None
        self.sent = self.all_final = False
        self._limit: FileLimit[Place] | None = None

    @property
    def missing(self) -> bool:
        """Return whether inputs wait for a service."""
        return self.attempts is not None and bool(self.attempts.missing) and not self.attempts.stopped

    def has(self, key: int) -> bool:
        """Return whether the scores of a group are final.

        Images are final at the end of the session: a group before them may still displace them.
        """
        return key in self.groups and (self.all_final or all(map(self._is_final, self.groups[key])))

    def _is_final(self, place: Place) -> bool:
        outcome = None if self.reward.batched else self.outcomes.get(place)
        if isinstance(outcome, Failure):
            return not (self.reward.on_timeout and outcome.broke_worker)
        return outcome is not None and not outcome.files

    def keep(self, place: Place, outcome: Outcome) -> None:
        """Keep an outcome, and drop the images that are beyond the limit."""
        self.outcomes[place] = outcome
        if isinstance(outcome, Result) and outcome.files:
            self._limit = self._limit or FileLimit(MOST_CALL_BYTES)
            for dropped in self._limit.add(place, outcome.size):
                self.outcomes[dropped] = self.outcomes[dropped].without_images()


class _Source:
    """Groups of a source in a session: their inputs and the names of their rows, by key; a part for each reward."""

    def __init__(self, name: str, scorer: Scorer) -> None:
        self.scorer, self.place = scorer, f"source {name}" if name else None
        self.groups: dict[int, Sequence[RewardInput]] = {}
        self.rows: dict[int, Sequence[str]] = {}
        self.scored: dict[int, GroupScores] = {}
        self.parts: list[_Part] = []
        for reward in scorer.rewards:
            reward.backend.begin()
            label = label_of(reward.member.gate) if reward.member.gate is not None else ""
            gate = next((part for part in self.parts if part.reward.member.label == label), None) if label else None
            self.parts.append(_Part(reward, self, gate))

    def row(self, place: Place) -> str:
        """Return the name of an input."""
        return self.rows[place[0]][place[1]]


class ScoringSession:
    """Scores of the groups of one draw, each source with its own reward, while others are still generated.

    As a context manager it cancels what is not scored; the scorers can be used again in any case.

    Args:
        scorers: by source name.
        rule: what happens when a service is down.
        strict: a bug in a reward raises and names the row; else the row has no score.
        ranks: the ranks that score together; None = this process alone. With a rule other than "raise" all of them
            call `collect` together.

    Attributes:
        waited_seconds: seconds of waiting for a service.
        outages: reasons why episodes have no score: a service that their environment needs is down.
    """

    def __init__(
        self,
        scorers: Mapping[str, Scorer],
        rule: AttemptRule = AttemptRule(),
        *,
        strict: bool,
        ranks: Ranks | None = None,
    ) -> None:
        self.rule, self.strict, self.ranks, self.waited_seconds = rule, strict, ranks or Ranks(), 0.0
        self._scorers, self._sources, self._last = scorers, dict[str, _Source](), False
        self.outages = list[str]()

    def __enter__(self) -> ScoringSession:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Forget all groups, and end the workers that score them."""
        for part in self._parts():
            part.source.scorer.session = None
            if part.reward.backend.pending:
                part.reward.backend.close()
        self._sources = {}

    def submit(self, key: int, source: str, inputs: Sequence[RewardInput], rows: Sequence[str] = ()) -> None:
        """Begin to score a group. Workers score while the caller does other work; a built-in reward scores here.

        A function that gets lists is called by `collect`, once, with all groups. A reward with a gate is given the
        responses whose gate is open, as soon as the reward of the gate has scored the group.

        Args:
            key: the group's position in the draw; the groups may come in any order.
            rows: names of the rows for messages; default `row 0`, `row 1`, ...
        """
        scorer = self._scorers[source]
        if scorer.session not in (None, self):
            raise ValueError("a session began while another one of the same scorer was open")
        if source not in self._sources:
            scorer.session, self._sources[source] = self, _Source(source, scorer)
        of = self._sources[source]
        if key in of.groups:
            raise ValueError(f"group {key} was submitted twice")
        of.groups[key], of.rows[key] = inputs, rows or [f"row {k}" for k in range(len(inputs))]
        for part in of.parts:
            if part.gate is None:
                self._begin(part, key, [(key, k) for k in range(len(inputs))])

    def listen(self, seconds: float = 0.0) -> None:
        """Take the outcomes of the next `seconds`, and give the workers what waits for them.

        Raises: RewardError for a bug if strict, and when the user's file cannot be loaded.
        """
        self._work(seconds)
        if (waiting := self.waiting) is not None:
            self.ranks.tell(waiting, self.rule)

    def collect(self) -> list[GroupScores]:
        """Wait for all scores: no more groups will come. Return the groups in the order of their keys.

        Raises: as `listen`. OutageError, on all ranks, when a service is down: for stop at once, for wait after
            `rule.minutes` without any answer; also when a failure ends the work (`Scorer.ended`). StepLeftError, on all
            ranks, when `ranks.stop_reason` ends the wait.
        """
        try:
            self._last = True
            self._work(None)
            if self.rule.on_outage == "wait":
                self._wait()
            for source in self._sources.values():
                self._check_sums(source)
            groups = sorted(self.scored.values(), key=lambda group: group.key)
            if self.rule.on_outage != "raise":
                self._agree(groups)
            return groups
        finally:
            self.cancel()

    @property
    def scored(self) -> dict[int, GroupScores]:
        """The groups whose scores are final so far, by key."""
        return {key: group for source in self._sources.values() for key, group in source.scored.items()}

    @property
    def is_idle(self) -> bool:
        """Return whether no input is being scored or waits for a service."""
        return not any(part.reward.backend.pending or part.missing for part in self._parts())

    @property
    def waiting(self) -> Waiting | None:
        """Return the wait for a service; None if nothing waits."""
        attempts = [part.attempts for part in self._parts() if part.attempts is not None]
        outages = [(a.outage, len(a.missing) + len(a.outage.asked)) for a in attempts if a.outage is not None]
        if not outages:
            return None
        now = time.monotonic()
        worst = min((outage for outage, _ in outages), key=lambda outage: outage.last_answer)
        since = time.time() - now + min(outage.begin for outage, _ in outages)
        return Waiting(sum(number for _, number in outages), worst.reason, since, now - worst.last_answer)

    def _parts(self) -> list[_Part]:
        return [part for source in self._sources.values() for part in source.parts]

    def _begin(self, part: _Part, key: int, places: list[Place]) -> None:
        """Let a reward score inputs of a group. A function that gets lists waits for the last group."""
        reward, group = part.reward, part.source.groups[key]
        part.groups[key] = places
        part.inputs |= {place: reward.needed(group[place[1]]) for place in places}
        if reward.batched or (part.attempts is not None and part.attempts.stopped):
            return
        if part.attempts is not None and part.attempts.is_silent:
            part.attempts.hold(places, time.monotonic())
            return
        self._send(part, places)
        while isinstance(reward.backend, InProcess) and reward.backend.pending:
            self._take(part, reward.backend.advance())

    def _send(self, part: _Part, places: Sequence[Place]) -> None:
        """Queue requests for inputs; all workers share them."""
        backend = part.reward.backend
        if part.attempts is not None and part.attempts.alone:
            backend.begin(fresh=part.attempts.fresh)
            backend.add([[place] for place in places], part.inputs)
        elif part.reward.batched:
            backend.add([sorted(places)], part.inputs)
        else:
            backend.add(requests_of(places, part.inputs, backend.size), part.inputs)

    def _work(self, seconds: float | None) -> None:
        """Take outcomes for some time, and ask again what is due; None = until nothing is left but what waits."""
        end = None if seconds is None else time.monotonic() + seconds
        self._open_gates()
        while True:
            busy = [part.reward.backend for part in self._parts() if self._ask(part)]
            left = None if end is None else max(0.0, end - time.monotonic())
            if not busy:
                outages = [a.outage for p in self._parts() if (a := p.attempts) is not None and a.outage is not None]
                if not left or not outages:
                    break
                time.sleep(min(left, *(outage.seconds_left(time.monotonic()) for outage in outages)))
                continue
            # Each pool is served in turn, so that the workers of all rewards have work until the last response.
            share = left if len(busy) == 1 else LISTEN_SECONDS if left is None else min(left, LISTEN_SECONDS)
            # A message that is on its way may take a moment longer: a pipe holds only a part of an image.
            transfers = any(backend.transfers for backend in busy)
            if share == 0.0 and transfers:
                share = MESSAGE_SECONDS / 10
            heard = [self._take(part, outcomes) for part in self._parts() if (outcomes := self._hear(part, share))]
            if end is not None and not heard and time.monotonic() - end >= (MESSAGE_SECONDS if transfers else 0.0):
                break
        self._open_gates()
        for source in self._sources.values():
            self._score_groups(source)

    def _hear(self, part: _Part, seconds: float | None) -> list[tuple[Place, Outcome]]:
        return part.reward.backend.advance(seconds) if part.reward.backend.pending else []

    def _ask(self, part: _Part) -> bool:
        """Ask what is due. Return whether anything is being asked; if nothing more will be, all outcomes are final."""
        backend, attempts = part.reward.backend, part.attempts
        last = self._last and (part.gate is None or part.gate.all_final)
        if part.reward.batched and not part.sent:
            part.sent = last
            if last and part.inputs:
                self._send(part, list(part.inputs))
        elif attempts is not None and (places := attempts.due(time.monotonic(), idle=not backend.pending, last=last)):
            self._send(part, places)
        if last and not (part.all_final or backend.pending or part.missing):
            part.all_final = True
            if attempts is not None:
                attempts.finish()
            self._check_part(part)
            self._open_gates()
        return backend.pending

    def _take(self, part: _Part, outcomes: Sequence[tuple[Place, Outcome]]) -> None:
        """Keep outcomes. Raise for a bug if strict; ask nothing more if too many rows are lost."""
        reward, now = part.reward, time.monotonic()
        for place, outcome in outcomes:
            reward.answered = reward.answered or isinstance(outcome, Result)
            if isinstance(outcome, Failure):
                if self.strict and self.rule.is_bug(outcome, has_price=bool(reward.on_timeout)):
                    raise self._error(part, place, outcome)
                part.attempts = part.attempts or Attempts(
                    self.rule, part.inputs, part.outcomes, reward.batched, reward.on_timeout, reward.answered
                )
            kept = outcome if part.attempts is None else part.attempts.take(place, outcome, now)
            if kept is not None:
                part.keep(place, kept)
            if part.attempts is not None and part.attempts.stopped:
                reward.backend.close()
                return
        if part.attempts is not None and part.attempts.is_silent:
            part.attempts.hold(reward.backend.hold(), now)

    def _error(self, part: _Part, place: Place, failure: Failure) -> RewardError:
        return as_error(advised(failure, part.inputs[place]), part.reward.spec.name, part.source.row(place))

    def _score(self, part: _Part, place: Place) -> Score:
        """Return the final score of an input. Raises: RewardError for a failure if strict."""
        if place not in part.scores:
            outcome, scorer = part.outcomes[place], part.source.scorer
            score = part.reward.value(outcome) if isinstance(outcome, Result) else outcome
            if isinstance(score, Failure):
                if self.strict and self.rule.is_bug(score):
                    raise self._error(part, place, score)
                scorer.ended = scorer.ended or (score if score.ends_run else None)
                status = "unavailable" if score.is_outage else "failed"
                score = Score(math.nan, {}, error=encodable(str(score)), status=status)
            part.scores[place] = score
        return part.scores[place]

    def _open_gates(self) -> None:
        """Give the rewards with a gate the responses whose gate is open, of all groups where this is known by now."""
        for part in self._parts():
            if (gate := part.gate) is None:
                continue
            for key in part.source.groups:
                if key in part.groups or not gate.has(key):
                    continue
                other, name = gate.reward.member, str(part.reward.member.gate)
                scores = [(place, self._score(gate, place)) for place in gate.groups[key]]
                self._begin(part, key, [place for place, score in scores if is_open(name, other, score)])

    def _score_groups(self, source: _Source) -> None:
        """Set the scores of the groups that are final now."""
        for key in source.groups:
            if key in source.scored or not all(part.has(key) for part in source.parts):
                continue
            places = [(key, k) for k in range(len(source.groups[key]))]
            scores = [self._total(source, place) for place in places]
            took = [math.fsum(p.outcomes[x].seconds for p in source.parts if x in p.outcomes) for x in places]
            source.scored[key] = GroupScores(key, scores, took)
            source.scorer.failures += sum(score.failed for score in scores)

    def _total(self, source: _Source, place: Place) -> Score:
        """Return the score of a response from those of all rewards. Raises: RewardError if there is none, if strict."""
        scorer, parts = source.scorer, [part for part in source.parts if place in part.inputs]
        if not scorer.spec.members:
            return self._score(parts[0], place)
        scores: dict[str, Score | None] = dict.fromkeys(m.label for m in scorer.spec.members)
        scores |= {part.reward.member.label: self._score(part, place) for part in parts}
        score = total(scorer.spec.members, scorer.weights, scores)
        if self.strict and score.failed:
            raise RewardError(str(score.error), where=source.row(place), hint="lower the parts, or the weights")
        return score

    def _check_part(self, part: _Part) -> None:
        """Check the scores of a reward, if strict. One of several may return None for all responses."""
        scores = [self._score(part, place) for place in sorted(part.inputs)]
        judged = [score for score in scores if score.status != "unavailable"]
        may_pass = bool(part.source.scorer.spec.members) and all(score.error is not None for score in judged)
        if self.strict and judged and not may_pass:
            part.reward.check(judged, part.source.row(min(part.inputs)), part.source.place)

    def _check_sums(self, source: _Source) -> None:
        """Check the sums of several rewards at the end, if strict; count the images that were left out."""
        scorer, parts = source.scorer, source.parts
        scorer.images_left_out = sum(s.note.endswith(LEFT_OUT) for part in parts for s in part.scores.values())
        if scorer.spec.members and self.strict:
            scores = [score for group in source.scored.values() for score in group.scores]
            own = {part.reward.member.label: list(part.scores.values()) for part in parts}
            first = next((row for rows in source.rows.values() for row in rows), None)
            check_sums(scorer.spec, scores, own, scorer.known, first, source.place)

    def _agree(self, groups: Sequence[GroupScores]) -> None:
        """Raise an OutageError on all ranks if a failure ends the work, or a service was down and the rule is stop.

        An episode cannot wait for a service: its process is gone. So with wait, the work ends if every one had an
        environment without its service; the others are left out.
        """
        ended = next((s.scorer.ended for s in self._sources.values() if s.scorer.ended is not None), None)
        errors = [s.error or "" for group in groups for s in group.scores if s.status == "unavailable"]
        size = len(self.outages) + sum(len(group.scores) for group in groups)
        of_ranks = self.ranks.gather((ended, size, len(self.outages), len(errors), [*self.outages, *errors][:1]))
        if failure := next((one for one, *_ in of_ranks if one is not None), None):
            raise OutageError(failure.message, hint=failure.hint or HINT)
        sizes, of_environments, of_rewards = (sum(of_rank[i] for of_rank in of_ranks) for i in (1, 2, 3))
        number = of_environments + of_rewards if self.rule.on_outage == "stop" else of_environments
        if number and (self.rule.on_outage == "stop" or (self.rule.on_outage == "wait" and number == sizes)):
            reasons = next(some for *_, some in of_ranks if some)
            raise OutageError(outage_words(reasons, number), hint=HINT)

    def _wait(self) -> None:
        """Return when every input of all ranks has its outcome.

        The ranks stay together: no collective operation waits longer than a tick and a call of a reward.
        """
        begin: float | None = None
        while True:
            states = self.ranks.gather((not all(part.all_final for part in self._parts()), self.waiting))
            if not any(is_open for is_open, _ in states):
                break
            if waiting := [one for _, one in states if one is not None]:
                begin = time.monotonic() if begin is None else begin
                self.ranks.look_at(waiting, self.rule)
            self.ranks.tick()
            self._work(TICK_SECONDS)
        self.waited_seconds = 0.0 if begin is None else time.monotonic() - begin
        if self.ranks.said is not None:
            self.ranks.tell_end(self.waited_seconds)


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
