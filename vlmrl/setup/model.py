"""Model, policy, encoder and sampling parameters of a recipe."""

from __future__ import annotations

from dataclasses import replace
from shlex import quote
from typing import Any

from vlmrl.checkpoint.io import check_files
from vlmrl.checkpoint.load import fingerprint, load_saved, saved_lora
from vlmrl.data.encode import Encoder
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import CheckpointError
from vlmrl.model.load import (
    DTYPES,
    banned_ids_of,
    load_model,
    load_processor,
    prepare_model,
    refuse_unknown_ids,
    stop_ids_of,
)
from vlmrl.model.lora import attach_adapter, fold_adapter
from vlmrl.model.policy import Policy
from vlmrl.model.stored_weights import set_loaded_whole
from vlmrl.recipe.rules.engine import why_whole
from vlmrl.recipe.schema import Lora, Model, Recipe
from vlmrl.recipe.tables import GREEDY, EvalSetting
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.store.checkpoints import HF, read_meta
from vlmrl.types import SamplingParams


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
    return load_saved(origin.checkpoint, settings, lora, world), processor


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
    pairs = [(k, v, getattr(now, k)) for k, v in before.model_dump().items() if k != "dropout"]
    for name, was, is_now in pairs:
        if was != getattr(now, name):
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
    """Return the policy of a recipe: this model at this temperature, with the ids of `banned_ids_of` banned."""
    refuse_unknown_ids(processor.tokenizer, model.get_input_embeddings().weight.shape[0], settings.path)
    banned = banned_ids_of(model, processor.tokenizer)
    return Policy(
        model,
        temperature=temperature,
        banned_ids=banned,
        entropy_gradient=entropy_gradient,
        shared_prefix=settings.shared_prefix,
        critic=critic,
    )


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
