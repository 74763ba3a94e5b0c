"""What an engine is, and the one function that says when a response ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vlmrl.data.encode import EncodedPrompt
from vlmrl.types import Finish, Sample, SamplingParams


@dataclass(frozen=True)
class SamplingRequest:
    """One prompt to be answered `num_samples` times; sample k is drawn with `seed` + k."""

    prompt: EncodedPrompt
    num_samples: int
    seed: int


class Generator(Protocol):
    """A rollout engine.

    Attributes:
        version: the policy version its weights are of; every sample carries it.
        copies_weights: whether it has weights of its own, which a sync could get wrong.
    """

    version: int
    copies_weights: bool

    def generate(
        self, requests: Sequence[SamplingRequest], params: SamplingParams, progress: Callable[[int], Any] | None = None
    ) -> list[list[Sample]]:
        """Samples of every request, in order. `progress` is called with the number of responses newly finished."""
        ...

    def sleep(self) -> None:
        """Give back what is needed only while generating (caches)."""
        ...

    def wake(self) -> None:
        """Undo `sleep`."""
        ...

    def load_weights(self, version: int, *, changed: bool = True) -> None:
        """Take over the trainer's weights as policy `version`; wakes it.

        Args: changed: whether they may differ from those taken over last; else only the version is noted.
        """
        ...

    def close(self) -> None:
        """Give everything back; it cannot be used any more."""
        ...


def finish_reason(
    token_ids: Sequence[int], params: SamplingParams, decode: Callable[[Sequence[int]], str]
) -> Finish | None:
    """Why a response ends after these tokens; None = it goes on. Both engines ask here, so they stop alike.

    A stop token or a stop string wins over the limit when both happen at the same token.
    """
    if token_ids and token_ids[-1] in params.stop_ids:
        return "stop"
    if params.stop and token_ids and any(s in decode(token_ids) for s in params.stop):
        return "stop"
    return "length" if len(token_ids) >= params.max_new_tokens else None
