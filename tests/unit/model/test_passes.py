"""Which forward passes a row needs, which all ranks make, and where filler passes stand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vlmrl.dist.world import World
from vlmrl.model.caches import Pass, common_passes, passes_of, with_fillers
from vlmrl.model.packing import PromptTokens, TrainItem, layout_of, make_row
from vlmrl.train.step_batch import FILLER, StepBatch
from vlmrl.types import Segment

T, I = False, True  # noqa: E741
PIXELS = {"pixel_values": torch.zeros(1, 3)}


def items(group: int, *lengths: int, image: bool = False) -> list[TrainItem]:
    prompt = PromptTokens((5, 6, 7), (0, int(image), 0), PIXELS if image else {}, int(image))
    return [TrainItem(prompt, group, (Segment("a", (9,) * n, True),), 10 * group + k) for k, n in enumerate(lengths)]


ROW = [*items(0, 5, 1, 9, image=True), *items(1, 4)]
"""Spans: 0 prompt, 1 to 3 responses of 5, 1 and 9 tokens, 4 prompt, 5 a response."""


@pytest.mark.parametrize(
    ("sharing", "expected"),
    [
        ("packed", [Pass((0, 1, 2, 3, 4, 5), True)]),
        # 9 and 5 together: padding at most doubles 5. 1 alone: 2 x 1 < 9.
        ("forked", [Pass((0,), True), Pass((3, 1), False), Pass((2,), False), Pass((4,), False), Pass((5,), False)]),
        ("padded", [Pass((0, 1), True), Pass((0, 2), True), Pass((0, 3), True), Pass((4, 5), False)]),
    ],
)
def test_passes_of_a_row(sharing: str, expected: list[Pass]) -> None:
    layout, images = layout_of(ROW)
    assert passes_of(layout, [bool(i) for i in images], sharing) == expected
    assert layout == make_row(ROW).layout and [s.end for s in layout] == [3, 8, 9, 18, 21, 25]


@pytest.mark.parametrize(
    ("of_ranks", "common"),
    [
        ([[I, T, T, T, T]], [I, T, T, T, T]),  # alone: its own
        ([[I, T, T], [I, T]], [I, T, T]),
        ([[T, I, T], [I, T, T]], [T, I, T, T]),  # the images coincide
        ([[T, T], [I]], [T, T, I]),
        ([[I, T, I, T], [T, I, T, T]], [T, I, T, T, I, T]),
        ([[T], [T, T, T], []], [T, T, T]),
    ],
)
def test_common_passes(of_ranks: list[list[bool]], common: list[bool]) -> None:
    assert common_passes(of_ranks) == tuple(common)
    for own in of_ranks:
        passes = list(with_fillers([Pass((k,), images) for k, images in enumerate(own)], common))
        assert [p.has_images for p in passes] == common
        assert [p.spans for p in passes if p.spans] == [(k,) for k in range(len(own))]


def test_passes_of_other_rows_are_refused() -> None:
    with pytest.raises(AssertionError, match="other rows"):
        list(with_fillers([Pass((0,), True)], [T, T]))


class Other(World):
    """First of two ranks; the second sends what it is given."""

    def gather(self, mine):
        return [mine, self.group]


def rows(of_other: list[tuple[bool, ...]], sharing: str, own: list[TrainItem]) -> list[tuple[list[int], tuple]]:
    filler = replace(items(0, 1, image=True)[0], group=-1, trajectory=FILLER)
    batch = StepBatch(own, [], [], world=Other(0, 2, group=of_other), filler=filler)
    seen: list[int] = []
    batch.meanwhile = lambda: seen.append(len(seen))
    found = [([i.trajectory for i in found], passes) for found, passes in batch.rows(100, sharing)]
    assert len(seen) == len(found)  # before each row
    return found


def test_rows_make_the_passes_of_all_ranks() -> None:
    own = items(1, 4, 4)  # text: a prompt, two responses in one pass
    assert rows([(T, T)], "forked", own) == [([10, 11], ())]
    assert rows([(T, T, T)], "forked", own) == [([10, 11], (T, T, T))]
    assert rows([(I, T)], "forked", own) == [([10, 11], (T, T, I, T))]
    # A rank without a row runs the filler: an image, and a response.
    assert rows([(T, T), (T, T)], "forked", own) == [([10, 11], ()), ([FILLER], (T, T, I, T))]
    assert rows([(I,)], "packed", own) == [([10, 11, FILLER], ())]
    assert rows([(T,), (T,)], "packed", own) == [([10, 11], ()), ([FILLER], ())]
