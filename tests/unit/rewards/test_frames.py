from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from vlmrl.rewards.frames import FrameBuffer, pack_frame


@given(
    st.lists(st.tuples(st.text(max_size=20), st.lists(st.binary(max_size=20), max_size=3)), max_size=4),
    st.integers(1, 9),
)
def test_frames_arrive_whole_however_the_bytes_are_cut(frames, size):
    data = b"".join(pack_frame({"text": text}, blobs) for text, blobs in frames)
    buffer, found = FrameBuffer(), []
    for start in range(0, len(data), size):
        buffer.feed(data[start : start + size])
        while (frame := buffer.pop()) is not None:
            found.append((frame[0]["text"], frame[1]))
    assert found == frames and buffer.pop() is None


def test_numbers_that_strict_json_lacks_survive():
    buffer = FrameBuffer()
    buffer.feed(pack_frame({"a": math.nan, "b": -math.inf, "c": {1, 2}}))
    frame = buffer.pop()
    assert frame is not None
    assert math.isnan(frame[0]["a"]) and frame[0]["b"] == -math.inf and frame[0]["c"] == "{1, 2}"
