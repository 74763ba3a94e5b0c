"""Validation that is off, or only at the end: what contradicts it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmrl.recipe.load import load_recipe
from vlmrl.recipe.rules.eval import EVAL_RULES

REST = '\n[model]\npath = "model"\n[[data]]\npath = "rows.jsonl"\n[reward]\nname = "reward.py:score"\n'


def told(folder: Path, settings: str, *overrides: str) -> list[tuple[str, str]]:
    """(level, message) of everything that the rules say of a recipe."""
    file = folder / "mine.toml"
    file.write_text(settings + REST)
    loaded = load_recipe(str(file), overrides=list(overrides))
    return [(p.level, p.message) for rule in EVAL_RULES for p in rule(loaded)]


@pytest.mark.parametrize(
    ("settings", "overrides"),
    [
        ("eval.enabled = false", ()),
        ("eval.at_start = false", ()),
        ("eval.at_start = false\neval.patience = 3\neval.every_steps = 5", ()),
        ('eval.every_steps = 5\neval.metric = "accuracy"', ("eval.enabled=false",)),
    ],
)
def test_no_validation_is_no_mistake(tmp_path, settings, overrides):
    assert told(tmp_path, settings, *overrides) == []


@pytest.mark.parametrize(
    ("settings", "overrides", "level", "message"),
    [
        ("eval.enabled = false\ntrain.stop_above = 0.9", (), "error", "`train.stop_above` is 0.9"),
        ("eval.enabled = false\neval.patience = 3", (), "error", "`eval.patience` is 3"),
        ("eval.patience = 3\neval.every_steps = 5", ("eval.enabled=false",), "error", "`eval.patience` is 3"),
        ("eval.enabled = false\neval.at_start = true", (), "warning", "`eval.at_start` does nothing"),
        ("eval.enabled = false\ncheckpoint.keep_best = false", (), "warning", "`checkpoint.keep_best` does nothing"),
        ("eval.every_steps = 0\ntrain.stop_above = 0.9", (), "warning", "no step is validated"),
        ("eval.every_steps = 0\neval.patience = 3", (), "error", "no validation is counted"),
    ],
)
def test_what_waits_for_a_validation_that_never_comes_is_named(tmp_path, settings, overrides, level, message):
    (found,) = told(tmp_path, settings, *overrides)
    assert found[0] == level and message in found[1]
