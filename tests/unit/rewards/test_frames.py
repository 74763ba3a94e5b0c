from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.workers.frames import WHOLE, FrameBuffer, GarbledError, pack_frame

TOKEN = bytes(range(16))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**64 - 1),
            st.integers(-1, 2**31 - 1),
            st.integers(0, 2**32 - 1),
            st.text(max_size=20),
            st.lists(st.binary(max_size=20), max_size=3),
        ),
        max_size=4,
    ),
    st.integers(1, 9),
)
def test_frames_arrive_whole_however_the_bytes_are_cut(frames, size):
    data = b"".join(pack_frame(TOKEN, n, item, pid, {"text": text}, blobs) for n, item, pid, text, blobs in frames)
    buffer, found = FrameBuffer(TOKEN), []
    for start in range(0, len(data), size):
        buffer.feed(data[start : start + size])
        while (frame := buffer.pop()) is not None:
            found.append((frame.request, frame.item, frame.pid, frame.body["text"], frame.blobs))
    assert found == frames and buffer.pop() is None


def test_numbers_that_strict_json_lacks_survive():
    buffer = FrameBuffer(TOKEN)
    buffer.feed(pack_frame(TOKEN, 1, WHOLE, 7, {"a": math.nan, "b": -math.inf, "c": {1, 2}}))
    frame = buffer.pop()
    assert frame is not None
    assert math.isnan(frame.body["a"]) and frame.body["b"] == -math.inf and frame.body["c"] == "{1, 2}"


GOOD = pack_frame(TOKEN, 3, 4, 5, {"parts": {"reward": 1.0}})


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        b"\n" + GOOD,
        GOOD[1:],
        pack_frame(TOKEN[::-1], 3, 4, 5, {}),
        GOOD[:-1] + b"!",
        b"{}" * 50,
        GOOD.replace(b'"parts"', b'"parts '),
        pack_frame(TOKEN, 3, 4, 5, {"n": "x" * 2000}),
        pack_frame(TOKEN, 3, 4, 5, {}, [b"x" * 2000]),
        pack_frame(TOKEN, 3, 4, 5, {"blobs": [9]}),
        pack_frame(TOKEN, 3, 4, 5, {}).replace(b"{}", b"[]"),
    ],
)
def test_what_is_no_frame_is_refused_after_the_frames_before_it(data):
    buffer = FrameBuffer(TOKEN, most=(1000, 1000))
    buffer.feed(GOOD + data)
    first = buffer.pop()
    assert first is not None and first.body == {"parts": {"reward": 1.0}}
    with pytest.raises(GarbledError):
        while buffer.pop() is not None:
            pass


@given(st.binary(min_size=1, max_size=60).filter(lambda data: not TOKEN.startswith(data[:16])))
def test_stray_bytes_are_refused_at_once_and_never_waited_for(data):
    buffer = FrameBuffer(TOKEN)
    buffer.feed(data)
    with pytest.raises(GarbledError):
        buffer.pop()


def test_what_json_is_made_of_may_be_replaced(monkeypatch):
    import json

    for owner, name in (
        (json, "dumps"),
        (json, "loads"),
        (json.JSONEncoder, "encode"),
        (json.JSONDecoder, "decode"),
        (json.JSONEncoder, "iterencode"),
        (json.JSONEncoder, "default"),
    ):
        monkeypatch.setattr(owner, name, None)
    buffer = FrameBuffer(TOKEN)
    buffer.feed(pack_frame(TOKEN, 0, 0, 0, {"a": 0.1, "b": object}))
    frame = buffer.pop()
    assert frame is not None and frame.body["a"] == 0.1
