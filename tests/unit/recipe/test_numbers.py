"""Every number of a recipe has limits, and numbers that are allowed alone are looked at together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.unit.recipe.test_broken_recipes import SOUND, problems_of
from vlmrl.recipe.explain import json_schema


def numbers_of(part: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every place of a JSON schema that takes a number."""
    if isinstance(part, Mapping):
        if part.get("type") in ("integer", "number"):
            yield path, part
        for name, inner in part.items():
            yield from numbers_of(inner, f"{path}/{name}")
    elif isinstance(part, list):
        for i, inner in enumerate(part):
            yield from numbers_of(inner, f"{path}/{i}")


def test_every_number_of_the_schema_has_a_smallest_and_a_largest_value():
    found = dict(numbers_of(json_schema()))
    assert len(found) > 60
    low, high = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
    open_ended = [path for path, number in found.items() if not (low & number.keys() and high & number.keys())]
    assert open_ended == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rollout.prompts_per_step", "4000000000000", "it must be at most 1,000,000"),
        ("train.steps", "9000000000000000000", "it must be at most 1,000,000,000"),
        ("rollout.temperature", "1e-300", "it must be at least 0.001"),
        ("reward.weights.score", "1e308", "it must be at most 1e+09"),
        ("reward.weights.score", "-1e308", "it must be at least -1e+09"),
        ("algo.kl_coef", "1e300", "it must be at most 1e+09"),
        ("optim.lr", "1e-300", "it must be at least 1e-12"),
        ("rollout.kv_cache_gib", "1e300", "it must be at most 1e+06"),
        ("data.0.share", "1e-300", "it must be at least 1e-06"),
    ],
)
def test_a_number_beyond_all_sense_is_refused_with_its_limit(tmp_path, monkeypatch, key, value, message):
    (problem,) = problems_of(tmp_path, SOUND, monkeypatch, (f"{key}={value}",))
    assert f"`{key}` is {value.replace('e308', 'e+308').replace('e300', 'e+300')}; {message}" == problem.message
    assert problem.where == f"--set {key}={value}"


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (
            ("rollout.prompts_per_step=100000", "rollout.samples_per_prompt=1000"),
            "one step is 100,000 prompts x 1,000 samples = 100,000,000 responses",
            "at most 10,000,000",
        ),
        (
            ("rollout.prompts_per_step=10000", "rollout.samples_per_prompt=1000", "rollout.max_new_tokens=30000"),
            "one step is 10,000 prompts x 1,000 samples = 10,000,000 responses of up to 30,000 tokens",
            "lower rollout.max_new_tokens",
        ),
        (("optim.lr=0.02", "optim.weight_decay=50"), "every update would remove the weights entirely", "0.01 to 0.1"),
    ],
)
def test_numbers_that_make_no_sense_together_are_errors(tmp_path, monkeypatch, overrides, message, hint):
    problems = [p for p in problems_of(tmp_path, SOUND, monkeypatch, overrides) if p.level == "error"]
    (problem,) = [p for p in problems if message in p.message]
    assert hint in str(problem.hint) and problem.where in {f"--set {text}" for text in overrides}


def test_a_large_but_possible_step_is_allowed(tmp_path, monkeypatch):
    large = (
        "rollout.prompts_per_step=16384",
        "rollout.samples_per_prompt=64",
        "rollout.max_new_tokens=32768",
        "rollout.batch_tokens=1000000",
        "train.tokens_per_row=40000",
    )
    assert problems_of(tmp_path, SOUND, monkeypatch, large) == []
