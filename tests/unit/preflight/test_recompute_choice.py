"""Choice for `model.gradient_checkpointing = "auto"`: the least recomputation that fits, once, on all ranks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from vlmrl.model.memory import KEY, STEPS
from vlmrl.model.model_facts import ModelFacts, model_facts
from vlmrl.recipe.auto_values import Choice, keep_choices
from vlmrl.recipe.load import LoadedRecipe, load_recipe
from vlmrl.setup import auto_choice, memory_plan
from vlmrl.setup.auto_choice import choice_text, choices_of, fill_for_answers, fill_for_run
from vlmrl.setup.memory_fit import Target, choose_recomputation, find_fits
from vlmrl.setup.memory_plan import TIGHT, Cluster, make_plan
from vlmrl.setup.memory_sizes import Gpu, PromptLengths

MODEL = Path(__file__).parents[2] / "golden" / "models" / "Qwen2.5-VL-7B"
RECIPES = Path(__file__).parents[3] / "recipes"
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
    for step, after in itertools.pairwise(STEPS):
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


WORDS = [f"model.path={MODEL}", "rollout.engine=vllm"]


def test_a_run_gets_the_choice_for_its_gpus_and_keeps_it(facts, tmp_path, monkeypatch):
    """By the estimated prompts, which are the same for `check` and `train`; a resume keeps it on any machine."""
    monkeypatch.setattr(auto_choice, "estimate_prompts", lambda loaded, sources: PROMPTS)
    recipe_text = f'extends = "{RECIPES / "fungi_im.toml"}"\n[model]\ngradient_checkpointing = "auto"\n'
    (tmp_path / "r.toml").write_text(recipe_text)
    large, small = (Target(8, Gpu("g", gib << 30)) for gib in (180, 80))
    found = {
        target: fill_for_run(load_recipe(tmp_path / "r.toml", overrides=WORDS), tmp_path, target)[0]
        for target in (large, small)
    }
    assert found[large].recipe.model.gradient_checkpointing is False
    expected = next(step for step in STEPS if update_gib(facts, step) <= TIGHT * 80)
    assert found[small].recipe.model.gradient_checkpointing == expected and expected not in (False, True)
    [choice] = [c for c in choices_of(found[small]) if c["key"] == KEY]
    assert choice["value"] == found[small].recipe.model.gradient_checkpointing
    assert choice_text(choice).startswith(f"{KEY} = {choice['value']}: an update needs about ")
    before = json.loads(json.dumps(found[small].resolved))
    again = keep_choices(load_recipe(tmp_path / "r.toml", overrides=WORDS), before)
    assert again.recipe.model.gradient_checkpointing == choice["value"] and again.origins == found[small].origins
    anew = keep_choices(load_recipe(tmp_path / "r.toml", overrides=[*WORDS, f"{KEY}=auto"]), before)
    assert fill_for_run(anew, tmp_path, large)[0].recipe.model.gradient_checkpointing is False


def test_without_a_gpu_nothing_is_read_or_recomputed(tmp_path, monkeypatch):
    monkeypatch.setattr(auto_choice, "open_sources", lambda loaded: pytest.fail("the data were opened"))
    (tmp_path / "r.toml").write_text('[model]\npath = "none"\ndevice = "cpu"\n[[data]]\npath = "d"\n')
    loaded, warnings = fill_for_run(load_recipe(tmp_path / "r.toml"), tmp_path)
    assert loaded.recipe.model.gradient_checkpointing is False and not warnings
    assert loaded.origins[KEY] == "auto: no GPU is used"
    answers, _ = fill_for_answers(load_recipe(tmp_path / "r.toml").recipe, "none")
    assert answers.model.gradient_checkpointing is False


def test_a_model_that_cannot_be_read_ends_with_the_least_memory(tmp_path):
    (tmp_path / "r.toml").write_text('[model]\npath = "none"\n[[data]]\npath = "d"\n[rollout]\nengine = "torch"\n')
    loaded, _ = fill_for_run(load_recipe(tmp_path / "r.toml"), tmp_path, Target(1, Gpu("g", 80 << 30)))
    assert loaded.recipe.model.gradient_checkpointing is True
    assert loaded.origins[KEY].startswith("auto: memory cannot be planned: ")


def test_the_mildest_setting_that_makes_a_run_fit_is_proposed(facts):
    """With 16 bytes of states per parameter sharded, activations alone are too much for 40 GiB."""
    gpu = Gpu("g", 68 << 30)
    cluster = Cluster(8, gpu, gpu.memory_bytes)
    loaded = load_recipe("fungi_im", overrides=[*WORDS, "model.dtype=bfloat16", f"{KEY}=false"])
    fits = find_fits(loaded, facts, cluster, PROMPTS)
    [edit] = [edit for fit in fits for edit in fit.changes if edit.key == KEY and len(fit.changes) == 1]
    needs = [update_gib(facts, step, 68) for step in STEPS]
    expected = next(s for s, need in zip(STEPS, needs, strict=True) if need <= TIGHT * 68)
    assert edit.value == expected and expected not in (False, True)
    assert edit.words == f"--set {KEY}={expected}" and "% longer" in edit.costs
