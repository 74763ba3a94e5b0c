"""A limit of the images that rewards return in one call: a step or an evaluation holds them all in memory."""

from __future__ import annotations

MOST_CALL_BYTES = 64 << 20
"""Of all images of one call of a scorer. A step of training makes one call a source in each process."""
LEFT_OUT = f"its images were left out: those of the responses before it fill {MOST_CALL_BYTES >> 20} MiB"


class FileLimit:
    """The images of the first responses of a call, up to a limit of bytes.

    Which ones they are does not depend on the order in which workers answer: those before the first response whose
    images, with all before it, are too many.

    Attributes:
        end: index of that response; no image from there on is kept. None = all are.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.end: int | None = None
        self._sizes: dict[int, int] = {}
        self._total = 0

    def add(self, index: int, size: int) -> list[int]:
        """Note the bytes of a response's images. Returns the responses whose images are to be let go of."""
        if not size:
            return []
        if not self.keeps(index):
            return [index]
        self._total += size - self._sizes.get(index, 0)
        self._sizes[index] = size
        gone = []
        while self._total > self.most:
            self.end = max(self._sizes)
            self._total -= self._sizes.pop(self.end)
            gone.append(self.end)
        return gone

    def keeps(self, index: int) -> bool:
        """Return whether the images of a response are kept, as far as is known."""
        return self.end is None or index < self.end
