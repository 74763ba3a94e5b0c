"""Number of logits that the head computes at once, by device.

model/logprobs.py computes with it, preflight/machine.py plans with it. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES_A_LOGIT = 17
"""Memory of one logit at the peak of its two passes: the logit, three more numbers and a flag, all in float32."""
FREE_SHARE = 0.25
"""Share of a device's free memory that the logits of one chunk may take."""


@dataclass(frozen=True)
class HeadChunks:
    """Sizes of the head's chunks, as numbers of logits.

    Args:
        chunk: held at once; when there are several chunks, each is computed again in the backward pass.
        block: part of a chunk that is turned into probabilities at once.
    """

    chunk: int
    block: int

    def positions(self, vocabulary: int) -> int:
        """Return the positions per chunk; 1 if a single position has more logits than a chunk."""
        return max(1, self.chunk // vocabulary)

    def peak_bytes(self, positions: int, vocabulary: int) -> int:
        """Return the peak memory of the log-probs of `positions` positions, in bytes."""
        return BYTES_A_LOGIT * vocabulary * min(positions, self.positions(vocabulary))


ON_CPU = HeadChunks(2**22, 2**19)
"""Larger chunks take as much time; 2 MiB of float32 (a block) stay in a core's cache between operations."""
ON_DEVICE = HeadChunks(2**28, 2**28)
"""4,800 positions of 152,000 words take 3 chunks and some 150 kernel launches; with blocks of 2^21 logits, 15,000."""
LEAST_ON_DEVICE = HeadChunks(2**24, 2**24)
"""Smallest chunk on a GPU, however little memory is free."""


def head_chunks(device: str, free_bytes: int | None = None) -> HeadChunks:
    """Return the sizes for a device.

    Args:
        device: "cpu", or the type of any other.
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
