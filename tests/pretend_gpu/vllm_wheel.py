"""vLLM's wheel for GPUs on a pretended GPU: the engine starts, gets weights, sleeps, wakes and gets new weights.

`scripts/pretend-gpu --all vllm` runs this in an environment of its own, `.venv-vllm-gpu`. vLLM's worker, its allocator
that sleeps and its loading of weights are the real ones. There is no forward pass: its kernels need a GPU.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

import torch
import vllm.distributed.device_communicators.cuda_wrapper as cuda_wrapper
import vllm.utils.system_utils as system_utils
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from vlmrl.model.load import load_model, load_processor
from vlmrl.model.tiny import build_tiny
from vlmrl.recipe.schema import Model
from vlmrl.rollout.vllm.engine import VllmEngine
from vlmrl.rollout.vllm.settings import EngineSettings
from vlmrl.rollout.weight_sync import PolicyWeights

LAYER = "layers.0.self_attn.{}_proj.weight"


def without_forward() -> None:
    """Let vLLM find CUDA's runtime in the pretended driver, and start without measuring a forward pass."""
    find = system_utils.find_loaded_library
    pretended: Any = lambda name: os.environ["LD_PRELOAD"] if name == "libcudart" else find(name)  # noqa: E731
    system_utils.find_loaded_library = cuda_wrapper.find_loaded_library = pretended
    Worker.determine_available_memory = lambda self: self.cache_config.kv_cache_memory_bytes
    Worker.compile_or_warm_up_model = lambda self: CompilationTimes(language_model=0.0, encoder=0.0)


def main() -> None:
    without_forward()
    with tempfile.TemporaryDirectory() as name:
        folder = str(build_tiny(Path(name) / "model", ["7 or 8?", "yes no"], vocabulary=300, hidden=64, layers=2))
        model = load_model(Model(path=folder, dtype="bfloat16", device="cuda")).requires_grad_(False)
        tokenizer = load_processor(Model(path=folder)).tokenizer
        weights = PolicyWeights(model, torch.bfloat16, folder)
        free = torch.cuda.mem_get_info()[0]
        engine = VllmEngine(weights, tokenizer, EngineSettings(folder, "bfloat16", "cuda", 2048, 256 << 20), say=print)
        worker = engine._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        awake = torch.cuda.mem_get_info()[0]
        assert worker.device.type == "cuda" and free - awake >= 256 << 20, "its cache is on the GPU"

        def gap() -> float:
            """Largest difference of the trainer's projections of a layer, and the engine's, which joins them."""
            own, joined = dict(model.named_parameters()), dict(worker.model_runner.get_model().named_parameters())
            [ours] = [n for n in joined if n.endswith(LAYER.format("qkv")) and "visual" not in n]
            parts = [p for x in "qkv" for n, p in own.items() if n.endswith("language_model." + LAYER.format(x))]
            return float((joined[ours].float() - torch.cat(parts).float()).abs().max())

        engine.load_weights(0)
        assert gap() == 0.0
        for step in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01)
            assert gap() > 0.005, "nothing was sent yet"
            engine.sleep()
            asleep = torch.cuda.mem_get_info()[0]
            assert asleep - awake >= 256 << 20, "its cache is free while it sleeps"
            engine.load_weights(step)
            assert gap() == 0.0
            print(f"step {step}: {engine.last_sync.text()}", flush=True)
        engine.close()


if __name__ == "__main__":
    main()
