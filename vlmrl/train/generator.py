"""Which engine generates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from vlmrl.data.encode import Encoder
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import EngineError, Load
from vlmrl.model.load import DTYPES
from vlmrl.model.lora import adapted_parts, adapter_rank
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Recipe
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.hosted_engine import (
    HostedEngine,
    engine_cards,
    place_alone,
    places_apart,
    places_shared,
    visible_cards,
)
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.rollout.weight_sync import PolicyWeights

GIB = 1 << 30


def make_generator(
    recipe: Recipe, policy: Policy, encoder: Encoder, files: str, say: Callable[[str], None], *, world: World = ALONE,
    log: Callable[[str], Path] | None = None,
) -> Generator:  # fmt: skip
    """The engine that the recipe names, for this policy: in this process; in processes of its own when it is in parts
    (`rollout.tensor_parallel`) or, while training (`log` is given), on the cards that the launcher set aside.

    Args:
        files: folder or hub name with the model's configuration and processor.
        say: told what is unusual, once.      log: name of a process -> its log.
    Raises: EngineError when it is not installed or does not start; LaunchError when its parts do not fit the cards.
    """
    r = recipe.rollout
    if r.engine == "torch":
        return TorchEngine(policy, encoder.tokenizer, batch_tokens=r.batch_tokens, on_halved=partial(_tell_halved, say))
    from vlmrl.rollout.vllm_engine import EngineSettings, VllmEngine

    settings = EngineSettings(
        folder=files, dtype=recipe.model.dtype, device=policy.device.type,
        max_tokens=r.max_prompt_tokens + max(r.max_new_tokens, recipe.eval.max_new_tokens or 0),
        kv_cache_bytes=int(r.kv_cache_gib * GIB), image_arguments=encoder.image_arguments,
        lora_rank=adapter_rank(policy.model), lora_vision=not adapted_parts(policy.model) <= {"language"},
        tensor_parallel=r.tensor_parallel, revision=recipe.model.revision,
        trust_remote_code=recipe.model.trust_remote_code,
    )  # fmt: skip
    weights = PolicyWeights(policy.model, DTYPES[recipe.model.dtype], files)
    if log is not None and r.engine_gpus:
        cards = engine_cards()
        if len(cards) != r.engine_gpus:
            raise EngineError(
                f"rollout.engine_gpus = {r.engine_gpus}, and the launcher set {len(cards)} cards aside for engines",
                hint="start the run with --gpus N, N the cards that train and those that generate together",
            )
        return HostedEngine(weights, settings, world, places_apart(cards, world, r.tensor_parallel), log=log)
    if r.tensor_parallel == 1:
        return VllmEngine(weights, encoder.tokenizer, settings, say=say)
    if log is None:
        places = [place_alone(r.tensor_parallel, visible_cards(settings.device, r.tensor_parallel))]
    else:
        places = places_shared(world, r.tensor_parallel, visible_cards(settings.device, world.local_size))
    return HostedEngine(weights, settings, world, places, shared=True, log=log)


def _tell_halved(say: Callable[[str], None], load: Load) -> None:
    say(f"out of memory with {load} at once: again with less; {load.budget} is too large for this machine")
