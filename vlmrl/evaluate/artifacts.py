"""Images that rewards made of the responses of an evaluation, up to a limit of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vlmrl.types import Group, ScoredSample

KEPT_BYTES = 64 * 1024 * 1024
"""Of all images of an evaluation that `vlmrl eval` makes; of one in training, a validation, an eighth."""


@dataclass
class ArtifactLimit:
    """A limit of bytes, spent response by response: one that does not fit loses its images, and is counted.

    Args: left: bytes that may still be kept.    left_out: responses whose images were not kept.
    """

    left: int
    left_out: int = 0

    def keep(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with the images that fit."""
        return [replace(group, samples=tuple(map(self._kept, group.samples))) for group in groups]

    def _kept(self, sample: ScoredSample) -> ScoredSample:
        score = sample.score
        size = sum(map(len, score.files.values()))
        if size <= self.left:
            self.left -= size
            return sample
        self.left_out += 1
        return replace(sample, score=replace(score, artifacts={}, files={}))


def kept_files(groups: Sequence[Group]) -> dict[str, bytes]:
    """Return the images that rewards made: sha256 -> image file."""
    return {sha256: file for group in groups for s in group.samples for sha256, file in s.score.files.items()}
