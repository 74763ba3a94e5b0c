"""The stream of rows over random sources."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.data.sampler import PromptStream

SOURCES = st.lists(
    st.tuples(st.integers(1, 12), st.sampled_from([0.1, 0.3, 0.5, 1.0, 2.0, 7.0])), min_size=1, max_size=4
)
STEPS = st.lists(st.integers(1, 9), min_size=1, max_size=25)


def stream(sources: list[tuple[int, float]], seed: int = 0) -> PromptStream:
    return PromptStream([length for length, _ in sources], [share for _, share in sources], seed)


@given(SOURCES, STEPS, st.integers(0, 24), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_a_resumed_stream_goes_on_as_the_uninterrupted_one(sources, steps, stop, seed) -> None:
    whole = stream(sources, seed)
    expected = [whole.next(count) for count in steps]
    first = stream(sources, seed)
    got = [first.next(count) for count in steps[:stop]]
    second = stream(sources, seed)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert got + [second.next(count) for count in steps[stop:]] == expected


@given(SOURCES, STEPS)
@settings(max_examples=200, deadline=None)
def test_every_source_is_within_one_row_of_its_exact_share_at_every_moment(sources, steps) -> None:
    exact = [Fraction(str(share)) for _, share in sources]
    made, drawn, total = stream(sources), Counter(), 0
    for count in steps:
        for draw in made.next(count):
            drawn[draw.source] += 1
            total += 1
            for source, share in enumerate(exact):
                assert abs(drawn[source] - total * share / sum(exact)) < 1


@given(SOURCES, STEPS)
@settings(max_examples=200, deadline=None)
def test_a_step_repeats_a_row_only_when_its_source_is_too_small(sources, steps) -> None:
    made = stream(sources)
    for count in steps:
        rows = Counter((draw.source, draw.row) for draw in made.next(count))
        asked = Counter()
        for (source, _), times in rows.items():
            asked[source] += times
        for (source, _), times in rows.items():
            length = sources[source][0]
            assert times <= -(-asked[source] // length)  # rounded up: 1 unless more are asked than there are


@given(st.integers(1, 12), STEPS)
@settings(max_examples=200, deadline=None)
def test_occurrences_count_the_earlier_draws_of_a_row(length, steps) -> None:
    made, seen = stream([(length, 1.0)]), Counter()
    for count in steps:
        for draw in made.next(count):
            assert draw.occurrence == seen[draw.row]
            seen[draw.row] += 1
    assert max(seen.values()) - min(seen.get(row, 0) for row in range(length)) <= 2


def test_each_epoch_deals_every_row_once_in_a_new_order() -> None:
    made = stream([(50, 1.0)], seed=1)
    epochs = [[draw.row for draw in made.next(50)] for _ in range(3)]
    assert all(sorted(rows) == list(range(50)) for rows in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(50))
