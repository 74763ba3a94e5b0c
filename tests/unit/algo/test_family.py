"""The table of algorithms: every cell names something that exists, and a recipe overrides single cells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vlmrl.algo import aggregate
from vlmrl.algo.advantages import ESTIMATORS
from vlmrl.algo.family import AGGREGATIONS, ALGORITHMS, resolve
from vlmrl.errors import RecipeError


@pytest.mark.parametrize("row", ALGORITHMS.values(), ids=list(ALGORITHMS))
def test_every_cell_of_every_row_exists(row):
    assert row.advantage in ESTIMATORS and row.aggregation in AGGREGATIONS and row.ratio in ("token", "sequence")
    assert (row.clip_low is None) == (row.clip_high is None)
    assert "arXiv" in row.summary


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_every_aggregation_of_the_table_is_one_that_works(name):
    import torch

    total = aggregate.Denominator.of(name, [2], 4)
    assert aggregate.aggregate(torch.ones(2), torch.tensor([2, 2]), total).item() > 0


def test_a_row_without_overrides_is_the_row():
    assert resolve("gspo") == ALGORITHMS["gspo"]


def test_overrides_change_their_cell_and_no_other():
    found = resolve("grpo", clip_high=0.5, aggregation="constant")
    assert found == replace(ALGORITHMS["grpo"], clip_high=0.5, aggregation="constant")


@pytest.mark.parametrize(
    "bad", [{"name": "gpro"}, {"name": "grpo", "advantage": "x"}, {"name": "grpo", "aggregation": "x"}]
)
def test_what_does_not_exist_is_an_error_with_what_does(bad):
    with pytest.raises(RecipeError, match="unknown algo") as caught:
        resolve(**bad)
    assert caught.value.hint and "known" in caught.value.hint
