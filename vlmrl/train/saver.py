"""Who writes a run's checkpoints: the training itself, or a thread of it, from copies, while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import torch

from vlmrl.dist.fsdp import HostCopies
from vlmrl.dist.world import ALONE, World


@dataclass(frozen=True)
class Written:
    """A whole checkpoint. Args: keep: steps of others that were not to be removed when it was begun."""

    step: int
    folder: Path
    keep: Sequence[int]


@dataclass
class Saver:
    """Writes one checkpoint at a time.

    Args:
        world: the processes, as those who write them talk to each other.
        copies: what is written beside the training is copied there first; None = nothing is.
    """

    world: World = ALONE
    copies: HostCopies | None = None
    _under_way: Future[Written] | None = None

    @classmethod
    def of(cls, asynchronous: bool | None, device: torch.device, world: World) -> Saver:
        """The saver of a recipe's `checkpoint.asynchronous`. All processes make it together."""
        on_a_gpu = device.type == "cuda"
        if not (on_a_gpu if asynchronous is None else asynchronous):
            return cls(world)
        return cls(world.apart(), HostCopies(pinned=on_a_gpu))

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint was begun, and `result` not asked for. The same on all processes."""
        return self._under_way is not None

    @property
    def written(self) -> bool:
        """Whether `result` would give an answer at once."""
        return self._under_way is None or self._under_way.done()

    def begin(self, write: Callable[[], Written]) -> None:
        """Let `write` run: to its end before this returns, or, with copies, beside what comes next."""
        assert self._under_way is None, "one checkpoint at a time"
        done = self._under_way = Future[Written]()

        def work() -> None:
            try:
                done.set_result(write())
            except BaseException as error:
                done.set_exception(error)

        if self.copies is None:
            work()
        else:  # a daemon: who leaves in a hurry leaves a checkpoint that is not complete, as a kill does
            Thread(target=work, name="checkpoint", daemon=True).start()

    def result(self) -> Written:
        """The checkpoint that was begun, whole on the disk: waits for it. Raises: what `write` raised."""
        assert self._under_way is not None
        done, self._under_way = self._under_way, None
        return done.result()
