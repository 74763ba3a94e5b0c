"""Code that a reward's worker runs: a user's source text, or a function of vlmrl by its name.

Both are sent to the worker as JSON. Names are imported from modules here: see base.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol

from vlmrl.types import RewardInput, RewardResult

Parts = Mapping[str, float | None]
RewardFn = Callable[..., "Parts | float | RewardResult"]


@dataclass(frozen=True)
class UserReward:
    """User's function as its worker needs it: with the source as it was read, so that a restart runs the same code.

    Args:
        file: path as shown to people.
        function: name in the file.
        source: text of the file.
        style: calling convention, see rewards/adapters.py; "auto" until the worker has inspected the function.
        args: keyword arguments bound to every call.
        batched: the function gets the whole list of responses in one call.
    """

    file: str
    function: str
    source: str
    style: str
    args: Mapping[str, Any]
    batched: bool = False

    @property
    def code(self) -> str:
        """Source as Python compiles it: without a byte order mark, which editors put before UTF-8."""
        return self.source.removeprefix("\ufeff")


@dataclass(frozen=True)
class WorkerFunction:
    """Built-in reward that runs in workers: the function that makes it there, and what that function takes.

    A reward runs in workers if it may hang or needs a main thread, or if it loads what no trainer should load. Its
    module is imported, and the function called, when a worker starts: that time is no response's.

    Args:
        name: of the reward, for messages.
        module: module of vlmrl; the trainer never imports it.
        function: name in the module: `function(**args)` returns RewardInput -> parts, or a RewardResult.
        args: JSON values.
    """

    name: str
    module: str
    function: str
    args: Mapping[str, Any] = field(default_factory=dict)
    batched = False

    @property
    def file(self) -> str:
        """Name of the code, for messages."""
        return f"built-in `{self.name}`"

    def make(self) -> RewardFn:
        """Import the module and return the reward. Raises: as the module and the function do."""
        return getattr(import_module(self.module), self.function)(**self.args)


@dataclass(frozen=True)
class ServiceFunction:
    """Built-in reward that asks a service, and answers later: the function that opens it, and what that function takes.

    It runs in this process, because a worker must not have the key of a service. Many responses are asked at a time.

    Args:
        name: of the reward, for messages.
        module: module of vlmrl; it is imported when the first response is scored.
        function: name in the module: `function(**args)` returns a `Service`.
        args: JSON values.
    """

    name: str
    module: str
    function: str
    args: Mapping[str, Any] = field(default_factory=dict)
    batched = False

    def open(self, place: ServicePlace) -> Service:
        """Import the module and open the service. Raises: as the module and the function do."""
        return getattr(import_module(self.module), self.function)(**self.args, place=place)


@dataclass(frozen=True)
class ServicePlace:
    """Place of a service's files.

    Args:
        folder: folder of the run; None = of no run.
        account: name of what a budget counts together.
    """

    folder: str | None = None
    account: str = "run"


NO_PLACE = ServicePlace()


class Service(Protocol):
    """Reward that answers later."""

    def try_out(self) -> Mapping[str, Any]:
        """Send one request. Return the facts about it as JSON values; `line` has them in words.

        Raises: RewardError with what to do. RewardUnavailable for an outage.
        """
        ...

    def counts(self) -> Mapping[str, float]:
        """Return metric -> number since the service was opened."""
        ...

    def summary(self, counts: Mapping[str, float]) -> str:
        """Return counts in one line for people; "" if there is nothing to tell."""
        ...

    def submit(self, inputs: Sequence[RewardInput]) -> list[Future[RewardResult]]:
        """Begin to score responses. Return one future per response; it raises RewardUnavailable for an outage."""
        ...

    def close(self) -> None:
        """End it."""
        ...


WorkerReward = UserReward | WorkerFunction
"""Code of either kind."""


def in_this_process(worker: WorkerFunction) -> RewardFn:
    """Return a built-in of workers as a function of this process, made at its first call, for tools and tests."""
    make_once = lru_cache(maxsize=1)(worker.make)
    return lambda x: make_once()(x)
