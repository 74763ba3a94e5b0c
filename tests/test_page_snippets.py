"""The snippets of README and docs/: recipes load by the schema, rewards and tasks compile and pay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomllib
from readme_commands import PAGES, read_page, snippets

from vlmrl.recipe.schema import Recipe
from vlmrl.rewards.several import faults, label_from
from vlmrl.types import RewardInput

TOML = [(page, text) for page in PAGES for text in snippets(read_page(page), "toml")]
PYTHON = [(page, text) for page in PAGES for text in snippets(read_page(page), "python")]
WHOLE = {"model": {"path": "a-model"}, "data": [{"path": "rows.jsonl"}]}
"""Tables that a part of a recipe leaves out."""


@pytest.mark.parametrize(("page", "text"), TOML, ids=lambda value: str(value).partition("\n")[0])
def test_every_piece_of_a_recipe_is_one(page: str, text: str) -> None:
    raw = tomllib.loads(text)
    raw["data"] = [WHOLE["data"][0] | source for source in raw.get("data", WHOLE["data"])]
    recipe = Recipe.model_validate(raw | {"model": WHOLE["model"] | raw.get("model", {})})
    for source in recipe.data:
        listed = source.all_rewards
        assert not list(faults([r.label or label_from(r.name) for r in listed], [r.gate for r in listed]))


def test_the_pages_show_recipes_and_rewards() -> None:
    assert len(TOML) >= 10 and len(REWARDS) >= 4


@pytest.mark.parametrize(("page", "text"), PYTHON, ids=lambda value: str(value).partition("\n")[0])
def test_every_python_snippet_compiles(page: str, text: str) -> None:
    compile(text, page, "exec")


REWARDS = [(page, text) for page, text in PYTHON if "def score(" in text]


@pytest.mark.parametrize(("page", "text"), REWARDS, ids=lambda value: str(value).partition("\n")[0])
def test_every_reward_pays(page: str, text: str, tmp_path: Path) -> None:
    """Each file with a `score` is loaded as rewards are and called; `grade`, which one leaves out, is put in."""
    if "grade(" in text:
        text += "\ndef grade(response, truth):\n    return [[0, 0, 1, 1]], 0.5, None\n"
        text = text.replace(', artifacts={"overlay": overlay}', "")
    namespace: dict[str, Any] = {}
    exec(compile(text, page, "exec"), namespace)
    truth = {"answer": 3 if "tasks" in page else "3", "same": 1.0}
    right = namespace["score"](RewardInput("<answer>3</answer>" if "<answer>" in text else "3", truth=truth))
    parts = getattr(right, "parts", right)
    assert parts if isinstance(parts, float) else all(0 <= value <= 1 for value in parts.values())
    if not isinstance(parts, float) and set(parts) == {"format", "answer"}:
        assert parts == {"format": 1.0, "answer": 1.0}


@pytest.mark.parametrize("page", PAGES)
def test_every_row_that_is_shown_is_json(page: str) -> None:
    for text in snippets(read_page(page), "json"):
        assert all(isinstance(json.loads(line), dict) for line in text.splitlines())


@pytest.mark.parametrize("page", PAGES)
def test_every_prompt_renders(page: str) -> None:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    environment = SandboxedEnvironment(undefined=StrictUndefined)
    for text in snippets(read_page(page), "jinja"):
        shown = environment.from_string(text).render(question="How many?")
        assert "How many?" in shown and "<image>" in shown
