"""How many logits the head makes at once, by device: model/logprobs.py works by it, preflight/machine.py plans by it.

No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES_A_LOGIT = 17
"""Memory of one logit at the peak of its two passes: itself, three numbers more and a flag, all in float32."""
FREE_SHARE = 0.25
"""Share of a device's free memory that the logits of one chunk may take."""


@dataclass(frozen=True)
class HeadChunks:
    """Numbers of logits.

    Args:
        chunk: held at once; of several chunks each is made again in the backward pass.
        block: of a chunk, turned into probabilities at once.
    """

    chunk: int
    block: int

    def positions(self, vocabulary: int) -> int:
        """Positions of a chunk; 1 where a single one has more logits than a chunk."""
        return max(1, self.chunk // vocabulary)

    def peak_bytes(self, positions: int, vocabulary: int) -> int:
        """Memory that the log-probs of so many positions take at most."""
        return BYTES_A_LOGIT * vocabulary * min(positions, self.positions(vocabulary))


ON_CPU = HeadChunks(2**22, 2**19)
"""More at once costs no less time; 2 MiB of float32 stay in a core's cache from one operation to the next."""
ON_DEVICE = HeadChunks(2**28, 2**28)
"""4,800 positions of 152,000 words: 3 chunks and some 150 launches of kernels; 15,000 in blocks of 2^21 logits."""
LEAST_ON_DEVICE = HeadChunks(2**24, 2**24)


def head_chunks(device: str, free_bytes: int | None = None) -> HeadChunks:
    """The sizes for a device.

    Args:
        device: "cpu", or the type of any other.
        free_bytes: memory of the device that nobody has taken; None = not known.
    Example: "cuda" with 8 GiB free: a quarter is 2 GiB, 1.2e8 logits of 17 bytes.
    """
    if device == "cpu":
        return ON_CPU
    if free_bytes is None:
        return ON_DEVICE
    fits = int(FREE_SHARE * free_bytes) // BYTES_A_LOGIT
    size = min(max(fits, LEAST_ON_DEVICE.chunk), ON_DEVICE.chunk)
    return HeadChunks(size, size)
