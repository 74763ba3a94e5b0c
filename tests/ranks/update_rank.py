"""One process of a shared update: `python update_rank.py MODEL OUT`, with torchrun's environment.

All processes make the same world of four groups; each takes its own. What comes out is written by the first: gradients,
metrics and errors of every case, to be compared with those of one process that has all groups.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from parity import adapted
from parity import world as world_of
from safetensors.torch import save_file
from same_inputs import compare_families
from tinyfamilies import BUILDERS, build
from tinyworld import encoded, four_prompts, items_of, prompt_tokens, response

from vlmrl.algo.algorithms import ALGORITHMS
from vlmrl.data.encode import EncodedPrompt, Encoder
from vlmrl.dist.fsdp import shard, whole
from vlmrl.dist.world import World, join_world
from vlmrl.errors import EngineError, TrainError
from vlmrl.model.families import sharded_units, units_of
from vlmrl.model.load import checkpoint_gradients, load_model, load_processor, share_prefix
from vlmrl.model.packing import TrainItem
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Data, Lora, Model, Optim, Recipe, Rollout
from vlmrl.rollout.engine import SamplingRequest
from vlmrl.rollout.sample import Prompt
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.setup.model import sampling_params
from vlmrl.train.journal import Progress
from vlmrl.train.learner import Learner, Optimizer, TokenBudgets
from vlmrl.train.rl import check_sync
from vlmrl.train.step_batch import FILLER, StepBatch
from vlmrl.train.update import PolicyGradient, update
from vlmrl.types import Sample, SamplingParams


@dataclass(frozen=True)
class Case:
    """Which process has each group, and what is trained how. Groups 0, 1 and 3 have images, group 2 has none."""

    owners: Sequence[int] = (0, 1, 1, 0)
    algorithm: str = "grpo"
    recompute: bool = False
    lora: Lora | None = None
    family: str | None = None


CASES = {
    "images on one": Case((0, 0, 1, 0)),
    "nothing on one": Case((0, 0, 0, 0), recompute=True),
    "chosen tokens": Case(algorithm="clip_cov"),
    "adapter": Case((1, 0, 0, 1), lora=Lora(rank=4)),
    "forked cache": Case((0, 1, 1), family="qwen3_5"),
    "padded": Case((0, 1, 1), family="llava"),
} | {name: Case((0, 1, 1), family=name) for name in BUILDERS if name not in ("qwen2_5_vl", "qwen3_5", "llava")}


def batch_of(items: list[TrainItem], filler: TrainItem, world: World, owners: Sequence[int]) -> StepBatch:
    mine = [i for i in items if owners[i.group % len(owners)] % world.size == world.rank]
    advantages = [(-1.0) ** k * (1 + 0.3 * k) for k in range(len(items))]
    return StepBatch(mine, advantages, [f"row {k}" for k in range(len(items))], world=world, filler=filler)


def policy_of(case: Case, settings: Model) -> Policy:
    model = load_model(settings) if case.family is None else build(case.family).model
    if case.family is not None:
        share_prefix(model)
    if case.recompute:
        checkpoint_gradients(model)
    if case.lora is not None:
        model = adapted(model, case.lora)
    return Policy(model)


def items_for(case: Case, encoder: Encoder) -> tuple[list[TrainItem], TrainItem]:
    """All trajectories, and the filler."""
    if case.family is not None:
        items = world_of(build(case.family))
        return items, replace(items[0], group=-1, trajectory=FILLER)
    prompts = four_prompts(encoder)
    items = items_of([(prompts[0], (5, 9)), (prompts[1], (3,)), (prompts[2], (7, 2, 4)), (prompts[3], (6, 6))])
    blank = prompt_tokens(encoded(encoder, "", [(56, 56)], "blank"))
    return items, TrainItem(blank, -1, (response(99, 2),), FILLER)


def sampled(policy: Policy, prompts: list[EncodedPrompt], tokenizer: Any, world: World) -> list[list[list[int]]]:
    """Ids of three samples a prompt, each process answering its own, some more than others."""
    mine = [i for i in range(len(prompts)) if i % 3 % world.size == world.rank]
    params = SamplingParams(max_new_tokens=12)
    made = TorchEngine(policy, tokenizer).generate([SamplingRequest(prompts[i], 3, 70 + i) for i in mine], params)
    by_prompt = dict(pair for theirs in world.gather(list(zip(mine, made, strict=True))) for pair in theirs)
    return [[list(s.token_ids) for s in by_prompt[i]] for i in range(len(prompts))]


class OffEngine(TorchEngine):
    """Takes itself for an engine with weights of its own, whose log-probs differ from the trainer's by `gaps`."""

    copies_weights = True
    gaps: Sequence[float] = ()

    def generate(self, *args: Any, **more: Any) -> list[list[Sample]]:
        return [
            [
                replace(s, sampler_logp=tuple(map(sum, zip(s.sampler_logp, cycle(self.gaps), strict=False))))
                for s in group
            ]
            for group in super().generate(*args, **more)
        ]


WILD = [0.0] * 15 + [7.0]
"""One token in sixteen."""
ENGINES = {"fine": ([0.0], [0.0]), "few wild": (WILD, WILD), "one off": ([0.0], [0.5]), "none to ask": (WILD, [0.5])}
"""What the engine of either process adds to its log-probs; in the last case the second process has no prompts."""


def sync_results(policy: Policy, prompts: list[EncodedPrompt], processor: Any, world: World, filler: TrainItem) -> dict:
    """Case -> the metrics of the check, or the error, the same on all processes."""
    recipe = Recipe(model=Model(path="m"), data=[Data(path="d")], rollout=Rollout(max_new_tokens=16))
    params = sampling_params(recipe, policy, processor.tokenizer)
    found: dict[str, Any] = {}
    for name, gaps in ENGINES.items():
        engine = OffEngine(policy, processor.tokenizer)
        engine.gaps = gaps[world.rank]
        budgets = TokenBudgets(recipe, Progress(), lambda load, before, now: None)
        learner = Learner(recipe, policy, None, budgets, world=world, filler=filler)  # type: ignore[arg-type]
        own = [] if name == "none to ask" and world.rank else prompts
        asked = [Prompt(SimpleNamespace(name="digits"), p.row, 0, p) for p in own]  # type: ignore[arg-type]
        try:
            result: Any = check_sync(learner, engine, asked, params, 0)
        except EngineError as error:
            result = error.message
        said = world.gather(result)
        assert all(s == said[0] for s in said), said
        found[name] = result
    return found


def main(model_folder: str, out: str) -> None:
    torch.set_num_threads(1)
    settings = Model(path=model_folder, dtype="float32", device="cpu")
    processor = load_processor(settings)
    encoder = Encoder(processor, min_pixels=56 * 56, max_pixels=112 * 112)
    found: dict[str, torch.Tensor] = {}
    told: dict[str, Any] = {}
    with join_world("cpu", timeout_seconds=60) as world:
        for name, case in CASES.items():
            policy = policy_of(case, settings)
            if world.size > 1:
                layers = sharded_units(policy.model, policy.sharing)
                shard(policy, layers, world, torch.device("cpu"), repeated=policy.sharing != "packed")
            if name == "images on one":
                told["samples"] = sampled(policy, four_prompts(encoder), processor.tokenizer, world)
            optimizer = Optimizer(policy.model, Optim(lr=1e-2, max_grad_norm=1e9))
            objective = PolicyGradient(ALGORITHMS[case.algorithm])
            step = optimizer.step

            def keep(lr: float, name: str = name, step=step, optimizer: Optimizer = optimizer) -> None:
                for key, p in optimizer.parameters.items():
                    gradient = whole(torch.zeros_like(p) if p.grad is None else p.grad)
                    found.setdefault(f"{name}/{key}", gradient.clone())
                step(lr)

            optimizer.step = keep
            items, filler = items_for(case, encoder)
            batch = batch_of(items, filler, world, case.owners)
            more = {"lr": 1e-2, "tokens_per_row": 150, "max_tokens": 16}
            told[name] = [update(policy, optimizer, batch, objective, **more) for _ in "ab"]
            bad = batch_of(items, filler, world, case.owners)
            bad.advantage_S[1] = float("nan")
            before = {n: whole(p.detach()).clone() for n, p in policy.named_parameters()}
            try:
                update(policy, optimizer, bad, objective, **more)
            except TrainError as error:
                told[f"{name} with NaN"] = error.message
            assert all(torch.equal(before[n], whole(p.detach())) for n, p in policy.named_parameters())
        if world.size > 1:
            told["bfloat16"] = compare_families(world)
            policy = policy_of(CASES["images on one"], settings)
            shard(policy, units_of(policy.model), world, torch.device("cpu"))
            _, filler = items_for(CASES["images on one"], encoder)
            told["sync"] = sync_results(policy, four_prompts(encoder), processor, world, filler)
        messages = world.gather({k: v for k, v in told.items() if "NaN" in k})
        assert all(m == messages[0] for m in messages)
        if world.is_main:
            save_file(found, Path(out) / f"{world.size}.safetensors")
            (Path(out) / f"{world.size}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
