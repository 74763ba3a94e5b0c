"""Updates of policies that make several forward passes per row, on 2 and 3 ranks: `python pass_ranks.py OUT`.

Rank 0 computes what one process computes, on the whole model, and writes how far the ranks' gradients are from it. The
ranks are forked from a process that has only imported: the imports take longer than the updates.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from parity import adapted
from parity import world as items_of
from processes import free_endpoint
from tinyfamilies import build

from vlmrl.algo.algorithms import ALGORITHMS
from vlmrl.dist.fsdp import gathered, shard, whole
from vlmrl.dist.world import ALONE, World, join_world
from vlmrl.model.families import sharded_units, units_of
from vlmrl.model.load import checkpoint_gradients, share_prefix
from vlmrl.model.packing import TrainItem
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Lora, Optim
from vlmrl.train.learner import Optimizer, ReferencePolicy
from vlmrl.train.step_batch import FILLER, StepBatch
from vlmrl.train.update import PolicyGradient, add_gradients, fill_logps

TIMEOUT_SECONDS = 30.0


EMBEDDINGS = ("embed_tokens", "lm_head")


@dataclass(frozen=True)
class Case:
    """One update. The groups of tests/parity.py: 0 and 2 have images, 1 and 3 have none; 2 has a tool's images too.

    Args:
        owners: group -> its rank, modulo the number of ranks.
        shard_size: ranks that hold a copy of the model together; None = all.
    """

    family: str
    owners: Sequence[int] = (0, 1, 1, 2)
    recompute: bool = False
    lora: Lora | None = None
    frozen: tuple[str, ...] = ()
    shard_size: int | None = None


CASES = {
    2: {
        "recomputed": Case("qwen3_5", recompute=True),
        "adapter": Case("qwen3_5", (1, 1, 0, 0), lora=Lora(rank=4)),
        "minicpm, two copies": Case("minicpmv4_6", (0, 1, 0, 1), shard_size=1),
        "padded": Case("llava", recompute=True),
    },
    3: {
        "kept": Case("qwen3_5"),
        "all on one": Case("qwen3_5", (0, 0, 0, 0), recompute=True),
        "frozen embeddings": Case("qwen3_5", recompute=True, frozen=EMBEDDINGS),
        "minicpm, recomputed": Case("minicpmv4_6", (0, 1, 2, 1), recompute=True),
    },
}
"""Number of ranks -> name -> case."""
MORE = {"tokens_per_row": 150, "max_tokens": 16}


def policy_of(case: Case) -> Policy:
    model = build(case.family).model
    share_prefix(model)
    if case.recompute:
        checkpoint_gradients(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in case.frozen))
    return Policy(model if case.lora is None else adapted(model, case.lora))


def batch_of(case: Case, items: Sequence[TrainItem], world: World) -> StepBatch:
    mine = [i for i in items if case.owners[i.group] % world.size == world.rank]
    advantages = [(-1.0) ** k * (1 + 0.3 * k) for k in range(len(items))]
    filler = replace(items[0], group=-1, trajectory=FILLER)
    return StepBatch(mine, advantages, [f"row {k}" for k in range(len(items))], world=world, filler=filler)


def outcome(policy: Policy, batch: StepBatch) -> tuple[dict[str, torch.Tensor], dict[int, torch.Tensor]]:
    """(gradients by name, log-probs of this rank's trajectories) after a pass with gradients."""
    optimizer = Optimizer(policy.model, Optim(lr=1e-2, max_grad_norm=1e9))
    logps: dict[int, torch.Tensor] = {}
    fill_logps(policy, batch, logps, MORE["tokens_per_row"])
    if batch.world.size > 1:
        with gathered(policy):  # as the built-in engine does before an update
            pass
    add_gradients(policy, optimizer, batch, PolicyGradient(ALGORITHMS["grpo"]), **MORE)
    gradients = {n: p.grad for n, p in policy.named_parameters() if p.requires_grad}
    return {n: torch.zeros(()) if g is None else whole(g) for n, g in gradients.items()}, logps


def compare(case: Case, world: World) -> dict[str, Any]:
    """Return the gaps of the ranks' gradients and log-probs from those of one process."""
    items = items_of(build(case.family))
    policy = policy_of(case)
    layers = sharded_units(policy.model, policy.sharing)
    units = len(units_of(policy.model)), len(layers)
    shard(policy, layers, world, torch.device("cpu"), repeated=True, group_size=case.shard_size)
    gradients, logps = outcome(policy, batch_of(case, items, world))
    found: dict[str, Any] = {"units": units}
    if case.lora is not None:  # the KL reference: the base, which this policy holds too
        reference: dict[int, torch.Tensor] = {}
        fill_logps(ReferencePolicy(policy), batch_of(case, items, world), reference, MORE["tokens_per_row"])
        found["reference"] = sum(float((reference[i] - logps[i]).abs().max()) for i in logps)
    by_trajectory = dict(pair for theirs in world.gather(list(logps.items())) for pair in theirs)
    if world.is_main:
        expected, expected_logps = outcome(policy_of(case), batch_of(case, items, ALONE))
        assert expected.keys() == gradients.keys() and expected_logps.keys() == by_trajectory.keys()
        squares = lambda gs: sum(float(g.double().square().sum()) for g in gs)  # noqa: E731
        gap = squares(gradients[n] - g for n, g in expected.items())
        found["gradient"] = (gap / squares(expected.values())) ** 0.5
        found["logp"] = max(float((by_trajectory[i] - x).abs().max()) for i, x in expected_logps.items())
        found["without gradient"] = sorted(n for n, g in expected.items() if not bool(g.any()))
    return found


def rank_main(out: Path, rank: int, size: int, endpoint: str) -> None:
    host, port = endpoint.split(":")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": host, "MASTER_PORT": port}
    torch.set_num_threads(1)
    with join_world("cpu", timeout_seconds=TIMEOUT_SECONDS) as world:
        found = {name: compare(case, world) for name, case in CASES[size].items()}
        if world.is_main:
            (out / f"{size}.json").write_text(json.dumps(found))


def main(out: str) -> None:
    fork = multiprocessing.get_context("fork")
    for size in CASES:
        endpoint = free_endpoint()
        ranks = [fork.Process(target=rank_main, args=(Path(out), rank, size, endpoint)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert not any(rank.exitcode for rank in ranks), [rank.exitcode for rank in ranks]


if __name__ == "__main__":
    main(*sys.argv[1:])
