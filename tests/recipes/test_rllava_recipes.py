"""Recipes for RLLaVA's scripts: what each script sets, few keys each, and the page that names them all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from vlmrl.algo.algorithms import algorithm_of
from vlmrl.recipe.files import parse_toml, shipped_folder
from vlmrl.recipe.load import load_recipe

FOLDER = shipped_folder() / "rllava"
PAGE = Path(__file__).parents[2] / "docs" / "experiments" / "rllava.md"
ROWS = [
    line.strip("|").split("|")
    for line in PAGE.read_text("utf-8").partition("## What differs")[0].splitlines()
    if line.startswith("| ")
]
"""Rows of the page's tables of scripts: script, recipe, remark."""
DEFAULT = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "aggregation": "token_mean", "kl_coef": 0.0}
"""Settings of RLLaVA's configuration where a script says nothing, except for its KL loss."""
KL_LOSS = {"kl": "low_var_kl", "kl_in": "loss", "kl_coef": 0.01}
KL_REWARD = {"kl": "k1", "kl_in": "reward", "kl_coef": 0.001}
BY_SEQUENCE: dict[str, Any] = {"aggregation": "sequence_mean", "dual_clip": None}
FREE: dict[str, Any] = {"clip_low": None, "clip_high": None, "dual_clip": None}
SCRIPTS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "group_mean_std", "surrogate": "clip", **KL_LOSS},
    "dapo": {"advantage": "group_mean_std", "filter": "spread", "clip_high": 0.28, "dual_clip": 10.0, **KL_LOSS},
    "dr_grpo": {"advantage": "group_mean", "aggregation": "constant"},
    "gmpo": {"surrogate": "gmpo", "clip_low": 0.4, "clip_high": 0.4, **BY_SEQUENCE},
    "gpg": {"advantage": "group_mean", "surrogate": "reinforce", "scale": "alive", **FREE},
    "gspo": {"ratio": "sequence_token", "clip_low": 3e-4, "clip_high": 4e-4, **BY_SEQUENCE},
    "opo": {"advantage": "length_weighted", **FREE},  # on policy no ratio is clipped
    "reinforce_plus_plus": {"advantage": "none", "scale": "tokens", **KL_REWARD},
    "reinforce_plus_plus_baseline": {"advantage": "group_mean", "scale": "tokens", **KL_REWARD},
    "remax": {"advantage": "greedy", "surrogate": "clip", **KL_REWARD},
    "rloo": {"advantage": "leave_one_out", "surrogate": "clip", **KL_REWARD},
    "clip_cov": {"surrogate": "clip_cov", "clip_low": 1.0, "clip_high": 1.0, "cov_share": 2e-4, "dual_clip": None},
    "kl_cov": {"surrogate": "kl_cov", "cov_share": 2e-3, **FREE},
    "uft_published": {"advantage": "group_mean", "surrogate": "clip", "aggregation": "constant", **FREE},
}
"""Recipe -> the cells that its script sets (examples/algorithms of TinyLoopX/RLLaVA at 4753d4a)."""
FUSED: dict[str, tuple[str, str, int, int]] = {
    "luffy_text_math": ("luffy", "text_math", 7, 8),
    "luffy_counting": ("luffy", "counting", 4, 1),
    "luffy_we_math": ("luffy", "we_math", 4, 8),
    "srft_text_math": ("srft", "text_math", 7, 1),
    "srft_we_math": ("srft", "we_math", 4, 1),
    "hpt": ("hpt", "text_math", 8, 8),
    "uft": ("uft", "text_math", 8, 8),
    "chord": ("chord", "text_math", 8, 8),
}
"""Recipe with demonstrations -> algorithm, task, samples beside the demonstration, updates."""
BASES = ("grpo.toml", "math_online.toml", "agent_code_agentic.toml", "luffy_text_math.toml", "luffy_we_math.toml")
"""Recipes of the folder that others extend."""
AGENTS: dict[str, tuple[Any, ...]] = {
    "agent_code_agentic": ("Qwen/Qwen2.5-VL-7B-Instruct", 8, 8, 4, 0.0, 15, 2048, 4096, ":Python", 5, 5 * 3072),
    "agent_search_agentic": ("Qwen/Qwen2.5-VL-3B-Instruct", 8, 5, 4, 0.0, 80, 2048, 4096, ":Search", 3, 3 * 3072),
    "agent_code_online": ("Qwen/Qwen2.5-VL-3B-Instruct", 4, 5, 1, 0.01, 15, 512, 4096, "", None, None),
    "agent_search_online": ("Qwen/Qwen2.5-VL-3B-Instruct", 16, 5, 4, 0.01, 40, 512, 2048, "", None, None),
}
"""Recipe -> model, prompts, samples, updates, KL, epochs, tokens of a turn, of a prompt, environment, turns, tokens."""
ON_POLICY = {"opo", "gpg", "math_online"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_recipe_has_the_cells_of_its_script(name: str) -> None:
    recipe = load_recipe(f"rllava/{name}").recipe
    algorithm = algorithm_of(recipe.algo)
    expected = DEFAULT | SCRIPTS[name]
    assert {cell: getattr(algorithm, cell) for cell in expected} == expected
    assert recipe.optim.lr == (3e-6 if name.startswith("reinforce") or name == "remax" else 1e-6)
    assert recipe.rollout.samples_per_prompt == (8 if name == "uft_published" else 5)
    assert recipe.train.updates_per_step == (1 if name in ON_POLICY else 8 if name == "uft_published" else 4)


@pytest.mark.parametrize("name", FUSED)
def test_a_recipe_with_demonstrations_has_the_numbers_of_its_script(name: str) -> None:
    recipe = load_recipe(f"rllava/{name}").recipe
    row, (data,) = algorithm_of(recipe.algo), recipe.data
    assert (row.name, data.task, recipe.rollout.samples_per_prompt, recipe.train.updates_per_step) == FUSED[name]
    assert row.demonstrations != "none" and data.demonstrations == "rows" and row.kl_coef == 0
    assert {cell: getattr(row, cell) for cell in FREE} == FREE or name == "chord"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_changes_few_keys_of_another(path: Path) -> None:
    raw = parse_toml(path.read_text("utf-8"))
    assert raw.pop("extends") in (
        *("../math_3b.toml", "../text_math_2b.toml", "../crop_7b.toml", "../counting_2b.toml", "../wemath_2b.toml"),
        *BASES,
    )
    assert sum(len(table) for table in raw.values() if isinstance(table, dict)) <= (13 if "environment" in raw else 7)
    assert path.stem in SCRIPTS or path.stem in ("ppo", "math_online", "deepeyes", *AGENTS, *FUSED)


def test_deepeyes_has_the_lengths_and_the_reward_of_its_script() -> None:
    recipe = load_recipe("rllava/deepeyes").recipe
    assert (recipe.model.path, recipe.rollout.samples_per_prompt) == ("Qwen/Qwen3-VL-4B-Instruct", 8)
    assert (recipe.rollout.max_prompt_tokens, recipe.rollout.max_new_tokens, recipe.environment.turns) == (
        6144,
        2048,
        2,
    )
    assert recipe.environment.name == ":DeepEyes" and recipe.reward.profile == "rllava" and recipe.rewards == []


@pytest.mark.parametrize("name", AGENTS)
def test_the_recipes_of_agents_have_the_numbers_of_their_scripts(name: str) -> None:
    recipe = load_recipe(f"rllava/{name}").recipe
    rollout, train, tool = recipe.rollout, recipe.train, recipe.environment
    episodes = (tool.name, tool.turns, tool.tokens) if tool.name else ("", None, None)
    numbers = (rollout.prompts_per_step, rollout.samples_per_prompt, train.updates_per_step)
    found = (recipe.model.path, *numbers, recipe.algo.kl_coef or 0.0, train.epochs, rollout.max_new_tokens)
    assert (*found, rollout.max_prompt_tokens, *episodes) == AGENTS[name]
    (data,) = recipe.data
    assert name.startswith(data.task) and data.path.endswith("_steps") == name.endswith("_online")
    assert recipe.reward.profile == ("rllava_episodes" if tool.name else "rllava")


def test_the_search_of_a_recipe_can_be_replaced_by_passages() -> None:
    args = load_recipe("rllava/agent_search_agentic").recipe.environment.args
    assert args == {"engine": "bocha"}
    own = load_recipe("rllava/agent_search_agentic", overrides=['environment.args={corpus = "p.jsonl"}'])
    assert own.recipe.environment.args == {"corpus": "p.jsonl"}


def test_the_page_names_every_recipe_and_no_other() -> None:
    named = {name for row in ROWS for name in re.findall(r"`([a-z0-9_/]+)`", row[1])}
    for name in named:
        load_recipe(name)
    assert {f"rllava/{path.stem}" for path in FOLDER.glob("*.toml")} <= named


def test_every_script_has_a_recipe_or_a_reason() -> None:
    without = [row for row in ROWS if row[1].strip() == "none"]
    assert len(without) == 1 and all(len(row[2].strip()) > 5 for row in without)
