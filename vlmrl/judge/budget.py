"""Budget of a judge: calls and cost of all processes together. A call is reserved before it is sent.

A reservation has the largest cost that the call is expected to have. When the answer is there, it becomes what the call
did cost; when the endpoint has certainly not worked on the request, it is given back. A reservation of a process that
was killed counts in full after its time.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from vlmrl.errors import RewardError
from vlmrl.judge.database import Database, open_to_read
from vlmrl.judge.failures import BudgetSpent
from vlmrl.judge.settings import cost_of
from vlmrl.recipe.judge_table import Prices

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
    """Return account -> what it has spent, as a file of verdicts says; {} if there is no such file, or no account.

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
        """Return the cost of a call."""
        return cost_of(self._prices, input_tokens, output_tokens)

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
            calls, spent_cost, largest = self._row(connection)
            expected = max(input_tokens, round(MARGIN * largest))
            cost = self.cost(expected, output_tokens)
            total = "SELECT count(*), coalesce(sum(cost), 0) FROM reserved WHERE account = ?"
            open_calls, open_cost = connection.execute(total, (self._account,)).fetchone()
            self._check(calls, spent_cost, cost)
            if not self._fits(calls + open_calls, spent_cost + open_cost, cost):
                return None
            values = (self._account, cost, now + self._hold_seconds)
            number = connection.execute(
                "INSERT INTO reserved (account, cost, until) VALUES (?, ?, ?)", values
            ).lastrowid
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
                hint="raise the limit: --set judge.max_calls=N; stored verdicts are not asked for again",
            )
        if self._max_cost is not None and spent_cost + cost > self._max_cost:
            raise BudgetSpent(
                f"the judge's budget is spent: {spent_cost:.4f} of {self._max_cost:g}, and the next call may cost "
                f"{cost:.4f}",
                hint="raise the limit: --set judge.max_cost=N; stored verdicts are not asked for again",
            )

    def _fits(self, calls: int, total: float, cost: float) -> bool:
        fits_calls = self._max_calls is None or calls + 1 <= self._max_calls
        return fits_calls and (self._max_cost is None or total + cost <= self._max_cost)

    def _row(self, connection: sqlite3.Connection) -> tuple[int, float, int]:
        query = "SELECT calls, cost, largest_input FROM spent WHERE account = ?"
        return connection.execute(query, (self._account,)).fetchone() or (0, 0.0, 0)

    def _drop(self, connection: sqlite3.Connection, reservation: Reservation) -> bool:
        return connection.execute("DELETE FROM reserved WHERE id = ?", (reservation.number,)).rowcount > 0

    def _add(
        self, connection: sqlite3.Connection, calls: int, cost: float, input_tokens: int, output_tokens: int
    ) -> None:
        connection.execute(
            "INSERT INTO spent VALUES (:account, :calls, :cost, :input, :output, :input) ON CONFLICT (account) DO "
            "UPDATE SET calls = calls + :calls, cost = cost + :cost, input_tokens = input_tokens + :input, "
            "output_tokens = output_tokens + :output, largest_input = max(largest_input, :input)",
            {
                "account": self._account,
                "calls": calls,
                "cost": cost,
                "input": input_tokens,
                "output": output_tokens,
            },
        )

    def _count_forgotten(self, connection: sqlite3.Connection, now: float) -> None:
        """Count reservations of killed processes in full: their calls may have been sent."""
        old = "FROM reserved WHERE account = ? AND (until < ? OR until > ?)"
        values = (self._account, now, now + LONGEST_HOLD)
        calls, cost = connection.execute(f"SELECT count(*), coalesce(sum(cost), 0) {old}", values).fetchone()
        if calls:
            connection.execute(f"DELETE {old}", values)
            self._add(connection, calls, cost, 0, 0)
