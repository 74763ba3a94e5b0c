"""One update on two processes is the update of one: gradients, metrics, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from processes import TESTS, run_ranks
from safetensors.torch import load_file
from tinyfamilies import BUILDERS

CASES = ["images on one", "nothing on one", "chosen tokens", "adapter", "forked cache", "padded"]
OTHERS = [name for name in BUILDERS if name not in ("qwen2_5_vl", "qwen3_5", "llava")]
TOLERANCE = 1e-5
"""Largest relative difference of gradients that counts as the same."""


@pytest.fixture(scope="module")
def outcome(tiny_folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    for size in (1, 2):
        run_ranks(size, TESTS / "ranks" / "update_rank.py", tiny_folder, out)
    return out


@pytest.mark.parametrize("case", [*CASES, *OTHERS])
def test_same_gradient(outcome: Path, case: str) -> None:
    one, two = (load_file(outcome / f"{size}.safetensors") for size in (1, 2))
    names = [n for n in one if n.startswith(f"{case}/")]
    assert one.keys() == two.keys() and names
    vision = [n for n in names if any(part in n for part in ("visual", "vision_tower", "vision_model"))]
    assert case == "adapter" or any(bool(one[n].any()) for n in vision)
    a, b = (torch.cat([x[n].double().flatten() for n in names]) for x in (two, one))
    assert float((a - b).norm() / b.norm()) <= TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_same_metrics(outcome: Path, case: str) -> None:
    """Of the first update, and of a second one from the weights that the first left."""
    one, two = (json.loads((outcome / f"{size}.json").read_text())[case] for size in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        assert b == pytest.approx(a, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_loss_that_is_not_finite_stops_all_with_the_name(outcome: Path, case: str) -> None:
    """All processes raise the same error, and no weight has changed on any (checked by each)."""
    one, two = (json.loads((outcome / f"{size}.json").read_text())[f"{case} with NaN"] for size in (1, 2))
    assert "row 1" in one and "row 1" in two


def test_sharding_changes_no_input_of_a_module_in_bfloat16(outcome: Path) -> None:
    """Bit by bit: what every module is given, the log-probs, and the summed gradient."""
    found = json.loads((outcome / "2.json").read_text())["bfloat16"]
    assert found and all(told.pop("modules") > 50 for told in found.values())
    assert found == {name: {"inputs": [], "outputs": [], "gradients": 0.0} for name in found}


def test_an_engine_that_is_off_stops_all_processes_and_wild_tokens_stop_none(outcome: Path) -> None:
    """All processes came to the same result, checked by each."""
    found = json.loads((outcome / "2.json").read_text())["sync"]
    assert found["fine"]["policy/sync_gap_max"] < 1e-4
    for case in ("few wild", "none to ask"):
        assert found[case]["policy/sync_gap_median"] < 1e-4 < 6.9 < found[case]["policy/sync_gap_max"]
    assert "the engine of process 1 differ" in found["one off"] and "rollout.max_sync_gap is 0.1" in found["one off"]


def test_engine_of_a_sharded_policy_samples_the_same(outcome: Path) -> None:
    one, two = (json.loads((outcome / f"{size}.json").read_text())["samples"] for size in (1, 2))
    assert one == two
    assert len({tuple(ids) for prompt in one for ids in prompt}) > 6


def test_gathered_in_buckets_tensors_are_what_was_sharded() -> None:
    """Rows that three processes do not divide, fewer rows than processes, plain tensors among them, other dtypes."""
    run_ranks(3, TESTS / "ranks" / "gather_rank.py")
