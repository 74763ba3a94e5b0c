"""Every recipe that comes with vlmrl loads, passes the rules, and is described."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmrl.recipe.checks import check_recipe
from vlmrl.recipe.explain import list_recipes
from vlmrl.recipe.files import shipped_folder
from vlmrl.recipe.load import LoadedRecipe, load_recipe
from vlmrl.setup.catalogs import catalogs

RECIPES = sorted(path for path in shipped_folder().rglob("*.toml"))
DATA = '[[data]]\npath = "data/{task}"\ntask = "{task}"\n'


def load(path: Path) -> LoadedRecipe:
    """A shipped recipe; of a base one the smallest child, with data."""
    if path.parent.name == "base":
        task = "geometry3k" if path.name.startswith("maye") else "digits"
        model = "" if "\n[model]" in path.read_text() else '[model]\npath = "demo/model"\n'
        Path("child.toml").write_text(f'extends = "{path}"\n{model}{DATA.format(task=task)}')
        return load_recipe("child.toml")
    return load_recipe(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: str(p.relative_to(shipped_folder())))
def test_a_shipped_recipe_loads_and_passes_every_rule_but_what_is_not_made_yet(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = load(path)
    for data in loaded.recipe.data:  # as `vlmrl prep` and `vlmrl demo` would have left them
        (tmp_path / data.path).mkdir(parents=True)
        (tmp_path / data.path / "dataset.json").write_text("{}")
    if loaded.recipe.model.path == "demo/model":
        (tmp_path / "demo" / "model").mkdir(parents=True)
        (tmp_path / "demo" / "model" / "config.json").write_text("{}")
    assert check_recipe(load(path), catalogs()) == []


@pytest.mark.parametrize("listed", list_recipes(), ids=lambda r: r.name)
def test_a_shipped_recipe_says_what_it_is_in_its_first_comment(listed):
    assert listed.error == ""
    assert len(listed.comment) > 40


def test_a_shipped_recipe_is_found_by_its_bare_name():
    assert load_recipe("digits_im").path == shipped_folder() / "digits_im.toml"


def test_every_shipped_recipe_fits_on_a_screen():
    assert all(len(path.read_text().splitlines()) <= 60 for path in RECIPES)


def test_the_published_line_of_the_taxonrl_recipes_sets_each_ones_published_epochs():
    base = shipped_folder() / "base" / "qwen2_5_vl_7b_taxonrl.toml"
    (line,) = [text for text in base.read_text().splitlines() if text.startswith("#   --set")]
    published = [text.rstrip() for text in line.split("--set ")[1:]]
    assert published[-1] == "train.epochs=60"
    of_taxonrl = [load_recipe(p) for p in RECIPES if f'extends = "base/{base.name}"' in p.read_text()]
    told = [loaded for loaded in of_taxonrl if "epochs" in loaded.recipe.paper]
    assert len(told) > 15 and {loaded.recipe.paper["epochs"] for loaded in told} == {15, 60}
    for loaded in told:
        epochs = loaded.recipe.paper["epochs"]
        chosen = load_recipe(loaded.path, overrides=[*published[:-1], f"train.epochs={epochs}"])
        assert (loaded.recipe.train.steps, chosen.recipe.train.epochs) == (300, epochs)
        assert chosen.recipe.train.steps == 0  # counted from the rows when a run begins
