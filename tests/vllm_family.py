"""A tiny model of a family under vLLM: are the engine's log-probs and ids the trainer's, after every sync?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tinyfamilies import build
from tinyprocessors import encoder_of
from tinyworld import encoded, rounding_errors, sampler_gap

from vlmrl.model.load import banned_ids_of, share_prefix
from vlmrl.model.lora import adapter_rank, attach_adapter
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Lora
from vlmrl.rollout.engine import SamplingRequest
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.rollout.vllm.engine import VllmEngine
from vlmrl.rollout.vllm.settings import EngineSettings
from vlmrl.rollout.weight_sync import PolicyWeights
from vlmrl.types import SamplingParams

SYNCS = 3
MOST_ROUNDING = 5
"""The engine's error is at most this many times the trainer's: both round float32, in another order. Where one is
large the other is: 0.5 to 1.7 times over all families; 100,000 times and more with weights of the version before."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Found:
    """What a family does.

    Args:
        errors: largest errors of (engine, trainer) after each sync, nats (`tinyworld.rounding_errors`); over text and
            image prompts alike.
        stale: largest |trainer - engine| before each sync but the first, the trainer's weights already changed.
        same: whether the greedy ids were the built-in engine's, after each sync.
    """

    errors: Sequence[tuple[float, float]]
    stale: Sequence[float]
    same: Sequence[bool]

    @property
    def ratio(self) -> float:
        """The engine's error as a multiple of the trainer's, the largest of all syncs."""
        return max(engine / trainer for engine, trainer in self.errors)


def measure(name: str, folder: Path, *, lora: bool = False, dtype: str = "float32") -> Found:
    """Three syncs of a family of tests/tinyfamilies.py, the weights (or the adapter's) changed before each.

    Args: folder: where its configuration and processor are written. Raises: what vLLM raises.
    """
    encoder, model = encoder_of(name), build(name, wide=True).model.to(DTYPES[dtype])
    model.save_pretrained(folder)
    encoder.processor.save_pretrained(folder)
    if lora:
        attach_adapter(model, Lora(rank=4, alpha=8), dtype=DTYPES[dtype])
    share_prefix(model)
    banned = banned_ids_of(model, encoder.tokenizer)
    policy, cold = (Policy(model, temperature=t, banned_ids=banned) for t in (0.9, 1.0))
    settings = EngineSettings(
        str(folder), dtype, "cpu", 900, 2**28, encoder.image_arguments, lora_rank=adapter_rank(model)
    )
    prompts = [
        encoded(encoder, "same?", name="t"),
        encoded(encoder, "0 1 2 yes", [(90, 70)], name="one"),
        encoded(encoder, "same or different?", [(56, 56), (64, 64)], name="two"),
        encoded(encoder, "".join(n for n in encoder.control.names[:4] if n != "<image>"), [(56, 56)], name="typed"),
    ]
    warm = SamplingParams(0.9, max_new_tokens=16, banned_ids=banned)
    greedy = replace(warm, temperature=0.0)
    requests = [SamplingRequest(p, 3, 100 * i) for i, p in enumerate(prompts)]
    weights = PolicyWeights(policy.model, DTYPES[dtype], settings.folder)
    engine, ours = VllmEngine(weights, encoder.tokenizer, settings, say=str), TorchEngine(cold, encoder.tokenizer)
    errors, stale, same = [], [], []
    for version in range(SYNCS):
        if version:
            _change(policy, version)
            stale.append(sampler_gap(policy, requests, engine.generate(requests, warm)))
        engine.load_weights(version)
        errors.append(rounding_errors(policy, requests, engine.generate(requests, warm)))
        once = [replace(r, num_samples=1) for r in requests]
        found, expected = (e.generate(once, greedy) for e in (engine, ours))
        same.append([s.token_ids for [s] in found] == [s.token_ids for [s] in expected])
    engine.close()
    return Found(errors, stale, same)


def _change(policy: Policy, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if p.ndim >= 2 and p.requires_grad:
                p.add_((0.1 if ".lora_" in name else 0.1 * p.std()) * torch.randn(p.shape, generator=rng).to(p.dtype))
