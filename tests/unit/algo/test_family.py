"""The table of algorithms: every cell names something that exists, and a recipe overrides single cells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vlmrl.algo import advantages, losses
from vlmrl.algo.algo_keys import CELLS, CHOICES, Algorithm
from vlmrl.algo.algorithms import ALGORITHMS, algorithm_of, resolve, stand_in, value_in_row, without_model
from vlmrl.algo.choices import AGGREGATIONS, ESTIMATORS, SURROGATES
from vlmrl.errors import RecipeError
from vlmrl.recipe.schema import Algo


@pytest.mark.parametrize("row", ALGORITHMS.values(), ids=list(ALGORITHMS))
def test_every_cell_of_every_row_exists(row):
    assert all(getattr(row, cell) in known or (cell, row.scale) == ("scale", None) for cell, known in CHOICES.items())
    assert "arXiv" in row.summary
    if row.surrogate in ("clip", "gmpo", "clip_cov"):
        assert (row.clip_low is None) == (row.clip_high is None)


def test_every_cell_is_a_recipe_key_and_every_recipe_key_a_cell():
    """Besides `name`."""
    assert set(Algo.model_fields) - {"name"} == set(CELLS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_recipe_that_only_names_a_row_gets_the_row(name):
    assert algorithm_of(Algo(name=name)) == ALGORITHMS[name]


def test_a_recipe_overrides_single_cells():
    found = algorithm_of(Algo(name="maye", kl_coef=0.0, gamma=0.9, truncated="mask"))
    assert found == replace(ALGORITHMS["maye"], kl_coef=0.0, gamma=0.9, truncated="mask")
    assert without_model(ALGORITHMS["remax"]).advantage == "group_mean"
    assert without_model(ALGORITHMS["otb"]) == replace(ALGORITHMS["otb"], advantage="group_mean")
    assert without_model(ALGORITHMS["opo"]) == ALGORITHMS["opo"]
    assert without_model(ALGORITHMS["ppo"]) == ALGORITHMS["ppo"]
    with pytest.raises(TypeError, match="colour"):
        resolve("grpo", colour="red")


def test_groups_of_equal_scores_count_in_every_row_but_under_a_filter():
    assert {name for name, row in ALGORITHMS.items() if not row.counts_dead} == {"dapo", "vppo"}
    assert not resolve("grpo", count_dead=False).counts_dead and not resolve("grpo", filter="spread").counts_dead


def test_what_needs_a_model_says_what_stands_in_without_one():
    told = {name: stand_in(row) for name, row in ALGORITHMS.items()}
    assert "critic" in told.pop("ppo") and "group mean" in told.pop("remax") and "group mean" in told.pop("otb")
    assert set(told.values()) == {""}


def test_every_estimator_has_a_baseline():
    assert set(ESTIMATORS) == set(advantages.BASELINES)


def test_which_rows_limit_their_ratio():
    limited = {name for name, row in ALGORITHMS.items() if row.limits_ratio}
    without = {"kl_cov", "rloo", "opo", "gpg", "reinforce", "remax", "luffy", "srft", "hpt", "uft"}
    without |= {"opd", "opd_reward", "opsd", "va_opd"}  # they learn from a teacher alone, on policy
    assert set(ALGORITHMS) - limited == without
    limiting = {name for name in SURROGATES if replace(ALGORITHMS["grpo"], surrogate=name).limits_ratio}
    assert limiting == {"clip", "clip_cov", "cispo", "gmpo", "sapo", "vespo"}
    without_bound = {name for name in SURROGATES if replace(ALGORITHMS["rloo"], surrogate=name).limits_ratio}
    assert without_bound == {"sapo", "vespo"}


class _Spied:
    """An algorithm that notes which of its cells are read."""

    def __init__(self, row: Algorithm) -> None:
        self.row, self.read = row, set[str]()

    def __getattr__(self, cell: str):
        self.read.add(cell)
        return getattr(self.row, cell)


@pytest.mark.parametrize("name", SURROGATES)
def test_a_surrogate_reads_the_cells_that_the_table_says_and_no_other(name):
    import torch

    from vlmrl.algo import losses

    assert set(SURROGATES) == set(losses.SURROGATE_LOSSES)
    row = replace(ALGORITHMS["easyr1"], surrogate=name)
    values = [torch.tensor([-0.1, -0.2, -0.4]), torch.tensor([-0.2, -0.2, -0.3]), torch.tensor([1.0, -1.0, 0.5])]
    selects = SURROGATES[name].selects
    spied = _Spied(row)
    selected = losses.select_tokens(spied, *([v] for v in values), seed=0)[0] if selects else None
    losses.policy_loss(spied, losses.Tokens(*values, torch.zeros(3, dtype=torch.long), selected))
    assert spied.read - {"surrogate"} == set(SURROGATES[name].reads)
    assert row.selects == selects


def test_every_condition_names_a_cell_and_values_that_exist():
    for cell in CELLS.values():
        for when in cell.used_when:
            assert set(when.values) <= set(CHOICES.get(when.cell, ())) and when.cell in CELLS, cell.name
    assert {name for name, facts in SURROGATES.items() for cell in facts.reads if cell not in CELLS} == set()
    read = {cell for facts in SURROGATES.values() for cell in facts.reads}
    assert {c.name for c in CELLS.values() if any(w.cell == "surrogate" for w in c.used_when)} == read


def test_the_value_in_a_row_is_the_one_that_counts():
    assert value_in_row("grpo", "clip_high") == 0.28 and value_in_row("rloo", "clip_high") is None
    assert value_in_row("grpo", "scale") == "group" and value_in_row("gpg", "scale") == "alive"


def test_what_the_correction_for_the_engine_comes_to():
    def of(row: Algorithm, **facts: bool) -> str:
        return row.importance_of(**{"own_engine": False, "filtered": False, "stale": False} | facts)

    grpo = ALGORITHMS["grpo"]
    assert of(grpo) == "truncate" and of(grpo, own_engine=True) == of(grpo, filtered=True) == "none"
    stale = {name: of(row, stale=True) for name, row in ALGORITHMS.items()}
    assert {name for name, how in stale.items() if how == "mask"} == {
        "kl_cov",
        "rloo",
        "opo",
        "gpg",
        "reinforce",
        "remax",
        "gspo",
        "gspo_token",
        "luspo",
        "luffy",
        "srft",
        "hpt",
        "uft",
        "opd",
        "opd_reward",
        "va_opd",
        "opsd",
    }
    assert set(stale.values()) == {"mask", "ratio"}
    assert of(resolve("grpo", importance="truncate"), stale=True) == "truncate"


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_every_aggregation_of_the_table_is_one_that_works(name):
    import torch

    total = losses.Denominator.of(name, [2], 4)
    assert losses.aggregate(torch.ones(2), torch.tensor([2, 2]), total).item() > 0


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
