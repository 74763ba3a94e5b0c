"""Forward passes of the transformers model that a packed row needs, and those that all ranks make together.

Where responses share their prompt by a forked cache or not at all, a row needs several passes, and the ranks need
different numbers of them. A sharded policy gathers each layer in each pass, so all ranks must make the same passes. A
rank makes a filler pass, without loss, where it needs none of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from vlmrl.model.attention.row_plan import groups_of
from vlmrl.model.forked_cache import batches_of_similar_length
from vlmrl.packed import Span


@dataclass(frozen=True)
class Pass:
    """One forward pass of the transformers model.

    Args:
        spans: indices of the row's spans that run: a prompt, responses that continue a prompt, or (padded) a prompt and
            one response. Empty for a filler pass.
        has_images: whether the vision tower runs too.
    """

    spans: tuple[int, ...]
    has_images: bool


def passes_of(layout: Sequence[Span], has_images: Sequence[bool], sharing: str) -> list[Pass]:
    """Return the passes that a row needs, in the order in which they run.

    Args:
        has_images: whether each span has images.
        sharing: as in `families.Family`.
    """
    passes: list[tuple[int, ...]] = []
    for prompt, *responses in groups_of(layout) if sharing != "packed" else ():
        if sharing == "padded":
            passes += [(prompt, response) for response in responses]
            continue
        lengths = [layout[i].end - layout[i].start for i in responses]
        passes.append((prompt,))
        passes += [tuple(responses[k] for k in batch) for batch in batches_of_similar_length(lengths)]
    passes = [tuple(range(len(layout)))] if sharing == "packed" else passes
    return [Pass(spans, any(has_images[i] for i in spans)) for spans in passes]


def common_passes(of_ranks: Sequence[Sequence[bool]]) -> tuple[bool, ...]:
    """Return the passes that all ranks make: whether each has images.

    The passes with images of all ranks coincide, because images are expensive; filler passes between them have none.

    Args:
        of_ranks: per rank, whether each pass that its row needs has images.
    Example: [text, image, text] and [image, text, text] -> [text, image, text, text].
    """
    common: list[bool] = []
    for counts in zip_longest(*map(_texts_between_images, of_ranks), fillvalue=0):
        common += [True, *[False] * max(counts)]
    return tuple(common[1:])


def _texts_between_images(pictured: Sequence[bool]) -> list[int]:
    """Return the number of passes without images before the first pass with images, and after each of them."""
    counts = [0]
    for has_images in pictured:
        if has_images:
            counts.append(0)
        else:
            counts[-1] += 1
    return counts


def with_fillers(own: Sequence[Pass], common: Sequence[bool]) -> Iterator[Pass]:
    """Yield a row's own passes in their order, and filler passes where all ranks make a pass that it does not need.

    Args:
        common: what `common_passes` returned for rows of which this is one.
    """
    waiting = deque(own)
    for has_images in common:
        if waiting and waiting[0].has_images == has_images:
            yield waiting.popleft()
        else:
            yield Pass((), has_images)
    assert not waiting, "the common passes are those of other rows"
