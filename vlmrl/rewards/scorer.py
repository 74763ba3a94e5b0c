"""Scoring of inputs. Training, validation, `try`, `check`, `eval` and `reward-check` all use this code."""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from vlmrl.rewards.sandbox.pool import Failure, Outcome, Result, WorkerPool, as_error
from vlmrl.rewards.sandbox.results import artifact_files, read_artifacts
from vlmrl.types import INAPPLICABLE, Media, RewardInput, Score
from vlmrl.visible import encodable

NOTHING: Mapping[str, Any] = {}
CHUNK = 32
"""Maximum number of inputs in one request to a worker."""
CHUNK_WITH_IMAGES = 4
"""The same if each input carries its images: a megapixel is three megabytes."""
EARNED = "alone too: it earns `on_timeout`"
"""End of the note of a score that is `on_timeout`."""
LOST_IN_A_ROW = 8
"""After so many rows in a row that hung or ended their worker, the rest of the call is not scored, to save hours.

It does not hold where `on_timeout` is declared and the reward has answered before: then the responses are the cause.
"""
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
        if self._pool is not None:
            self._pool.close()

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
        limit = FileLimit(MOST_CALL_BYTES)
        if self._pool is None:
            scored: Iterable[tuple[int, Any]] = enumerate(self._score_here(inputs, limit))
        else:
            outcomes = sorted(self._run_workers(self._pool, inputs, strict, limit).items())
            outcomes = [(i, o if limit.keeps(i) else o.without_images()) for i, o in outcomes]
            scored = ((index, self._score_of(outcome)) for index, outcome in outcomes)
        scores, self.seconds, self.images_left_out = [], [], 0
        for index, (score, seconds) in scored:
            if isinstance(score, Failure):
                if strict:
                    raise as_error(score, self.spec.name, rows[index] if rows else f"row {index}")
                unavailable = score.kind == UNAVAILABLE
                self.failures += not unavailable
                status = "unavailable" if unavailable else "failed"
                score = Score(math.nan, {}, error=encodable(str(score)), status=status)
            self.images_left_out += score.note.endswith(LEFT_OUT)
            scores.append(score)
            self.seconds.append(seconds)
        if strict and scores:
            if all(score.error is not None for score in scores):
                failure = Failure(CONTRACT, f"it returned None for all {len(scores)} responses of a call")
                raise as_error(failure, self.spec.name, rows[0] if rows else "row 0")
            self.check_weights(scores)
        return scores

    def _score_here(self, inputs: Sequence[RewardInput], limit: FileLimit) -> Iterator[tuple[Score | Failure, float]]:
        """Yield the score or failure of each input in this process, and the seconds that the function took."""
        fn, clock = self.spec.fn, time.perf_counter
        for index, x in enumerate(inputs):
            start = clock()
            try:
                result = fn(x)
            except VlmrlError as error:
                kind = UNAVAILABLE if isinstance(error, RewardUnavailable) else CONTRACT
                yield Failure(kind, error.message, hint=error.hint), clock() - start
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                line = f"{Path(last.filename).name}:{last.lineno} in {last.name}: {last.line}"
                yield Failure(type(error).__name__, str(error), (line,)), clock() - start
            else:
                seconds = clock() - start
                yield self._score_of_result(result, index, limit), seconds

    def _score_of_result(self, result: Any, index: int, limit: FileLimit) -> Score | Failure:
        """Return the score of a built-in reward's result. Its details are JSON values; its own tests ensure that."""
        try:
            parts, note, detail, images = split_result(result)
            artifacts, files = read_artifacts(artifact_files(images)) if images else ({}, {})
            if limit.add(index, sum(map(len, files.values()))):  # rows are in order: only the last one can be dropped
                artifacts, files, note = {}, {}, "; ".join(filter(None, (note, LEFT_OUT)))
        except RewardError as error:
            return Failure(CONTRACT, error.message, hint=error.hint)
        return self._valued(parts, note, detail, artifacts, files)

    def _score_of(self, outcome: Outcome) -> tuple[Score | Failure, float]:
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

    def _run_workers(
        self, pool: WorkerPool, inputs: Sequence[RewardInput], strict: bool, limit: FileLimit
    ) -> dict[int, Outcome]:
        """Return outcomes by index; in strict mode only those up to the first failure, perhaps not all of them."""
        inputs = [self._without_unneeded(x) for x in inputs]
        indices = range(len(inputs))
        if pool.runs.batched:
            batches = [indices]
        else:
            most = CHUNK_WITH_IMAGES if self.spec.needs_images else CHUNK
            size = max(1, min(most, -(-len(inputs) // pool.size)))
            batches = [indices[i : i + size] for i in range(0, len(inputs), size)]
        run_of_lost = 0

        def give_up(outcome: Outcome) -> bool:
            nonlocal run_of_lost
            run_of_lost = run_of_lost + 1 if _is_lost(outcome) and not pool.runs.batched else 0
            self._answers = self._answers or isinstance(outcome, Result)
            responses_hang = self.spec.on_timeout and self._answers
            return (strict and self._is_bug(outcome)) or (run_of_lost == LOST_IN_A_ROW and not responses_hang)

        outcomes = pool.run(batches, inputs, give_up, limit=limit)
        if strict and any(map(self._is_bug, outcomes.values())):
            return {i: o for i, o in outcomes.items() if isinstance(o, Result) or self._is_bug(o)}
        lost = [i for i, outcome in outcomes.items() if _is_lost(outcome)]
        raised = [o for o in outcomes.values() if isinstance(o, Failure) and o.kind not in (CONTRACT, UNAVAILABLE)]
        if pool.runs.batched and len(inputs) > 1 and len(raised) == len(inputs):
            alone = self._run_alone(pool, inputs, limit)
            return self._with_timeout_scores(outcomes | alone, [i for i in lost if i in alone])
        if self.spec.on_timeout and lost:
            again = pool.run([[i] for i in lost], inputs, lambda outcome: False, fresh=True, limit=limit)
            outcomes = self._with_timeout_scores(outcomes | {i: _noted(o, outcomes[i]) for i, o in again.items()}, lost)
        if len(outcomes) < len(inputs):
            message = f"not scored: the worker had been lost {LOST_IN_A_ROW} times in a row"
            outcomes = {i: outcomes.get(i, Failure("", message)) for i in indices}
        return outcomes

    def _is_bug(self, outcome: Outcome) -> bool:
        """Return whether the reward failed. With `on_timeout`, a response that hangs is not a failure of the reward."""
        return isinstance(outcome, Failure) and not (self.spec.on_timeout and outcome.is_lost)

    def _with_timeout_scores(self, outcomes: dict[int, Outcome], lost: Sequence[int]) -> dict[int, Outcome]:
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

    def _run_alone(self, pool: WorkerPool, inputs: Sequence[RewardInput], limit: FileLimit) -> dict[int, Outcome]:
        """Score each row in a call of its own.

        After too many failures in a row, the others keep the batch call's failure.
        """
        outcomes: dict[int, Outcome] = {}
        failed = 0
        for index in range(len(inputs)):
            outcome = pool.run([[index]], inputs, lambda _: False, limit=limit)[index]
            failed = failed + 1 if isinstance(outcome, Failure) else 0
            if isinstance(outcome, Result):
                note = "; ".join(filter(None, (outcome.note, "scored alone: the batch call failed")))
                outcome = replace(outcome, note=note)
            outcomes[index] = outcome
            if failed == ALONE_FAILURES:
                break
        return outcomes


def earned_on_timeout(score: Score) -> bool:
    """Return whether a score is `on_timeout`: the response hung or killed the worker twice."""
    return score.note.endswith(EARNED)


def _is_lost(outcome: Outcome) -> bool:
    return isinstance(outcome, Failure) and outcome.is_lost


def _noted(outcome: Outcome, before: Outcome) -> Outcome:
    """Return the result of a row that was scored again alone, with a note that says why."""
    if not isinstance(outcome, Result) or not isinstance(before, Failure):
        return outcome
    return replace(outcome, note="; ".join(filter(None, (outcome.note, f"asked again alone: {before.message}"))))
