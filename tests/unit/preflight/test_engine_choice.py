"""Which engine `rollout.engine = "auto"` becomes, and what the user is told."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from vlmrl.model.model_facts import ModelFacts
from vlmrl.recipe.load import load_recipe
from vlmrl.rollout.vllm import settings
from vlmrl.rollout.vllm.settings import VllmFacts
from vlmrl.setup.auto_choice import UNUSED, EngineWorld, choose_engine
from vlmrl.setup.memory_sizes import Gpu

GPU = Gpu("H100", 80 << 30, 3.35e12)
KNOWS = VllmFacts("0.32.0", frozenset({"Qwen2_5_VLForConditionalGeneration"}))
TEXT = {"num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "vocab_size": 152064}
SEVEN_B = ModelFacts(
    "qwen2_5_vl", {"language": 8_292_000_000}, TEXT, {}, architecture="Qwen2_5_VLForConditionalGeneration"
)


def never() -> VllmFacts:
    pytest.fail("vLLM was asked, which takes seconds")


def chosen(tmp_path: Path, *overrides: str, gpu=GPU, vllm=lambda: KNOWS, facts=SEVEN_B, elsewhere=False):
    (tmp_path / "r.toml").write_text('[model]\npath = "m"\n[[data]]\npath = "d"\n')
    recipe = load_recipe(tmp_path / "r.toml", overrides=overrides).recipe
    assert recipe.rollout.engine == "auto"
    return choose_engine(recipe, EngineWorld(gpu, vllm, lambda: facts, "r.toml:1", elsewhere))


def test_without_a_gpu_the_built_in_engine_is_taken_without_a_word(tmp_path):
    choice = chosen(tmp_path, gpu=None, vllm=never)
    assert (choice.value, choice.problem) == ("torch", None)
    assert chosen(tmp_path, "kind=sft", vllm=never).problem is None


def test_a_choice_without_effect_is_marked_so_that_it_is_not_shown(tmp_path):
    assert chosen(tmp_path, "kind=sft", "eval.metric=loss", vllm=never).reason == UNUSED
    assert chosen(tmp_path, "kind=sft", "eval.metric=reward", vllm=never).reason != UNUSED


def test_on_a_gpu_vllm_is_taken_where_it_knows_the_model(tmp_path):
    choice = chosen(tmp_path)
    assert (choice.value, choice.problem) == ("vllm", None)
    assert choice.reason == "vLLM 0.32.0 is installed and knows Qwen2_5_VLForConditionalGeneration"
    other = chosen(tmp_path, vllm=never, elsewhere=True)
    assert other.value == "vllm" and other.reason == "as if vLLM were installed beside H100"


@pytest.mark.parametrize(
    ("vllm", "overrides", "words", "hint"),
    [
        (VllmFacts(), [], "vLLM is not installed", "pip install '.[vllm]' (in vlmrl's checkout)"),
        (
            VllmFacts("0.32.0", error="ImportError: undefined symbol: _ZN3c10"),
            [],
            "undefined symbol",
            "reinstall it",
        ),
        (VllmFacts("0.31.0", frozenset({"LlamaForCausalLM"})), [], "vLLM 0.31.0 does not know Qwen2_5_VL", "a newer"),
        (KNOWS, ["lora.rank=8", "lora.dora=true"], "`lora.dora` is on", "leave it out"),
        (KNOWS, ["lora.rank=8", 'model.quantize="4bit"'], "cannot be synced to vLLM", "leave it out"),
        (KNOWS, ["rollout.temperature=0.001"], "samples at 0.01 at least", "raise it"),
    ],
)
def test_where_vllm_cannot_it_is_said_why_what_it_costs_and_what_to_do(tmp_path, vllm, overrides, words, hint):
    choice = chosen(tmp_path, *overrides, vllm=lambda: vllm)
    assert choice.value == "torch" and words in choice.reason
    problem = choice.problem
    assert problem is not None and problem.level == "warning" and words in problem.message
    assert "times as long as with vLLM (estimated)" in problem.message and hint in (problem.hint or "")


def test_a_recipe_that_needs_vllm_does_not_go_on_without_it(tmp_path):
    for key in ("rollout.engine_gpus=2", "rollout.tensor_parallel=2"):
        problem = chosen(tmp_path, key, vllm=VllmFacts).problem
        assert (
            problem is not None and problem.level == "error" and "needs vLLM: vLLM is not installed" in problem.message
        )


def test_the_estimate_of_the_slowdown(tmp_path):
    """7B on one GPU: a step reads 16.6 GB in 5.0 ms; 28 layers from Python take 22.4 ms more, vLLM's scheduler 2 ms.
    32 x 8 responses of 512 and 512 of the prompt's tokens: 262,144 in batches of 65,536 are 4, vLLM takes 256 at once.
    4 x 27.4 / 7.0 = 15.8."""
    problem = chosen(tmp_path, vllm=VllmFacts).problem
    assert problem is not None and "about 16 times" in problem.message


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    """A package `vllm` of a given text, first on the path of processes that are started."""

    def make(text: str) -> None:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").write_text(textwrap.dedent(text))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[3]}")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "vllm", raising=False)

    return make


def test_the_installed_vllm_is_asked_in_a_process_of_its_own(fake_vllm):
    fake_vllm("""
        print("noise on stdout")
        class ModelRegistry:
            @staticmethod
            def get_supported_archs():
                return {"B", "A"}
    """)
    found = settings.probe_vllm()
    assert found.is_installed and found.architectures == {"A", "B"} and not found.error
    assert "vllm" not in sys.modules


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise ImportError('libcudart.so.13: cannot open')", "ImportError: libcudart.so.13: cannot open"),
        ("import os; os._exit(11)", "exit code 11"),
    ],
)
def test_a_vllm_that_cannot_be_imported_is_an_error_in_words(fake_vllm, text, error):
    fake_vllm(text)
    found = settings.probe_vllm()
    assert found.is_installed and error in found.error and not found.architectures


@pytest.mark.parametrize("compiled", ["_C", "_C_stable_libtorch"])
def test_a_compiled_part_of_either_build_that_cannot_be_loaded_is_an_error(fake_vllm, tmp_path, compiled):
    fake_vllm("class ModelRegistry: get_supported_archs = staticmethod(set)")
    part = next(p for p in tmp_path.rglob("vllm") if p.is_dir()) / f"{compiled}.py"
    part.write_text("raise ImportError('undefined symbol')")
    assert "undefined symbol" in settings.probe_vllm().error


def test_no_vllm_is_asked_where_none_is(monkeypatch):
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(settings.subprocess, "run", lambda *a, **k: pytest.fail("a process was started"))
    assert settings.probe_vllm() == VllmFacts()
