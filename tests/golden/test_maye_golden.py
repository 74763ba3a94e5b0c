"""Hand-worked numbers of MAYE's published formulas (arXiv:2504.02587): the row `maye`, and what its recipes select."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from vlmrl.algo.advantages import ScoredGroup
from vlmrl.algo.algorithms import ALGORITHMS, algorithm_of
from vlmrl.algo.credit import scored_group, step_advantages
from vlmrl.algo.losses import clipped_surrogate, k3
from vlmrl.recipe.load import load_recipe
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import Finish, RewardInput, Score

ROW = ALGORITHMS["maye"]


def advantages(right: int, wrong: int, tokens: int = 4, name: str = "maye") -> list[float]:
    """Advantages of so many right (score 1) and wrong (0) responses, one per prompt: [a right one's, a wrong one's]."""
    groups = [ScoredGroup([score], [True], lengths=[tokens]) for score in [1.0] * right + [0.0] * wrong]
    values = [float(samples[0][0]) for samples in step_advantages(groups, ALGORITHMS[name])]
    assert values == [values[0]] * right + [values[-1]] * wrong
    return [values[0], values[-1]]


def test_whitening_of_ten_responses_of_four_tokens_adds_the_mean_back():
    # 12 tokens of return 1, 28 of 0: mean 0.3, sum of squares 12 x 0.49 + 28 x 0.09 = 8.4, over 40 - 1: 0.215385
    # 0.7 / sqrt(0.215385) + 0.3 = 1.508310 + 0.3; -0.3 / sqrt(0.215385) + 0.3 = -0.646419 + 0.3
    assert advantages(3, 7) == pytest.approx([1.808310, -0.346419], abs=1e-6)
    # The same without the mean: what the row `reinforce++` has.
    assert advantages(3, 7, name="reinforce++") == pytest.approx([1.508310, -0.646419], abs=1e-6)


@pytest.mark.parametrize(
    ("right", "wrong", "expected"),
    [
        (500, 500, [1.50, -0.50]),  # mean 0.5, deviation 0.5: 0.5 / 0.5 + 0.5, -0.5 / 0.5 + 0.5
        (900, 100, [1.23, -2.10]),  # mean 0.9, deviation 0.3: 0.1 / 0.3 + 0.9, -0.9 / 0.3 + 0.9
    ],
)
def test_whitening_of_a_large_batch(right: int, wrong: int, expected: list[float]):
    assert advantages(right, wrong) == pytest.approx(expected, abs=0.005)


def test_whitening_counts_tokens():
    # One right response of 1 token, one wrong of 3: mean 0.25, squares 0.5625 + 3 x 0.0625 = 0.75 over 3: 0.25
    groups = [ScoredGroup([1.0], [True], lengths=[1]), ScoredGroup([0.0], [True], lengths=[3])]
    found = [float(samples[0][0]) for samples in step_advantages(groups, ROW)]
    assert found == pytest.approx([0.75 / 0.5 + 0.25, -0.25 / 0.5 + 0.25])


def test_a_response_without_an_end_token_scores_the_penalty_whatever_it_says():
    scores = [Score(2.0, {"accuracy": 1.0, "format": 1.0}), Score(1.0, {"accuracy": 1.0}), Score(0.0, {})]
    group = scored_group(scores, ["stop", "length", "stop"], [5, 8, 3], ROW, max_tokens=8)
    assert group.scores == [2.0, -0.1, 0.0] and group.included == [True, True, True]


def test_the_loss_of_a_token_is_the_clipped_ratio_and_k3():
    ratio = torch.tensor([1.5, 0.5, 1.5, 1.1], dtype=torch.float64)
    advantage = torch.tensor([1.808310, -0.346419, -0.346419, 1.808310], dtype=torch.float64)
    found = clipped_surrogate(ratio.log(), advantage, clip_low=ROW.clip_low, clip_high=ROW.clip_high)
    # right and 1.5: clipped at 1.2; wrong and 0.5: clipped at 0.8; wrong and 1.5: not clipped; inside: not clipped
    expected = [-1.808310 * 1.2, 0.346419 * 0.8, 0.346419 * 1.5, -1.808310 * 1.1]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    # reference over policy 2 and 1/2: 2 - 1 - ln 2 and 1/2 - 1 + ln 2
    logp = torch.tensor([0.25, 0.5], dtype=torch.float64).log()
    reference = torch.tensor([0.5, 0.25], dtype=torch.float64).log()
    assert k3(logp, reference).tolist() == pytest.approx([1 - math.log(2), math.log(2) - 0.5])
    assert (ROW.kl, ROW.kl_in, ROW.kl_coef, ROW.gamma) == ("k3", "loss", 0.001, 1.0)


RECIPES = [f"maye_{data}_{model}" for data in ("geometry3k", "mm_math") for model in ("qwen2_vl", "qwen2_5_vl")]


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipes_have_the_published_numbers(name: str):
    ours, published, sft = (load_recipe(name + end).recipe for end in ("", "_published", "_sft"))
    rollout, train, optim = published.rollout, published.train, published.optim
    assert (rollout.prompts_per_step, rollout.samples_per_prompt, rollout.engine_gpus) == (7 * 128, 1, 1)
    assert (rollout.temperature, rollout.top_p, rollout.max_new_tokens) == (1.0, 1.0, 2048)
    assert (train.updates_per_step, train.epochs) == (128 // 4, 50 if "geometry3k" in name else 30)
    assert (optim.lr, optim.beta1, optim.beta2, optim.epsilon) == (5e-6, 0.9, 0.95, 1e-5)
    assert (optim.weight_decay, optim.max_grad_norm) == (0.01, 1.0)
    assert (optim.schedule, optim.warmup_ratio) == ("cosine", 0.1)
    assert published.model.freeze == ["vision", "connector"]
    assert algorithm_of(published.algo) == ROW
    row = algorithm_of(ours.algo)
    assert (row.name, row.kl, row.kl_in, row.kl_coef) == ("reinforce++", "k3", "loss", 0.001)
    assert (row.clip_low, row.clip_high, row.gamma) == (0.2, 0.2, 1.0)
    assert (sft.kind, sft.optim.lr, sft.train.rows_per_step, sft.train.epochs) == ("sft", 1e-5, 16, 30)
    assert sft.optim.schedule == "cosine"
    for recipe in (ours, published, sft):
        assert recipe.model.path == f"Qwen/Qwen2{'.5' if '2_5' in name else ''}-VL-7B-Instruct"
        settings = {key: (s.temperature, s.top_p, s.samples) for key, s in recipe.eval.settings.items()}
        assert settings == {"pass8": (1.0, 1.0, 8), "pass1_t06": (0.6, 1.0, 1), "pass1_t001": (0.01, 0.001, 1)}
        assert (recipe.eval.sets, recipe.eval.every_epochs, recipe.eval.at_start) == (["validation", "test"], 1, True)
        assert recipe.eval.allow_test_split and recipe.data[0].variant is None
        numbers = recipe.paper["numbers"]
        metrics = {"pass8": "pass@8", "pass1_t06": "accuracy", "pass1_t001": "accuracy"}
        assert set(numbers) == {f"{rows}/{key}/{metrics[key]}" for rows in recipe.eval.sets for key in settings}


@pytest.mark.parametrize("name", ["maye_mm_math_qwen2_vl", "maye_geometry3k_qwen2_5_vl"])
def test_penalties_of_the_recipes_are_weighted_parts(name: str):
    reward = load_recipe(name).recipe.reward
    spec = load_reward("math", args=reward.args)

    def score(text: str, finish: Finish = "stop", tokens: int = 9) -> float:
        parts: Any = spec(RewardInput(text, {"answer": "20"}, finish=finish, num_tokens=tokens))
        assert set(reward.weights) <= set(parts)
        return sum(weight * parts[part] for part, weight in reward.weights.items())

    assert score("So \\boxed{20}") == 1.0
    assert score("So \\boxed{20}", "length") == pytest.approx(0.9), "a right answer stays the better one"
    assert score("So \\boxed{20}", tokens=0) == pytest.approx(0.9)
    assert score("So \\boxed{21}", "length") == pytest.approx(-0.1)
    # 2 of the letters s, o and two ideographs; the command of the box counts its 5 letters: 2 / 9
    assert score("\u7b54\u6848 so \\boxed{21}") == pytest.approx(-0.1 * 2 / 9)
    published = load_recipe(f"{name}_published").recipe.reward
    assert (published.profile, published.weights) == ("maye", {})
    assert load_reward("maye", args=published.args).ranges["penalty"] == (-3.0, 1.1)


def test_the_published_gain_can_be_computed_again_from_the_numbers_of_the_recipes():
    """On MM-Math with Qwen2-VL, RL's mean is 1.35 times the base model's over six cells, and its maximum 1.76 times."""
    numbers = load_recipe("maye_mm_math_qwen2_vl").recipe.paper["numbers"].values()
    assert sum(n["rl"] / n["base"] for n in numbers) / 6 == pytest.approx(1.349, abs=5e-4)
    assert sum(n["rl_max"] / n["base"] for n in numbers) / 6 == pytest.approx(1.761, abs=5e-4)
    other = load_recipe("maye_geometry3k_qwen2_vl").recipe.paper["numbers"].values()
    assert sum(n["rl"] / n["base"] for n in other) / 6 == pytest.approx(1.358, abs=5e-4)
    assert sum(n["rl_max"] / n["base"] for n in other) / 6 == pytest.approx(1.531, abs=5e-4)
