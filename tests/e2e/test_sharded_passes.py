"""Policies that make several forward passes per row, sharded layer by layer: ranks compute what one process does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pass_ranks import CASES
from processes import TESTS, run_ranks

TOLERANCE = 1e-5
"""Largest relative difference of gradients, and of log-probs in nats."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("passes")
    run_ranks(1, TESTS / "pass_ranks.py", out)
    return out


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, cases in CASES.items() for name in cases])
def test_ranks_compute_what_one_process_computes(outcome: Path, size: int, name: str) -> None:
    found = json.loads((outcome / f"{size}.json").read_text())[name]
    of_model, sharded = found["units"]
    assert 3 <= sharded <= of_model and (sharded == of_model or name == "padded")
    assert found["gradient"] <= TOLERANCE and found["logp"] <= TOLERANCE
    vision = [n for n in found["without gradient"] if "blocks" in n or "encoder.layers" in n]
    assert not vision or name == "adapter"  # filler passes add zeros to what others learn from images
    assert name != "adapter" or found["reference"] > 0.1  # without its adapter, the model is another
