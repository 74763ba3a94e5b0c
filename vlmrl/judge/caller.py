"""Calls of a judge: at most so many at once, each within the budget, with pauses that hold for all of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vlmrl.endpoint.chat import ChatAnswer, ChatRequest
from vlmrl.endpoint.failures import EndpointError, EndpointRejects, RequestRefused
from vlmrl.judge.attempts import Pauses
from vlmrl.judge.breaker import Breaker, Turn
from vlmrl.judge.budget import Budget, Reservation
from vlmrl.judge.counters import Counting
from vlmrl.judge.failures import JudgeRejected, NoVerdict
from vlmrl.judge.file_thread import FileThread
from vlmrl.judge.provider import Provider
from vlmrl.judge.settings import JudgeSettings

FULL_SECONDS = 0.1
"""Pause before a call asks again for a place in the budget that calls in flight may set free."""
PICTURE_TOKENS = 1600
"""Expected tokens of a picture, until the endpoint has counted some."""
CHARS_PER_TOKEN = 2


@dataclass(frozen=True)
class Called:
    """Answered call. `seconds`: its duration."""

    answer: ChatAnswer
    seconds: float


class Caller:
    """Sender of chats for one event loop.

    Args:
        file: thread in which the budget is asked.
        breaker: circuit breaker that is asked before each call.
        pauses, rng: lengths of pauses, and the source of their jitter.
        counting: gets the calls, retries, tokens, cost and seconds.
        notify: called with a line for the user when the circuit opens and closes.
    """

    def __init__(
        self,
        settings: JudgeSettings,
        provider: Provider,
        budget: Budget,
        *,
        file: FileThread,
        breaker: Breaker,
        pauses: Pauses,
        rng: random.Random,
        counting: Counting,
        notify: Callable[[str], Any],
    ) -> None:
        self._settings, self._provider, self._budget, self._file = settings, provider, budget, file
        self._breaker, self._pauses, self._rng = breaker, pauses, rng
        self._counting, self._notify = counting, notify
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._rejected: JudgeRejected | None = None
        self._has_answered, self._calm_from = False, 0.0

    async def call(self, chat: ChatRequest, *, is_first: bool) -> Called | None:
        """Send a chat once. Return None if it was not sent, because the circuit is open.

        Args:
            is_first: it is the first call of its request.
        Raises: as `send`.
        """
        async with self._slots:
            while (seconds := self._calm_from - time.monotonic()) > 0:
                await asyncio.sleep(seconds + self._pauses.first * self._rng.uniform(0.0, 0.5))
            turn = self._breaker.take()
            return None if turn is None else await self.send(chat, turn, is_first=is_first)

    async def send(self, chat: ChatRequest, turn: Turn, *, is_first: bool = True) -> Called:
        """Send a chat at once, within the budget, and end the turn.

        Raises: BudgetSpent, JudgeRejected for a mistake in the settings, NoVerdict for a refused request; EndpointDown
            or BrokenAnswer for a call that may be repeated.
        """
        reservation = None
        try:
            if self._rejected is not None:
                raise self._rejected
            reservation = await self._reserve(chat)
            self._counting.add(calls=1, retries=0 if is_first else 1)
            begin = time.monotonic()
            try:
                answer = await self._provider.ask(chat)
            finally:
                seconds = time.monotonic() - begin
                self._counting.add(seconds=seconds)
        except EndpointError as error:
            await self._note_failure(error, turn, reservation)
            raise self._judged(error) from None
        except BaseException:
            # A call that was cancelled in flight keeps its reservation: it counts in full after its time.
            self._breaker.leave(turn)
            raise
        if self._breaker.is_open:
            self._notify("the judge answers again")
        self._breaker.answer()
        self._has_answered = True
        tokens = answer.prompt_tokens, answer.num_tokens
        await self._settle(reservation, *tokens)
        self._counting.add(input_tokens=tokens[0] or 0, output_tokens=tokens[1] or 0)
        return Called(answer, seconds)

    async def _settle(self, reservation: Reservation, input_tokens: int | None, output_tokens: int | None) -> None:
        """Count the cost of a call that was answered, or may have been; None = the number is not known."""
        cost = await self._file.run(self._budget.settle, reservation, input_tokens, output_tokens)
        is_known = input_tokens is not None and output_tokens is not None
        self._counting.add(cost=cost, **({} if is_known else {"assumed": 1, "assumed_cost": cost}))

    async def close(self) -> None:
        """Close the provider."""
        await self._provider.close()

    async def _reserve(self, chat: ChatRequest) -> Reservation:
        tokens = expected_tokens(chat)
        while (reservation := await self._file.run(self._budget.reserve, tokens, chat.max_tokens)) is None:
            await asyncio.sleep(FULL_SECONDS)
        return reservation

    async def _note_failure(self, error: EndpointError, turn: Turn, reservation: Reservation | None) -> None:
        """End the turn and the reservation of a call that failed. A Retry-After holds for all calls."""
        if isinstance(error, (RequestRefused, EndpointRejects)):
            self._breaker.answer()
        elif error.is_busy:
            self._breaker.leave(turn)
        elif self._breaker.fail(turn):
            self._notify(f"the judge fails: {error.message}; from now on one request at a time tries it again")
        wished = min(error.retry_after, self._pauses.most_retry_after)
        self._calm_from = max(self._calm_from, time.monotonic() + wished)
        if reservation is None:
            return
        if error.may_be_charged:
            await self._settle(reservation, None, None)
        else:
            await self._file.run(self._budget.give_back, reservation)

    def _judged(self, error: EndpointError) -> Exception:
        """Return the error of the judge for one of the endpoint; an outage stays what it is."""
        message, where = error.message, error.where
        if isinstance(error, EndpointRejects):
            self._rejected = JudgeRejected(f"the judge cannot be used: {message}", where=where, hint=error.hint)
            return self._rejected
        if isinstance(error, RequestRefused):
            if self._has_answered:
                return NoVerdict(f"the judge refuses the request: {message}", where=where)
            hint = f"does the model `{self._settings.name}` read images, take a JSON schema and this temperature?"
            return JudgeRejected(f"the judge refuses the first request: {message}", where=where, hint=hint)
        return error


def expected_tokens(chat: ChatRequest) -> int:
    """Return a rough upper number of the tokens of a prompt, until the endpoint has counted some."""
    parts = [part for turn in chat.turns for part in turn.parts]
    texts = sum(len(part) for part in parts if isinstance(part, str))
    return texts // CHARS_PER_TOKEN + PICTURE_TOKENS * sum(not isinstance(part, str) for part in parts)
