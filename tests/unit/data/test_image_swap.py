"""Which images a row shows in the place of its own: never its own content, each image once, equal sizes first."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.data.blinded_images import _Swap, swap_images
from vlmrl.errors import DataError
from vlmrl.types import Media


def image(name: str, width: int = 8, height: int = 6) -> Media:
    return Media(name, width, height)


def shown(media: Sequence[Sequence[Media]], seed: int = 0) -> list[tuple[Media, ...]]:
    return [tuple(media[row][position] for row, position in places) for places in swap_images(media, seed)]


def contents(images: Sequence[Media]) -> set[str]:
    return {m.sha256 for m in images}


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(0, 5))
def test_no_row_shows_an_image_of_its_own(data: st.DataObject, seed: int) -> None:
    """Rows of 0 to 3 of a few images of a few sizes, so that many rows share images."""
    pool = [image(f"i{k}", 8 + k % 3) for k in range(data.draw(st.integers(4, 9)))]
    rows = data.draw(st.lists(st.lists(st.sampled_from(pool), max_size=3), min_size=2, max_size=25))
    everything = contents([m for row in rows for m in row])
    if any(row and contents(row) == everything for row in rows):
        return  # it shows all there is; see below
    result = shown(rows, seed)
    for row, new in zip(rows, result, strict=True):
        assert len(new) == len(row) and not contents(new) & contents(row)
    assert result == shown(rows, seed)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=40), st.integers(0, 5))
def test_rows_with_images_of_their_own_exchange_them_whole(counts: list[int], seed: int) -> None:
    """A derangement of the rows with as many images; a row that is alone with its count is composed of several."""
    rows = [[image(f"r{i}-{k}") for k in range(n)] for i, n in enumerate(counts)]
    result = shown(rows, seed)
    together = [i for i, n in enumerate(counts) if counts.count(n) > 1]
    assert Counter(result[i] for i in together) == Counter(tuple(rows[i]) for i in together)
    assert all(result[i] != tuple(rows[i]) for i in together)


def test_images_of_the_same_size_are_exchanged_where_there_are_two() -> None:
    sizes = [(8, 6)] * 3 + [(20, 20)] * 2 + [(30, 10)]
    rows = [[image(f"i{k}", *size)] for k, size in enumerate(sizes)]
    result = shown(rows, 3)
    assert [(new.width, new.height) == size for (new,), size in zip(result, sizes, strict=True)].count(True) >= 4
    # The one of its size gives its image to a row of another size, and gets that row's new one.
    assert Counter(m for (m,) in result) == Counter(m for (m,) in rows)


def test_rows_that_share_an_image_get_another_one_even_if_it_fills_half_of_the_rows() -> None:
    rows = [[image("common")] for _ in range(10)] + [[image(f"i{k}")] for k in range(10)]
    result = shown(rows)
    assert all(new.sha256 != "common" for (new,) in result[:10])
    assert Counter(new.sha256 for (new,) in result)["common"] == 10


def test_a_rotation_alone_is_enough_where_rows_share_all_images_or_none() -> None:
    rows = [[image(f"i{k % 7}"), image(f"j{k % 7}")] for k in range(40)]
    swap = _Swap(rows, random.Random(1))
    swap.rotate(range(40))
    assert swap.conflicts(range(40)) == [] and sorted(swap.giver) == list(range(40))


def test_a_content_that_fills_most_rows_is_replaced_by_others_that_are_shown_twice() -> None:
    rows = [[image("common")] for _ in range(9)] + [[image("a")], [image("b")]]
    result = shown(rows)
    assert all(new.sha256 in "ab" for (new,) in result[:9])
    assert all(new.sha256 != own.sha256 for (new,), (own,) in zip(result, rows, strict=True))


def test_another_seed_is_another_exchange() -> None:
    rows = [[image(f"i{k}")] for k in range(30)]
    assert shown(rows, 0) != shown(rows, 1)


def test_rows_without_images_show_none() -> None:
    assert shown([[], [image("a")], [], [image("b")]]) == [(), (image("b"),), (), (image("a"),)]


def test_a_row_that_shows_everything_is_an_error() -> None:
    with pytest.raises(DataError, match="one row has all"):
        swap_images([[image("a")], [image("a")]], 0)
