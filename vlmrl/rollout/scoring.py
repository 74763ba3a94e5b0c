"""From rollouts to scored groups: a group is scored while others are still generated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import TracebackType
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.rewards.outage import OnOutage
from vlmrl.rewards.sandbox.outcomes import Failure
from vlmrl.rewards.several_scorer import RewardScorer
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.sample import Prompt, Rollout, requests_for, rollouts_of
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
