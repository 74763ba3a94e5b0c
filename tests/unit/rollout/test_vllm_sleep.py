"""vLLM's sleep of level 2 with the real vLLM, whose CPU build cannot sleep: a stand-in destroys what a GPU loses."""

from __future__ import annotations

import pytest
import torch
from sleeping_vllm import install
from tinyfamilies import build
from tinyprocessors import encoder_of
from tinyworld import encoded, rounding_errors
from vllm_family import MOST_ROUNDING

from vlmrl.errors import EngineError
from vlmrl.model.load import banned_ids_of, share_prefix
from vlmrl.model.policy import Policy
from vlmrl.rollout.engine import SamplingRequest
from vlmrl.rollout.vllm.engine import VllmEngine
from vlmrl.rollout.vllm.settings import EngineSettings
from vlmrl.rollout.weight_sync import PolicyWeights
from vlmrl.types import SamplingParams

pytestmark = pytest.mark.slow
CYCLES = 20


class Sleeping(EngineSettings):
    """Settings of an engine that sleeps once it is built: vLLM refuses the option on a CPU."""

    built = False
    sleeps = property(lambda self: type(self).built)  # type: ignore[assignment]


def test_twenty_cycles_of_sleep_wake_and_sync_lose_nothing(tmp_path, monkeypatch) -> None:
    """Qwen3-VL keeps its deep-stack inputs in a list of tensors.

    A batch of text alone adds them to its first layers as they are; a batch with an image writes them first.
    """
    pools = install(monkeypatch)
    encoder, model = encoder_of("qwen3_vl"), build("qwen3_vl", wide=True).model
    model.save_pretrained(tmp_path)
    encoder.processor.save_pretrained(tmp_path)
    share_prefix(model)
    banned = banned_ids_of(model, encoder.tokenizer)
    policy = Policy(model, temperature=0.9, banned_ids=banned)
    settings = Sleeping(str(tmp_path), "float32", "cpu", 600, 2**26, encoder.image_arguments)
    engine = VllmEngine(PolicyWeights(model, torch.float32, str(tmp_path)), encoder.tokenizer, settings, say=print)
    monkeypatch.setattr(Sleeping, "built", True)
    params = SamplingParams(0.9, max_new_tokens=3, banned_ids=banned)
    prompts = [encoded(encoder, "same?", name="t"), encoded(encoder, "yes", [(56, 56)], "one")]
    requests = [SamplingRequest(p, 1, 100 * i) for i, p in enumerate(prompts)]

    def is_exact() -> bool:
        errors = [rounding_errors(policy, [r], engine.generate([r], params)) for r in requests]
        engines, trainers = zip(*errors, strict=True)
        return max(engines) < MOST_ROUNDING * max(trainers)

    engine.load_weights(0)
    assert is_exact()
    rng = torch.Generator().manual_seed(1)
    for version in range(1, CYCLES + 1):
        engine.sleep()
        engine.sleep()  # a second one does nothing
        assert pools.cycles == version
        changed = version % 4 != 0  # weights that sleep discarded are sent though nothing changed
        with torch.no_grad():
            for p in policy.model.parameters():
                if changed and p.ndim >= 2:
                    p.add_(0.05 * p.std() * torch.randn(p.shape, generator=rng))
        engine.load_weights(version, changed=changed)
        assert is_exact(), version
    pools.frees = 0.5  # another program took half of what became free
    with pytest.raises(EngineError, match="sleep of the engine freed"):
        monkeypatch.setattr("vlmrl.rollout.vllm.weight_loading.SLACK_BYTES", 0)
        engine.sleep()
    engine.close()
