"""Runs with FSDP2: the check of what can be sharded, the sharding of the policy, and the filler of several ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from PIL import Image
from torch import nn

from vlmrl.data.chat_template import IMAGE_SLOT
from vlmrl.data.encode import Encoder
from vlmrl.dist.fsdp import allocate, own_part, own_rows, shard
from vlmrl.dist.world import World
from vlmrl.errors import LaunchError
from vlmrl.model.families import sharded_units
from vlmrl.model.load import DTYPES, pick_device
from vlmrl.model.packing import PromptTokens, TrainItem
from vlmrl.model.policy import Policy
from vlmrl.model.safetensors_blocks import is_finite, non_finite
from vlmrl.model.stored_weights import StoredWeight, stored_weight, why_loaded_whole
from vlmrl.recipe.rules.engine import check_trainers
from vlmrl.recipe.schema import Recipe
from vlmrl.train.step_batch import FILLER
from vlmrl.types import Media, Message, Row, Segment

FILLER_SIDE = 56
"""Side of the filler's square image in pixels, before the processor resizes it."""


def check_sharing(recipe: Recipe, world: World) -> None:
    """Raise a LaunchError if the recipe's policy is sharded (`is_sharded`), but cannot be."""
    for unfit in check_trainers(recipe, world.size):
        raise LaunchError(unfit.message, hint=unfit.hint)


def on_cpu(recipe: Recipe) -> Recipe:
    """Return the recipe with a model that loads into main memory, as far as it is loaded before it is sharded."""
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"device": "cpu"})})


def shard_policy(policy: Policy, recipe: Recipe, world: World) -> str:
    """Shard a policy. Read this rank's rows of weights that are still in files; the others are in main memory.

    Returns: a description of the sharding, for the user.
    Raises: CheckpointError on all ranks when a weight is not finite.
    """
    device, dtype = pick_device(recipe.model.device), DTYPES[recipe.model.dtype]
    settings = recipe.parallel
    # Sharded parameters that are trained become float32; a checkpoint saves them in the dtype that they had.
    policy.saved_dtypes = {
        n: p.dtype for n, p in policy.model.named_parameters() if p.requires_grad and p.dtype != torch.float32
    }
    stored = {n: w for n, p in policy.model.named_parameters() if (w := stored_weight(p)) is not None}
    shard(
        policy,
        sharded_units(policy.model, policy.sharing),
        world,
        device,
        repeated=policy.sharing != "packed",
        compute_dtype=None if recipe.model.dtype == "float32" else dtype,
        group_size=settings.shard_size,
        offload=settings.offload,
        exact=[] if policy.value_head is None else [policy.value_head],
    )
    policy.device, policy.dtype = device, dtype
    if stored:
        allocate(policy, torch.device("cpu") if settings.offload else device)
        read_own_rows(policy.model, stored, world)
    reason = why_loaded_whole(policy.model)
    whole = f"; each process loaded the whole model first, because {reason}" if reason else ""
    if world.size == 1:
        return f"weights, gradients and moments are in main memory between their uses{whole}"
    size = settings.shard_size or world.size
    copies = f", {world.size // size} copies of the model" if size < world.size else ""
    offloaded = ", in main memory between uses" if settings.offload else ""
    return f"sharded over {size} processes{copies}{offloaded}{whole}"


@torch.no_grad()
def read_own_rows(model: nn.Module, stored: Mapping[str, StoredWeight], world: World) -> None:
    """Read this rank's rows of a sharded model from files.

    Args:
        stored: name of a parameter -> its weight in files.
    Raises: CheckpointError on all ranks when a weight is not finite.
    """
    not_finite = set()
    for name, parameter in model.named_parameters():
        if name not in stored:
            continue
        (first, last), part = own_rows(parameter), own_part(parameter.detach())
        for start, rows in stored[name].blocks(first, last):
            part[start - first : start - first + len(rows)].copy_(rows)
            if not is_finite(rows):
                not_finite.add(name)
    if any_rank := set().union(*world.gather(not_finite)):
        source = next(iter(stored.values())).source
        raise non_finite([n for n in stored if n in any_rank], source)


def make_filler(encoder: Encoder, stop_id: int) -> TrainItem:
    """Return a trajectory without loss: a blank image, and a response that ends at once."""
    picture = Image.new("RGB", (FILLER_SIDE, FILLER_SIDE))
    row = Row("filler", "filler", "filler", {}, (Media("filler", FILLER_SIDE, FILLER_SIDE),))
    prompt = encoder.encode(row, [Message("user", IMAGE_SLOT)], [picture])
    return TrainItem(PromptTokens.of(prompt), FILLER, (Segment("assistant", (stop_id,), True),), FILLER)
