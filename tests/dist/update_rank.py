"""One process of a shared update: `python update_rank.py MODEL OUT`, with torchrun's environment.

All processes make the same world of four groups; each takes its own. What comes out is written by the first: gradients,
metrics and errors of every case, to be compared with those of one process that has all groups.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tinyworld import encoded, items_of, prompt_tokens, response

from vlmrl.algo.family import ALGORITHMS
from vlmrl.data.batch import TrainItem
from vlmrl.data.encode import Encoder
from vlmrl.dist.fsdp import shard, units_of, whole
from vlmrl.dist.world import World, join_world
from vlmrl.errors import TrainError
from vlmrl.model.load import load_model, load_processor
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Model, Optim
from vlmrl.train.optim import Optimizer
from vlmrl.train.update import FILLER, PolicyGradient, StepBatch, update

OWNERS = {"images on one": [0, 0, 1, 0], "nothing on one": [0, 0, 0, 0], "both": [0, 1, 1, 0]}
"""Case -> the process that has each group. Groups 0, 1 and 3 have images, group 2 has none."""
ALGORITHM = {"images on one": "grpo", "nothing on one": "grpo", "both": "clip_cov"}


def batch_of(items: list[TrainItem], filler: TrainItem, world: World, owners: list[int]) -> StepBatch:
    mine = [i for i in items if owners[i.group] % world.size == world.rank]
    advantages = [(-1.0) ** k * (1 + 0.3 * k) for k in range(len(items))]
    return StepBatch(mine, advantages, [f"row {k}" for k in range(len(items))], world=world, filler=filler)


def main(model_folder: str, out: str) -> None:
    torch.set_num_threads(1)
    settings = Model(path=model_folder, dtype="float32", device="cpu")
    encoder = Encoder(load_processor(settings), min_pixels=56 * 56, max_pixels=112 * 112)
    prompts = [
        encoded(encoder, "what is it?", [(56, 56), (112, 84)], "a"), encoded(encoder, "and this one?", [(84, 84)], "b"),
        encoded(encoder, "no image here, only text", (), "c"), encoded(encoder, "which?", [(56, 112)], "d"),
    ]  # fmt: skip
    items = items_of([(prompts[0], (5, 9)), (prompts[1], (3,)), (prompts[2], (7, 2, 4)), (prompts[3], (6, 6))])
    blank = prompt_tokens(encoded(encoder, "", [(56, 56)], "blank"))
    filler = TrainItem(blank, -1, (response(99, 2),), FILLER)
    found: dict[str, torch.Tensor] = {}
    told: dict[str, object] = {}
    with join_world("cpu", timeout_seconds=60) as world:
        for case, owners in OWNERS.items():
            policy = Policy(load_model(settings))
            if world.size > 1:
                shard(policy, units_of(policy.model), world, torch.device("cpu"))
            optimizer = Optimizer(policy.model, Optim(lr=1e-2, max_grad_norm=1e9))
            objective = PolicyGradient(ALGORITHMS[ALGORITHM[case]], entropy_coef=0.0)
            step = optimizer.step

            def keep(lr: float, case: str = case, step=step, optimizer: Optimizer = optimizer) -> None:
                for name, p in optimizer.parameters.items():
                    found.setdefault(f"{case}/{name}", whole(torch.zeros_like(p) if p.grad is None else p.grad).clone())
                step(lr)

            optimizer.step = keep
            batch = batch_of(items, filler, world, owners)
            runs = [update(policy, optimizer, batch, objective, lr=1e-2, tokens_per_row=150, max_tokens=16) for _ in "ab"]
            told[case] = runs
            bad = batch_of(items, filler, world, owners)
            bad.advantage_S[1] = float("nan")
            before = {n: whole(p.detach()).clone() for n, p in policy.named_parameters()}
            try:
                update(policy, optimizer, bad, objective, lr=1e-2, tokens_per_row=150, max_tokens=16)
            except TrainError as error:
                told[f"{case} with NaN"] = error.message
            assert all(torch.equal(before[n], whole(p.detach())) for n, p in policy.named_parameters())
        messages = world.gather({k: v for k, v in told.items() if "NaN" in k})
        assert all(m == messages[0] for m in messages)
        if world.is_main:
            save_file(found, Path(out) / f"{world.size}.safetensors")
            (Path(out) / f"{world.size}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
