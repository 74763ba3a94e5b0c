from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.data.open_dataset import MAX_LOST, RowUnits, cut_rows

rows_of_pairs = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40), st.booleans()).map(lambda row: RowUnits(row[:2], row[2])),
    max_size=120,
)


@pytest.mark.slow
@given(rows_of_pairs, st.integers(0, 40), st.integers(0, 5))
@settings(max_examples=300, deadline=None)
def test_no_unit_is_on_both_sides_of_a_cut_and_little_is_lost(rows: list[RowUnits], wanted: int, seed: int) -> None:
    cut = cut_rows(rows, wanted, seed=seed)
    taken, lost = set(cut.taken), set(cut.lost)
    assert not taken & lost and len(taken) <= wanted and len(lost) <= MAX_LOST * len(rows)
    inside = {unit for i in taken for unit in rows[i].units}
    outside = {unit for i, row in enumerate(rows) if i not in taken | lost for unit in row.units}
    assert not inside & outside
    assert cut_rows(rows, wanted, seed=seed) == cut


def test_pairs_that_share_nothing_are_cut_without_loss() -> None:
    rows = [RowUnits((2 * i, 2 * i + 1), i % 2) for i in range(500)]
    cut = cut_rows(rows, 60, seed=1)
    assert len(cut.taken) == 60 and not cut.lost
    assert cut_rows(rows, 60, seed=2).taken != cut.taken


def test_where_everything_hangs_together_units_are_drawn_and_labels_keep_their_shares() -> None:
    rng = random.Random(0)  # 1,500 images, each in eight pairs, every second pair the same
    rows = [RowUnits((rng.randrange(1500), rng.randrange(1500)), i % 2 == 0) for i in range(6000)]
    cut = cut_rows(rows, 300, seed=0)
    assert len(cut.taken) >= 8 and 0.08 * len(rows) < len(cut.lost) <= MAX_LOST * len(rows)
    same = sum(rows[i].label is True for i in cut.taken)
    assert 2 * same == len(cut.taken)


def test_a_training_set_of_one_class_of_pairs_is_left_whole() -> None:
    assert cut_rows([RowUnits((0, 1), True)] * 50, 10, seed=0).taken == []
    assert cut_rows([], 10, seed=0).taken == []
