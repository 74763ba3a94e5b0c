"""Protocol of a rollout engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from vlmrl.data.encode import EncodedPrompt
from vlmrl.types import Sample, SamplingParams


@dataclass(frozen=True)
class SamplingRequest:
    """Request for `num_samples` responses to one prompt; sample k is drawn with `seed` + k.

    Args:
        script: tokens of the turns that the policy writes in an episode, for `EpisodeEngine.follow`.
    """

    prompt: EncodedPrompt
    num_samples: int
    seed: int
    script: Sequence[tuple[int, ...]] = ()


@dataclass(frozen=True)
class SyncSpeed:
    """Size and duration of a weight sync of one rank.

    Args:
        bytes: of the weights, or of the adapter, each counted once, however many engines get them.
        seconds: from the first tensor until all engines have loaded the last one.
        transport: the way they took, in words.
    """

    bytes: int
    seconds: float
    transport: str

    @property
    def gb_per_second(self) -> float:
        return self.bytes / 1e9 / max(self.seconds, 1e-9)

    def record(self) -> dict[str, float | str]:
        """Return the values for a run's log."""
        return {**asdict(self), "gb_per_second": self.gb_per_second}

    def text(self) -> str:
        """Return the values in words."""
        size = f"{self.bytes / 1e9:.2f} GB" if self.bytes >= 1e9 else f"{self.bytes / 1e6:.1f} MB"
        return (
            f"weight sync: {size} in {self.seconds:.2f} s ({self.gb_per_second:.2f} GB/s), {self.transport};"
            " again after every step"
        )


class Generator(Protocol):
    """Rollout engine. Requests are submitted and polled within a round.

    Attributes:
        version: policy version of its weights; every sample carries the version that sampled it.
        copies_weights: whether it has its own copy of the weights, which a sync could get wrong.
        works_alone: whether it goes on generating between two polls, on GPUs that the trainer does not use. Requests
            may then be submitted before an update and polled after it.
        admits: whether a request joins those in flight at once. If not, it waits until all of them are complete.
        max_open: number of responses that it generates at the same time, if several ranks have such an engine each:
            prompts that would wait in one engine can then be taken by another. None = a fixed deal.
        last_sync: size and duration of the last `load_weights` that sent weights; None = it has sent none.
    """

    version: int
    copies_weights: bool
    works_alone: bool
    admits: bool = False
    max_open: int | None = None
    last_sync: SyncSpeed | None = None

    def round(self, progress: Callable[[int], Any] | None = None) -> AbstractContextManager[Any]:
        """Context manager: inside, requests can be submitted and polled. On exit, requests that are left are dropped.

        What all ranks must do together, such as gathering sharded weights, happens at its edges. So all ranks enter a
        round, each with its own requests, which may be none.

        Args:
            progress: called with the number of newly finished responses.
        """
        ...

    def submit(self, request: SamplingRequest, params: SamplingParams) -> int:
        """Queue a request and return its id. Generation begins with the next `poll`, at the latest."""
        ...

    def poll(self, timeout: float | None = None) -> list[tuple[int, list[Sample]]]:
        """Generate until a request is complete, and return the complete ones: (id, all its samples).

        Args:
            timeout: return after about this many seconds even if none is complete; at least one token is generated.
                None = no limit. Without open requests, the result is [] at once.
        """
        ...

    def generate(
        self, requests: Sequence[SamplingRequest], params: SamplingParams, progress: Callable[[int], Any] | None = None
    ) -> list[list[Sample]]:
        """Return the samples of every request, in order: one round.

        Args:
            progress: called with the number of newly finished responses.
        """
        with self.round(progress):
            ids = [self.submit(request, params) for request in requests]
            samples: dict[int, list[Sample]] = {}
            while len(samples) < len(ids):
                samples |= dict(self.poll())
        return [samples[i] for i in ids]

    def sleep(self) -> None:
        """Free the memory that is needed only while generating (caches)."""
        ...

    def wake(self) -> None:
        """Undo `sleep`."""
        ...

    def load_weights(self, version: int, *, changed: bool = True) -> None:
        """Load the trainer's weights as policy `version`. Wakes the engine.

        Args:
            changed: whether they may differ from those loaded last; if not, only the version is set.
        """
        ...

    def close(self) -> None:
        """Free everything. The engine cannot be used afterwards."""
        ...
