"""Choice of the engine that generates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vlmrl.data.encode import Encoder
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import EngineError, Load
from vlmrl.model.device_memory import free_bytes, memory_use
from vlmrl.model.load import DTYPES
from vlmrl.model.lora import adapted_parts, adapter_rank
from vlmrl.model.memory import MAX_SEQUENCES, RESERVE_SHARE, Demand, engine_work, size_cache, text_cache_shape
from vlmrl.model.model_facts import usable_memory
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Recipe
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.rollout.vllm.hosted_engine import (
    HostedEngine,
    place_alone,
    places_apart,
    places_shared,
    reserved_gpus,
    visible_gpus,
)
from vlmrl.rollout.weight_sync import PolicyWeights

GIB = 1 << 30


def make_generator(
    recipe: Recipe,
    policy: Policy,
    encoder: Encoder,
    files: str,
    say: Callable[[str], None],
    *,
    world: World = ALONE,
    log: Callable[[str], Path] | None = None,
    pending_bytes: int = 0,
) -> Generator:
    """Return the engine that the recipe selects, for this policy.

    The engine usually runs in this process. It has processes of its own when it is split over GPUs
    (`rollout.tensor_parallel`), or when it runs in training (`log` is given) on GPUs that the launcher reserved.

    Args:
        files: folder or hub name with the model's configuration and processor.
        say: called once for each unusual event, with a text.
        log: name of a process -> path of its log file; None outside training.
        pending_bytes: memory in bytes that the trainer will need and has not allocated yet.
    Raises: EngineError when the engine is not installed or does not start; LaunchError when the number of its parts
        does not match the GPUs.
    """
    r = recipe.rollout
    if r.engine == "torch":
        return TorchEngine(policy, encoder.tokenizer, batch_tokens=r.batch_tokens, on_halved=partial(_tell_halved, say))
    from vlmrl.rollout.vllm.engine import VllmEngine
    from vlmrl.rollout.vllm.settings import EngineSettings

    settings = EngineSettings(
        folder=files,
        dtype=recipe.model.dtype,
        device=policy.device.type,
        max_tokens=_longest(recipe, policy.model.config.get_text_config()),
        kv_cache_bytes=cache_bytes(recipe, policy, world, log is not None, pending_bytes),
        image_arguments=encoder.image_arguments,
        lora_rank=adapter_rank(policy.model),
        lora_vision=not adapted_parts(policy.model) <= {"language"},
        tensor_parallel=r.tensor_parallel,
        weight_transport=r.weight_transport,
        revision=recipe.model.revision,
        trust_remote_code=recipe.model.trust_remote_code,
    )
    weights = PolicyWeights(policy.model, DTYPES[recipe.model.dtype], files)
    if log is not None and r.engine_gpus:
        gpus = reserved_gpus()
        if len(gpus) != r.engine_gpus:
            raise EngineError(
                f"rollout.engine_gpus = {r.engine_gpus}, but the launcher reserved {len(gpus)} GPUs for engines",
                hint="start the run with --gpus N, where N counts the GPUs that train and those that generate",
            )
        return HostedEngine(weights, settings, world, places_apart(gpus, world, r.tensor_parallel), log=log)
    if r.tensor_parallel == 1:
        return VllmEngine(weights, encoder.tokenizer, settings, say=say)
    if log is None:
        places = [place_alone(r.tensor_parallel, visible_gpus(settings.device, r.tensor_parallel))]
    else:
        places = places_shared(world, r.tensor_parallel, visible_gpus(settings.device, world.local_size))
    return HostedEngine(weights, settings, world, places, shared=True, log=log)


def _longest(recipe: Recipe, text: Any) -> int:
    """Return the tokens of the longest prompt and response together; vLLM refuses more than the model has positions."""
    r = recipe.rollout
    longest = r.max_prompt_tokens + max(r.max_new_tokens, recipe.eval.longest(r.max_new_tokens))
    return min(longest, int(getattr(text, "max_position_embeddings", None) or longest))


def cache_bytes(recipe: Recipe, policy: Policy, world: World, trains: bool, pending_bytes: int) -> int:
    """Return the size in bytes of vLLM's cache on each of its GPUs.

    It is the recipe's `kv_cache_gib` if set. Otherwise it is the size that the responses of a step need, but not more
    than the memory that the trainer's states (in the form they have during sampling) and the engine's weights leave.

    Args:
        trains: whether a trainer uses the same machine; if not, the engine answers whole splits (`vlmrl eval`).
        pending_bytes: as for `make_generator`.
    """
    r = recipe.rollout
    if r.kv_cache_gib is not None:
        return int(r.kv_cache_gib * GIB)
    text = dict(policy.model.config.get_text_config().to_dict())
    longest = _longest(recipe, policy.model.config.get_text_config())
    engines = max(1, (r.engine_gpus or world.size) // r.tensor_parallel)
    # -(-a // b) rounds up: prompts of a step per engine.
    groups, samples = (-(-r.prompts_per_step // engines), r.samples_per_prompt) if trains else (MAX_SEQUENCES, 1)
    demand = Demand(groups, samples, r.max_prompt_tokens, r.max_new_tokens, longest)
    device = policy.device
    if device.type == "cuda":
        weights = sum(p.numel() for p in policy.model.parameters()) * DTYPES[recipe.model.dtype].itemsize
        size = DTYPES[recipe.model.dtype].itemsize
        engine_bytes = weights // r.tensor_parallel + engine_work(
            text, size, longest, demand.sequences, r.tensor_parallel
        )
        total = memory_use(device)[1]
        # Reserved GPUs are assumed to be of the same type as this GPU, and empty.
        free = total if trains and r.engine_gpus else (free_bytes(device) or 0) - pending_bytes
        free -= engine_bytes + int(RESERVE_SHARE * total)
    else:
        free = usable_memory() // world.local_size
    shape = text_cache_shape(text, recipe.model.dtype)
    return size_cache(shape, demand, free, device.type, r.tensor_parallel).chosen


def _tell_halved(say: Callable[[str], None], load: Load) -> None:
    say(f"out of memory with {load} at once; trying again with less: {load.budget} is too large for this machine")
