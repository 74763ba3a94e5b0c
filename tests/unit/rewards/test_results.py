"""What a reward may return beside numbers: a detail, images, a note; and what becomes of them."""

from __future__ import annotations

import hashlib
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vlmrl import RewardInput, RewardResult
from vlmrl.errors import RewardError
from vlmrl.rewards import outcomes
from vlmrl.rewards.base import RewardSpec, split_result
from vlmrl.rewards.outcomes import FileLimit, artifact_files, detail_text, read_artifacts, read_detail
from vlmrl.rewards.scoring import Scorer
from vlmrl.store.rollouts import read_rollouts, write_rollouts
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import Call, Group, Media, Row, Score, ScoredSample, Segment, Trajectory, Turn

DRAWS = """
from PIL import Image
import numpy as np
from vlmrl import RewardResult

def reward(x):
    if x.response == "number":
        return 0.5
    render = Image.new("RGB", (len(x.response), 3), (255, 0, 0))
    detail = {"boxes": np.array([[1, 2], [3, 4]]), "iou": np.float32(0.5), "text": x.response}
    return RewardResult({"iou": 0.5, "shape": None}, note="drawn", detail=detail, artifacts={"render": render})
"""


def test_a_result_of_a_worker_becomes_a_score_with_detail_and_images(scorer):
    with scorer(DRAWS) as s:
        drawn, number = s.score([RewardInput("abcd"), RewardInput("number")], strict=True)
    assert (drawn.value, dict(drawn.parts), drawn.note) == (1.0, {"iou": 0.5, "shape": None}, "drawn")
    assert drawn.detail == {"reward": {"boxes": [[1, 2], [3, 4]], "iou": 0.5, "text": "abcd"}}
    (sha256,) = drawn.files
    assert drawn.artifacts == {"render": Media(sha256, 4, 3)}
    assert hashlib.sha256(drawn.files[sha256]).hexdigest() == sha256
    image = Image.open(io.BytesIO(drawn.files[sha256]))
    assert (image.format, image.size, image.getpixel((3, 2))) == ("PNG", (4, 3), (255, 0, 0))
    assert (number.value, number.detail, dict(number.artifacts), dict(number.files)) == (0.5, None, {}, {})


def test_a_result_of_a_reward_in_this_process_is_the_same():
    image = Image.new("L", (2, 2))
    spec = RewardSpec("own", lambda x: RewardResult(0.25, "n", {"a": 1}, {"i": image}), {}, {}, pure=True)
    (score,) = Scorer(spec).score([RewardInput("")], strict=True)
    assert (score.value, score.note, score.detail) == (0.25, "n", {"own": {"a": 1}})
    assert [(m.width, m.height) for m in score.artifacts.values()] == [(2, 2)]
    assert set(score.files) == {m.sha256 for m in score.artifacts.values()}
    broken = RewardSpec("own", lambda x: RewardResult(0.25, artifacts={"i": 7}), {}, {}, pure=True)
    with pytest.raises(RewardError, match="`i` is a int, not a PIL image"):
        Scorer(broken).score([RewardInput("")], strict=True)


def test_parts_of_a_result_may_be_a_number_or_carry_note_and_detail():
    assert split_result(RewardResult(0.5)) == ({"reward": 0.5}, "", None, {})
    assert split_result({"a": 1, "note": "n", "detail": {"b": 2}}) == ({"a": 1}, "n", {"b": 2}, {})
    assert split_result({"a": 1, "note": 2.0, "detail": 3.0}) == ({"a": 1, "note": 2.0, "detail": 3.0}, "", None, {})
    assert split_result(RewardResult({"a": 1, "note": "inner"}, "outer", [1])) == ({"a": 1}, "outer", [1], {})


@pytest.mark.parametrize("value", [None, True, 3, 0.5, "text \u00e9", [], {"a": [1, {"b": None}]}])
def test_a_detail_comes_back_as_it_was(value):
    assert read_detail(detail_text(value)) == value


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (float("nan"), "Out of range float"),
        ({"a": {(1, 2): 3}}, "keys must be"),
        (b"bytes", "it holds a bytes"),
        (object(), "it holds a object"),
        (np.array([1.0, np.inf]), "Out of range float"),
    ],
)
def test_a_detail_that_is_no_json_says_what_it_holds(value, told):
    with pytest.raises(RewardError, match=told) as error:
        detail_text(value)
    assert error.value.hint is not None


def test_the_cap_of_a_detail_is_exact():
    at = outcomes.MOST_DETAIL_BYTES
    assert len(detail_text("d" * (at - 2)) or "") == at
    with pytest.raises(
        RewardError, match=f"contains itself, or is at least {at + 1:,} bytes of JSON; the cap is {at:,}"
    ):
        detail_text("d" * (at - 1))
    with pytest.raises(RewardError, match="the cap is"):
        read_detail(json.dumps("d" * (at - 1)))


def test_a_detail_with_half_a_surrogate_pair_can_be_written():
    text = json.dumps(read_detail(detail_text({"\ud800": ["\udfff"]})), ensure_ascii=False)
    assert text.encode("utf-8")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA", "P", "CMYK", "F", "I;16", "HSV", "YCbCr"])
def test_an_image_of_any_mode_is_a_png_with_its_size(mode):
    files = artifact_files({"a": Image.new(mode, (5, 4))})
    media, kept = read_artifacts(files)
    assert (media["a"].width, media["a"].height) == (5, 4)
    assert kept == {media["a"].sha256: files["a"]}
    assert artifact_files({"a": Image.new(mode, (5, 4))}) == files, "the same bytes for the same pixels"


def test_metadata_of_an_image_is_left_out_and_transparency_is_kept():
    image = Image.new("P", (2, 2))
    image.info = {"transparency": 0, "comment": "secret", "icc_profile": b"secret"}
    (data,) = artifact_files({"a": image}).values()
    assert b"secret" not in data
    assert Image.open(io.BytesIO(data)).mode == "RGBA"


def test_one_image_under_two_names_is_one_file():
    media, kept = read_artifacts(artifact_files({name: Image.new("L", (2, 2)) for name in "ab"}))
    assert list(media) == ["a", "b"] and len(kept) == 1


@pytest.mark.slow
def test_the_largest_images_fit_the_workers_answer(scorer):
    """Eight of a million pixels each, of noise that does not compress, just below the cap of bytes."""
    source = """
    from PIL import Image
    import os
    from vlmrl import RewardResult
    def reward(x):
        side = 1000
        images = {str(i): Image.frombytes("L", (side, side), os.urandom(side * side)) for i in range(8)}
        return RewardResult(1.0, detail="d" * 65000, artifacts=images)
    """
    with scorer(source) as s:
        first, second = s.score([RewardInput("a")] * 2, strict=True)
    assert len(first.artifacts) == len(second.files) == 8


def test_what_a_reward_looks_at_reaches_the_worker(scorer):
    media = (Media("0" * 64, 30, 20),)
    turns = (Turn("assistant", "look", (), (Call("crop", {"box": [1, 2]}),)), Turn("tool", "", media))
    x = RewardInput("a", prompt_id="p7", sample=3, media=media, seen_sizes=((28, 28),), turns=turns)
    source = """
    from vlmrl import RewardResult
    def reward(x):
        assert x.turns[0].calls[0].arguments == {"box": [1, 2]} and x.turns[1].media == x.media
        return RewardResult(1.0, detail=[x.prompt_id, x.sample, x.media[0].width, x.seen_sizes, x.turns[0].text])
    """
    with scorer(source) as s:
        (score,) = s.score([x], strict=True)
    assert score.detail == {"reward": ["p7", 3, 30, [[28, 28]], "look"]}


def test_a_dict_in_verls_form_keeps_its_numbers_alone(scorer):
    source = """
    def compute_score(data_source, solution_str, ground_truth):
        return {"score": 1.0, "acc": True, "pred": "x", "detail": {"a": 1}}
    """
    with scorer(source, function="compute_score") as s:
        (score,) = s.score([RewardInput("a", {"answer": "a"})], strict=True)
    assert (dict(score.parts), score.detail) == ({"score": 1.0, "acc": 1.0}, None)


def test_the_name_of_a_detail_is_that_of_the_function_or_of_the_built_in(reward_file):
    assert reward_file("def grade(x): return 1.0", function="grade").key == "grade"
    assert load_reward("exact_match").key == "exact_match"


def nested(levels: int) -> list:
    value: list = []
    for _ in range(levels - 1):
        value = [value]
    return value


def test_a_detail_of_the_most_levels_can_be_read_from_the_rollouts_again(tmp_path):
    at = outcomes.MOST_DETAIL_LEVELS
    detail = read_detail(detail_text(nested(at)))
    with pytest.raises(RewardError, match=f"nests more than {at} levels"):
        read_detail(detail_text(nested(at + 1)))
    segment = Segment("assistant", (1,), True, (0.0,))
    trajectory = Trajectory("t", "p", 0, 0, 0, 0, (1,), (segment,), (), "stop")
    sample = ScoredSample(trajectory, "x", Score(1.0, {}, detail={"mine": detail}))
    write_rollouts(tmp_path / "r.parquet", [Group(Row("p", "s", "t", {}), "x", (sample,))], step=0)
    [group] = read_rollouts(tmp_path / "r.parquet")
    assert group.samples[0].score.detail == {"mine": detail}


def test_a_detail_that_names_a_thing_twice_is_refused():
    with pytest.raises(RewardError, match="the key `1` occurs more than once"):
        read_detail(detail_text({1: "a", "1": "b"}))


@pytest.mark.parametrize(
    "detail",
    [["x" * 1000] * 10_000_000, np.zeros((10_000, 10_000), np.uint8), {"a": {str(i): 0 for i in range(100_000)}}],
)
def test_a_detail_that_is_far_too_large_is_refused_before_it_is_written_out(detail):
    with pytest.raises(RewardError, match=r"at least .* bytes of JSON; the cap is|it holds an array of 100,000,000"):
        detail_text(detail)


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.none(), inner),
    )
)
def test_the_least_length_of_a_detail_is_never_above_its_length(value):
    assert outcomes._least_bytes(value) <= len(detail_text(value) or "null")


class Endless(dict):
    """A mapping that says it holds one thing and gives them without end."""

    def __len__(self) -> int:
        return 1

    def items(self):
        while True:
            yield "same", Image.new("L", (1, 1))


def test_the_cap_of_artifacts_holds_whatever_a_mapping_says_and_whoever_sent_them():
    with pytest.raises(RewardError, match="9 artifacts; the cap is 8"):
        artifact_files(Endless())
    (data,) = artifact_files({"a": Image.new("L", (1, 1))}).values()
    with pytest.raises(RewardError, match="the cap is 8"):
        read_artifacts({str(i): data for i in range(9)})
    with pytest.raises(RewardError, match="the cap is 200"):
        read_artifacts({"n" * 201: data})


@pytest.mark.parametrize(
    ("values", "kind"), [([0, 300, 65535], np.uint16), ([-7, 0, 90_000], np.int32), ([0.0, 0.25, 1.0], np.float32)]
)
def test_numbers_beyond_bytes_are_shown_in_their_own_range(values, kind):
    image = Image.fromarray(np.array([values], kind))
    media, kept = read_artifacts(artifact_files({"a": image}))
    shown = np.asarray(Image.open(io.BytesIO(kept[media["a"].sha256])))[0]
    low, high = values[0], values[-1]
    assert shown.tolist() == [round((v - low) / (high - low) * 255) for v in values]
    with pytest.raises(RewardError, match="not finite"):
        artifact_files({"a": Image.fromarray(np.array([[np.nan, 1.0]], np.float32))})


ODD = """
from vlmrl import RewardResult, RewardUnavailable
ON_TIMEOUT = {"reward": 0.0}

class Note(str):
    def __getitem__(self, place):
        return "x" * 5_000_000

class Odd(Exception):
    def __str__(self):
        raise SystemExit

def reward(x):
    if x.response == "note":
        return RewardResult({"reward": 1.0}, note=Note("abc"))
    if x.response == "text":
        raise Odd()
    if x.response == "hint":
        raise RewardUnavailable("down", hint="h" * 5_000_000)
    if x.response == "object":
        error = RewardUnavailable("down")
        error.hint = object()
        raise error
    return 1.0
"""


def test_texts_of_a_reward_that_are_none_are_no_hang_that_earns_on_timeout(scorer):
    with scorer(ODD) as s:
        fine, note, text, hint, odd = s.score([RewardInput(t) for t in ("fine", "note", "text", "hint", "object")])
    assert (note.value, note.note, fine.value) == (1.0, "abc", 1.0)
    assert (text.status, text.error) == ("failed", "Odd: (its text cannot be made: SystemExit) (mine.py:17)")
    assert (hint.status, hint.error, odd.status) == ("unavailable", "down", "unavailable")


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.randoms())
def test_which_images_are_kept_does_not_depend_on_the_order_of_answers(sizes, random):
    limit, order, kept = FileLimit(10), list(range(len(sizes))), {}
    random.shuffle(order)
    for index in order:
        kept[index] = sizes[index]
        for gone in limit.add(index, sizes[index]):
            del kept[gone]
        assert sum(kept.values()) <= 10
    first = next((i for i in range(len(sizes)) if sum(sizes[: i + 1]) > 10), len(sizes))
    assert {i for i, size in kept.items() if size} == {i for i, size in enumerate(sizes[:first]) if size}


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_images_of_a_call_beyond_the_limit_are_left_out_and_counted(scorer, monkeypatch, workers):
    size = len(artifact_files({"a": Image.new("L", (9, 9))})["a"])
    monkeypatch.setattr("vlmrl.rewards.scoring.MOST_CALL_BYTES", 3 * size + 1)
    source = """
    from PIL import Image
    from vlmrl import RewardResult
    def reward(x):
        return RewardResult(float(x.response), artifacts={"a": Image.new("L", (9, 9))})
    """

    def here(x):
        return RewardResult(float(x.response), artifacts={"a": Image.new("L", (9, 9))})

    own = Scorer(RewardSpec("own", here, {}, {}, pure=True))
    with scorer(source, options={"workers": workers}) if workers else own as s:
        scores = s.score([RewardInput(str(i)) for i in range(6)], strict=True)
        assert [score.value for score in scores] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert [bool(score.files) for score in scores] == [bool(score.artifacts) for score in scores]
        assert [bool(score.files) for score in scores] == [True] * 3 + [False] * 3
        assert s.images_left_out == 3 and all("left out" in score.note for score in scores[3:])
