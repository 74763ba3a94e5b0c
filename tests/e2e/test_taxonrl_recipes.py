"""Every TaxonRL recipe trains: two steps of the tiny model on drawn rows of its domain, as the recipe has them else."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from command_line import settings, this_process
from pair_tables import add_square
from small_runs import start

from vlmrl.data.dataset_writer import building
from vlmrl.recipe.explain import diff_recipes
from vlmrl.recipe.files import shipped_folder
from vlmrl.recipe.load import LoadedRecipe, load_recipe
from vlmrl.setup.sources import make_scorer
from vlmrl.store.runs import Run
from vlmrl.tasks.source import open_source
from vlmrl.tasks.taxonrl.domains import DOMAINS, truth_distance

BASE = "qwen2_5_vl_7b_taxonrl.toml"
RECIPES = sorted(p.stem for p in shipped_folder().glob("*.toml") if BASE in p.read_text())
STARTS = ("bird_sft", "gorilla_sft")
PUBLISHED = ("reward.profile=taxonrl", "algo.name=easyr1", "rollout.max_prompt_tokens=2048")
"""What the base recipe's comment names as the published setting, besides `train.epochs`."""
SMALL = (
    "model.dtype=float32",
    "model.device=cpu",
    "model.min_pixels=784",
    "model.max_pixels=3136",
    "model.gradient_checkpointing=false",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=2",
    "rollout.max_new_tokens=8",
    "train.steps=2",
    "train.rows_per_step=2",
    "train.tokens_per_row=2048",
    "train.rehearsal=false",
    "optim.warmup_steps=0",
    "optim.lr=1e-3",
    "eval.every_steps=0",
    "eval.max_rows=2",
    "checkpoint.every_steps=0",
)
"""A run in a second. Nothing of what a recipe is about: data, task, variant, reward, algorithm."""
ROWS = {"train": 6, "validation": 2}


def rows_of(task: str, split: str, build: Any) -> Iterator[dict[str, Any]]:
    """Pairs of coloured squares with a truth of the task's schema."""
    domain, rng = DOMAINS[task], random.Random(split)
    for number in range(ROWS[split]):
        same = number % 2 == 0
        truth: dict[str, Any] = {"same": same}
        for field in domain.fields:
            first, other = rng.sample(list(field.labels or ("Alpha", "Beta")), 2)
            truth[field.name] = [first, first if same else other]
        truth["distance"] = truth_distance(domain, truth)
        media = [add_square(build, (40 * number % 256, 200 * side, len(split) * 20)) for side in range(2)]
        yield {"prompt_id": f"{task}-{split}-{number:016x}", "truth": truth, "images": media}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with the datasets that the recipes name, each prepared once."""
    folder = tmp_path_factory.mktemp("taxonrl")
    for data in {load_recipe(name).recipe.data[0].path: load_recipe(name).recipe.data[0] for name in RECIPES}.values():
        with building(folder / data.path) as build:
            for split in ROWS:
                build.write_rows(split, rows_of(data.task, split, build))
            build.finish({"name": data.task, "task": data.task, "splits": {s: {} for s in ROWS}, "args": {}})
    return folder


def load(name: str, *more: str) -> LoadedRecipe:
    return load_recipe(name, overrides=[*SMALL, *more])


def train(loaded: LoadedRecipe, root: Path, name: str | None = None) -> Run:
    run, status = start(loaded, root, name=name)
    assert status == "done"
    return run


def reward_of(run: Run) -> Mapping[str, Any]:
    return run.manifest.rewards[0]


@pytest.fixture(scope="module")
def starts(place, tiny_folder) -> Path:
    """The runs folder with the supervised starts, under the names that other recipes begin from."""
    root = place / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for name in STARTS:
            run = train(load(name, f"model.path={tiny_folder}"), root, name)
            losses = [line["loss/cross_entropy"] for line in run.metrics("train")]
            assert len(losses) == 2 and losses[1] < losses[0], "the traces teach nothing"
    return root


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in RECIPES if n not in STARTS])
def test_a_recipe_trains_for_two_steps(name, place, starts, tiny_folder, monkeypatch):
    monkeypatch.chdir(place)
    start = load_recipe(name).recipe.model.path
    own = [] if start in STARTS else [f"model.path={tiny_folder}"]
    loaded = load(name, *own)
    run = train(loaded, starts)
    assert bool(run.manifest.parent) == (start in STARTS)
    lines = run.metrics("train")
    assert len(lines) == 2 and len(run.metrics("validation")) == 2
    groups = run.read_rollouts(1)
    data = loaded.recipe.data[0]
    assert [len(g.samples) for g in groups] == [2, 2] and {g.row.task for g in groups} == {data.task}
    asked = DOMAINS[data.task].variant(data.variant or "baseline").required_fields
    tags = [f"<{DOMAINS[data.task].truth_field(field).tag}>" for field in asked]
    assert all(tag in g.prompt_text for g in groups for tag in tags), "the prompt does not ask for what is paid"


@pytest.mark.parametrize("name", [n for n in RECIPES if n not in STARTS])
def test_the_published_reward_of_a_recipe_scores_its_rows(name, place, tiny_folder, monkeypatch):
    monkeypatch.chdir(place)
    words = re.search(r"--set '(reward\.args=.*)'", (shipped_folder() / f"{name}.toml").read_text())
    more = [words.group(1)] if words else []
    loaded = load(name, f"model.path={tiny_folder}", *PUBLISHED, *more)
    source = open_source(loaded.recipe.data[0], loaded.recipe.reward)
    assert source.reward.name == "taxonrl"
    script = str(loaded.recipe.paper["script"])
    share = re.search(r"_(\d\dp)\.sh", script)
    assert share is None or share.group(1) in source.reward.args["function"]
    with make_scorer(source, loaded.recipe) as scorer:
        row = source.rows[0]
        text = source.task.trace(row, random.Random(0)) if source.task.trace else ""
        (score,) = scorer.score([source.reward_input(row, text, "stop", 9, "")], strict=True)
    assert score.error is None and score.value > 0.5


def test_there_are_the_24_scripts_and_two_starts():
    scripts = {load_recipe(n).recipe.paper["script"].partition(" (")[0] for n in RECIPES}
    assert len(RECIPES) == 26 and len(scripts) == 24
    assert all(load_recipe(n).recipe.paper["dataset"].startswith("maxvonk/") for n in RECIPES)


def test_the_published_setting_trains_with_the_published_reward_and_algorithm(
    place, tiny_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(place)
    run = train(load("fungi_im", f"model.path={tiny_folder}", *PUBLISHED), tmp_path)
    assert reward_of(run)["name"] == "taxonrl"
    assert reward_of(run)["args"]["function"] == "lfw_fungi_im:compute_score_gemini"
    assert all(line["policy/kl_coef"] == 0.01 for line in run.metrics("train"))


@pytest.mark.parametrize("share", [20, 60])
def test_the_ablation_is_one_number(share):
    rows = diff_recipes(load_recipe("bird_im_concrete"), load_recipe(f"bird_levels_{share}"))
    changed = {r["key"]: r["right"] for r in rows if not r["key"].startswith("paper") and r["right"] is not None}
    assert changed == {"reward.args.levels_weight": share / 100}


def test_80_percent_on_the_levels_leaves_the_answer_a_tenth(place, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    weights = reward_of(train(load("bird_levels_80", f"model.path={tiny_folder}"), tmp_path))["weights"]
    levels = [weights.pop(level) for level in ("order", "family", "genus")]
    assert sum(levels) == pytest.approx(0.8) and weights == {"format": 0.1, "answer": pytest.approx(0.1)}


def test_a_start_that_is_missing_is_an_error(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    done = this_process("train", "bird_large", *settings(*SMALL), "--runs", tmp_path, cwd=place)
    assert done.code == 2 and "bird_sft" in done.err and not list(tmp_path.iterdir())
