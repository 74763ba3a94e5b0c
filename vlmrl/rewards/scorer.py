"""Scoring of inputs. Training, validation, `try`, `check`, `eval` and `reward-check` all use this code."""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from vlmrl.errors import RewardError, RewardUnavailable, VlmrlError
from vlmrl.rewards.base import (
    RewardSpec,
    check_parts,
    check_weight_sizes,
    combine,
    counting_weights,
    split_result,
)
from vlmrl.rewards.file_limit import LEFT_OUT, MOST_CALL_BYTES, FileLimit
from vlmrl.rewards.sandbox.frames import CONTRACT, UNAVAILABLE
from vlmrl.rewards.sandbox.outcomes import Failure, Outcome, Place, Result, as_error
from vlmrl.rewards.sandbox.pool import WorkerPool
from vlmrl.rewards.sandbox.results import artifact_files, read_artifacts
from vlmrl.rewards.scoring_call import EARNED, Call, Scored, is_lost, noted
from vlmrl.types import INAPPLICABLE, Media, RewardInput, Score
from vlmrl.visible import encodable

NOTHING: Mapping[str, Any] = {}
CHUNK = 32
"""Maximum number of inputs in one request to a worker."""
CHUNK_WITH_IMAGES = 4
"""The same if each input carries its images: a megapixel is three megabytes."""
LOST_IN_A_ROW = 8
"""After so many rows in a row that hung or ended their worker, the rest of the call is not scored, to save hours. All
rows are scored if the reward has `on_timeout` and has answered before: then the responses are the cause."""
MESSAGE_SECONDS = 0.05
"""Additional time in which `collect` listens while a message is being sent or received, in seconds."""
ALONE_FAILURES = 3
"""After a failed batch call each row is scored alone, until this many rows in a row have failed."""


class Scorer:
    """Scorer of responses with one reward. As a context manager it ends the reward's worker processes.

    Args:
        spec: the reward.
        weights: part -> weight, used as given; None or empty: the reward's own (see `RewardSpec.weights`).
        timeout_seconds: wall clock limit for one call in a worker; then the worker is ended and another one started.
            A built-in's own limit holds where it is shorter.
        memory_mb: address space of one worker, in MiB.
        workers: number of worker processes.
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
    ) -> None:
        self.spec, self.weights = spec, dict(weights or spec.weights)
        check_weight_sizes(self.weights, spec.name)
        self.failures = 0
        self.seconds: list[float] = []
        self.images_left_out = 0
        self._pool = None
        self._answers = spec.is_builtin
        self._call: Call | None = None
        if spec.in_worker is not None:
            if spec.on_timeout and isinstance(price := self._valued(spec.on_timeout, ""), Failure):
                raise RewardError(f"on_timeout cannot be used: {price.message}", where=spec.name, hint=price.hint)
            seconds = min(timeout_seconds, spec.timeout_seconds)
            self._pool = WorkerPool(spec.in_worker, size=workers, memory_mb=memory_mb, timeout_seconds=seconds)

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        self._call = None
        if self._pool is not None:
            self._pool.close()

    @property
    def is_idle(self) -> bool:
        """Whether no worker has anything to do, or will have before `collect()`."""
        return self._pool is None or not self._pool.pending

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
        self, key: int, inputs: Sequence[RewardInput], *, strict: bool = False, rows: Sequence[str] | None = None
    ) -> None:
        """Begin to score a group while others are still generated. A call is all groups up to `collect()`.

        Workers score while the caller does other work; a built-in reward scores here. A function that gets lists is
        called by `collect()`, once, with all groups.

        Args:
            key: the group's position in the call; the groups may come in any order.
            strict, rows: as in `score`.
        """
        if self._call is None:
            self._call = Call(strict, FileLimit(MOST_CALL_BYTES))
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
                will come: wait for all, end the call, and return all groups that were not returned yet.
        Raises: as `score`. The call has ended then.
        """
        call = self._call
        if call is None:
            return []
        try:
            if self._pool is not None:
                self._listen(self._pool, call, timeout)
            if timeout is not None and not (call.strict and call.stopped):
                return [(key, self._scores(call, key)) for key in call.complete(again=bool(self.spec.on_timeout))]
            return self._end(call)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Forget all groups that were submitted, and end the workers that score them."""
        self._call = None
        if self._pool is not None and self._pool.pending:
            self._pool.close()

    def _begin(self, call: Call, key: int) -> None:
        """Begin to score a group, except with a function that gets lists."""
        places = call.groups[key]
        if call.stopped:
            return
        if self._pool is None:
            for place in places:
                call.keep_here(place, self._score_here(call.inputs[place]))
                if call.strict and isinstance(call.here[place][0], Failure):
                    call.stopped = True
                    return
        elif not self._pool.runs.batched:
            most = CHUNK_WITH_IMAGES if self.spec.needs_images else CHUNK
            size = max(1, min(most, -(-len(places) // self._pool.size)))
            batches = [places[i : i + size] for i in range(0, len(places), size)]
            self._pool.add(batches, call.inputs)

    def _listen(self, pool: WorkerPool, call: Call, timeout: float | None) -> None:
        """Take the workers' outcomes: all of them, or those of the next `timeout` seconds."""
        if timeout is None and pool.runs.batched:
            pool.add([sorted(call.inputs)], call.inputs)
        end = None if timeout is None else time.monotonic() + timeout
        while pool.pending and not call.stopped:
            left = None if end is None else max(0.0, end - time.monotonic())
            # A message that is on its way may take a moment longer: a pipe holds only a part of an image.
            outcomes = pool.advance(MESSAGE_SECONDS / 10 if left == 0.0 and pool.transfers else left)
            for place, outcome in outcomes:
                call.keep_outcome(place, outcome)
                call.lost_in_a_row = call.lost_in_a_row + 1 if is_lost(outcome) and not pool.runs.batched else 0
                self._answers = self._answers or isinstance(outcome, Result)
                lost_too_often = call.lost_in_a_row == LOST_IN_A_ROW and not (self.spec.on_timeout and self._answers)
                call.stopped = lost_too_often or (call.strict and self._is_bug(outcome))
                if call.stopped:
                    pool.close()
                    return
            late = 0.0 if end is None else time.monotonic() - end
            if end is not None and not outcomes and late >= (MESSAGE_SECONDS if pool.transfers else 0.0):
                return

    def _end(self, call: Call) -> list[tuple[int, list[Score]]]:
        """Return all groups that were not returned yet, and end the call."""
        if self._pool is not None:
            call.outcomes = self._settled(self._pool, call)
        self.seconds, self.images_left_out = [], 0
        for place in sorted(call.inputs):
            if place in call.outcomes or place in call.here:
                self._score_at(call, place)
        scores = [call.scores[place][0] for place in sorted(call.scores)]
        self.seconds = [call.scores[place][1] for place in sorted(call.scores)]
        self.images_left_out = sum(score.note.endswith(LEFT_OUT) for score in scores)
        if call.strict and scores:
            if all(score.error is not None for score in scores):
                failure = Failure(CONTRACT, f"it returned None for all {len(scores)} responses of a call")
                raise as_error(failure, self.spec.name, call.rows[min(call.scores)])
            self.check_weights(scores)
        self._call = None
        return [(key, self._scores(call, key)) for key in call.groups if key not in call.returned]

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
                if call.strict:
                    raise as_error(score, self.spec.name, call.rows[place])
                unavailable = score.kind == UNAVAILABLE
                self.failures += not unavailable
                status = "unavailable" if unavailable else "failed"
                score = Score(math.nan, {}, error=encodable(str(score)), status=status)
            call.scores[place] = score, seconds
        return call.scores[place][0]

    def _score_here(self, x: RewardInput) -> Scored:
        """Return the score or failure of an input in this process, and the seconds that the function took."""
        clock = time.perf_counter
        start = clock()
        try:
            result = self.spec.fn(x)
        except VlmrlError as error:
            kind = UNAVAILABLE if isinstance(error, RewardUnavailable) else CONTRACT
            return Failure(kind, error.message, hint=error.hint), clock() - start
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            line = f"{Path(last.filename).name}:{last.lineno} in {last.name}: {last.line}"
            return Failure(type(error).__name__, str(error), (line,)), clock() - start
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
                self._check_some_weight(parts, weights)
                value = combine({**dict.fromkeys(weights), **parts}, weights)[0]
            else:
                value = combine(parts, weights)[0]
            return Score(value, parts, note, detail=details, artifacts=artifacts, files=files)
        except RewardError as error:
            return Failure(CONTRACT, error.message, hint=error.hint)

    def _check_some_weight(self, parts: Mapping[str, float | None], weights: Mapping[str, float]) -> None:
        """Raise a RewardError when the weights name none of the parts that were returned."""
        if parts and not parts.keys() & weights.keys():
            weighted, returned = ", ".join(weights), ", ".join(parts)
            raise RewardError(
                f"its weights name {weighted}, but the parts that it returned are: {returned}",
                hint="correct [reward.weights], or return a part of that name",
            )

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

    def _settled(self, pool: WorkerPool, call: Call) -> dict[Place, Outcome]:
        """Return the outcomes after second tries; in strict mode, if there is a failure, perhaps not all."""
        outcomes = call.outcomes
        if call.strict and any(map(self._is_bug, outcomes.values())):
            return {place: o for place, o in outcomes.items() if isinstance(o, Result) or self._is_bug(o)}
        lost = [place for place, outcome in outcomes.items() if is_lost(outcome)]
        raised = [o for o in outcomes.values() if isinstance(o, Failure) and o.kind not in (CONTRACT, UNAVAILABLE)]
        if pool.runs.batched and len(call.inputs) > 1 and len(raised) == len(call.inputs):
            alone = self._run_alone(pool, call)
            return self._with_timeout_scores(outcomes | alone, [place for place in lost if place in alone])
        if self.spec.on_timeout and lost:
            for place, outcome in pool.run([[place] for place in lost], call.inputs, fresh=True).items():
                call.keep_outcome(place, noted(outcome, outcomes[place]))
            outcomes = self._with_timeout_scores(outcomes, lost)
        missing = Failure("", f"not scored: the worker had been lost {LOST_IN_A_ROW} times in a row")
        return {place: outcomes.get(place, missing) for place in call.inputs}

    def _is_bug(self, outcome: Outcome) -> bool:
        """Return whether the reward failed. With `on_timeout`, a response that hangs is not a failure of the reward."""
        return isinstance(outcome, Failure) and not (self.spec.on_timeout and outcome.is_lost)

    def _with_timeout_scores(self, outcomes: dict[Place, Outcome], lost: Sequence[Place]) -> dict[Place, Outcome]:
        """Return the outcomes with `on_timeout` for those that were `lost` once, and again when they were alone.

        A reward that has never answered hangs by itself: its responses stay without a score.
        """
        self._answers = self._answers or any(isinstance(o, Result) for o in outcomes.values())
        if not (self.spec.on_timeout and self._answers):
            return outcomes
        priced = {i: o for i in lost if isinstance(o := outcomes[i], Failure) and o.is_lost}
        parts: dict[str, float | None] = {**self.spec.on_timeout}
        notes = {i: f"{failure.message}; {EARNED}" for i, failure in priced.items()}
        return outcomes | {i: Result(parts, notes[i], 0.0) for i in priced}

    def _without_unneeded(self, x: RewardInput) -> RewardInput:
        """Return an input without images and ids that the reward does not need: they are most of what would be sent."""
        if x.images and not self.spec.needs_images:
            x = replace(x, images=())
        return replace(x, token_ids=None) if x.token_ids is not None and not self.spec.needs_token_ids else x

    def _run_alone(self, pool: WorkerPool, call: Call) -> dict[Place, Outcome]:
        """Score each row in a call of its own.

        After too many failures in a row, the others keep the batch call's failure.
        """
        failed, places = 0, sorted(call.inputs)
        for index, place in enumerate(places):
            outcome = pool.run([[place]], call.inputs)[place]
            failed = failed + 1 if isinstance(outcome, Failure) else 0
            if isinstance(outcome, Result):
                note = "; ".join(filter(None, (outcome.note, "scored alone: the batch call failed")))
                outcome = replace(outcome, note=note)
            call.keep_outcome(place, outcome)
            if failed == ALONE_FAILURES:
                places = places[: index + 1]
                break
        return {place: call.outcomes[place] for place in places}
