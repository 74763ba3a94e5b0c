from __future__ import annotations

import math
import time

import pytest

from vlmrl.errors import RewardError
from vlmrl.rewards.scoring import Scorer
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import RewardInput

ON_B = "def reward(x):\n    if x.response == 'b':\n        {body}\n    return 1.0\n"
"""A reward that goes wrong on the second of the three inputs."""


BAD = {
    "raise KeyError('colour')": "KeyError: 'colour' (mine.py:4)",
    "return float('nan')": "`reward` is nan, not a finite number",
    "return float('inf')": "`reward` is inf, not a finite number",
    "return 10 ** 400": "not a finite number",
    "return '1.0'": "`reward` is '1.0', not a finite number",
    "return [1.0]": "`reward` is [1.0], not a finite number",
    "return None": "no part of the reward applies: reward",
    "return {'a': None, 'b': None}": "no part of the reward applies: a, b",
    "return {}": "no part of the reward applies: it returned no part",
    "return {'a': 'high'}": "`a` is 'high', not a finite number",
    "import sys; sys.exit(3)": "SystemExit: 3",
    "import os; os._exit(7)": "exit code 7",
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": "SIGSEGV",
    "return len(bytearray(10 ** 12))": "MemoryError",
    "class E(Exception): __str__ = None\n    raise E": "E: (its text cannot be made",
}


@pytest.mark.slow
def test_a_bad_reward_costs_only_its_own_row(scorer):
    """Each response names the body of the reward that it gets."""
    bodies = "\n".join(f"def f{n}():\n    {body}" for n, body in enumerate(BAD))
    good = RewardInput("good")
    with scorer(f"def reward(x): return 1.0 if x.response == 'good' else globals()[x.response]()\n\n{bodies}\n") as s:
        scores = s.score([row for n in range(len(BAD)) for row in (good, RewardInput(f"f{n}"))] + [good], strict=False)
        assert [(score.value, score.error) for score in scores[::2]] == [(1.0, None)] * (len(BAD) + 1)
        assert s.failures == len(BAD)
        for n, (words, bad) in enumerate(zip(BAD.values(), scores[1::2], strict=True)):
            assert math.isnan(bad.value) and bad.parts == {}
            assert words in (bad.error or "")
            with pytest.raises(RewardError) as error:
                s.score([good, RewardInput(f"f{n}"), good], strict=True, rows=["p0", "p1", "p2"])
            assert error.value.where == "p1"
            assert words.partition(" (mine")[0] in error.value.message


@pytest.mark.slow
@pytest.mark.parametrize("body", ["import time; time.sleep(60)", "while True: pass", "pow(3, 10 ** 9)"])
def test_a_reward_that_hangs_is_ended_by_the_clock(scorer, inputs, body):
    with scorer(ON_B.format(body=body), options={"timeout_seconds": 0.4}) as s:
        start = time.monotonic()
        values = s.score(inputs, strict=False)
        assert time.monotonic() - start < 5
        assert [v.value for v in (values[0], values[2])] == [1.0, 1.0]
        assert values[1].error == "no answer within 0.4 s; its worker was ended"
        with pytest.raises(RewardError, match="no answer within"):
            s.score(inputs, strict=True)


def test_an_error_shows_the_users_lines_and_prints_and_nothing_of_ours(scorer, inputs):
    source = """
    import json
    def parse(text):
        return json.loads(text)

    def reward(x):
        print("parsing", x.response)
        return parse(x.response)
    """
    with scorer(source) as s, pytest.raises(RewardError) as error:
        s.score(inputs[:1], strict=True)
    text = str(error.value)
    assert "mine.py:8 in reward: return parse(x.response)" in text
    assert "mine.py:4 in parse: return json.loads(text)" in text
    assert "JSONDecodeError" in text and "parsing a" in text
    assert "worker.py" not in text and "decoder.py" not in text


def test_what_a_reward_prints_does_not_disturb_the_answers(scorer, inputs):
    source = """
    import os, sys
    def reward(x):
        print("x" * 300_000)
        print("warn", file=sys.stderr)
        os.write(1, b"raw \\xff bytes\\n")
        os.close(0)
        return 0.5
    """
    with scorer(source) as s:
        assert s.score(inputs[:1], strict=False)[0].value == 0.5


def test_closing_every_stream_is_survived(scorer, inputs):
    source = "import os\nos.close(1); os.close(2)\ndef reward(x): return 0.5\n"
    with scorer(source) as s:
        assert {r.value for r in s.score(inputs, strict=False)} == {0.5}


@pytest.mark.slow
def test_parts_notes_and_weights(scorer, inputs):
    source = "def reward(x): return {'a': 1.0, 'b': None, 'c': 3, 'note': 'fine'}"
    with scorer(source, weights={"a": 0.25, "b": 0.75}) as s:
        (score,) = s.score(inputs[:1], strict=True)
        assert (score.value, score.parts, score.note) == (1.0, {"a": 1.0, "b": None, "c": 3.0}, "fine")
    with scorer(source) as s:  # no weights anywhere: every part counts 1, the share of b goes to the others
        assert s.score(inputs[:1], strict=True)[0].value == pytest.approx(6.0, abs=1e-12)
    with scorer("def reward(x): return {'reward': 0.5, 'extra': 9.0}") as s:
        assert s.score(inputs[:1], strict=True)[0].value == 0.5


def test_a_part_that_a_response_lacks_is_noted_and_none_for_all_of_them_is_named(scorer, inputs):
    source = "def reward(x): return {'a': 0.5, 'note': 'odd'} if x.response == 'b' else {'a': 0.5, 'b': 1}"
    with scorer(source, weights={"a": 0.5, "b": 0.5}) as s:
        notes = [score.note for score in s.score(inputs, strict=True)]
        assert notes == ["", "odd; the reward returned no `b`: its weight goes to the other parts", ""]
    with scorer("def reward(x): pass", weights={"a": 0.5, "b": 0.5}) as s:
        assert "it returned None, and its weights name a, b" in str(s.score(inputs, strict=False)[0].error)


def test_weights_and_ranges_may_stand_in_the_file(scorer, inputs):
    source = """
    WEIGHTS = {'a': 2}
    RANGES = {'a': (0, 1)}
    def reward(x): return {'a': 5 if x.response == 'b' else 0}
    """
    with scorer(source) as s:
        good, bad, _ = s.score(inputs, strict=False)
        assert good.value == 0.0
        assert bad.error == "reward part `a` is 5.0, outside its declared range [0.0, 1.0]"


def test_a_weight_for_a_part_that_never_comes_is_an_error(scorer, inputs):
    with scorer("def reward(x): return {'a': 1.0}", weights={"a": 1.0, "b": 1.0}) as s:
        with pytest.raises(RewardError, match=r"part `b`, which reward .* does not return"):
            s.score(inputs, strict=True)
        assert s.score(inputs, strict=False)[0].value == 2.0


def test_numbers_of_other_libraries_are_numbers(scorer, inputs):
    source = """
    from decimal import Decimal
    from fractions import Fraction
    import numpy as np
    def reward(x):
        return {"a": np.float32(0.5), "b": np.array(1), "c": True, "d": Decimal("0.25"), "e": Fraction(1, 4)}
    """
    with scorer(source) as s:
        assert s.score(inputs[:1], strict=True)[0].parts == {"a": 0.5, "b": 1.0, "c": 1.0, "d": 0.25, "e": 0.25}


@pytest.mark.slow
def test_many_rows_keep_their_order_over_several_workers(scorer):
    rows = [RewardInput(response="x" * n) for n in range(200)]
    source = """
    import os, time
    def reward(x):
        time.sleep(0.02)
        return {'reward': len(x.response), 'pid': os.getpid()}
    """
    with scorer(source, options={"workers": 3}) as s:
        scores = s.score(rows, strict=True)
        assert [r.value for r in scores] == list(range(200))
        assert len({r.parts["pid"] for r in scores}) == 3
        assert len(s.seconds) == 200 and all(t >= 0 for t in s.seconds)
        again = s.score(rows, strict=True)
        assert {r.parts["pid"] for r in again} == {r.parts["pid"] for r in scores}


@pytest.mark.slow
def test_a_reward_that_ends_its_worker_every_time_is_not_asked_for_ever(scorer):
    with scorer("import os\ndef reward(x): os._exit(3)") as s:
        scores = s.score([RewardInput("a")] * 40, strict=False)
    assert [r.error for r in scores[:8]] == ["it ended its worker process with exit code 3"] * 8
    assert {r.error for r in scores[8:]} == {"not scored: the worker had been lost 8 times in a row"}


@pytest.mark.slow
def test_the_memory_limit_is_the_recipes(scorer, inputs):
    source = "def reward(x): return float(len(bytearray(600 << 20)) > 0)"
    with scorer(source, options={"memory_mb": 512}) as s:
        assert "MemoryError" in (s.score(inputs[:1], strict=False)[0].error or "")
        with pytest.raises(RewardError, match="MemoryError") as error:
            s.score(inputs[:1], strict=True)
        assert "memory_mb" in (error.value.hint or "")
    with scorer(source, options={"memory_mb": 1024}) as s:
        assert s.score(inputs[:1], strict=True)[0].value == 1.0


def test_no_rows_need_no_worker(scorer):
    with scorer("def reward(x): return 1.0") as s:
        assert s.score([], strict=True) == []


def test_images_reach_a_reward_that_reads_them_pixel_by_pixel(scorer):
    from PIL import Image

    image = Image.new("RGB", (3, 2), (10, 20, 30))
    image.putpixel((2, 1), (200, 0, 7))
    x = RewardInput("a", images=[image, Image.new("RGB", (1, 1), (5, 5, 5))])
    source = "def reward(x): return float(sum(x.images[0].getpixel((2, 1))) + x.images[1].getpixel((0, 0))[0])"
    with scorer(source) as s:
        assert s.spec.needs_images
        assert s.score([x, x], strict=True)[1].value == 212.0
    with scorer("def reward(x): return float(len(list(vars(type(x)))) > 0)") as s:
        assert not s.spec.needs_images
        assert s.score([x], strict=True)[0].value == 1.0


@pytest.mark.slow
def test_hashes_of_text_are_the_same_in_every_worker(scorer, inputs):
    with scorer("def reward(x): return float(hash('colour') % 1000)", options={"workers": 2}) as s:
        first = {r.value for r in s.score(inputs * 20, strict=True)}
        s.close()
        assert {r.value for r in s.score(inputs, strict=True)} == first and len(first) == 1


def test_a_changed_file_does_not_change_a_running_reward(scorer, inputs, tmp_path):
    with scorer("def reward(x):\n    if x.response == 'b': raise SystemExit\n    return 1.0") as s:
        (tmp_path / "mine.py").write_text("def reward(x): return 99.0")
        s.close()
        assert s.score(inputs[:1], strict=True)[0].value == 1.0


def test_a_builtin_runs_in_this_process_and_its_errors_name_the_row():
    spec = load_reward("pair_answer", args={})
    good = RewardInput("<think>x</think><answer>1</answer>", truth={"same": True})
    bad = RewardInput("<think>x</think><answer>1</answer>", truth={})
    with Scorer(spec) as s:
        scores = s.score([good, bad], strict=False)
        assert scores[0].value == 1.0 and scores[0].note == ""
        assert "truth field `same` is None" in (scores[1].error or "")
        with pytest.raises(RewardError) as error:
            s.score([good, bad], strict=True)
        assert error.value.where == "row 1"
        assert s.score([RewardInput("hm", truth={"same": True})], strict=True)[0].note == "no <think>"


BATCH = """
def reward(completions, **kwargs):
    if "b" in completions:
        {body}
    return [float(c == "a") for c in completions]
"""


def test_a_batch_reward_that_is_down_is_not_asked_for_every_row(scorer, tmp_path):
    source = f"""
    def reward(completions, **kwargs):
        with open({str(tmp_path / "calls")!r}, "a") as f: f.write("x")
        raise ConnectionError("down")
    """
    with scorer(source) as s:
        scores = s.score([RewardInput("a")] * 20, strict=False)
    assert all("down" in (r.error or "") for r in scores)
    assert (tmp_path / "calls").read_text() == "x" * 4  # the batch, then three rows alone


def test_a_batch_of_the_wrong_length_is_an_error_for_all(scorer, inputs):
    with scorer("def reward(completions, **kwargs): return [1.0]") as s:
        assert all(
            r.error == "reward `reward` returned 1 scores for 3 responses" for r in s.score(inputs, strict=False)
        )
    with scorer("def reward(completions, **kwargs): return 1.0") as s:
        assert "not a list" in (s.score(inputs, strict=False)[0].error or "")


@pytest.mark.parametrize(
    ("columns", "advice"),
    [
        ({"bild": "7.png"}, 'the column `hour` as the answer, it is x.truth["answer"] here'),
        ({"hour": 7}, "The answer is x.truth[\"answer\"], and this column x.columns['hour']"),
    ],
)
def test_the_column_that_became_the_answer_is_named_where_it_is_read_by_its_own_name(scorer, columns, advice):
    x = RewardInput("b", {"answer": 7}, columns)
    with scorer("def reward(x):\n    return float(x.truth['hour'] == 7)\n") as s, pytest.raises(RewardError) as caught:
        s.score([x], strict=True)
    assert advice in (hint := caught.value.hint or "")
    assert "columns = {" not in hint


def test_a_number_that_was_not_measured_says_what_was(scorer):
    code = "def reward(x):\n    return x.measured['reward']\n"
    x = RewardInput("b", {"answer": 7}, {}, measured={"steps": 2.0})
    with scorer(code) as s, pytest.raises(RewardError) as caught:
        s.score([x], strict=True)
    hint = caught.value.hint or ""
    assert "measured for this response: steps." in hint and "x.measured.get('reward')" in hint
    assert "truth" not in hint


@pytest.mark.slow
def test_a_truth_that_the_row_lacks_says_what_the_row_has(scorer):
    x = RewardInput("b", {"label": "red"}, {"picture": 1, "label": "red"})
    code = "def reward(x):\n    return float(x.truth['answer'] == x.response)\n"
    with scorer(code) as s, pytest.raises(RewardError) as caught:
        s.score([x], strict=True, rows=["rows.jsonl:7"])
    assert "KeyError: 'answer'" in caught.value.message and caught.value.where == "rows.jsonl:7"
    hint = caught.value.hint or ""
    assert "the truth of this row has label, and no `answer`; columns: picture, label." in hint
    assert 'columns = { answer = "..." }' in hint
