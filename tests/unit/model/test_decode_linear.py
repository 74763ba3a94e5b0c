"""Linear layers while decoding: the same products, and nothing left behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vlmrl.rollout import torch_engine
from vlmrl.rollout.torch_engine import MAX_ROWS, fast_linears


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 5), (3, 1, 5), (MAX_ROWS, 5), (MAX_ROWS + 1, 5), (0, 5)])
def test_same_products(shape: tuple[int, ...], bias: bool) -> None:
    layer, x = nn.Linear(5, 7, bias=bias), torch.randn(shape)
    with torch.inference_mode():
        wanted = layer(x)
        with fast_linears(nn.Sequential(layer)):
            found = layer(x)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted)


def test_weights_are_copied_as_far_as_there_is_room_and_read_anew_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two layers of 35 weights fits in 140 bytes. Changed weights count in the next round."""
    monkeypatch.setattr(torch_engine, "PACKED_BYTES", 4 * 35)
    model, x = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)), torch.randn(3, 5)
    for _ in range(2):
        with torch.inference_mode(), fast_linears(model):
            found = model(x)
            copies = [layer.forward.weight.is_mkldnn for layer in model]
        assert copies == [True, False]
        torch.testing.assert_close(found, model(x))
        with torch.no_grad():
            model[0].weight.mul_(3.0)


def test_a_layer_that_runs_many_rows_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vision tower, say, which comes first among the modules and sees no few rows."""
    monkeypatch.setattr(torch_engine, "PACKED_BYTES", 4 * 35)
    tower, text = nn.Linear(5, 7), nn.Linear(7, 5)
    with torch.inference_mode(), fast_linears(nn.ModuleList([tower, text])):
        text(tower(torch.randn(MAX_ROWS + 1, 5))[:3])
        assert tower.forward.weight is None and text.forward.weight.is_mkldnn


def test_layers_are_as_before_even_after_an_error() -> None:
    layer = nn.Linear(5, 7)
    with pytest.raises(RuntimeError, match="stop"), fast_linears(layer):
        assert "forward" in vars(layer)
        raise RuntimeError("stop")
    assert "forward" not in vars(layer)
    layer(torch.randn(2, 5)).sum().backward()
    assert layer.weight.grad is not None


def test_other_layers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subclasses (quantized layers), halves, and layers whose forward somebody replaced keep their own."""

    class Own(nn.Linear):
        pass

    replaced = nn.Linear(2, 2)
    replaced.forward = lambda x: x + 1.0
    model = nn.ModuleList([Own(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16), replaced])
    with fast_linears(model):
        assert not any("forward" in vars(m) for m in model[:2])
        assert model[2](torch.zeros(1)) == 1.0
    assert replaced(torch.zeros(1)) == 1.0
    monkeypatch.setattr(torch_engine, "HAS_FAST_LINEAR", False)
    layer = nn.Linear(2, 2)
    with fast_linears(layer):
        assert "forward" not in vars(layer)
