"""Three processes that each read their own rows have, bit for bit, the shards of a model that was loaded whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from processes import TESTS, run_ranks
from safetensors.torch import load_file, save_file
from tinyfamilies import build

from vlmrl.model.model_facts import quiet_transformers
from vlmrl.model.stored_weights import publishing

pytestmark = pytest.mark.slow
FAMILIES = ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5_moe", "gemma4", "glm4v", "llava")
"""Tied and untied heads, experts that are merged, more experts than processes. test_stored_weights.py has all."""
BROKEN = "with NaN"


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("ranks")
    for name in FAMILIES:
        model = build(name).model
        with quiet_transformers(), publishing(model):
            model.save_pretrained(place / "models" / name)
    # In the last rows of one weight and the first of another: no process sees both.
    broken = place / "models" / BROKEN
    broken.mkdir()
    for path in (place / "models" / "qwen2_5_vl").iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][-1, 0] = float("nan")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("inf")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    run_ranks(3, TESTS / "loaded_rank.py", place / "models", place / "results.json")
    return json.loads((place / "results.json").read_text()) | {"folder": str(broken)}


@pytest.mark.parametrize("case", [*(f"{name} bfloat16" for name in FAMILIES), "qwen2_5_vl float32"])
def test_families_have_the_same_shards(results, case) -> None:
    result = results[f"{case} all"]
    assert result["wrong"] == [] and result["parameters"] > 20, result
    assert result["said"] == "sharded over 3 processes"


@pytest.mark.parametrize("case", ["adapter", "offload"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_and_offload(results, case, dtype) -> None:
    result = results[f"qwen2_5_vl {dtype} {case}"]
    assert result["wrong"] == [], result
    assert bool(result["adapter"]) is (case == "adapter")


def test_weights_that_are_not_finite_are_named_by_all_processes(results) -> None:
    """The rank script compares the errors of all processes."""
    names = [f"model.language_model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)]
    result = results[f"{BROKEN} bfloat16 all"]
    assert result["where"] == results["folder"]
    assert result["error"] == f"2 weights of `{results['folder']}` hold NaN or infinity: {', '.join(names)}"
