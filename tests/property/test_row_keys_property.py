"""Units of rows, against a slow implementation with Python's dictionaries."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.evaluate.estimates import RowKeys, incidence_of

ROWS = st.lists(st.lists(st.sampled_from("abcdefg"), max_size=4), max_size=12)


def slow_units(clusters):
    """(row, unit) pairs in order, number of units."""
    members = {}
    for row, ids in enumerate(clusters):
        for key in dict.fromkeys(ids):
            members.setdefault(key, []).append(row)
    covered = {row for rows in members.values() for row in rows}
    unique = dict.fromkeys(tuple(rows) for rows in members.values())
    unique.update(dict.fromkeys((row,) for row in range(len(clusters)) if row not in covered))
    return sorted((row, unit) for unit, rows in enumerate(unique) for row in rows), len(unique)


@given(ROWS)
def test_units_have_the_rows_and_the_order_of_the_slow_implementation(clusters):
    fast = incidence_of(RowKeys.of(clusters))
    assert (list(zip(fast.rows_in.tolist(), fast.unit_of.tolist(), strict=True)), fast.count) == slow_units(clusters)


@given(ROWS, st.randoms(use_true_random=False))
def test_rows_that_are_taken_keep_their_ids(clusters, rng):
    keys = RowKeys.of(clusters)
    use = [rng.random() < 0.5 for _ in clusters]
    taken = keys.take(np.array(use, dtype=bool))
    assert list(taken) == [ids for ids, used in zip(keys, use, strict=True) if used]
