"""The stream of rows over random sources."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.tasks.source import PromptStream

SOURCES = st.lists(
    st.tuples(st.integers(1, 12), st.sampled_from([0.1, 0.3, 0.5, 1.0, 2.0, 7.0])), min_size=1, max_size=4
)
STEPS = st.lists(st.integers(1, 9), min_size=1, max_size=25)


def stream(sources: list[tuple[int, float]], seed: int = 0) -> PromptStream:
    return PromptStream([length for length, _ in sources], [share for _, share in sources], seed)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    steps = stream([(3, 1.0)])  # a row that a step has had waits for the next one
    assert set(Counter(draw.row for _ in range(300) for draw in steps.next(2)).values()) == {200}


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    steps=st.integers(0, 5),
    count=st.integers(1, 6),
    seed=st.integers(0, 3),
)
def test_adopting_ones_own_state_is_loading_it(lengths, steps, count, seed):
    shares = [1.0 + i for i in range(len(lengths))]
    a, b, c = (PromptStream(lengths, shares, seed) for _ in range(3))
    for _ in range(steps):
        a.next(count)
    assert b.adopt(a.state_dict()) == []
    c.load_state_dict(a.state_dict())
    assert b.state_dict() == c.state_dict() == a.state_dict()
    assert b.next(count) == c.next(count) == a.next(count)


@given(length=st.integers(1, 9), drawn=st.integers(1, 12), more=st.integers(1, 4))
def test_a_source_that_grew_begins_its_first_epoch_and_the_others_go_on(length, drawn, more):
    before = PromptStream([5, length], [1.0, 1.0], 0)
    before.next(drawn)
    state = before.state_dict()
    after = PromptStream([5, length + more], [1.0, 1.0], 0)
    (note,) = after.adopt(state)
    assert f"{length} rows before, {length + more} now" in note
    new = after.state_dict()
    assert new["decks"][0] == state["decks"][0] and new["drawn"] == state["drawn"]
    assert new["decks"][1] == {"epoch": 0, "position": 0, "waiting": []}
    draws = [d.row for _ in range(2 * (length + more)) for d in after.next(1) if d.source == 1]
    assert sorted(draws[: length + more]) == list(range(length + more)), "its first epoch holds each row once"


def test_other_shares_are_counted_from_there_on_and_another_seed_begins_anew():
    before = PromptStream([40, 40], [9.0, 1.0], 0)
    before.next(20)
    after = PromptStream([40, 40], [1.0, 1.0], 0)
    assert len(after.adopt(before.state_dict())) == 1
    assert [d.source for d in after.next(4)] == [0, 1, 0, 1], "the other source does not catch up"
    assert after.state_dict()["decks"][0]["position"] == before.state_dict()["decks"][0]["position"] + 2
    other = PromptStream([40, 40], [9.0, 1.0], 1)
    assert "train.seed" in other.adopt(before.state_dict())[0]
    assert other.state_dict() == PromptStream([40, 40], [9.0, 1.0], 1).state_dict()
