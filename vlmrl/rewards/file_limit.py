"""Limit of the images that rewards return in one call: a step or an evaluation holds them all in memory."""

from __future__ import annotations

from typing import Generic, TypeVar

Index = TypeVar("Index", int, tuple[int, int])
MOST_CALL_BYTES = 64 << 20
"""Maximum size of all images of one call of a scorer. A training step makes one call per source and process."""
LEFT_OUT = f"its images were left out: those of the responses before it fill {MOST_CALL_BYTES >> 20} MiB"


class FileLimit(Generic[Index]):
    """Images of the first responses of a call, up to a limit of bytes.

    The choice does not depend on the order in which workers answer. Images are kept before the first response at which
    the sum of the sizes exceeds the limit.

    Attributes:
        end: that response; images of it and of later ones are dropped. None = all are kept.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.end: Index | None = None
        self._sizes: dict[Index, int] = {}
        self._total = 0

    def add(self, index: Index, size: int) -> list[Index]:
        """Record the bytes of a response's images. Return the responses whose images are to be dropped."""
        if not size:
            return []
        if not self.keeps(index):
            return [index]
        self._total += size - self._sizes.get(index, 0)
        self._sizes[index] = size
        dropped: list[Index] = []
        while self._total > self.most:
            self.end = max(self._sizes)
            self._total -= self._sizes.pop(self.end)
            dropped.append(self.end)
        return dropped

    def keeps(self, index: Index) -> bool:
        """Return whether the images of a response are kept, as far as is known now."""
        return self.end is None or index < self.end
