"""Words of a refusal to resume: what is true of the run, once, and a number of steps to go on to."""

from __future__ import annotations

import pytest

from vlmrl.recipe.changes import Change, rule_of
from vlmrl.recipe.schema import Lora, Recipe
from vlmrl.train.resume import _without_adapter, changes_in_words, more_steps

KEYS = ("rank", "alpha", "targets", "vision")


@pytest.mark.parametrize(("steps", "more"), [(0, 1), (3, 6), (14, 30), (100, 200), (150, 300), (500, 1000)])
def test_the_number_of_steps_to_go_on_to_is_round_and_larger(steps: int, more: int):
    assert more_steps(steps) == more


def test_an_adapter_for_a_run_of_all_weights_is_refused_once_and_as_what_it_is():
    changes = [Change(f"lora.{key}", None, 4, rule_of(("lora", key))) for key in KEYS]
    changes.insert(1, Change("optim.lr", 0.1, 0.2, rule_of(("optim", "lr"))))
    full = Recipe.model_construct(lora=None)
    adapted = Recipe.model_construct(lora=Lora(rank=4))
    one, lr = _without_adapter(changes, full, adapted)
    assert (one.kind, one.what, one.new, lr.what) == ("refused", "lora", "rank 4", "optim.lr")
    text = changes_in_words([one], "t2")
    assert "trains all weights and has no adapter" in text and "--set model.path=t2" in text and "fold" not in text
    assert _without_adapter(changes, adapted, adapted) == changes, "another rank of an adapter stays as it was"
