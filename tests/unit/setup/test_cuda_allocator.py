"""Which processes get expandable segments: every combination of device, engine and the user's own variables."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from vlmrl.recipe.load import load_recipe
from vlmrl.setup import model
from vlmrl.setup.model import EXPANDABLE, VARIABLES, allocator_settings, set_allocator

ENGINES = {
    "vllm in the process": (["rollout.engine=vllm"], False),
    "vllm on its own GPUs": (["rollout.engine=vllm", "rollout.engine_gpus=1"], True),
    "vllm in parts": (["rollout.engine=vllm", "rollout.tensor_parallel=2"], False),  # weights go as handles
    "built-in": (["rollout.engine=torch"], True),
    "sft": (["rollout.engine=vllm", "kind=sft"], True),  # it never starts an engine
}
USERS = [{}, *({name: "max_split_size_mb:128"} for name in VARIABLES)]


@pytest.mark.parametrize(("engine", "device", "user"), itertools.product(ENGINES, ("cuda", "cpu"), USERS))
def test_all_cases(tmp_path: Path, engine: str, device: str, user: dict[str, str]):
    (tmp_path / "r.toml").write_text('[model]\npath = "m"\n[[data]]\npath = "d"\n')
    words, alone = ENGINES[engine]
    recipe = load_recipe(tmp_path / "r.toml", overrides=words).recipe
    expected = EXPANDABLE if alone and device == "cuda" and not user else None
    assert allocator_settings(recipe, device, {"PATH": "/bin", **user}) == expected


def test_an_empty_variable_is_none(tmp_path: Path):
    (tmp_path / "r.toml").write_text('[model]\npath = "m"\n[[data]]\npath = "d"\n')
    recipe = load_recipe(tmp_path / "r.toml", overrides=["rollout.engine=torch"]).recipe
    assert allocator_settings(recipe, "cuda", {VARIABLES[0]: ""}) == EXPANDABLE


def test_the_settings_are_given_to_torch_for_a_gpu_alone(tmp_path: Path, monkeypatch):
    given: list[str] = []
    monkeypatch.setattr(model.torch._C, "_accelerator_setAllocatorSettings", given.append)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "r.toml").write_text('[model]\npath = "m"\n[[data]]\npath = "d"\n')
    recipe = load_recipe(tmp_path / "r.toml", overrides=["rollout.engine=torch"]).recipe
    assert set_allocator(recipe, torch.device("cpu")) is None and not given
    assert set_allocator(recipe, torch.device("cuda")) == EXPANDABLE and given == [EXPANDABLE]
