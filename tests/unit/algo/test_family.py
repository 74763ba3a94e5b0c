"""The table of algorithms: every cell names something that exists, and a recipe overrides single cells."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from vlmrl.algo import advantages, aggregate
from vlmrl.algo.family import (
    AGGREGATIONS,
    ALGORITHMS,
    CELLS,
    CHOICES,
    SURROGATES,
    Algorithm,
    algorithm_of,
    resolve,
    stand_in,
    without_greedy,
)
from vlmrl.errors import RecipeError
from vlmrl.recipe.rules import algo as check_algo
from vlmrl.recipe.schema import Algo


@pytest.mark.parametrize("row", ALGORITHMS.values(), ids=list(ALGORITHMS))
def test_every_cell_of_every_row_exists(row):
    assert all(getattr(row, cell) in known or (cell, row.scale) == ("scale", None) for cell, known in CHOICES.items())
    assert "arXiv" in row.summary
    if row.surrogate in ("clip", "gmpo", "clip_cov"):
        assert (row.clip_low is None) == (row.clip_high is None)


def test_every_cell_is_a_recipe_key_and_every_recipe_key_a_cell():
    """Besides `name`, and the entropy bonus, which is no choice of the family."""
    assert set(Algo.model_fields) - {"name", "entropy_coef"} == set(CELLS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_recipe_that_only_names_a_row_gets_the_row(name):
    assert algorithm_of(Algo(name=name)) == ALGORITHMS[name]


def test_a_recipe_overrides_single_cells():
    found = algorithm_of(Algo(name="maye", kl_coef=0.0, gamma=0.9, truncated="mask"))
    assert found == replace(ALGORITHMS["maye"], kl_coef=0.0, gamma=0.9, truncated="mask")
    assert without_greedy(ALGORITHMS["remax"]).advantage == "group_mean"
    assert without_greedy(ALGORITHMS["opo"]) == ALGORITHMS["opo"]
    assert without_greedy(ALGORITHMS["ppo"]) == ALGORITHMS["ppo"]
    with pytest.raises(TypeError, match="colour"):
        resolve("grpo", colour="red")


def test_groups_of_equal_scores_count_in_every_row_but_under_a_filter():
    assert {name for name, row in ALGORITHMS.items() if not row.counts_dead} == {"dapo"}
    assert not resolve("grpo", count_dead=False).counts_dead and not resolve("grpo", filter="spread").counts_dead


def test_what_needs_a_model_says_what_stands_in_without_one():
    told = {name: stand_in(row) for name, row in ALGORITHMS.items()}
    assert "critic" in told.pop("ppo") and "group mean" in told.pop("remax")
    assert set(told.values()) == {""}


def test_the_rules_on_recipes_know_the_scales_of_a_critic():
    assert check_algo.CRITIC_SCALES == advantages.CRITIC_SCALES


def test_the_rules_on_recipes_know_which_surrogates_limit_their_ratio():
    for surrogate in SURROGATES:
        for bound in (None, 0.2):
            row = replace(ALGORITHMS["grpo"], surrogate=surrogate, clip_high=bound)
            assert check_algo.limits_ratio(asdict(row)) == row.limits_ratio
    limited = {name for name, row in ALGORITHMS.items() if row.limits_ratio}
    assert set(ALGORITHMS) - limited == {"kl_cov", "rloo", "opo", "gpg", "reinforce", "remax"}


def test_what_the_correction_for_the_engine_comes_to():
    def of(row: Algorithm, **facts: bool) -> str:
        return row.importance_of(**{"own_engine": False, "filtered": False, "stale": False} | facts)

    grpo = ALGORITHMS["grpo"]
    assert of(grpo) == "truncate" and of(grpo, own_engine=True) == of(grpo, filtered=True) == "none"
    stale = {name: of(row, stale=True) for name, row in ALGORITHMS.items()}
    assert {name for name, how in stale.items() if how == "mask"} == {
        "kl_cov", "rloo", "opo", "gpg", "reinforce", "remax", "gspo", "gspo_token",
    }  # fmt: skip
    assert set(stale.values()) == {"mask", "ratio"}
    assert of(resolve("grpo", importance="truncate"), stale=True) == "truncate"


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
    "bad",
    [
        {"name": "gpro"},
        {"name": "grpo", "advantage": "x"},
        {"name": "grpo", "aggregation": "x"},
        {"name": "grpo", "scale": "x"},
        {"name": "grpo", "kl": "k4"},
    ],
)
def test_what_does_not_exist_is_an_error_with_what_does(bad):
    with pytest.raises(RecipeError, match="unknown algo") as caught:
        resolve(**bad)
    assert caught.value.hint and "known" in caught.value.hint
