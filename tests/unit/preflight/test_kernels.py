"""Which optional kernels a model would use on a GPU, and what is said where they are missing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.nn.attention import _registry, current_flash_attention_impl

from vlmrl.cli import check
from vlmrl.errors import CheckpointError
from vlmrl.model import attention
from vlmrl.model.model_facts import ModelFacts
from vlmrl.recipe.load import load_recipe
from vlmrl.setup import check as kernels
from vlmrl.setup.check import PLAIN_ATTENTION, attention_kernel, check_kernels
from vlmrl.setup.memory_fit import Target, check_device
from vlmrl.setup.memory_sizes import Gpu

GPU = Gpu("H100", 80 << 30, 3.35e12)
OWN = "PyTorch's variable-length kernel"
INSTALL = "pip install '.[flash-attn]' --no-build-isolation (in vlmrl's checkout)"
HYBRID = ["linear_attention"] * 3 + ["full_attention"]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """Set which optional packages are installed, and whether the machine has a GPU."""

    def set_to(*installed: str, gpu: Gpu | None = GPU) -> None:
        spec = object()
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name in installed else None)
        package = SimpleNamespace(flash_attn_varlen_func=print)
        monkeypatch.setitem(sys.modules, "flash_attn", package if "flash_attn" in installed else None)
        monkeypatch.setattr(kernels, "find_cluster", lambda loaded, target: SimpleNamespace(gpu=target.gpu or gpu))

    return set_to


def recipe(tmp_path: Path, *overrides: str):
    (tmp_path / "r.toml").write_text('[model]\npath = "m"\n[[data]]\npath = "d"\n')
    return load_recipe(tmp_path / "r.toml", overrides=overrides)


def facts(model_type: str = "qwen2_5_vl", sharing: str = "packed", **text) -> ModelFacts:
    return ModelFacts(model_type, {"language": 1}, {"num_hidden_layers": 4, **text}, {}, sharing=sharing)


@pytest.mark.parametrize(
    ("model", "dtype", "installed", "text", "images", "missing"),
    [
        (facts(), "bfloat16", (), OWN, OWN, INSTALL),
        (facts(), "bfloat16", ("flash_attn",), "flash-attn", "flash-attn", None),
        (facts(), "float32", (), "FlexAttention", PLAIN_ATTENTION, None),
        # Images of Gemma 3 see each other both ways, and its tower runs one image at a time.
        (facts("gemma3"), "bfloat16", (), "FlexAttention", PLAIN_ATTENTION, None),
        (facts("qwen3_5", "forked", layer_types=HYBRID), "bfloat16", (), PLAIN_ATTENTION, OWN, INSTALL),
        (facts(sharing="padded"), "bfloat16", (), PLAIN_ATTENTION, PLAIN_ATTENTION, None),
        (facts("internvl"), "bfloat16", (), OWN, PLAIN_ATTENTION, INSTALL),
    ],
)
def test_what_computes_attention(tmp_path, environment, model, dtype, installed, text, images, missing):
    environment(*installed)
    found = attention_kernel(recipe(tmp_path, f"model.dtype={dtype}"), model)
    assert found == {"text": text, "images": images, "missing": missing, "unused": []}


def test_other_kernels_are_used_only_where_the_recipe_names_them(tmp_path, environment):
    """Installed, they are offered, if flash attention runs anything of this model."""
    environment("flash_attn_interface", "flash_attn.cute.interface")
    plain = recipe(tmp_path, "model.dtype=bfloat16")
    assert attention_kernel(plain, facts()) == {
        "text": OWN,
        "images": OWN,
        "missing": INSTALL,
        "unused": ["fa3", "fa4"],
    }
    assert attention_kernel(plain, facts("gemma3"))["unused"] == []
    chosen = attention_kernel(recipe(tmp_path, "model.dtype=bfloat16", "model.attention=fa3"), facts())
    assert chosen == {"text": "FlashAttention 3", "images": "FlashAttention 3", "missing": None, "unused": []}
    environment()
    with pytest.raises(CheckpointError, match=r"needs the module flash_attn\.cute\.interface, which is not installed"):
        attention_kernel(recipe(tmp_path, "model.attention=fa4"), facts())


def test_kernels_are_exchanged_in_torch_and_put_back(monkeypatch):
    """torch's own registry, with a stand-in for the package: it says what would be installed into the dispatcher."""
    events: list[str] = []
    handle = SimpleNamespace(remove=lambda: events.append("removed"))
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=print))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    registry = {"FA3": lambda: events.append("FA3") or handle, "FA4": lambda: [][0]}
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", registry)
    attention.use_kernels("auto")
    assert attention._kernel().__name__ == "kernel" and not events, "flash-attn's own function"
    attention.use_kernels("fa3")
    assert events == ["FA3"] and current_flash_attention_impl() == "FA3"
    assert attention._kernel().func.__name__ == "varlen_attn", "torch's, through which these kernels run"
    attention.use_kernels("auto")
    assert events == ["FA3", "removed"] and current_flash_attention_impl() is None
    assert attention._kernel().__name__ == "kernel"
    attention._kernel.cache_clear()


@pytest.mark.parametrize("error", [ImportError("no kernels for this GPU"), RuntimeError("no kernels for this GPU")])
def test_kernels_that_cannot_be_used_are_named(monkeypatch, error):
    def fail() -> None:
        raise error

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", {"FA4": fail})
    with pytest.raises(CheckpointError, match=r'model\.attention = "fa4" cannot be used here: no kernels') as raised:
        attention.use_kernels("fa4")
    assert "torch has kernels of its own" in str(raised.value.hint)


def test_on_a_cpu_the_key_does_nothing_and_check_says_so(tmp_path):
    found = check_device(recipe(tmp_path, "model.attention=fa3", "model.device=cpu"), Target())
    assert [p.level for p in found] == ["warning"] and "does nothing: no GPU is used" in found[0].message


def test_compilation_needs_a_compiler_and_check_says_so(tmp_path, monkeypatch):
    compiling = recipe(tmp_path, "model.compile=true", "model.device=cpu")
    assert check_device(compiling, Target()) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    [found] = check_device(compiling, Target())
    assert found.level == "error" and "`model.compile` needs a C compiler, and none is in PATH" in found.message


@pytest.mark.parametrize(
    ("file", "source", "kernel"),
    [
        ("__init__.py", "def flash_attn_varlen_func(): ...", "flash-attn"),
        ("__init__.py", "", OWN),
        ("cute/interface.py", "def flash_attn_varlen_func(): ...", OWN),  # what flash-attn-4 installs
    ],
)
def test_a_flash_attn_without_the_function_counts_as_absent(tmp_path, monkeypatch, file, source, kernel):
    path = tmp_path / "site" / "flash_attn" / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setattr(kernels, "find_cluster", lambda loaded, target: SimpleNamespace(gpu=GPU))
    named = attention_kernel(recipe(tmp_path), facts())
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        sys.modules.pop(name)
    missing = None if kernel == "flash-attn" else INSTALL
    assert named == {"text": kernel, "images": kernel, "missing": missing, "unused": ["fa4"] if "cute" in file else []}
    assert (attention.flash_attn() is not None) == (kernel == "flash-attn")
    sys.modules.pop("flash_attn", None)


def test_a_broken_flash_attn_is_named_before_training(tmp_path, monkeypatch):
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckpointError, match="flash-attn is installed and cannot be imported: undefined symbol"):
        attention.flash_attn()


def test_nothing_is_said_of_kernels_without_a_gpu_or_of_another_machine(tmp_path, environment):
    hybrid = facts("qwen3_5", "forked", layer_types=HYBRID)
    environment(gpu=None)
    loaded = recipe(tmp_path)
    assert attention_kernel(loaded, hybrid) is None and check_kernels(loaded, hybrid) == []
    environment()
    elsewhere = Target(8, GPU)
    assert attention_kernel(loaded, hybrid, elsewhere) is None and check_kernels(loaded, hybrid, elsewhere) == []


@pytest.mark.parametrize(
    ("installed", "named"),
    [
        ((), ["flash-linear-attention", "causal-conv1d"]),
        (("fla",), ["causal-conv1d"]),
        (("fla", "causal_conv1d"), []),
    ],
)
def test_a_hybrid_is_warned_of_each_kernel_that_it_lacks(tmp_path, environment, installed, named):
    environment(*installed)
    found = check_kernels(recipe(tmp_path), facts("qwen3_5", "forked", layer_types=HYBRID))
    assert [p.level for p in found] == ["warning"] * len(named)
    for problem, name in zip(found, named, strict=True):
        assert problem.message.startswith(f"{name} is not installed") and f"'.[{name}]'" in (problem.hint or "")
        assert "3 " in problem.message
    assert check_kernels(recipe(tmp_path), facts()) == []


def test_the_screen_names_the_missing_kernel():
    def shown(**attention):
        facts = {"type": "m", "parameters": 0, "trained": 0}
        bytes_of = ("checkpoint_bytes", "rollouts_bytes_at_most", "merged_bytes", "free_bytes")
        disk = {"checkpoints_at_once": 1, "folder": "runs", **dict.fromkeys(bytes_of, 0)}
        return dict(check._machine_lines({"model": facts, "disk": disk, "attention": attention}))

    lines = shown(text=OWN, images=OWN, missing=INSTALL, unused=[])
    assert lines["attention"] == OWN and lines[""].endswith(INSTALL) and "flash-attn would be used instead" in lines[""]
    lines = shown(text="FlexAttention", images=PLAIN_ATTENTION, missing=None, unused=[])
    assert lines["attention"] == f"FlexAttention; for images {PLAIN_ATTENTION}" and "" not in lines
    lines = shown(text="flash-attn", images="flash-attn", missing=None, unused=["fa3"])
    assert lines[""] == "FlashAttention 3 is installed, not used: not yet run on a GPU (--set model.attention=fa3)"
