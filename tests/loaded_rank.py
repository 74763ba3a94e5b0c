"""One process of a sharded load: `python loaded_rank.py FOLDER OUT`, with torchrun's environment.

FOLDER has a model folder for each case. The first process writes which shards are not, bit for bit, those of the model
that transformers loads whole, and the errors of all processes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from vlmrl.dist.fsdp import own_part, own_rows
from vlmrl.dist.world import World, join_world
from vlmrl.errors import CheckpointError
from vlmrl.model.load import prepare_model, read_model
from vlmrl.model.lora import adapter_parameters, attach_adapter
from vlmrl.model.policy import Policy
from vlmrl.model.stored_weights import is_stored
from vlmrl.recipe.schema import Data, Lora, Model, Parallel, Recipe
from vlmrl.train.session import shard_policy

DTYPES_OF = {"qwen2_5_vl": ("float32", "bfloat16")}
"""Dtypes of a case. In bfloat16, trained weights are converted twice: to the model's dtype, and to float32."""


def policy_of(recipe: Recipe, in_files: bool) -> Policy:
    torch.manual_seed(recipe.train.seed)
    model = prepare_model(read_model(recipe.model, in_files=in_files), recipe.model)
    assert is_stored(model) is in_files
    if recipe.lora is not None:
        attach_adapter(model, recipe.lora, dtype=torch.bfloat16 if recipe.model.dtype == "bfloat16" else torch.float32)
    return Policy(model, critic=True)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def compare(recipe: Recipe, world: World) -> dict[str, Any]:
    """Gaps between the policy that each process reads by rows, and the one that it loads whole before sharding."""
    policy, before = policy_of(recipe, True), policy_of(recipe, False)
    said = [shard_policy(p, recipe, world) for p in (policy, before)]
    found, expected = dict(policy.named_parameters()), dict(before.named_parameters())
    wrong = [] if list(found) == list(expected) and said[0] == said[1] else ["names"]
    for name, parameter in found.items():
        a, b = parameter.detach(), expected[name].detach()
        alike = (a.dtype, a.shape, a.device, own_rows(a)) == (b.dtype, b.shape, b.device, own_rows(b))
        alike = alike and parameter.requires_grad == expected[name].requires_grad
        if not (alike and torch.equal(bits(own_part(a)), bits(own_part(b)))):
            wrong.append(name)
    buffers = dict(before.named_buffers())
    wrong += [n for n, b in policy.named_buffers() if not torch.equal(b, buffers[n])]
    wrong += [] if policy.saved_dtypes == before.saved_dtypes else ["saved dtypes"]
    wrong = sorted({n for names in world.gather(wrong) for n in names})
    adapter = len(adapter_parameters(policy.model)) if recipe.lora else 0
    return {"wrong": wrong, "parameters": len(found), "adapter": adapter, "said": said[0]}


def main(folder: str, out: str) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with join_world("cpu", timeout_seconds=60) as world:
        for place in sorted(Path(folder).iterdir()):
            for dtype in DTYPES_OF.get(place.name, ("bfloat16",)):
                words = {"path": str(place), "dtype": dtype, "device": "cpu", "gradient_checkpointing": False}
                model = Model.model_validate(words)
                recipe = Recipe(kind="rl", model=model, data=[Data(path="d")])
                cases = {"all": recipe}
                if place.name == "qwen2_5_vl":
                    cases["adapter"] = recipe.model_copy(update={"lora": Lora(rank=4, vision=True)})
                    cases["offload"] = recipe.model_copy(update={"parallel": Parallel(offload=True)})
                for name, case in cases.items():
                    try:
                        result: dict[str, Any] = compare(case, world)
                    except CheckpointError as error:
                        result = {"error": error.message, "where": error.where}
                    everywhere = world.gather(result)
                    assert all(r == everywhere[0] for r in everywhere), everywhere
                    results[f"{place.name} {dtype} {name}"] = result
        if world.is_main:
            Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
