"""Details and images that a reward returns for the few responses of a page.

The reward is asked for them once more, because a scan of a million responses keeps numbers alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vlmrl.check.rescore import image_reader
from vlmrl.check.saved import Saved, SavedSample
from vlmrl.check.scan import Chosen
from vlmrl.rewards.scorer import Scorer
from vlmrl.types import Score


def findings(saved: Saved, chosen: Mapping[str, Chosen], samples: Mapping[int, SavedSample]) -> dict[int, Score]:
    """Return row -> its score with details, images and their files, where the reward returned any.

    Args: chosen: source -> its reward; rows of other sources are left out.
    """
    read, found = image_reader(saved), {}
    for source, choice in chosen.items():
        rows = [row for row, sample in samples.items() if sample.source == source]
        inputs = [samples[row].input for row in rows]
        if choice.spec.needs_images:
            seen = [read(samples[row].media, samples[row].where) for row in rows]
            inputs = [replace(x, images=images) for x, images in zip(inputs, seen, strict=True)]
        with Scorer(choice.spec, choice.weights, **saved.limits()) as scorer:
            scores = scorer.score(inputs, rows=[samples[row].where for row in rows])
        found |= {row: s for row, s in zip(rows, scores, strict=True) if s.detail is not None or s.artifacts}
    return found
