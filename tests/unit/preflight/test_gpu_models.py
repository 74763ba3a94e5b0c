"""GPUs by name and by size."""

from __future__ import annotations

import pytest

from vlmrl.errors import RecipeError
from vlmrl.setup.memory_sizes import GIB, known_gpu, parse_gpu


@pytest.mark.parametrize(
    ("text", "gib"),
    [
        ("80", 80), ("24GB", 24), ("79.5 GiB", 79.5), ("H100", 79.1), ("h200", 139.8), ("A100", 79.1),
        ("a100-40GB", 39.4), ("4090", 23.5), ("RTX 4090", 23.5), ("3g.40gb", 39.2), ("MIG 1g.10gb", 9.8),
    ],
)  # fmt: skip
def test_what_gpu_memory_may_say(text, gib):
    assert parse_gpu(text).memory_bytes == pytest.approx(gib * GIB, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIE"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A10G", None),
        ("NVIDIA A10", "A10"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla V100-SXM2-32GB", "V100-32"),
    ],
)
def test_names_that_cuda_gives(name, known):
    found = known_gpu(name)
    assert (found and found.name) == known


@pytest.mark.parametrize("text", ["", "0", "-5", "H1000", "many", "nan", "5000"])
def test_what_is_no_gpu(text):
    with pytest.raises(RecipeError, match="--gpu-memory cannot be"):
        parse_gpu(text)
