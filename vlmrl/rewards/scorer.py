"""Scoring of inputs. Training, validation, `try`, `check`, `eval` and `reward-check` all use this code."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.rewards.attempts import LOST_IN_A_ROW, Call, OnOutage, Outage, Scored, is_bug, is_lost, requests_of, settle
from vlmrl.rewards.base import (
    NO_PLACE,
    RewardSpec,
    Service,
    ServicePlace,
    check_parts,
    check_some_weight,
    check_weight_sizes,
    combine,
    counting_weights,
    split_result,
)
from vlmrl.rewards.outcomes import (
    LEFT_OUT,
    MOST_CALL_BYTES,
    Failure,
    FileLimit,
    Outcome,
    Place,
    advised,
    artifact_files,
    as_error,
    failure_of,
    read_artifacts,
)
from vlmrl.rewards.service_pool import ServicePool
from vlmrl.rewards.worker_pool import WorkerPool
from vlmrl.types import INAPPLICABLE, Media, RewardInput, Score
from vlmrl.untrusted import encodable
from vlmrl.workers.frames import CONTRACT

NOTHING: Mapping[str, Any] = {}
MESSAGE_SECONDS = 0.05
"""Additional time in which `collect` listens while a message is being sent or received, in seconds."""


class Scorer:
    """Scorer of responses with one reward. As a context manager it ends the reward's worker processes.

    Args:
        spec: the reward.
        weights: part -> weight, used as given; None or empty: the reward's own (see `RewardSpec.weights`).
        timeout_seconds: wall clock limit for one call in a worker; then the worker is ended and another one started.
            A built-in's own limit holds where it is shorter.
        memory_mb: address space of one worker, in MiB.
        workers: number of worker processes.
        place: where a service keeps its files.
        ended: (attribute) failure that ends the work, such as a spent budget; None = there is none.
        failures: (attribute) rows so far on which the reward failed, without those where a service was unavailable.
        seconds: (attribute) time the reward took for each row of the last call.
        images_left_out: (attribute) rows of the last call whose images were dropped; see `FileLimit`.
    Raises: RewardError for a weight that no reward can use, or an `on_timeout` that makes no score.
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
        self.failures, self.images_left_out = 0, 0
        self.seconds: list[float] = []
        self.ended: Failure | None = None
        self._pool: WorkerPool | ServicePool | None = None
        self._answers = spec.is_builtin
        self._call: Call | None = None
        if spec.in_worker is not None:
            if spec.on_timeout and isinstance(price := self._valued(spec.on_timeout, ""), Failure):
                raise RewardError(f"on_timeout cannot be used: {price.message}", where=spec.name, hint=price.hint)
            seconds = spec.timeout_seconds if spec.counts_work else min(timeout_seconds, spec.timeout_seconds)
            self._pool = WorkerPool(spec.in_worker, size=workers, memory_mb=memory_mb, timeout_seconds=seconds)
        elif spec.service is not None:
            self._pool = ServicePool(spec.service, place)

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        self._call = None
        if self._pool is not None:
            self._pool.close()

    @property
    def services(self) -> list[Service]:
        """The service that scores, if it is open."""
        return [s for s in [getattr(self._pool, "service", None)] if s is not None]

    def pids(self) -> list[int]:
        """Return the processes that run the reward: its workers, or this one."""
        return self._pool.pids() if self._pool is not None else [os.getpid()]

    def score(
        self, inputs: Sequence[RewardInput], *, strict: bool = False, rows: Sequence[str] | None = None
    ) -> list[Score]:
        """Return one score per input, in order.

        A function that gets lists (TRL, EasyR1 batch) gets all inputs in one call. If that call raises or hangs and not
        strict, each row is scored alone, so that one bad row does not affect the others; its score carries a note.

        Args:
            strict: a failure raises, with the row, the exception and the user's lines of the traceback. Otherwise the
                row's Score has value NaN, no parts, and `error`. If a reward in TRL's form returns None, the error is
                INAPPLICABLE; with strict, that raises only if it happens for every input.
            rows: names of the rows for messages; default `row 0`, `row 1`, ...
        Raises: RewardError (strict); RewardError when the user's file cannot be loaded (always).
        """
        if self._call is not None:
            raise ValueError("`score` was called while groups were submitted and not collected")
        self.submit(0, inputs, strict=strict, rows=rows)
        return self.collect()[0][1]

    def submit(
        self,
        key: int,
        inputs: Sequence[RewardInput],
        *,
        strict: bool = False,
        rows: Sequence[str] | None = None,
        on_outage: OnOutage = "raise",
    ) -> None:
        """Begin to score a group while others are still generated. A call is all groups up to `collect()`.

        Workers score while the caller does other work; a built-in reward scores here. A function that gets lists is
        called by `collect()`, once, with all groups.

        Args:
            key: the group's position in the call; the groups may come in any order.
            strict, rows: as in `score`.
            on_outage: what the call does when a service is down; the first group decides for all.
        """
        if self._call is None:
            self._call = Call(strict, FileLimit(MOST_CALL_BYTES), on_outage, answered=self._answers)
            if self._pool is not None:
                self._pool.begin()
        if self._pool is not None:
            inputs = [self._without_unneeded(x) for x in inputs]
        self._call.add(key, inputs, rows or [f"row {k}" for k in range(len(inputs))])
        try:
            self._begin(self._call, key)
        except BaseException:
            self.cancel()
            raise

    def collect(self, timeout: float | None = None) -> list[tuple[int, list[Score]]]:
        """Return groups whose scores are final: (key, scores), each once.

        Args:
            timeout: how long to listen to the workers, in seconds; 0 = take what they have sent. None = no more groups
                will come: wait for all, end the call, and return all groups that were not returned yet. If inputs wait
                for a service, the call stays open (`is_open`), and is collected again when they have been asked.
        Raises: as `score`. The call has ended then.
        """
        call = self._call
        if call is None:
            return []
        try:
            self._listen(call, timeout)
            ends = (call.stopped and call.strict) or (timeout is None and (call.stopped or not call.missing))
            if ends and self._pool is not None:
                settle(self._pool, call, self.spec.on_timeout)
            self._answers = call.answered
            if not ends or (call.missing and not call.stopped):
                return [(key, self._scores(call, key)) for key in call.complete(again=bool(self.spec.on_timeout))]
            return self._end(call)
        except BaseException:
            self.cancel()
            raise

    @property
    def is_open(self) -> bool:
        """Return whether groups were submitted and their call has not ended."""
        return self._call is not None

    @property
    def is_busy(self) -> bool:
        """Return whether inputs of the open call are being scored, or wait for a service."""
        return self._call is not None and bool(self._call.missing or (self._pool is not None and self._pool.pending))

    @property
    def outage(self) -> Outage | None:
        """The outage for which inputs of the open call wait; None = there is none."""
        return None if self._call is None else self._call.outage

    @property
    def missing(self) -> int:
        """Number of inputs of the open call that wait for a service, or are being asked again."""
        call = self._call
        return 0 if call is None or call.outage is None else len(call.missing) + call.outage.asked

    def cancel(self) -> None:
        """Forget all groups that were submitted, and end the workers that score them."""
        self._call = None
        if self._pool is not None and self._pool.pending:
            self._pool.close()

    def _begin(self, call: Call, key: int) -> None:
        """Begin to score a group, except with a function that gets lists."""
        if call.stopped:
            return
        if self._pool is None:
            self._score_all_here(call, call.groups[key])
        elif self._pool.runs.batched:
            return
        elif call.is_silent:
            call.hold(call.groups[key])
        else:
            self._send(self._pool, call, call.groups[key])

    def _send(self, pool: WorkerPool | ServicePool, call: Call, places: Sequence[Place]) -> None:
        """Queue requests for inputs that are scored one by one; all workers share them."""
        alone = pool.runs.batched  # a function of lists that failed with several responses at once
        pool.add([[p] for p in places] if alone else requests_of(places, call.inputs, pool.size), call.inputs)

    def _score_all_here(self, call: Call, places: Sequence[Place]) -> None:
        """Score inputs in this process. A bug ends a strict call."""
        for place in places:
            scored = self._score_here(call.inputs[place])
            call.keep_here(place, scored)
            if call.strict and isinstance(scored[0], Failure) and is_bug(scored[0], {}, call.on_outage):
                call.stopped = True
                return

    def _listen(self, call: Call, timeout: float | None) -> None:
        """Take the workers' outcomes: all of them, or those of the next `timeout` seconds. Ask missing inputs again."""
        pool = self._pool
        if pool is not None and timeout is None and pool.runs.batched and not call.batch_sent:
            call.batch_sent = True
            pool.add([sorted(call.inputs)], call.inputs)
        end = None if timeout is None else time.monotonic() + timeout
        while not call.stopped:
            self._ask_missing(call)
            left = None if end is None else max(0.0, end - time.monotonic())
            if pool is None or not pool.pending:
                if not call.missing or call.outage is None or left is None or left == 0.0:
                    return
                time.sleep(min(left, call.outage.seconds_left))
                continue
            # A message that is on its way may take a moment longer: a pipe holds only a part of an image.
            outcomes = pool.advance(MESSAGE_SECONDS / 10 if left == 0.0 and pool.transfers else left)
            self._take(pool, call, outcomes)
            late = 0.0 if end is None else time.monotonic() - end
            if end is not None and not outcomes and late >= (MESSAGE_SECONDS if pool.transfers else 0.0):
                return

    def _take(self, pool: WorkerPool | ServicePool, call: Call, outcomes: Sequence[tuple[Place, Outcome]]) -> None:
        """Keep outcomes of the workers. Stop the call at a bug if it is strict, and if too many rows are lost."""
        for place, outcome in outcomes:
            call.keep_outcome(place, outcome)
            call.lost_in_a_row = call.lost_in_a_row + 1 if is_lost(outcome) and not pool.runs.batched else 0
            lost_too_often = call.lost_in_a_row == LOST_IN_A_ROW and not self.spec.on_timeout
            bug = is_bug(outcome, self.spec.on_timeout, call.on_outage)
            call.stopped = lost_too_often or (call.strict and bug)
            if call.stopped:
                pool.close()
                return
        if call.is_silent:
            call.hold(pool.hold())

    def _ask_missing(self, call: Call) -> None:
        """Ask missing inputs again, if it is time."""
        batched = self._pool is not None and self._pool.runs.batched
        places = call.next_round(at_once=batched)
        if self._pool is None:
            self._score_all_here(call, places)
        elif places and batched and not call.ran_alone:
            self._pool.add([sorted(places)], call.inputs)
        elif places:
            self._send(self._pool, call, places)
        if call.outage is not None and not call.missing and not call.outage.asked:
            call.outage = None

    def _end(self, call: Call) -> list[tuple[int, list[Score]]]:
        """Return all groups that were not returned yet, and end the call."""
        self.seconds, self.images_left_out = [], 0
        for place in sorted(call.inputs):
            if place in call.outcomes or place in call.here:
                self._score_at(call, place)
        scored = [call.scores[place] for place in sorted(call.scores)]
        scores, self.seconds = [score for score, _ in scored], [seconds for _, seconds in scored]
        self.images_left_out = sum(score.note.endswith(LEFT_OUT) for score in scores)
        judged = [score for score in scores if score.status != "unavailable"]
        if call.strict and judged:
            self._check_call(call, judged)
        self._call = None
        return [(key, self._scores(call, key)) for key in call.groups if key not in call.returned]

    def _check_call(self, call: Call, scores: Sequence[Score]) -> None:
        """Check all scores of a strict call. Raises: RewardError if there is none, or as `check_weights`."""
        if all(score.error is not None for score in scores):
            failure = Failure(CONTRACT, f"it returned None for all {len(scores)} responses of a call")
            raise as_error(failure, self.spec.name, call.rows[min(call.scores)])
        self.check_weights(scores)

    def _scores(self, call: Call, key: int) -> list[Score]:
        """Return the final scores of a group."""
        call.returned.add(key)
        return [self._score_at(call, place) for place in call.groups[key]]

    def _score_at(self, call: Call, place: Place) -> Score:
        """Return the final score of an input. A failure raises if strict, else it is counted.

        Raises: RewardError.
        """
        if place not in call.scores:
            score, seconds = call.here[place] if place in call.here else self._score_of(call.outcomes[place])
            if isinstance(score, Failure):
                if call.strict and is_bug(score, {}, call.on_outage):
                    raise as_error(advised(score, call.inputs[place]), self.spec.name, call.rows[place])
                self.ended = self.ended or (score if score.ends_run else None)
                self.failures += not score.is_outage
                status = "unavailable" if score.is_outage else "failed"
                score = Score(math.nan, {}, error=encodable(str(score)), status=status)
            call.scores[place] = score, seconds
        return call.scores[place][0]

    def _score_here(self, x: RewardInput) -> Scored:
        """Return the score or failure of an input in this process, and the seconds that the function took."""
        start = (clock := time.perf_counter)()
        try:
            result = self.spec.fn(x)
        except Exception as error:
            return failure_of(error), clock() - start
        seconds = clock() - start
        return self._score_of_result(result), seconds

    def _score_of_result(self, result: Any) -> Score | Failure:
        """Return the score of a built-in reward's result. Its details are JSON values; its own tests ensure that."""
        try:
            parts, note, detail, images = split_result(result)
            artifacts, files = read_artifacts(artifact_files(images)) if images else ({}, {})
        except RewardError as error:
            return Failure(CONTRACT, error.message, hint=error.hint)
        return self._valued(parts, note, detail, artifacts, files)

    def _score_of(self, outcome: Outcome) -> Scored:
        """Return the score or failure of a worker's outcome, and the seconds that the function took."""
        if isinstance(outcome, Failure):
            return outcome, 0.0
        if self.spec.user and self.spec.user.style == "trl" and outcome.parts.get("reward") is None:
            return Score(math.nan, {}, encodable(outcome.note), INAPPLICABLE), outcome.seconds
        score = self._valued(outcome.parts, outcome.note, outcome.detail, outcome.artifacts, outcome.files)
        return score, outcome.seconds

    def _valued(
        self,
        returned: Mapping[str, Any],
        note: str,
        detail: Any = None,
        artifacts: Mapping[str, Media] = NOTHING,
        files: Mapping[str, bytes] = NOTHING,
    ) -> Score | Failure:
        """Return the score: parts checked against their ranges and combined with the weights; all else unchanged."""
        note = encodable(note)
        details = None if detail is None else {self.spec.key: detail}
        try:
            parts = check_parts(returned, self.spec.ranges)
            weights = counting_weights(parts, self.weights)
            if not weights.keys() <= parts.keys():
                check_some_weight(parts, weights)
            value = combine({**dict.fromkeys(weights), **parts}, weights)[0]
            return Score(value, parts, note, detail=details, artifacts=artifacts, files=files)
        except RewardError as error:
            return Failure(CONTRACT, error.message, hint=error.hint)

    def check_weights(self, scores: Sequence[Score]) -> None:
        """Check the parts that the recipe names (weights, the accuracy).

        Raises: RewardError for one that none of these scores has and the reward does not declare.
        """
        known = {name for score in scores for name in score.parts} | set(self.spec.ranges)
        place = "WEIGHTS" if self.spec.user is not None and self.weights == self.spec.weights else "[reward.weights]"
        named = [(place, name) for name in self.weights]
        if self.spec.accuracy_named:
            named.append(("[reward] accuracy", str(self.spec.accuracy)))
        for place, name in named:
            if name not in known:
                raise RewardError(
                    f"{place} names the part `{name}`, which reward `{self.spec.name}` does not return",
                    hint=f"its parts: {', '.join(sorted(known))}",
                )

    def _without_unneeded(self, x: RewardInput) -> RewardInput:
        """Return an input without images and ids that the reward does not need: they are most of what would be sent."""
        if x.images and not self.spec.needs_images:
            x = replace(x, images=())
        return replace(x, token_ids=None) if x.token_ids is not None and not self.spec.needs_token_ids else x
