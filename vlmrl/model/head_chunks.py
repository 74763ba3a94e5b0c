"""Number of logits that the head computes at once, by device.

model/logprobs.py uses it to compute log-probs, preflight/machine.py to plan memory. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES_A_LOGIT = 17
"""Bytes per logit at the peak of forward and backward pass: the logit and three more float32 numbers, and a flag of one
byte."""
FREE_SHARE = 0.25
"""Share of a device's free memory that the logits of one chunk may take."""


@dataclass(frozen=True)
class HeadChunks:
    """Sizes of the head's chunks, as numbers of logits.

    Args:
        chunk: logits held at once; if there are several chunks, each is computed again in the backward pass.
        block: logits of a chunk that are turned into probabilities at once.
    """

    chunk: int
    block: int

    def positions(self, vocabulary: int) -> int:
        """Return the number of positions per chunk; 1 if a single position has more logits than a chunk."""
        return max(1, self.chunk // vocabulary)

    def peak_bytes(self, positions: int, vocabulary: int) -> int:
        """Return the peak memory of the log-probs of `positions` positions, in bytes."""
        return BYTES_A_LOGIT * vocabulary * min(positions, self.positions(vocabulary))


ON_CPU = HeadChunks(2**22, 2**19)
"""Sizes on the CPU. Larger chunks are not faster; a block, 2 MiB of float32, stays in a core's cache between
operations."""
ON_DEVICE = HeadChunks(2**28, 2**28)
"""Sizes on a GPU. For 4,800 positions and a vocabulary of 152,000, they mean 3 chunks and about 150 kernel launches;
with blocks of 2^21 logits it would be 15,000 launches."""
LEAST_ON_DEVICE = HeadChunks(2**24, 2**24)
"""Smallest sizes on a GPU, used even if less memory is free."""


def head_chunks(device: str, free_bytes: int | None = None) -> HeadChunks:
    """Return the sizes for a device.

    Args:
        device: type of the device, "cpu" or any other.
        free_bytes: free memory of the device; None = unknown.
    Example: "cuda" with 8 GiB free: a quarter is 2 GiB, 1.2e8 logits of 17 bytes.
    """
    if device == "cpu":
        return ON_CPU
    if free_bytes is None:
        return ON_DEVICE
    fits = int(FREE_SHARE * free_bytes) // BYTES_A_LOGIT
    size = min(max(fits, LEAST_ON_DEVICE.chunk), ON_DEVICE.chunk)
    return HeadChunks(size, size)
