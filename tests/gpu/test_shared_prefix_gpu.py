"""The backends of packed rows on a real GPU: `pytest tests/gpu/test_shared_prefix_gpu.py` on a machine that has one.

Skipped without CUDA. Written without a GPU at hand: run it before trusting `flex` or `varlen`.
"""

from __future__ import annotations

import pytest
import torch
from parity import world
from tinyfamilies import build

from vlmrl.model import attention as flex_attention
from vlmrl.model.load import share_prefix
from vlmrl.model.packing import TrainItem, make_row, pack
from vlmrl.model.policy import Policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def outcome(name: str, backend: str, dtype: torch.dtype, items: list[TrainItem]) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, gradient as one vector), float32, on the CPU."""
    model = build(name).model.to("cuda", dtype)
    share_prefix(model)
    policy = Policy(model, backend=backend)
    logps = []
    for chosen in pack(items, 10_000):
        logp = policy(make_row(chosen, "cuda")).logp
        (logp * torch.cos(torch.arange(len(logp), device="cuda"))).sum().backward()
        logps.append(logp.detach())
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return torch.cat(logps).cpu(), gradient.float().cpu()


@pytest.mark.parametrize(
    ("backend", "dtype", "allowed"),
    [
        ("flex", torch.float32, 1e-3),
        ("flex", torch.bfloat16, 0.1),
        ("varlen", torch.bfloat16, 0.1),
    ],
)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_a_backend_equals_sdpa(name, backend, dtype, allowed):
    torch.backends.cuda.matmul.allow_tf32 = False
    items = world(build(name))
    found, expected = outcome(name, backend, dtype, items), outcome(name, "sdpa", dtype, items)
    assert float((found[0] - expected[0]).abs().mean()) <= allowed
    assert float((found[1] - expected[1]).norm() / expected[1].norm()) <= allowed


def test_rows_of_one_bucket_compile_once():
    items = world(build("qwen2_5_vl"))
    flex_attention.compiled_shapes.clear()
    for count in range(1, 4):
        outcome("qwen2_5_vl", "flex", torch.float32, items[:count])
    assert len(flex_attention.compiled_shapes) == 1
