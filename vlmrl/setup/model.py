"""Model, policy, encoder, sampling parameters and engine of a recipe; settings of torch's CUDA allocator.

Packed rows differ in length from step to step. Blocks of fixed size then leave gaps that no later tensor fits
(fragmentation). Expandable segments grow instead, so a run fits nearer to the memory plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from vlmrl.checkpoint.io import check_files
from vlmrl.checkpoint.load import fingerprint, load_saved, saved_lora
from vlmrl.data.encode import Encoder
from vlmrl.data.turns import TurnEncoder
from vlmrl.dist.world import ALONE, World
from vlmrl.environments.base import EnvironmentLimits
from vlmrl.environments.calls import form_of
from vlmrl.environments.processes import EnvironmentPool, LoadedEnvironment
from vlmrl.errors import CheckpointError, EngineError, Load
from vlmrl.model.attention import hold_kernel
from vlmrl.model.compiled import compile_layers
from vlmrl.model.device_memory import free_bytes, memory_use
from vlmrl.model.load import (
    DTYPES,
    banned_ids_of,
    load_model,
    load_processor,
    prepare_model,
    refuse_unknown_ids,
    stop_ids_of,
)
from vlmrl.model.lora import adapted_parts, adapter_rank, attach_adapter, fold_adapter
from vlmrl.model.memory import MAX_SEQUENCES, RESERVE_SHARE, Demand, engine_work, size_cache, text_cache_shape
from vlmrl.model.model_facts import usable_memory
from vlmrl.model.policy import Policy
from vlmrl.model.stored_weights import set_loaded_whole
from vlmrl.recipe.rules.engine import why_whole
from vlmrl.recipe.schema import Environment, Lora, Model, Recipe
from vlmrl.recipe.tables import GREEDY, EvalSetting
from vlmrl.rollout.chat import ChatWriter
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.episodes import EpisodeEngine, EpisodeKind, EpisodeLimits, TurnWriter
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
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.store.checkpoints import HF, read_meta
from vlmrl.store.provenance import usable_cores
from vlmrl.tasks.source import Source
from vlmrl.types import Row, SamplingParams


def load_origin(
    settings: Model, origin: ModelOrigin, lora: Lora | None = None, world: World | None = None
) -> tuple[Any, Any]:
    """Return (model, processor) of an origin, with the device and dtype of `settings`; an adapter is not folded in.

    Args:
        world: the ranks that will shard the model, whose weights stay in their files; None = it is loaded whole.
    """
    if origin.checkpoint is not None:
        check_files(origin.checkpoint, HF)  # a changed chat template, for example, would change the model's answers
    processor = load_processor(settings, path=origin.files)
    if origin.checkpoint is None:
        return load_model(settings, path=origin.path, in_files=world is not None), processor
    return load_saved(origin.checkpoint, settings, lora, world, origin.root), processor


def load_for_training(
    recipe: Recipe, origin: ModelOrigin, world: World | None = None
) -> tuple[Any, Any, dict[str, Any]]:
    """Return (model, processor, base of the adapter) at the start of a run.

    The base identifies the frozen weights of the adapter; without an adapter it holds only path and revision. If the
    origin has an adapter and the recipe has a `[lora]` table, this adapter is trained further. If the recipe has no
    `[lora]` table, the adapter is folded into the weights, and all weights are trained.

    Args:
        world: the ranks that will shard the model; None = it is not sharded. Its weights stay in their files until
            then, unless they are needed before: by DoRA, and to fold an adapter.
    Raises: CheckpointError as `load_origin`, or when the recipe's `[lora]` table differs from that of the origin's
        adapter.
    """
    base: dict[str, Any] = {"path": origin.path, "revision": recipe.model.revision}
    before = None if origin.checkpoint is None else saved_lora(origin.checkpoint)
    if recipe.model.quantize and before is None and origin.checkpoint is not None:
        raise CheckpointError(
            f"model.quantize needs a Hugging Face folder or hub name, but `{origin.path}` is a run",
            hint=f"vlmrl merge {quote(origin.path)} --out FOLDER, then --set model.path=FOLDER",
        )
    if before is not None and recipe.lora is not None:
        _same_adapter(before, recipe.lora, origin)
    reason = "an adapter is folded into it" if before is not None and recipe.lora is None else why_whole(recipe)
    model, processor = load_origin(recipe.model, origin, recipe.lora, None if reason else world)
    if reason:
        set_loaded_whole(model, reason)
    if recipe.lora is None:
        if before is not None:
            prepare_model(fold_adapter(model), recipe.model)
        return model, processor, base
    if before is not None:
        assert origin.checkpoint is not None
        return model, processor, read_meta(origin.checkpoint)["base"]
    if origin.parent is not None:
        base |= {"run": origin.parent["run"], "step": origin.step}
    base["fingerprint"] = fingerprint(model, world or ALONE)
    attach_adapter(model, recipe.lora, recipe.model.freeze, DTYPES[recipe.model.dtype])
    return model, processor, base


def _same_adapter(before: Lora, now: Lora, origin: ModelOrigin) -> None:
    """Raise a CheckpointError unless an adapter can be trained with this `[lora]` table. Its dropout may differ."""
    for name, was in before.model_dump(exclude={"dropout"}).items():
        if was != (is_now := getattr(now, name)):
            raise CheckpointError(
                f"`lora.{name}` is {is_now}, but the adapter of `{origin.path}` was made with {was}",
                hint=f"use {was}; or train on the merged model: vlmrl merge {quote(origin.path)} --out FOLDER",
            )


def make_policy(
    settings: Model,
    model: Any,
    processor: Any,
    temperature: float,
    entropy_gradient: bool = False,
    critic: bool = False,
) -> Policy:
    """Return the policy of a recipe: this model at this temperature, with the ids of `banned_ids_of` banned.

    With `model.compile = true` its layers are compiled when they first run.
    """
    refuse_unknown_ids(processor.tokenizer, model.get_input_embeddings().weight.shape[0], settings.path)
    banned = banned_ids_of(model, processor.tokenizer)
    policy = Policy(
        model,
        temperature=temperature,
        banned_ids=banned,
        entropy_gradient=entropy_gradient,
        shared_prefix=settings.shared_prefix,
        critic=critic,
    )
    if settings.compile is True:
        hold_kernel(policy.device)
        compile_layers(policy)
    return policy


def make_encoder(settings: Model, processor: Any) -> Encoder:
    return Encoder(
        processor, min_pixels=settings.min_pixels, max_pixels=settings.max_pixels, thinking=settings.thinking
    )


def sampling_params(recipe: Recipe, policy: Policy, tokenizer: Any) -> SamplingParams:
    """Return the sampling parameters of training."""
    r = recipe.rollout
    return SamplingParams(
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        max_new_tokens=r.max_new_tokens,
        stop_ids=stop_ids_of(policy.model, tokenizer),
        stop=tuple(r.stop),
        banned_ids=policy.banned_ids,
    )


def setting_params(recipe: Recipe, policy: Policy, tokenizer: Any, setting: EvalSetting = GREEDY) -> SamplingParams:
    """Return the sampling parameters of an evaluation under a setting; the default is greedy."""
    return replace(
        sampling_params(recipe, policy, tokenizer),
        temperature=setting.temperature,
        top_p=setting.top_p,
        top_k=setting.top_k,
        max_new_tokens=recipe.eval.token_limit(setting, recipe.rollout.max_new_tokens),
    )


VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables with torch's allocator settings: its present name and the two old ones."""
EXPANDABLE = "expandable_segments:True"


def allocator_settings(recipe: Recipe, device: str, environment: Mapping[str, str]) -> str | None:
    """Return the allocator settings for a process that trains; None = torch's own.

    A vLLM engine that sleeps in the same process has an allocator of its own, whose memory pool does not work with
    expandable segments (pytorch issue 147851). An engine in parts on the same GPUs gets the weights as handles of GPU
    memory. Those of expandable segments need the call pidfd_getfd, which containers without privileges deny (pytorch
    issue 165685).

    Args:
        device: type of the device that trains.
        environment: environment variables. Settings of the user are kept.
    """
    r = recipe.rollout
    has_engine = recipe.kind == "rl" and r.engine == "vllm" and not r.engine_gpus
    is_set = any(environment.get(name) for name in VARIABLES)
    return None if device != "cuda" or has_engine or is_set else EXPANDABLE


def set_allocator(recipe: Recipe, device: torch.device) -> str | None:
    """Apply `allocator_settings` to this process, before its first tensor is on a GPU, and return them.

    They are set by a call, not by the environment, because processes of engines would inherit a variable.
    """
    settings = allocator_settings(recipe, device.type, os.environ)
    if settings is not None:
        torch._C._accelerator_setAllocatorSettings(settings)  # torch.cuda.memory has the same under a deprecated name
    return settings


GIB = 1 << 30


def make_generator(
    recipe: Recipe,
    policy: Policy,
    encoder: Encoder,
    files: str = "",
    say: Callable[[str], None] = lambda text: None,
    *,
    sources: Sequence[Source] = (),
    engine: str | None = None,
    world: World = ALONE,
    log: Callable[[str], Path] | None = None,
    pending_bytes: int = 0,
) -> Generator:
    """Return the engine that the recipe selects, for this policy; its samples are episodes for some sources.

    The engine usually runs in this process. It has processes of its own when it is split over GPUs
    (`rollout.tensor_parallel`), or when it runs in training (`log` is given) on GPUs that the launcher reserved.

    Args:
        files: folder or hub name with the model's configuration and processor; the built-in engine does not need it.
        say: called once for each unusual event, with a text.
        sources: the sources whose rows it gets; their environments answer the model between its turns.
        engine: another engine than `rollout.engine`.
        log: name of a process -> path of its log file; None outside training.
        pending_bytes: memory in bytes that the trainer will need and has not allocated yet.
    Raises: EngineError when the engine is not installed or does not start; LaunchError when the number of its parts
        does not match the GPUs; RewardError or DataError when an environment cannot be used with this model.
    """
    r = recipe.rollout

    def make_engine() -> Generator:
        if (engine or r.engine) == "torch":
            halved = partial(_tell_halved, say)
            return TorchEngine(policy, encoder.tokenizer, batch_tokens=r.batch_tokens, on_halved=halved)
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

    kinds = episode_kinds(sources, encoder, world)
    try:
        inner = make_engine()
    except BaseException:
        for kind in kinds.values():
            kind.pool.close()
        raise
    return EpisodeEngine(inner, kinds, encoder.tokenizer) if kinds else inner


def episode_kinds(sources: Sequence[Source], encoder: Encoder | None, world: World = ALONE) -> dict[str, EpisodeKind]:
    """Return name of a dataset -> its episodes, with their processes; sources with one turn are left out.

    Args:
        encoder: of the model; None = an endpoint has it, and observations become messages.
    Raises: RewardError when an environment cannot be loaded; DataError when the chat template has no place for what a
        tool returns.
    """
    kinds: dict[str, EpisodeKind] = {}
    turns_of = cache(TurnEncoder)  # one for each encoder, so for each set of tools

    def writer(source: Source, row: Row) -> TurnWriter:
        if encoder is None:
            return ChatWriter(source.environment is not None and source.environment.of(row).is_open)
        return turns_of(source.encoder(encoder, row))

    known: list[tuple[tuple[LoadedEnvironment, Environment], EpisodeKind]] = []
    for source in sources:
        # What rows call their source: those of a file of validation have another name than those of training.
        name, e = source.dataset.name, source.environment_settings
        if source.environment is None or name in kinds:
            continue
        own = (source.environment, e)
        if (same := next((kind for other, kind in known if other == own), None)) is not None:
            kinds[name] = replace(same, repeats=source.repeats)
            continue
        for one in source.environment.described.values():  # the chat template must show what their tools return
            _ = encoder and turns_of(encoder.with_tools(one.tools, e.calls, is_open=one.is_open))
        workers = e.workers or 2 * usable_cores()  # of this machine: its ranks share them
        form = form_of(str(encoder.processor.chat_template) if encoder else "") if e.calls == "auto" else e.calls
        pool = EnvironmentPool(source.environment, form, EnvironmentLimits.of(e, max(1, workers // world.local_size)))
        limits = EpisodeLimits(e.turns, e.tokens, e.images, e.observation_tokens, e.seconds)
        kinds[name] = EpisodeKind(pool, limits, partial(writer, source), source.repeats)
        known.append((own, kinds[name]))
    return kinds


def _longest(recipe: Recipe, text: Any) -> int:
    """Return the tokens of the longest prompt and response together; vLLM refuses more than the model has positions."""
    r = recipe.rollout
    longest = r.max_prompt_tokens + max(recipe.longest_response, recipe.eval.longest(r.max_new_tokens))
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
    demand = Demand(groups, samples, r.max_prompt_tokens, recipe.longest_response, longest)
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
