"""Fixtures shared by all tests: a tiny model folder, made once a session, and policies over it."""

from __future__ import annotations

import copy
import gc
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# Before torch is loaded anywhere: see vlmrl/cli/app.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A fork of a process that has other threads is not safe, and numpy starts some for each core (see warm.py).
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; processes of tests inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests end processes, not machines: none waits for the disk, as processes that begin anew do. A bad handle is an error.
os.fsync = os.fstat

# Until everything is collected: what is imported stays, and each collection of garbage would go through all of it.
gc.disable()

settings.register_profile(
    "vlmrl",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("vlmrl")

SLOW_FOLDERS = ("e2e", "ranks")
"""Folders below tests/ whose tests run whole commands or several processes: each is `slow`."""


TINY_TEXTS = [
    "Are these two images the same digit? Answer with a number.",
    "<think><loop>no; yes</loop><digit>3; 8</digit></think><answer>0.25</answer>",
    "0 1 2 3 4 5 6 7 8 9 yes no same different",
]


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own runs folder, or a crash point left in the shell, must not reach a test."""
    for name in ("VLMRL_RUNS", "VLMRL_CRASH_AT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session", autouse=True)
def one_look_at_the_repository() -> Iterator[None]:
    """git is asked once about the folder of the whole session, and not for each of the runs that tests make in it."""
    from vlmrl.store import provenance

    here, ask = os.getcwd(), provenance._git

    @cache
    def answer(*args: str) -> bytes | None:
        return ask([*args], None)

    def git(args: list[str], folder: Path | None) -> bytes | None:
        return answer(*args) if folder is None and os.getcwd() == here else ask(args, folder)

    provenance._git = git
    yield
    provenance._git = ask


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory):
    """A Hugging Face folder of a small Qwen2.5-VL whose weights are large enough for clear preferences.

    As initialised (std 0.02) every token is about equally likely, and a wrong mask would hide in the rounding.
    """
    import torch

    from vlmrl.model.model_facts import quiet_transformers
    from vlmrl.model.tiny import build_tiny

    folder = tmp_path_factory.mktemp("tiny") / "model"
    with quiet_transformers():
        build_tiny(folder, TINY_TEXTS, vocabulary=300, hidden=64, layers=2, init_std=0.02)
        from transformers import Qwen2_5_VLForConditionalGeneration

        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.ndim >= 2:
                    p.mul_(8.0 if "embed_tokens" in name else 4.0)
        model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory):
    """The same model as it is initialised, for tolerances that are absolute numbers of nats."""
    from vlmrl.model.tiny import build_tiny

    return build_tiny(tmp_path_factory.mktemp("small") / "model", TINY_TEXTS, vocabulary=300, hidden=64, layers=2)


@pytest.fixture(scope="session")
def tiny_processor(tiny_folder):
    from vlmrl.model.load import load_processor
    from vlmrl.recipe.schema import Model

    return load_processor(Model(path=str(tiny_folder)))


@pytest.fixture(scope="session")
def _tiny_model(tiny_folder):
    from vlmrl.model.load import load_model
    from vlmrl.recipe.schema import Model

    return load_model(Model(path=str(tiny_folder), dtype="float32", device="cpu"))


@pytest.fixture
def tiny_model(_tiny_model):
    """A copy of the tiny model, float32, on the CPU, ready for the shared-prefix path; the test may train it."""
    return copy.deepcopy(_tiny_model)


@pytest.fixture
def frozen_tiny_model(_tiny_model):
    """The session's one tiny model, not copied: for tests that only read it."""
    return _tiny_model


@pytest.fixture(scope="module")
def eager_model(tiny_folder):
    """The tiny model through transformers' plain attention, which has never heard of packed rows."""
    import torch
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(
        tiny_folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="session")
def tiny_banned(_tiny_model, tiny_processor):
    from vlmrl.model.load import banned_ids_of

    return banned_ids_of(_tiny_model, tiny_processor.tokenizer)


@pytest.fixture(scope="session")
def tiny_encoder(tiny_processor):
    from vlmrl.data.encode import Encoder

    return Encoder(tiny_processor, min_pixels=56 * 56, max_pixels=112 * 112)


RUN_VLLM = {
    "test_split_engine.py",
    "test_tensor_parallel.py",
    "test_vllm_ranks.py",
    "test_vllm_runs.py",
    "test_vllm_stops.py",
    "test_served.py",
    "test_vllm_families.py",
    "test_vllm_engine.py",
    "test_vllm_sleep.py",
}
"""Test files that import vLLM: they run in the environment that its metadata allows (scripts/test)."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a test of vLLM where only such tests are run: importing all files takes half a minute."""
    name = collection_path.name
    if not (config.option.markexpr.startswith("vllm") and name.startswith("test_")) or name in RUN_VLLM:
        return None
    text = collection_path.read_text("utf-8")
    return None if '"vllm"' in text or "mark.vllm" in text else True


def pytest_collection_finish() -> None:
    """Leave all that was imported and collected out of later collections of garbage: each took half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter take everything apart at its end; libraries print what is left."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that run vLLM (whole files, and the cases of others that are named after it) and slow folders."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.path.relative_to(here).parts[0] in SLOW_FOLDERS:
            item.add_marker("slow")
        case = getattr(item, "callspec", None)
        if item.path.name in RUN_VLLM or (case is not None and case.params.get("engine") == "vllm"):
            item.add_marker("vllm")
    # Files with slow tests first (scripts/test keeps the order): at the end no worker is left alone with a long one.
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)
