"""What a part of a reward may be, and how large parts, weights and their sum."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.errors import RewardError
from vlmrl.rewards.base import LARGEST, RewardSpec, check_parts, check_weight_sizes, combine, value_bounds
from vlmrl.rewards.scoring import Scorer
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import RewardInput


class Half:
    def __float__(self) -> float:
        return 0.5


@pytest.mark.parametrize(
    "value",
    [
        0.5,
        Half(),
        Decimal("0.5"),
        Fraction(1, 2),
        np.float16(0.5),
        np.float32(0.5),
        np.float64(0.5),
        np.longdouble(0.5),
        np.array(0.5),
        np.array([0.5]),
        np.array([[0.5]]),
        torch.tensor(0.5),
        torch.tensor([0.5]),
        torch.tensor(0.5, dtype=torch.bfloat16),
        torch.tensor(0.5, requires_grad=True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_says_that_it_is_one_real_number_is_a_part(value):
    assert check_parts({"p": value}, {}) == {"p": 0.5}


@pytest.mark.parametrize("value", [True, 1, np.int8(1), np.bool_(True), torch.tensor(True), torch.tensor(1)])
def test_whole_numbers_and_truths_are_numbers(value):
    assert check_parts({"p": value, "none": None}, {}) == {"p": 1.0, "none": None}


@pytest.mark.parametrize(
    "value",
    [
        "0.5",
        b"1",
        bytearray(b"1"),
        memoryview(b"1"),
        np.str_("1"),
        [1.0],
        (1.0,),
        {"a": 1.0},
        object(),
        1j,
        complex(1, 0),
        np.complex64(1),
        np.complex128(1 + 2j),
        np.array(1 + 0j),
        np.array([1 + 0j]),
        torch.tensor(1 + 2j),
        torch.tensor(1 + 0j),
        np.array([1.0, 2.0]),
        torch.tensor([1.0, 2.0]),
        np.array([]),
        np.datetime64("2020-01-01"),
        np.timedelta64(3, "s"),
        math.nan,
        math.inf,
        -math.inf,
        np.float32("nan"),
        torch.tensor(math.nan),
        Decimal("NaN"),
        Decimal("1e400"),
        10**400,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_finite_real_number_is_refused(value):
    with pytest.raises(RewardError, match=r"part `p` is .*not a finite number"):
        check_parts({"p": value}, {})


@pytest.mark.parametrize("value", [1e308, -1e308, 1.1e9, 10**10])
def test_a_finite_part_that_is_absurd_is_refused_with_the_bound(value):
    with pytest.raises(RewardError, match=r"part `p` is .*, beyond 1e\+09") as error:
        check_parts({"p": value}, {})
    assert "of the order of 1" in (error.value.hint or "")
    assert check_parts({"p": LARGEST, "q": -LARGEST}, {}) == {"p": LARGEST, "q": -LARGEST}


@pytest.mark.parametrize("weight", [1e308, -1e10, math.inf, -math.inf, math.nan])
def test_a_weight_that_is_absurd_is_refused_before_anything_is_scored(weight):
    with pytest.raises(RewardError, match="the weight of the part `a` is"):
        check_weight_sizes({"a": weight}, "r")
    spec = RewardSpec("r", lambda x: {"a": 1.0}, {}, {"a": 1.0}, pure=True)
    with pytest.raises(RewardError, match="the weight of the part `a` is"):
        Scorer(spec, {"a": weight})


@given(
    st.dictionaries(
        st.sampled_from("abc"),
        st.tuples(st.floats(-LARGEST, LARGEST), st.none() | st.floats(-LARGEST, LARGEST)),
        min_size=1,
    )
)
def test_a_score_is_a_number_within_the_bound_or_an_error(parts):
    try:
        value, _ = combine({k: v for k, (_, v) in parts.items()}, {k: w for k, (w, _) in parts.items()})
    except RewardError:
        return
    assert -LARGEST <= value <= LARGEST


@pytest.mark.parametrize("parts", [{"a": 1e308, "b": 1e308}, {"a": math.inf, "b": -math.inf}, {"a": LARGEST, "b": 1.0}])
def test_a_sum_that_overflows_is_an_error_with_its_terms(parts):
    with pytest.raises(RewardError, match=r"the score 2 x .* \+ 1 x .* is beyond 1e\+09"):
        combine(parts, {"a": 2.0, "b": 1.0})


def test_the_bounds_of_a_score_are_those_of_its_weighted_parts():
    spec = RewardSpec("r", lambda x: {}, {"a": (0.0, 1.0), "b": (-1.0, 0.5)}, {}, pure=True)
    assert value_bounds(spec, {"a": 2.0, "b": -1.0, "c": 0.0}) == (-0.5, 3.0)
    assert value_bounds(spec, {"a": 2.0, "c": 1.0}) == value_bounds(spec, {}) == (-math.inf, math.inf)


def test_the_bounds_hold_where_a_reward_runs(scorer):
    rows = [RewardInput(text) for text in ("1j", "1e308", "9e8", "0.5")]
    source = "def reward(x): return complex(x.response) if 'j' in x.response else float(x.response)"
    with scorer(source, weights={"reward": 10.0}) as s:
        first, second, third, fourth = s.score(rows)
    assert "`reward` is 1j, not a finite number" in (first.error or "")
    assert "`reward` is 1e+308, beyond 1e+09" in (second.error or "")
    assert third.error == "the score 10 x 9e+08 is beyond 1e+09" and fourth.value == 5.0


@pytest.mark.parametrize(
    "ranges", ["{'a': (1, 0)}", "{'a': 3}", "{'a': (0, 1, 2)}", "{'a': ('x', 1)}", "{'a': (0, float('nan'))}"]
)
def test_a_range_that_is_none_is_said_when_the_file_is_loaded(reward_file, ranges):
    with pytest.raises(RewardError, match=r"RANGES gives the part `a` .*, not two numbers with the smaller first"):
        reward_file(f"RANGES = {ranges}\ndef reward(x): return {{'a': 0}}")


@pytest.mark.parametrize("key", [1, 1.5, None, True, ("a",), b"a"])
def test_the_name_of_a_part_is_a_text(key):
    with pytest.raises(RewardError, match=f"has the name .*{type(key).__name__}"):
        check_parts({key: 0.2, "1": 0.7}, {})


@pytest.mark.parametrize("name", ["two\nlines", "a\rb", "\x1b[2J", "half \ud800", "a\u2028b", "\x00"])
def test_a_name_that_no_table_or_file_can_hold_is_refused(name):
    with pytest.raises(RewardError, match="a character that cannot be shown in a line") as error:
        check_parts({name: 0.2}, {})
    assert error.value.message.isascii() and error.value.message.isprintable()


@pytest.mark.parametrize("name", ["format", "две части", "a b", "\u200bzero", "", "note"])
def test_other_texts_are_names(name):
    assert check_parts({name: 0.25}, {}) == {name: 0.25}


def test_two_parts_of_one_name_are_refused():
    class Level(str):
        def __str__(self) -> str:
            return "level"

    with pytest.raises(RewardError, match="two parts of the reward are called `level`"):
        check_parts({Level("a"): 0.2, "level": 0.7}, {})


NAMES = """
NAMES = {'number': {1: 0.2, '1': 0.7}, 'newline': {'a\\nb': 1.0}, 'half': {'\\ud800': 1.0}, 'plain': {'1': 0.7}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        "def reward(x): return NAMES[x.response]",
        "def reward(solution_str, ground_truth): return {**NAMES[solution_str], 'score': 0.7}",
        "def reward(reward_inputs): return [{**NAMES[r['response']], 'overall': 0.7} for r in reward_inputs]",
    ],
)
def test_names_are_held_to_that_in_every_calling_convention(body, scorer):
    rows = [RewardInput(text, truth={"answer": "a"}) for text in ("number", "newline", "half", "plain")]
    with scorer(NAMES + body) as s:
        *wrong, plain = s.score(rows)
    assert [score.error is not None for score in wrong] == [True] * 3 and plain.value == 0.7
    assert "has the name 1, a int" in wrong[0].error and all("cannot be shown" in w.error for w in wrong[1:])


@pytest.mark.parametrize("table", ["WEIGHTS = {1: 0.5, '1': 0.5}", "RANGES = {1: (0, 1), '1': (0, 2)}"])
def test_a_declaration_names_parts_by_texts(reward_file, table):
    with pytest.raises(RewardError, match="has the name 1, a int"):
        reward_file(f"{table}\ndef reward(x): return {{'1': 0.5}}")


def test_half_characters_of_a_note_or_an_error_are_escaped_where_they_come_in(scorer):
    source = """
        def reward(x):
            if x.response == "error":
                raise ValueError("half \\ud800")
            return {"reward": 1.0, "note": "half \\ud800"}
    """
    with scorer(source) as s:
        noted, failed = s.score([RewardInput("note"), RewardInput("error")])
    assert noted.note == "half \\ud800" and "half \\ud800" in failed.error
    for text in (noted.note, failed.error):
        text.encode()


def test_a_byte_order_mark_is_no_part_of_the_program(tmp_path):
    source = "def reward(x): return {'format': 1.0 if x.response else 0.0}\n"
    (tmp_path / "marked.py").write_bytes(b"\xef\xbb\xbf" + source.encode())
    (tmp_path / "plain.py").write_text(source)
    marked, plain = (load_reward(f"{n}.py:reward", args={}, base_dir=tmp_path) for n in ("marked", "plain"))
    assert marked.source_sha256 != plain.source_sha256 and marked.user.source.encode().startswith(b"\xef\xbb\xbf")
    with Scorer(marked) as s:
        assert [x.value for x in s.score([RewardInput("a"), RewardInput("")])] == [1.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "change", "told"),
    [
        ("nan", "math.isfinite = lambda x: True", "`reward` is nan, not a finite number"),
        ("text", "math.nan = 0.5", "`reward` is 'text', not a finite number"),
        ("raise", "import traceback; traceback.extract_tb = lambda t: []", "mine.py:"),
        ("raise", "import contextlib; contextlib.suppress = None", "mine.py:"),
        ("name", "import unicodedata; unicodedata.category = lambda c: 'Lu'", "cannot be shown in a line"),
    ],
)
def test_a_worker_holds_on_to_what_it_checks_with(scorer, row, change, told):
    source = f"""
        import math
        RETURNED = {{"nan": float("nan"), "text": "text", "name": {{"\\u2028": 1.0}}}}
        def reward(x):
            {change}
            if x.response == "raise":
                raise ValueError("mine")
            return RETURNED[x.response]
    """
    with scorer(source) as s:
        scores = s.score([RewardInput(row)] * 2)
    assert [told in (score.error or "") for score in scores] == [True, True], scores
