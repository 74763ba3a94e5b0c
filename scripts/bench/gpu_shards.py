"""FSDP2 over NCCL in a world of one process: what sharding changes in numbers, time and memory. Needs torch and
transformers, and pydantic for the recipe's types.

Nothing is cut in such a world, but everything else happens: parameters in float32 that are cast when they are gathered,
gradients that are reduced, hooks on every unit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from gpu import seconds
from gpu_world import GIB, Case, World, one_pass
from torch import Tensor

from vlmrl.dist.fsdp import shard, whole
from vlmrl.dist.world import World as Processes
from vlmrl.model.device_memory import give_back
from vlmrl.model.families import sharded_units

Row = dict[str, Any]
Outcome = tuple[Tensor, dict[str, Tensor]]


def start_group(device: torch.device) -> None:
    """Begin a process group of this process alone."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.FileStore(tempfile.mktemp(prefix="group-"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


def outcome(world: World, tokens_per_row: int | None = None) -> Outcome:
    """(log-probs, gradients by name) of the group, whole, on the device; no gradients are left behind."""
    budget = tokens_per_row or world.case.tokens_per_row
    logp = one_pass("shared", world.policy, world.items, budget)[0]
    gradients = {n: whole(p.grad) for n, p in world.policy.model.named_parameters() if p.grad is not None}
    world.policy.model.zero_grad(set_to_none=True)
    return logp, gradients


def gaps(found: Outcome, expected: Outcome) -> Row:
    """`logp_mean`: nats, over tokens. `gradient`: norm of the difference over the norm."""
    assert found[1].keys() == expected[1].keys(), "a gradient is missing"
    squares = lambda x: float(x.float().square().sum(dtype=torch.float64))  # noqa: E731
    off = sum(squares(found[1][n].float() - g.float()) for n, g in expected[1].items())
    norm = sum(squares(g) for g in expected[1].values())
    return {"logp_mean": float((found[0] - expected[0]).abs().mean()), "gradient": (off / norm) ** 0.5}


def timed(world: World) -> Row:
    """Seconds and peak memory of a pass; the first one warms up."""
    run = lambda: one_pass("shared", world.policy, world.items, world.case.tokens_per_row)  # noqa: E731
    run()
    cuda = world.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    took = seconds(run, world.device)
    world.policy.model.zero_grad(set_to_none=True)
    return {"seconds": took, "peak_gib": torch.cuda.max_memory_allocated() / GIB if cuda else None}


def sharded_update(smoke: bool, model: str) -> Iterator[Row]:
    """A pass over the TaxonRL group, plain and sharded by layer."""
    case = Case("parity", "taxon", model, "shared", "sdpa" if smoke else "varlen")
    yield from _plain_and_sharded(case, smoke, ["by layer"])


def forked_units(smoke: bool, model: str) -> Iterator[Row]:
    """The same for a model whose layers run once for the prompt and again for its responses: as one unit, and by
    layer, as training shards it.
    """
    case = Case("parity", "taxon", model, "shared", "sdpa")
    yield from _plain_and_sharded(case, smoke, ["one unit", "by layer"])


def _plain_and_sharded(case: Case, smoke: bool, ways: Sequence[str]) -> Iterator[Row]:
    """A row for the plain model, which has gone when the next is made, and one for each way of sharding it."""
    world = World(case, smoke)
    expected, name = outcome(world), case.model
    two_a_row = len(world.items[0].prompt.ids) + sum(item.num_tokens for item in world.items[:2])
    repacked = gaps(outcome(world, two_a_row), expected)
    shown = f"{repacked['logp_mean']:.1e}, {repacked['gradient']:.1e}"
    yield {"case": f"{name}, not sharded", **timed(world), "repacked": shown}
    start_group(world.device)
    for way in ways:
        del world
        give_back(torch.device("cpu" if smoke else "cuda"))
        world = World(case, smoke)
        sharing = world.policy.sharing
        layers, repeated = sharded_units(world.policy.model, sharing) if way == "by layer" else [], sharing != "packed"
        shard(world.policy, layers, Processes(), world.device, repeated=repeated, compute_dtype=torch.bfloat16)
        moved = gaps(outcome(world), expected)
        ok = all(moved[key] <= repacked[key] for key in moved)
        yield {"case": f"{name}, sharded, {way}", **timed(world), **moved, "repacked": shown, "ok": ok}
    dist.destroy_process_group()
