"""What got lost in a weight sync, by name: fused, renamed, dropped and tied weights, by hand."""

from __future__ import annotations

import pytest

from vlmrl.rollout.weight_sync import dropped_tensors

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "qkv": ["qkv"]}
SENT = [
    "model.embed.weight",
    *(f"model.layers.0.{x}_proj.{leaf}" for x in "qkv" for leaf in ("weight", "bias")),
    "model.visual.0.qkv.weight",
]
PARAMETERS = ["lm.embed.weight", "lm.layers.0.qkv_proj.weight", "lm.layers.0.qkv_proj.bias", "visual.0.qkv.weight"]


def rename(name: str) -> str | None:
    if name.startswith("model.rotary"):
        return None
    return name.replace("model.visual", "visual").replace("model.", "lm.")


def lost(sent=SENT, loaded=PARAMETERS, parameters=PARAMETERS) -> list[str]:
    return dropped_tensors(sent, set(loaded), set(parameters), rename=rename, fused=FUSED)


def test_all_arrived():
    assert lost() == []


@pytest.mark.parametrize("name", SENT)
def test_a_tensor_that_is_not_sent_is_named_even_inside_a_fused_weight(name):
    assert lost(sent=[n for n in SENT if n != name]) == [rename(name)]


@pytest.mark.parametrize("parameter", PARAMETERS)
def test_a_weight_that_is_not_loaded_names_what_was_sent_for_it(parameter):
    head, leaf = parameter.rsplit(".", 1)
    parts = [n for n in SENT if rename(n) == parameter or (head.endswith("qkv_proj") and n.endswith(f"_proj.{leaf}"))]
    assert lost(loaded=[n for n in PARAMETERS if n != parameter]) == sorted(parts)


def test_a_tensor_the_engine_has_no_place_for_is_named():
    assert lost(sent=[*SENT, "model.extra.weight"]) == ["model.extra.weight"]
    assert lost(sent=[*SENT, "model.rotary.weight"]) == ["model.rotary.weight"]


def test_a_weight_sent_fused_needs_no_parts():
    sent = [n for n in SENT if "_proj.weight" not in n] + ["model.layers.0.qkv_proj.weight"]
    assert lost(sent=sent) == []
