"""Recipes that look at the picture: the numbers of the published scripts, and no problem."""

from __future__ import annotations

from typing import Any

import pytest

from vlmrl.algo.algorithms import algorithm_of
from vlmrl.recipe.load import load_recipe
from vlmrl.recipe.rules.training import check_algo

SCRIPTS: dict[str, dict[str, Any]] = {
    "math_3b_papo": {
        "perception": "loss", "perception_gradient": "both", "perception_coef": 0.01, "perception_entropy": 0.03,
        "mask_share": 0.6, "mask_patch": 14, "clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0, "kl_coef": 0.0,
        "aggregation": "token_mean", "advantage": "group_mean_std",
    },
    "math_3b_vppo": {
        "perception": "select", "perception_share": 0.4, "perception_floor": 0.9, "perception_entropy": 0.06,
        "mask_share": 0.5, "mask_patch": 14, "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "kl_coef": 0.0,
        "aggregation": "token_mean", "advantage": "group_mean_std", "filter": "spread",
    },
}  # fmt: skip
"""Recipe -> cells of the scripts: of MikeWangWZHL/PAPO at fb63bf4 without a reference, of huaixuheqing/VPPO-RL at
a23c54b."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_recipe_has_the_cells_of_its_script(name: str) -> None:
    loaded = load_recipe(name)
    algorithm = algorithm_of(loaded.recipe.algo)
    assert {cell: getattr(algorithm, cell) for cell in SCRIPTS[name]} == SCRIPTS[name]
    assert not list(check_algo(loaded))
    assert loaded.recipe.rollout.samples_per_prompt == (8 if name == "math_3b_vppo" else 5)
    assert (loaded.recipe.rollout.max_new_tokens, loaded.recipe.optim.lr) == (2048, 1e-6)
