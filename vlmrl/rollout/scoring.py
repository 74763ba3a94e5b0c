"""From rollouts to scored groups: a group is scored while others are still generated; the rule for outages.

The rule says what happens when a service that a reward needs is down. All ranks decide the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import TracebackType
from typing import Any, Literal

from vlmrl.dist import world as rank_process
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import RewardError, RewardUnavailable
from vlmrl.recipe.schema import Reward
from vlmrl.redaction.redact import excerpt
from vlmrl.rewards.attempts import OnOutage
from vlmrl.rewards.outcomes import Failure
from vlmrl.rewards.several_scorer import RewardScorer
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.sample import Prompt, Rollout, requests_for, rollouts_of
from vlmrl.store.layout import span
from vlmrl.store.summary import ANSWERS, WAITS
from vlmrl.types import Group, RewardInput, Sample, SamplingParams, Score, ScoredSample, Trajectory, name_row

LISTEN_SECONDS = 0.05
"""Time in seconds after which generation pauses, for the workers of the rewards to be given more work."""


@dataclass(frozen=True)
class Missing:
    """Samples that wait for a service, on one rank.

    Args:
        number: of the samples.
        reason: the reward's newest message.
        since: begin of the outage, in seconds since 1970.
        silent_seconds: seconds since the service answered for the last time.
    """

    number: int
    reason: str
    since: float
    silent_seconds: float


class Scoring:
    """Scores of the rollouts of a draw, each source with its own reward.

    As a context manager it cancels what is not finished: the scorers can be used again in any case.

    Args:
        scorers: by source name.
        strict: a bug in a reward stops the run and names the row, instead of masking the sample.
        on_outage: what happens when a service is down, as of `Scorer.submit`. With "wait", `settle` and `advance` come
            before `finish`, see outages.py.
        seen: called while others are still generated, when samples wait for a service.
    """

    def __init__(
        self,
        scorers: Mapping[str, RewardScorer],
        *,
        strict: bool,
        on_outage: OnOutage = "raise",
        seen: Callable[[Missing], None] = lambda missing: None,
    ) -> None:
        self.scorers, self.strict, self._seen = scorers, strict, seen
        self.on_outage: OnOutage = on_outage
        self._rollouts: dict[int, Rollout] = {}
        self._sources: dict[str, RewardScorer] = {}
        self._scores: dict[int, list[Score]] = {}

    def __enter__(self) -> Scoring:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for scorer in self._sources.values() if error is not None else ():
            scorer.cancel()

    def submit(self, index: int, rollout: Rollout) -> None:
        """Begin to score a rollout. `index`: its position in the draw; rollouts may come in any order."""
        name, row = rollout.prompt.source.name, rollout.prompt.row.prompt_id
        self._rollouts[index] = rollout
        self._sources[name] = self.scorers[name]
        inputs = _reward_inputs(rollout)
        rows = [name_row(name, row, k) for k in range(len(inputs))]
        self.scorers[name].submit(index, inputs, strict=self.strict, rows=rows, on_outage=self.on_outage)

    def submit_all(self, rollouts: Sequence[Rollout]) -> None:
        """Begin to score all rollouts of a draw."""
        for index, rollout in enumerate(rollouts):
            self.submit(index, rollout)

    def listen(self) -> None:
        """Take the scores that are there, and give the workers what waits for them. Does not wait."""
        self._collect(0.0)
        if (missing := self.missing()) is not None:
            self._seen(missing)

    @property
    def is_open(self) -> bool:
        """Return whether some inputs have no final outcome yet."""
        return any(scorer.is_open for scorer in self._sources.values())

    def missing(self) -> Missing | None:
        """Return what waits for a service, or None."""
        outages = [(x.missing, x.outage) for x in self._sources.values() if x.missing and x.outage is not None]
        if not outages:
            return None
        worst = max((outage for _, outage in outages), key=lambda outage: outage.silent_seconds)
        since = min(outage.since for _, outage in outages)
        return Missing(sum(number for number, _ in outages), worst.reason, since, worst.silent_seconds)

    def settle(self) -> None:
        """Wait for the scores of all inputs except those that wait for a service."""
        self._collect(None)

    def advance(self, seconds: float) -> None:
        """Ask missing inputs again when it is time, and take scores. Returns after about `seconds` at the latest."""
        for name, scorer in self._sources.items():
            if scorer.is_open:
                self._take(name, seconds)
            if scorer.is_open and not scorer.is_busy:
                self._take(name, None)

    @property
    def ended(self) -> Failure | None:
        """Failure of a reward that ends the work; None = there is none."""
        return next((s.ended for s in self._sources.values() if s.ended is not None), None)

    @property
    def is_idle(self) -> bool:
        """Return whether no worker has anything left to do: `finish` then waits only for second tries."""
        return not any(scorer.is_busy for scorer in self._sources.values())

    def finish(self, seconds: float | None = None) -> list[Group]:
        """Wait for all scores. Return the groups in the order of the draw; advantages are still 0.

        Args:
            seconds: duration of the sampling for the record; None = as the rollouts have it.
        """
        self._collect(None)
        if seconds is not None:
            self._rollouts = {i: replace(rollout, seconds=seconds) for i, rollout in self._rollouts.items()}
        took = {name: iter(scorer.seconds) for name, scorer in self._sources.items()}
        return [self._group(i, took[r.prompt.source.name]) for i, r in sorted(self._rollouts.items())]

    def _collect(self, timeout: float | None) -> None:
        for name in self._sources:
            self._take(name, timeout)

    def _take(self, name: str, timeout: float | None) -> None:
        try:
            scored = self._sources[name].collect(timeout)
        except RewardError as error:
            raise type(error)(error.message, where=error.where or f"source {name}", hint=error.hint) from error
        self._scores |= dict(scored)

    def _group(self, index: int, seconds: Iterator[float]) -> Group:
        """Return a group. `seconds`: what its reward took for each of its source's rows, from this group on."""
        rollout, scores = self._rollouts[index], self._scores[index]
        samples = [
            ScoredSample(
                _trajectory(rollout.prompt, k, sample),
                sample.text,
                score,
                masked=score.error is not None,
                generate_seconds=rollout.seconds,
                reward_seconds=next(seconds),
                turns=sample.turns,
                files=sample.files,
            )
            for k, (sample, score) in enumerate(zip(rollout.samples, scores, strict=True))
        ]
        return Group(rollout.prompt.row, rollout.prompt.encoded.text, tuple(samples))


def sample_scored(
    generator: Generator,
    prompts: Iterable[Prompt],
    params: SamplingParams,
    scoring: Scoring,
    *,
    num_samples: int,
    run_seed: int,
    version: int,
    room: int | None = None,
    progress: Callable[[int], Any] | None = None,
) -> float:
    """Sample `num_samples` responses to every prompt with policy `version`, and begin to score each group at once.

    All ranks call this, each with its own prompts. `scoring.finish` then returns the groups.

    Args:
        room: number of prompts that are taken from the iterable before one of them is complete; None = all.
    Returns: seconds that the sampling took.
    Raises: EngineError when a sample is from another version.
    """
    start = time.perf_counter()
    with generator.round(progress):
        waiting, open_requests = enumerate(prompts), dict[int, tuple[int, Prompt]]()
        while True:
            free = None if room is None else room - len(open_requests)
            for index, prompt in islice(waiting, free):
                (request,) = requests_for([prompt], num_samples, run_seed, version)
                open_requests[generator.submit(request, params)] = (index, prompt)
            if not open_requests:
                break
            for number, samples in generator.poll(LISTEN_SECONDS):
                index, prompt = open_requests.pop(number)
                (rollout,) = rollouts_of([prompt], [samples], 0.0, version)
                scoring.submit(index, rollout)
            scoring.listen()
    return time.perf_counter() - start


def score_rollouts(rollouts: Sequence[Rollout], scorers: Mapping[str, RewardScorer], *, strict: bool) -> list[Group]:
    """Score all responses, each source with its own reward: see `Scoring`."""
    with Scoring(scorers, strict=strict) as scoring:
        scoring.submit_all(rollouts)
        return scoring.finish()


def _trajectory(prompt: Prompt, index: int, sample: Sample) -> Trajectory:
    return Trajectory(
        task=prompt.source.task_name,
        prompt_id=prompt.row.prompt_id,
        occurrence=prompt.occurrence,
        sample=index,
        version=sample.version,
        seed=sample.seed,
        prompt_ids=prompt.encoded.prompt_ids,
        segments=sample.parts,
        media=prompt.encoded.row.media,  # the images that the model saw
        finish=sample.finish,
        seen_sizes=prompt.encoded.seen_sizes,
    )


def _reward_inputs(rollout: Rollout) -> list[RewardInput]:
    """Return the input of the reward for each sample. All have the same images, which are decoded once."""
    prompt, samples = rollout.prompt, rollout.samples
    if not samples:
        return []
    first = samples[0]
    base = prompt.source.reward_input(
        prompt.row, first.text, first.finish, first.num_sampled_tokens, prompt.encoded.text
    )
    return [
        replace(
            base,
            response=sample.text,
            finish=sample.finish,
            num_tokens=sample.num_sampled_tokens,
            token_ids=sample.token_ids or None,
            step=sample.version,
            prompt_id=prompt.row.prompt_id,
            sample=index,
            media=prompt.row.media,
            seen_sizes=prompt.encoded.seen_sizes,
            turns=sample.turns,
        )
        for index, sample in enumerate(samples)
    ]


TICK_SECONDS = 0.5
"""Time between two agreements of the ranks while they wait, in seconds: an interruption is seen after this time."""
REMIND_SECONDS = 300.0
"""Time between two messages about the same outage, in seconds."""
MOST_REASON_CHARS = 500


HINT = "what was answered is kept: start the service, then give the same command again, and it goes on"


class OutageError(RewardUnavailable):
    """Error: an outage ends the work. All ranks raise it together."""


class StepLeftError(Exception):
    """End of a wait, because the run is to stop: the step cannot be finished now. `reason`: why the run stops."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class Outages:
    """Rule of a run, or of an evaluation, for outages of the services that its rewards need.

    Args:
        action: wait = ask the missing samples again; mask = they have no score; stop = the work ends.
        minutes: longest wait without any answer.
        world: the ranks that score together.
        say: shows a message to the user; called on all ranks.
        note: records an event with its facts; called on all ranks.
        stop_reason: returns why a wait must end now, or None. All ranks call it together.
        seconds: (attribute) seconds of waiting since it was last set to 0.
    """

    action: Literal["wait", "mask", "stop"] = "wait"
    minutes: float = 30.0
    world: World = ALONE
    say: Callable[[str], None] = lambda text: None
    note: Callable[[str, Mapping[str, Any]], None] = lambda event, facts: None
    stop_reason: Callable[[], str | None] = lambda: None
    seconds: float = 0.0
    _said: float | None = field(default=None, repr=False)

    @classmethod
    def of(cls, settings: Reward, world: World, say: Callable[[str], None]) -> Outages:
        """Return the rule of a recipe's `[reward]` table."""
        return cls(settings.outage, settings.outage_minutes, world, say)

    def scoring(self, scorers: Mapping[str, RewardScorer], *, strict: bool) -> Scoring:
        """Return a `Scoring` that follows the rule; `finish` ends it. `strict` concerns bugs of the reward alone."""
        waits = self.action == "wait"
        return Scoring(scorers, strict=strict, on_outage="wait" if waits else "mask", seen=self._tell)

    def score(self, rollouts: Sequence[Rollout], scorers: Mapping[str, RewardScorer], *, strict: bool) -> list[Group]:
        """Score all responses, each source with its own reward; see `finish`."""
        with self.scoring(scorers, strict=strict) as scoring:
            scoring.submit_all(rollouts)
            return self.finish(scoring)

    def finish(self, scoring: Scoring, seconds: float | None = None) -> list[Group]:
        """Wait for all scores of this rank. Return its groups, as `Scoring.finish`. All ranks call it together.

        Raises: OutageError, on all ranks, when a service is down: for stop at once, for wait after `minutes` without
            any answer; also when a failure ends the work (`Scorer.ended`). StepLeftError, on all ranks, when
            `stop_reason` ends the wait.
        """
        if self.action == "wait":
            self._wait(scoring)
        groups = scoring.finish(seconds)
        failures = self.world.gather(scoring.ended)
        if failure := next((one for one in failures if one is not None), None):
            raise OutageError(failure.message, hint=failure.hint or HINT)
        if self.action == "stop":
            errors = [s.score.error or "" for g in groups for s in g.samples if s.score.status == "unavailable"]
            of_ranks = self.world.gather((len(errors), errors[:1]))
            if number := sum(count for count, _ in of_ranks):
                reason = next(error for _, some in of_ranks for error in some)
                message = f"the reward was unavailable for {number} sample(s): {_last_line(reason)}"
                raise OutageError(message, hint=HINT)
        return groups

    def _wait(self, scoring: Scoring) -> None:
        """Return when every input of all ranks has its outcome."""
        begin, outage = time.monotonic(), False
        scoring.settle()
        while True:
            # The ranks stay together: no collective operation waits longer than a tick and a call of a reward.
            states = self.world.gather((scoring.is_open, scoring.missing()))
            if not any(is_open for is_open, _ in states):
                break
            waiting = [missing for _, missing in states if missing is not None]
            if waiting and not outage:
                outage, begin = True, time.monotonic()
            if waiting:
                self._look_at(waiting)
            rank_process.phase(WAITS)  # the watch of the ranks sees that this one is alive
            scoring.advance(TICK_SECONDS)
        if outage:
            self.seconds += time.monotonic() - begin
        if self._said is not None:
            self._said = None
            self.say("the service answers again, and all samples are scored")
            self.note(ANSWERS, {"waited": round(self.seconds, 1)})

    def _look_at(self, waiting: Sequence[Missing]) -> None:
        """Tell the user about an outage. Raise if the wait must end; `waiting` is the same on all ranks."""
        worst = max(waiting, key=lambda missing: missing.silent_seconds)
        number = sum(missing.number for missing in waiting)
        self._tell(Missing(number, worst.reason, min(m.since for m in waiting), worst.silent_seconds))
        if (reason := self.stop_reason()) is not None:
            raise StepLeftError(reason)
        if worst.silent_seconds > 60 * self.minutes:
            message = f"the reward was unavailable for {span(worst.silent_seconds)} ({number} sample(s) wait for it)"
            raise OutageError(f"{message}: {_last_line(worst.reason)}", hint=HINT)

    def _tell(self, missing: Missing) -> None:
        """Show an outage and record it, once and then after every REMIND_SECONDS."""
        now = time.monotonic()
        if self._said is not None and now - self._said < REMIND_SECONDS:
            return
        first, self._said = self._said is None, now
        reason = _last_line(missing.reason)
        since = time.strftime("%H:%M:%S", time.localtime(missing.since))
        self.say(
            f"{'' if first else 'still '}{WAITS} since {since}: {reason}. {missing.number} sample(s) so far are asked "
            f"again until it answers; after {self.minutes:g} min without an answer this stops (reward.outage_minutes)"
        )
        if first:
            self.note(WAITS, {"reason": reason, "samples": missing.number})


def _last_line(text: str) -> str:
    return excerpt(text.strip().rpartition("\n")[2], MOST_REASON_CHARS)


ENOUGH_RESPONSES = 256
"""Responses in flight that keep an engine busy; with fewer, one that admits requests at any time gets more prompts."""
MOST_AHEAD = 1024
"""Maximum number of prompts that are submitted after the oldest one in flight: the others wait for its grade."""
Answered = tuple[int, Rollout]
"""(number of a prompt, its responses)."""


def answer_pieces(
    engine: Generator,
    pieces: Iterator[Sequence[tuple[int, Prompt]]],
    params: SamplingParams,
    *,
    num_samples: int,
    run_seed: int,
    progress: Callable[[int], Any] | None = None,
) -> Iterator[Answered | None]:
    """Yield the responses to prompts as they are complete; None about every LISTEN_SECONDS if none is.

    All samples of a prompt are one request. A piece is submitted when all prompts of the piece before are complete: so
    the batches of the built-in engine depend on the pieces alone, not on the time. An engine that admits requests at
    any time (`Generator.admits`) gets the next piece before it runs dry.

    Args:
        pieces: (number, prompt) of each prompt. Pieces are taken when there is room for them; one may be empty.
    Raises: EngineError when a response is from another version of the policy.
    """
    version, pieces_left, submitted = engine.version, True, 0
    waiting: dict[int, tuple[int, int, Prompt, float]] = {}  # id -> place, number, prompt, begin; the oldest first

    def has_room() -> bool:
        if not waiting:
            return True
        oldest = next(iter(waiting.values()))[0]
        return engine.admits and len(waiting) * num_samples < ENOUGH_RESPONSES and submitted - oldest < MOST_AHEAD

    with engine.round(progress):
        while True:
            while pieces_left and has_room():
                piece = next(pieces, None)
                if piece is None:
                    pieces_left = False
                    break
                if not piece:  # nothing to submit, but the caller has something to do
                    yield None
                requests = requests_for([prompt for _, prompt in piece], num_samples, run_seed, version)
                for (number, prompt), request in zip(piece, requests, strict=True):
                    waiting[engine.submit(request, params)] = (submitted, number, prompt, time.perf_counter())
                    submitted += 1
            if not waiting:
                break
            complete = engine.poll(LISTEN_SECONDS)
            for request_id, samples in complete:
                _, number, prompt, begin = waiting.pop(request_id)
                seconds = time.perf_counter() - begin
                (rollout,) = rollouts_of([without_pixels(prompt)], [samples], seconds, version)
                yield number, rollout
            if not complete:
                yield None


def without_pixels(prompt: Prompt) -> Prompt:
    """Return a prompt without the tensors of its images, which only an engine reads; they are most of its memory."""
    return replace(prompt, encoded=replace(prompt.encoded, images={}, pictures=()))
