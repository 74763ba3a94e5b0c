"""What `model.gradient_checkpointing = "auto"` becomes: the least recomputation that fits, once, on all ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmrl.model.model_facts import ModelFacts, model_facts
from vlmrl.model.recomputation import STEPS
from vlmrl.preflight import memory_plan
from vlmrl.preflight.gpu_models import Gpu
from vlmrl.preflight.memory_plan import TIGHT, Cluster, make_plan
from vlmrl.preflight.memory_sizes import PromptLengths
from vlmrl.preflight.recompute_choice import KEY, choose_recomputation
from vlmrl.recipe.load import LoadedRecipe, load_recipe
from vlmrl.recipe.settle import Choice

MODEL = Path(__file__).parents[2] / "golden" / "models" / "Qwen2.5-VL-7B"
PROMPTS = PromptLengths(1982, 1682, 2048)


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return model_facts(recipe("auto").recipe.model, path=str(MODEL))


def recipe(setting: str) -> LoadedRecipe:
    words = [f"model.path={MODEL}", "rollout.engine=vllm", "model.dtype=bfloat16", f"{KEY}={setting}"]
    return load_recipe("fungi_im", overrides=words)


def chosen(facts: ModelFacts, gib: float) -> Choice:
    gpu = Gpu(f"{gib:g} GiB GPU", int(gib * 2**30))
    return choose_recomputation(recipe("auto"), facts, Cluster(8, gpu, gpu.memory_bytes), PROMPTS)


def update_gib(facts: ModelFacts, setting: object, gib: float = 80) -> float:
    gpu = Gpu("x", int(gib * 2**30))
    plan = make_plan(recipe(json.dumps(setting)), facts, Cluster(8, gpu, gpu.memory_bytes), PROMPTS)
    return next(p.total for p in plan.phases if p.name == "update") / 2**30


def test_the_least_recomputation_that_leaves_room_is_chosen(facts):
    """For every step: on a GPU where it just fits it is chosen, on one a little smaller the next one is."""
    for step, after in zip(STEPS[:-1], STEPS[1:], strict=True):
        needs = update_gib(facts, step)
        assert chosen(facts, (needs + 0.1) / TIGHT).value == step
        assert chosen(facts, (needs - 0.1) / TIGHT).value == after
    assert chosen(facts, 10).value is True  # nothing fits: the memory check says what else to change


def test_the_reason_names_what_it_needs_and_what_the_step_before_would_need(facts):
    needs = [update_gib(facts, step) for step in ("vision", 0.25)]
    gib = (needs[1] + 1) / TIGHT
    choice = chosen(facts, gib)
    assert choice.value == 0.25
    assert choice.reason.startswith(f"an update needs about {needs[1]:.1f} GiB of {gib:.1f} GiB on each GPU, ")
    assert choice.reason.endswith(f'with "vision" {needs[0]:.1f} GiB')


def test_only_the_update_counts(facts, monkeypatch):
    """A rollout that fills the GPU is no reason to recompute: it needs the same with every setting."""
    full = memory_plan._Planner._rollout
    monkeypatch.setattr(memory_plan._Planner, "_rollout", lambda self: full(self) | {"more": 10**12})
    assert chosen(facts, update_gib(facts, False) / TIGHT + 1).value is False
