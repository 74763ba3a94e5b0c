"""What got lost in a weight sync, by name: fused, renamed, dropped and tied weights, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vlmrl.dist.world import group_of_one
from vlmrl.rollout import weight_sync
from vlmrl.rollout.weight_sync import Delivery, dropped_tensors

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


class Plain:
    """The weights of modules that are published under their own names."""

    model_type, adapted, two_way_images = "plain", False, False

    def __init__(self, trained: nn.Module) -> None:
        self.trained = trained

    def tensors(self):
        return weight_sync.base_tensors(self.trained, {n: n for n in self.trained.state_dict()}, torch.float32)

    def write_adapter(self, folder: Path) -> None:
        raise AssertionError("there is none")


def delivered(*, skipped: str = "") -> list[str] | None:
    """What a delivery finds lost, to an engine that reaches a layer by a second way too and fuses two of its weights.

    Args: skipped: a weight that its loader leaves out.
    """

    class Inner(nn.Module):
        packed_modules_mapping = {"qk": ["q", "k"]}

        def __init__(self) -> None:
            super().__init__()
            self.qk, self.out = nn.Linear(2, 4, bias=False), nn.Linear(2, 2, bias=False)

    engine = nn.ModuleDict({"second": nn.ModuleDict({"way": Inner()})})
    engine["layer"] = engine["second"]["way"]  # type: ignore[index]
    trained = nn.ModuleDict({"layer": nn.ModuleDict({n: nn.Linear(2, 2, bias=False) for n in ("q", "k", "out")})})
    delivery = Delivery(Plain(trained))

    def load(tensors) -> set[str]:
        names = [n for n, _ in tensors if n != skipped]
        return {"layer.qk.weight" if n[6] in "qk" else n for n in names}

    delivery.load_into(engine, load)
    return delivery.lost


def test_a_second_way_to_a_weight_is_no_other_weight():
    assert delivered() == []
    assert delivered(skipped="layer.out.weight") == ["layer.out.weight"]


def test_what_an_engines_loader_does_not_read_is_gathered_all_the_same(monkeypatch):
    """Other processes wait for it."""
    trained = nn.ModuleDict({n: nn.Linear(2, 2, bias=False) for n in ("a", "b", "c")})
    given = []
    real = weight_sync.whole_tensors
    monkeypatch.setattr(weight_sync, "whole_tensors", lambda *a: (given.append(pair[0]) or pair for pair in real(*a)))
    delivery = Delivery(Plain(trained))
    delivery.load_into(nn.ModuleDict({"a": nn.Linear(2, 2, bias=False)}), lambda tensors: {next(tensors)[0]})
    assert given == ["a.weight", "b.weight", "c.weight"]
    assert delivery.lost == ["b.weight", "c.weight"]


def test_what_a_single_process_has_sharded_is_whole_already(monkeypatch):
    """No collective is needed, and none is called."""
    with group_of_one("cpu"):
        mesh = init_device_mesh("cpu", (1,))
        full = {"a": torch.randn(3, 4), "b": torch.randn(7), "c": torch.randn(2, 5)}
        named = {n: t if n == "c" else distribute_tensor(t, mesh, [Shard(0)]) for n, t in full.items()}
        for name in ("all_gather_single", "all_gather_into_tensor"):
            monkeypatch.setattr(torch.distributed, name, None, raising=False)
        for bucket_bytes in (1, 1 << 20):
            found = dict(weight_sync.whole_tensors(named.items(), bucket_bytes, torch.bfloat16))
            assert list(found) == list(full) and all(type(t) is torch.Tensor for t in found.values())
            assert all(torch.equal(found[n], full[n].bfloat16()) for n in "ab")
            assert torch.equal(found["c"], full["c"])  # not sharded: the model computes in its dtype already
