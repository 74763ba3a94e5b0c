"""A run whose recipe is over tables of the current folder, as its folder stands when the first step begins."""

from __future__ import annotations

from pathlib import Path

from vlmrl.recipe.load import load_recipe
from vlmrl.setup.auto_choice import fill_for_run
from vlmrl.setup.run_records import Labels, start_run
from vlmrl.store.runs import Run

SETTINGS = """
model = {path = "nobody/nothing", dtype = "float32", gradient_checkpointing = false}
rollout.engine = "torch"
reward.name = "reward.py:score"
"""


def run_of(data: str, settings: str = "", kind: str = "rl") -> Run:
    """A run of a recipe with these `[[data]]` entries."""
    Path("mine.toml").write_text(f'kind = "{kind}"\n{SETTINGS}{settings}\n{data}')
    loaded, _ = fill_for_run(load_recipe("mine.toml"), Path("runs"))
    with start_run(loaded, Path("runs"), ["vlmrl"], Labels()) as run:
        pass
    return run


def entry(path: str, more: str = "") -> str:
    return f'[[data]]\npath = "{path}"\n{more}\n'
