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
from vlmrl.rewards.base import LARGEST, RewardSpec, check_parts, check_weight_sizes, combine
from vlmrl.rewards.scorer import Scorer
from vlmrl.types import RewardInput


class Half:
    def __float__(self) -> float:
        return 0.5


@pytest.mark.parametrize(
    "value",
    [
        0.5, Half(), Decimal("0.5"), Fraction(1, 2), np.float16(0.5), np.float32(0.5), np.float64(0.5),
        np.longdouble(0.5), np.array(0.5), np.array([0.5]), np.array([[0.5]]), torch.tensor(0.5), torch.tensor([0.5]),
        torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor(0.5, requires_grad=True),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_whatever_says_that_it_is_one_real_number_is_a_part(value):
    assert check_parts({"p": value}, {}) == {"p": 0.5}


@pytest.mark.parametrize("value", [True, 1, np.int8(1), np.bool_(True), torch.tensor(True), torch.tensor(1)])
def test_whole_numbers_and_truths_are_numbers(value):
    assert check_parts({"p": value, "none": None}, {}) == {"p": 1.0, "none": None}


@pytest.mark.parametrize(
    "value",
    [
        "0.5", b"1", bytearray(b"1"), memoryview(b"1"), np.str_("1"), [1.0], (1.0,), {"a": 1.0}, object(),
        1j, complex(1, 0), np.complex64(1), np.complex128(1 + 2j), np.array(1 + 0j), np.array([1 + 0j]),
        torch.tensor(1 + 2j), torch.tensor(1 + 0j), np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), np.array([]),
        np.datetime64("2020-01-01"), np.timedelta64(3, "s"), math.nan, math.inf, -math.inf, np.float32("nan"),
        torch.tensor(math.nan), Decimal("NaN"), Decimal("1e400"), 10**400,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
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
        st.tuples(st.floats(-LARGEST, LARGEST), st.none() | st.floats(-LARGEST, LARGEST)), min_size=1,
    )
)  # fmt: skip
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
    with pytest.raises(RewardError, match=r"RANGES gives the part `a` .*, not two numbers, the smaller first"):
        reward_file(f"RANGES = {ranges}\ndef reward(x): return {{'a': 0}}")
