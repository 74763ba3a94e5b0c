"""Families beyond Qwen2.5-VL under vLLM; `scripts/bench/vllm_families.py` measures all of them.

Qwen2-VL names its fused weights in a part of the model alone; InternVL's weights are called otherwise by transformers
than where they are published; Qwen3-VL gives vision features to several layers, and has an adapter here.
"""

from __future__ import annotations

import pytest
import torch
from tinyfamilies import BUILDERS, build
from vllm_family import MOST_ROUNDING, measure

from vlmrl.errors import EngineError
from vlmrl.model.stored_weights import as_published, published_names
from vlmrl.recipe.rules.engine import CPU_REFUSALS


@pytest.mark.slow
@pytest.mark.parametrize(("family", "lora"), [("qwen2_vl", False), ("internvl", False), ("qwen3_vl", True)])
def test_log_probs_and_greedy_ids_are_the_trainers_after_every_sync(tmp_path, family, lora) -> None:
    found = measure(family, tmp_path, lora=lora)
    assert found.ratio < MOST_ROUNDING and min(found.stale) > 1.0
    assert all(found.same)


@pytest.mark.parametrize(
    ("family", "dtype"), [*CPU_REFUSALS, ("gemma3", "float32"), ("gemma3", "bfloat16"), ("gemma4", "float32")]
)
def test_a_family_that_it_cannot_generate_for_is_refused_before_anything_is_built(tmp_path, family, dtype) -> None:
    with pytest.raises(EngineError, match=family) as refused:
        measure(family, tmp_path, dtype=dtype)
    assert 'rollout.engine = "torch"' in (refused.value.hint or "")


@pytest.mark.parametrize("family", BUILDERS)
def test_published_names_lose_no_tensor(family) -> None:
    """Each goes out once, under a name of its own, as it is or in parts that are all of it."""
    model = build(family).model
    state = model.state_dict()
    names = published_names(model, {name: tensor.shape for name, tensor in state.items()})
    parts = {n: as_published(model, {n: t}) for n, t in state.items() if n not in names}
    sent = [*names.values(), *(n for made in parts.values() for n in made)]
    assert len(set(sent)) == len(sent)
    for name, made in parts.items():
        assert sum(t.numel() for t in made.values()) == state[name].numel()
        assert torch.equal(*(torch.cat([t.flatten() for t in x]).sort()[0] for x in (made.values(), [state[name]])))


def test_published_names_do_not_depend_on_where_the_model_came_from() -> None:
    """A model from its configuration, as a run's checkpoint is loaded, and one that remembers its files' names."""
    name = "model.vision_tower.embeddings.patch_embedding.weight"
    model = build("gemma3").model
    shapes = {name: model.state_dict()[name].shape}
    expected = {name: "vision_tower.vision_model.embeddings.patch_embedding.weight"}
    for seen in (None, []):
        model._weight_conversions = seen
        assert published_names(model, shapes) == expected
        assert model._weight_conversions is seen
