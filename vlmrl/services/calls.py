"""Calls of a judge: at most so many at once, each within the budget, with pauses that hold for all of them.

After several failures in a row, one request at a time tries the endpoint, with growing pauses (circuit breaker). The
budget is that of all processes together. A call is reserved before it is sent, with the largest cost that it is
expected to have. When the answer is there, the reservation becomes what the call did cost; when the endpoint has
certainly not worked on the request, it is given back. That of a process that was killed counts in full after its time.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.recipe.tables import Prices
from vlmrl.services.client import Pauses
from vlmrl.services.judge_database import FileThread
from vlmrl.services.judge_settings import JudgeSettings
from vlmrl.services.protocol import (
    BudgetSpent,
    ChatAnswer,
    ChatRequest,
    EndpointError,
    EndpointRejects,
    JudgeDown,
    JudgeRejected,
    NoJudgement,
    RequestRefused,
)
from vlmrl.services.providers import Provider
from vlmrl.services.shared_file import Database, open_to_read

OPEN = "the judge has failed several times in a row, and one request at a time is sent to test it"


class Attempts:
    """Attempts of one request.

    Args:
        settings: the number of attempts, and whether an outage is waited for.
        rng: source of the jitter: pauses are drawn between half of their length and all of it.
        clock: seconds of a clock that never goes back.

    Attributes:
        failed: number of attempts so far that failed, or could not be sent because the circuit is open.
    """

    def __init__(
        self,
        settings: JudgeSettings,
        pauses: Pauses,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._pauses, self._rng, self._clock = settings, pauses, rng, clock
        self.failed, self._since = 0, 0.0

    def pause_after(self, failure: EndpointError | None) -> float:
        """Return the pause before the next attempt, in seconds.

        Args:
            failure: failure of this attempt; None = it was not sent, because the circuit is open.
        Raises: JudgeDown, because of the failure, when there is no further attempt.
        """
        now = self._clock()
        self._since = self._since if self.failed else now
        self.failed += 1
        waits = self._settings.outage == "wait"
        limit = 60 * self._settings.outage_minutes
        if now - self._since >= limit if waits else self.failed >= self._settings.attempts:
            message = failure.message if failure is not None else OPEN
            times = f"{self.failed} attempts" if self.failed > 1 else "1 attempt"
            where = failure.where if failure is not None else None
            raise JudgeDown(f"the judge gave no judgement in {times}: {message}", where=where) from failure
        return self._pauses.after(self.failed, failure.retry_after if failure is not None else 0.0, self._rng)


FAILURES = 8
"""Failures in a row after which the circuit opens."""
FIRST_PROBE_SECONDS, MOST_PROBE_SECONDS = 1.0, 30.0
"""Pause before the first probe, and the longest pause. It doubles with every probe that fails."""


@dataclass(frozen=True)
class Turn:
    """Permission to send one request. `is_probe`: it tries an endpoint that has failed."""

    is_probe: bool


class Breaker:
    """Circuit breaker of one endpoint, for one event loop.

    While the circuit is closed, all requests are sent. While it is open, one probe is sent after each pause. Any answer
    of the endpoint closes it.

    Args:
        failures: failures in a row after which the circuit opens.
        first_seconds, most_seconds: pause before the first probe, and the longest pause.
        rng: source of the jitter: pauses are drawn between half of their length and all of it.
        clock: seconds of a clock that never goes back.

    Attributes:
        opened: number of times that the circuit has opened.
    """

    def __init__(
        self,
        *,
        failures: int = FAILURES,
        first_seconds: float = FIRST_PROBE_SECONDS,
        most_seconds: float = MOST_PROBE_SECONDS,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_failures, self._first, self._most = failures, first_seconds, most_seconds
        self._rng, self._clock = rng or random.Random(), clock
        self._failures, self._pause, self._next, self._is_probing = 0, first_seconds, 0.0, False
        self._closed = asyncio.Event()
        self._closed.set()
        self.opened = 0

    @property
    def is_open(self) -> bool:
        """Return whether requests wait for a probe."""
        return not self._closed.is_set()

    def take(self) -> Turn | None:
        """Return the turn of a request that may be sent now; None while the circuit is open and no probe is due.

        Whoever takes a turn must end it with `answer`, `fail` or `leave`.
        """
        if not self.is_open:
            return Turn(is_probe=False)
        if self._is_probing or self._clock() < self._next:
            return None
        self._is_probing = True
        return Turn(is_probe=True)

    def answer(self) -> None:
        """Note that the endpoint has answered: the circuit closes."""
        self._failures, self._pause, self._is_probing = 0, self._first, False
        self._closed.set()

    def fail(self, turn: Turn) -> bool:
        """Note a failure. Return whether it has opened the circuit."""
        if self.is_open:
            if turn.is_probe:
                self._pause = min(2 * self._pause, self._most)
                self._plan()
                self._is_probing = False
            return False
        self._failures += 1
        if self._failures < self._most_failures:
            return False
        self._closed.clear()
        self.opened += 1
        self._plan()
        return True

    def leave(self, turn: Turn) -> None:
        """Note that a request says nothing about the endpoint: it was not sent, was cancelled, or met a busy server."""
        self._is_probing = self._is_probing and not turn.is_probe

    async def wait(self, seconds: float) -> None:
        """Wait, at most until the circuit closes if it is open."""
        if not self.is_open:
            await asyncio.sleep(seconds)
            return
        with suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(self._closed.wait(), seconds)

    def seconds_left(self) -> float:
        """Return the seconds until the next probe is due."""
        return max(0.0, self._next - self._clock())

    def _plan(self) -> None:
        self._next = self._clock() + self._pause * self._rng.uniform(0.5, 1.0)


LONGEST_HOLD = 7200.0
"""Seconds, longer than any call may take. A reservation that ends later is from before the clock was set back."""
MARGIN = 1.25
"""Expected tokens of a prompt, as a multiple of the largest prompt that was counted so far."""


@dataclass(frozen=True)
class Spent:
    """Calls of an account that may have been charged, with their cost and their tokens, in all processes.

    Args:
        reserved: number of calls that are in flight.
    """

    calls: int
    cost: float
    input_tokens: int
    output_tokens: int
    reserved: int = 0


def spent_in(path: Path) -> dict[str, Spent]:
    """Return account -> what it has spent, as a file of judgements says; {} if there is no such file, or no account.

    A file that another process writes may be read. Raises: RewardError for a file that cannot be read.
    """
    if not path.is_file():
        return {}
    try:
        with closing(open_to_read(path)) as connection:
            query = "SELECT account, calls, cost, input_tokens, output_tokens FROM spent"
            spent = {name: Spent(*sums) for name, *sums in connection.execute(query)}
            open_calls = dict(connection.execute("SELECT account, count(*) FROM reserved GROUP BY account"))
    except sqlite3.Error as error:
        raise RewardError(f"the judge's file cannot be read: {error}", where=str(path)) from None
    nothing = Spent(0, 0.0, 0, 0)
    names = sorted({*spent, *open_calls})
    return {name: replace(spent.get(name, nothing), reserved=open_calls.get(name, 0)) for name in names}


@dataclass(frozen=True)
class Reservation:
    """Call that may be sent. `cost`: its largest expected cost."""

    number: int
    cost: float


class Budget:
    """Budget of one account.

    Args:
        account: name of what is counted together, such as the id of a run.
        max_calls, max_cost: limits; None = none.
        prices: price of the tokens; None = they cost nothing.
        hold_seconds: time after which a reservation counts in full: longer than a call can take.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        database: Database,
        *,
        account: str,
        max_calls: int | None,
        max_cost: float | None,
        prices: Prices | None,
        hold_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database, self._account = database, account
        self._max_calls, self._max_cost = max_calls, max_cost
        self._prices, self._hold_seconds, self._clock = prices, hold_seconds, clock

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """Return the cost of a call, in the currency of the prices; 0 without prices."""
        if self._prices is None:
            return 0.0
        return (input_tokens * self._prices.input + output_tokens * self._prices.output) / 1_000_000

    def reserve(self, input_tokens: int, output_tokens: int) -> Reservation | None:
        """Reserve a call before it is sent. Return None if it must wait for calls in flight, which may cost less.

        Args:
            input_tokens: expected tokens of the prompt.
            output_tokens: token limit of the answer.
        Raises: BudgetSpent when the call does not fit, even if the calls in flight cost nothing.
        """

        def work(connection: sqlite3.Connection) -> Reservation | None:
            now = self._clock()
            self._count_forgotten(connection, now)
            query = "SELECT calls, cost, largest_input FROM spent WHERE account = ?"
            calls, spent_cost, largest = connection.execute(query, (self._account,)).fetchone() or (0, 0.0, 0)
            expected = max(input_tokens, round(MARGIN * largest))
            cost = self.cost(expected, output_tokens)
            total = "SELECT count(*), coalesce(sum(cost), 0) FROM reserved WHERE account = ?"
            open_calls, open_cost = connection.execute(total, (self._account,)).fetchone()
            self._check(calls, spent_cost, cost)
            if self._max_calls is not None and calls + open_calls + 1 > self._max_calls:
                return None
            if self._max_cost is not None and spent_cost + open_cost + cost > self._max_cost:
                return None
            insert = "INSERT INTO reserved (account, cost, until) VALUES (?, ?, ?)"
            number = connection.execute(insert, (self._account, cost, now + self._hold_seconds)).lastrowid
            return Reservation(int(number or 0), cost)

        return self._database.run(work)

    def settle(self, reservation: Reservation, input_tokens: int | None, output_tokens: int | None) -> float:
        """Count a call that was answered, or may have been. Return its cost.

        Args:
            input_tokens, output_tokens: as the endpoint counts them; None = it does not say: the expected cost counts.
        """
        known = input_tokens is not None and output_tokens is not None
        cost = self.cost(input_tokens or 0, output_tokens or 0) if known else reservation.cost

        def work(connection: sqlite3.Connection) -> float:
            if self._drop(connection, reservation):  # else it has already been counted in full
                self._add(connection, 1, cost, input_tokens or 0, output_tokens or 0)
            return cost

        return self._database.run(work)

    def give_back(self, reservation: Reservation) -> None:
        """Drop a reservation whose call was not sent, or was refused with an error status."""
        self._database.run(lambda connection: self._drop(connection, reservation))

    def spent(self) -> Spent:
        """Return what all processes have spent."""

        def work(connection: sqlite3.Connection) -> Spent:
            self._count_forgotten(connection, self._clock())
            query = "SELECT calls, cost, input_tokens, output_tokens FROM spent WHERE account = ?"
            calls, cost, inputs, outputs = connection.execute(query, (self._account,)).fetchone() or (0, 0.0, 0, 0)
            count = "SELECT count(*) FROM reserved WHERE account = ?"
            in_flight = connection.execute(count, (self._account,)).fetchone()[0]
            return Spent(int(calls), float(cost), int(inputs), int(outputs), int(in_flight))

        return self._database.run(work)

    def _check(self, calls: int, spent_cost: float, cost: float) -> None:
        if self._max_calls is not None and calls + 1 > self._max_calls:
            raise BudgetSpent(
                f"the judge's budget is spent: {calls:,} of {self._max_calls:,} calls",
                hint="raise the limit: --set judge.max_calls=N; stored judgements are not asked for again",
            )
        if self._max_cost is not None and spent_cost + cost > self._max_cost:
            raise BudgetSpent(
                f"the judge's budget is spent: {spent_cost:.4f} of {self._max_cost:g}, and the next call may cost "
                f"{cost:.4f}",
                hint="raise the limit: --set judge.max_cost=N; stored judgements are not asked for again",
            )

    def _drop(self, connection: sqlite3.Connection, reservation: Reservation) -> bool:
        return connection.execute("DELETE FROM reserved WHERE id = ?", (reservation.number,)).rowcount > 0

    def _add(
        self, connection: sqlite3.Connection, calls: int, cost: float, input_tokens: int, output_tokens: int
    ) -> None:
        values = {"account": self._account, "calls": calls, "cost": cost}
        connection.execute(
            "INSERT INTO spent VALUES (:account, :calls, :cost, :input, :output, :input) ON CONFLICT (account) DO "
            "UPDATE SET calls = calls + :calls, cost = cost + :cost, input_tokens = input_tokens + :input, "
            "output_tokens = output_tokens + :output, largest_input = max(largest_input, :input)",
            values | {"input": input_tokens, "output": output_tokens},
        )

    def _count_forgotten(self, connection: sqlite3.Connection, now: float) -> None:
        """Count reservations of killed processes in full: their calls may have been sent."""
        old = "FROM reserved WHERE account = ? AND (until < ? OR until > ?)"
        values = (self._account, now, now + LONGEST_HOLD)
        calls, cost = connection.execute(f"SELECT count(*), coalesce(sum(cost), 0) {old}", values).fetchone()
        if calls:
            connection.execute(f"DELETE {old}", values)
            self._add(connection, calls, cost, 0, 0)


@dataclass(frozen=True)
class Counters:
    """Counts of one service since it began.

    Args:
        calls: calls that were sent, whatever came back.
        cached: requests that the cache answered.
        deduped: requests that shared the call of an equal request in flight.
        retries: calls after the first one of their request.
        invalid: answers that were no judgement.
        unavailable: requests without a judgement, those that score 0 for an outage included.
        opened: times that the circuit opened.
        input_tokens, output_tokens: tokens of answered calls, as the endpoint counts them.
        cost: cost of the calls, by the prices of the settings.
        assumed: calls whose tokens are not known, because no answer came, or one without their number.
        assumed_cost: what they may have cost at most; it is part of `cost`.
        seconds: sum of the durations of the calls.
    """

    calls: int = 0
    cached: int = 0
    deduped: int = 0
    retries: int = 0
    invalid: int = 0
    unavailable: int = 0
    opened: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    assumed: int = 0
    assumed_cost: float = 0.0
    seconds: float = 0.0


class Counting:
    """Counters that several threads read while one adds to them."""

    def __init__(self) -> None:
        self._counters, self._lock = Counters(), threading.Lock()

    def add(self, **more: float) -> None:
        """Add to counters by their names."""
        with self._lock:
            sums = {name: getattr(self._counters, name) + number for name, number in more.items()}
            self._counters = replace(self._counters, **sums)

    def now(self) -> Counters:
        """Return the counts so far."""
        with self._lock:
            return self._counters


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

        Raises: BudgetSpent, JudgeRejected for a mistake in the settings, NoJudgement for a refused request;
            EndpointDown or BrokenAnswer for a call that may be repeated.
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
        await self._count_cost(reservation, *tokens)
        self._counting.add(input_tokens=tokens[0] or 0, output_tokens=tokens[1] or 0)
        return Called(answer, seconds)

    async def _count_cost(self, reservation: Reservation, input_tokens: int | None, output_tokens: int | None) -> None:
        """Count the cost of a call that was answered, or may have been; None = the number is not known."""
        cost = await self._file.run(self._budget.settle, reservation, input_tokens, output_tokens)
        is_known = input_tokens is not None and output_tokens is not None
        self._counting.add(cost=cost, **({} if is_known else {"assumed": 1, "assumed_cost": cost}))

    async def close(self) -> None:
        """Close the provider."""
        await self._provider.close()

    async def _reserve(self, chat: ChatRequest) -> Reservation:
        # A rough upper number of the prompt's tokens, until the endpoint has counted some.
        parts = [part for turn in chat.turns for part in turn.parts]
        texts = sum(len(part) for part in parts if isinstance(part, str))
        tokens = texts // CHARS_PER_TOKEN + PICTURE_TOKENS * sum(not isinstance(part, str) for part in parts)
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
            self._notify(
                f"the judge fails: {error.message}; until it answers, one request at a time is sent to test it"
            )
        self._calm_from = max(self._calm_from, time.monotonic() + self._pauses.wished(error.retry_after))
        if reservation is None:
            return
        if error.may_be_charged:
            await self._count_cost(reservation, None, None)
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
                return NoJudgement(f"the judge refuses the request: {message}", where=where)
            hint = f"does the model `{self._settings.name}` read images, take a JSON schema and this temperature?"
            return JudgeRejected(f"the judge refuses the first request: {message}", where=where, hint=hint)
        return error
