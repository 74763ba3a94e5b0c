"""Plans of memory beside the tensors of real updates: small models, one process, one that offloads, shards of four.

The processes of a group are played by one: collectives of the backend "fake" do nothing, so the numbers are wrong and
the memory is right.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist
from planned_updates import Shape, counted, planned
from torch.testing._internal.distributed.fake_pg import FakeStore

from vlmrl.dist.world import group_of_one

TOLERANCE = 0.15


@pytest.fixture
def group():
    """Four processes, of which this is the first and the only one."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield 4
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen2_5_vl", "float32"), ("qwen2_5_vl", "bfloat16"), ("qwen3_vl", "bfloat16")],
)
def test_one_process(tmp_path, monkeypatch, family, dtype, recomputed):
    found = counted(monkeypatch, family, dtype, recomputed, 1)
    assert planned(tmp_path, family, dtype, recomputed, 1) == pytest.approx(found, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen2_5_vl", "float32"), ("qwen2_5_vl", "bfloat16"), ("qwen3_5", "float32")],
)
def test_shards_of_four(tmp_path, monkeypatch, group, family, dtype):
    found = counted(monkeypatch, family, dtype, True, group)
    assert planned(tmp_path, family, dtype, True, group) == pytest.approx(found, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), [("qwen2_5_vl", "float32"), ("qwen2_5_vl", "bfloat16")])
def test_one_process_that_offloads(tmp_path, monkeypatch, family, dtype):
    """On a CPU, where states and gathered units are in the same memory."""
    with group_of_one("cpu"):
        found = counted(monkeypatch, family, dtype, True, 1, offload=True)
    assert planned(tmp_path, family, dtype, True, 1, offload=True) == pytest.approx(found, rel=TOLERANCE)


SHAPES = {
    "long responses": ("qwen2_5_vl", "float32", Shape({"num_hidden_layers": 8}, {}, 160)),
    "a large image": ("qwen2_5_vl", "bfloat16", Shape({"num_hidden_layers": 4}, {"depth": 8}, 24, 3, 196)),
    "many narrow layers": ("qwen3_vl", "bfloat16", Shape({"num_hidden_layers": 12, "intermediate_size": 256})),
}
"""Name -> (family, dtype, shape): the activations of the text model, of the vision tower and of many layers lead."""


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["vision", 0.25, 0.5, 0.75])
@pytest.mark.parametrize("name", SHAPES)
def test_settings_between_nothing_and_all(tmp_path, monkeypatch, name, setting):
    family, dtype, shape = SHAPES[name]
    found = counted(monkeypatch, family, dtype, setting, 1, shape=shape)
    assert planned(tmp_path, family, dtype, setting, 1, shape=shape) == pytest.approx(found, rel=TOLERANCE)
