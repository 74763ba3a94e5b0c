"""`vlmrl demo --model-only` for a table of one's own: its model runs the user's recipe on a CPU."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from tests.small_runs import start
from vlmrl.demo import make_model
from vlmrl.errors import DataError
from vlmrl.recipe.load import load_recipe

RECIPE = """[model]
path = "tiny"
[[data]]
path = "rows.jsonl"
prompt = "prompt.jinja"
columns = {images = "picture", answer = "colour"}
[reward]
name = "exact_match"
[train]
steps = 1
rehearsal = false
[rollout]
prompts_per_step = 2
samples_per_prompt = 2
max_new_tokens = 4
"""


@pytest.fixture
def place(tmp_path):
    """A table whose columns nothing recognises, with its recipe, in a folder that is not the current one."""
    folder = tmp_path / "mine"
    (folder / "img").mkdir(parents=True)
    rows = [{"picture": f"img/{c}.png", "colour": c, "asked": "Whatcolourisit"} for c in ("vermilion", "ultramarine")]
    for row in rows:
        Image.new("RGB", (56, 56)).save(folder / str(row["picture"]))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 20))
    (folder / "prompt.jinja").write_text("<image>{{ asked }}?\n")
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


def test_a_recipe_with_a_table_of_ones_own_gets_a_model_that_trains(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert make_model(place / "recipe.toml", place / "tiny", seed=1) > 1_000_000
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / "tiny")
    # Learned from this table's prompt and answers: one token each, and many for words that are not in it.
    assert [len(tokenizer.tokenize(word)) for word in ("vermilion", "ultramarine", "Whatcolourisit")] == [1, 1, 1]
    assert len(tokenizer.tokenize("aquamarines")) > 3
    run, status = start(load_recipe(place / "recipe.toml"), tmp_path / "runs")
    assert status == "done" and len(run.metrics("train")) == 1


def test_a_table_whose_columns_are_not_recognised_is_pointed_to_the_recipe(place, tmp_path):
    with pytest.raises(DataError) as caught:
        make_model(place / "rows.jsonl", tmp_path / "tiny", seed=1)
    assert "--data RECIPE.toml" in str(caught.value.hint) and not (tmp_path / "tiny").exists()
