"""What is written as rollouts is what is read, to the last bit."""

from __future__ import annotations

import math
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.store.rollouts import read_rollouts, write_rollouts
from vlmrl.types import Call, Group, Media, Row, Score, ScoredSample, Segment, Trajectory, Turn

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
mappings = st.dictionaries(st.text(max_size=8), json_values, max_size=3)
media = st.builds(
    Media, st.text("0123456789abcdef", min_size=64, max_size=64), st.integers(1, 2**31 - 1), st.integers(1, 9999)
)
medias = st.lists(media, max_size=3).map(tuple)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
floats = st.floats(allow_nan=False)
seconds = st.floats(0, 1e9)
int32 = st.integers(0, 2**31 - 1)


@st.composite
def segments(draw) -> Segment:
    tokens = draw(ids)
    logp = st.lists(st.floats(width=32, allow_nan=False), min_size=len(tokens), max_size=len(tokens)).map(tuple)
    images = draw(medias)
    return Segment(
        draw(texts),
        tokens,
        draw(st.booleans()),
        draw(st.none() | logp),
        author=draw(st.sampled_from(["policy", "demonstration", "environment"])),
        version=draw(st.none() | int32),
        media=images,
        seen_sizes=draw(seen(images)),
    )


def seen(images: tuple[Media, ...]):
    """The sizes that a model saw of them, or that they are not known."""
    size = st.tuples(st.integers(1, 9999), st.integers(1, 9999))
    return st.just(()) | st.lists(size, min_size=len(images), max_size=len(images)).map(tuple)


turns = st.builds(Turn, texts, texts, medias, st.lists(st.builds(Call, texts, mappings), max_size=2).map(tuple))


@st.composite
def groups(draw) -> Group:
    row = Row(draw(texts), draw(texts), draw(texts), draw(mappings), draw(medias), draw(mappings))
    samples = []
    for _ in range(draw(st.integers(1, 3))):
        trajectory = Trajectory(
            row.task,
            row.prompt_id,
            draw(int32),
            draw(int32),
            draw(int32),
            draw(st.integers(0, 2**63 - 1)),
            draw(ids),
            tuple(draw(st.lists(segments(), max_size=3))),
            row.media,
            draw(st.sampled_from(["stop", "length"])),
            draw(seen(row.media)),
        )
        parts = st.dictionaries(texts, st.none() | floats, max_size=3)
        score = Score(
            draw(floats),
            draw(parts),
            draw(texts),
            draw(st.none() | texts),
            status=draw(st.sampled_from(["ok", "failed", "unavailable"])),
            detail=draw(st.none() | mappings),
            artifacts=draw(st.dictionaries(texts, media, max_size=2)),
        )
        numbers = draw(floats), draw(st.booleans()), draw(seconds), draw(seconds)
        spoken = tuple(draw(st.lists(turns, max_size=2)))
        dependency = draw(st.none() | st.lists(st.floats(0, 10, width=32), max_size=3).map(tuple))
        samples.append(ScoredSample(trajectory, draw(texts), score, *numbers, turns=spoken, dependency=dependency))
    return Group(row, draw(texts), tuple(samples))


def round_trip(written: list[Group]) -> list[Group]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rollouts", "000001.parquet")
        write_rollouts(path, written, step=0)
        return read_rollouts(path)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(groups(), max_size=3))
def test_groups_come_back_exactly(written: list[Group]):
    assert round_trip(written) == written


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.floats(), st.floats(), st.floats(width=32))
def test_every_float_comes_back_bit_for_bit(value: float, advantage: float, logp: float):
    row = Row("p", "s", "t", {})
    t = Trajectory("t", "p", 0, 0, 0, 0, (1,), (Segment("assistant", (1,), True, (logp,)),), (), "stop")
    sample = ScoredSample(t, "", Score(value, {}, error="it raised"), advantage)
    back = round_trip([Group(row, "", (sample,))])[0].samples[0]
    sampled = back.trajectory.segments[0].sampler_logp
    assert sampled is not None
    for before, after in ((value, back.score.value), (advantage, back.advantage), (logp, sampled[0])):
        assert bits(before) == bits(after) or (math.isnan(before) and math.isnan(after))
