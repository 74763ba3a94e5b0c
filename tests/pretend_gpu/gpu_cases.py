"""Cases that the tests run in a process with a pretended GPU: `python gpu_cases.py CASE ARGUMENTS`; prints JSON.

cases: `accepted`, `gaps FAMILY DTYPE BACKEND`, `updates FAMILIES`, `waits FAMILY DTYPE`, `runs PLACE`, `handles`,
`memory RECIPE RUNS`.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from parity import adapted, differences, packed, world
from pretend_gpu.kernels import seen
from tinyfamilies import build

from vlmrl.algo.algorithms import resolve
from vlmrl.model.load import checkpoint_gradients, share_prefix
from vlmrl.model.packing import TrainItem
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Lora
from vlmrl.rollout.vllm.wire import export, open_tensor
from vlmrl.train.step_batch import StepBatch
from vlmrl.train.update import PolicyGradient, add_gradients

TOKENS_PER_ROW = 120


def accepted() -> list[str]:
    """Return what the pretended GPU does though CUDA would refuse it."""
    x, mask = torch.ones(3, device="cuda"), torch.ones(3, dtype=torch.bool)
    assert (x + torch.tensor(1.0)).sum().item() == 6 and x[mask].is_cuda and not x.cpu().is_cuda
    wrong: dict[str, Callable[[], Any]] = {
        "a sum": lambda: x + torch.ones(3),
        "a list": lambda: torch.cat([x, torch.ones(3)]),
        "an index": lambda: torch.ones(3)[x.long()],
        "a generator": lambda: torch.rand(3, device="cuda", generator=torch.Generator()),
        "a mask": lambda: x.where(mask, x),
        "values": lambda: x.index_put((mask,), torch.ones(3)),
        "numpy": lambda: x.numpy(),
    }
    done = []
    for name, call in wrong.items():
        with suppress(RuntimeError, TypeError):
            call()
            done.append(name)
    return done


def policy_of(name: str, device: str, dtype: torch.dtype, backend: str = "auto", recomputed: bool = False) -> Policy:
    model = build(name).model.to(device, dtype)
    share_prefix(model)
    if recomputed or dtype != torch.float32:
        checkpoint_gradients(model)
    return Policy(model, backend=backend, banned_ids=[0, 3])


def items_of(name: str, dtype: torch.dtype, seed: int = 0) -> list[TrainItem]:
    """The trajectories of the parity tests, pixels in that dtype."""

    def cast(images: Any) -> Any:
        return {k: x.to(dtype) if x.is_floating_point() else x for k, x in images.items()}

    items = world(build(name), seed)
    return [replace(i, prompt=replace(i.prompt, images=cast(i.prompt.images)), images=cast(i.images)) for i in items]


def gaps(name: str, dtype: torch.dtype, backend: str) -> dict[str, Any]:
    """The largest difference of log-probs and of gradients between the GPU and the CPU, and how far the CPU's gradient
    is from its own in float32: what rounding alone does to this model.

    Tokens go to the same experts in both: in half precision a tie within rounding falls either way, and 12 of 1,722
    choices that fell the other way were a gap of 0.37 in the gradient (0.02 with the same choices).
    """
    items, experts = items_of(name, dtype), defaultdict[str, list[torch.Tensor]](list)
    policy = policy_of(name, "cpu", dtype, "sdpa")
    with choosing(policy, lambda router, chosen: experts[router].append(chosen) or chosen):
        expected = packed(policy, items, TOKENS_PER_ROW)
    rounding = 0.0
    if dtype != torch.float32:
        exact = policy_of(name, "cpu", torch.float32, "sdpa", recomputed=True)
        again = {router: list(calls) for router, calls in experts.items()}
        with choosing(exact, lambda router, _: again[router].pop(0)):
            rounding = differences(expected, packed(exact, items_of(name, torch.float32), TOKENS_PER_ROW))[1]
    policy = policy_of(name, "cuda", dtype, backend)
    with choosing(policy, lambda router, _: experts[router].pop(0)):
        logp, gradient = differences(packed(policy, items, TOKENS_PER_ROW), expected)
    return {"logp": logp, "gradient": gradient, "rounding": rounding, "path": policy.path}


def updates(names: str) -> dict[str, tuple[float, float]]:
    """Family -> `differences` of one update of all weights in float32; with " lora": of an adapter, vision included."""
    found = {}
    for name in names.split(","):
        outcomes = []
        for device in ("cpu", "cuda"):
            family = build(name.removesuffix(" lora"))
            model = adapted(family.model, Lora(rank=4, vision=True)) if name.endswith(" lora") else family.model
            share_prefix(model)
            policy = Policy(model.to(device), backend="sdpa")
            outcomes.append(packed(policy, world(family), TOKENS_PER_ROW))
        found[name] = differences(outcomes[1], outcomes[0])
    return found


@contextmanager
def choosing(policy: Policy, choose: Callable[[str, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Let `choose` replace the experts of each call of a router: its name and its own choice [tokens, K] -> indices."""

    def hook(name: str, router: Any, inputs: Any, outputs: Any) -> Any:
        logits, scores, chosen = outputs
        chosen = choose(name, chosen).to(chosen.device)
        weights = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(scores.dtype), chosen

    routers = [(n, m) for n, m in policy.model.named_modules() if type(m).__name__.endswith("TopKRouter")]
    hooks = [module.register_forward_hook(partial(hook, name)) for name, module in routers]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def waits(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Waits per packed row of an update by function, of rows with new prompts; and vlmrl's sums in half precision."""

    def counted(seeds: range) -> Counter[str]:
        items: list[TrainItem] = []
        for seed in seeds:
            items.append(replace(items_of(name, dtype, seed)[0], group=seed, trajectory=len(items)))
        batch = StepBatch(items, [1.0] * len(items), ["row"] * len(items))
        before = seen.waits.copy()
        alone: Any = SimpleNamespace(clear=lambda: None)
        add_gradients(policy, alone, batch, objective, tokens_per_row=10, max_tokens=99)
        counts: Counter[str] = Counter()
        for (function, _), n in (seen.waits - before).items():
            counts[function or "threads of autograd"] += n
        return counts

    policy, objective = policy_of(name, "cuda", dtype), PolicyGradient(resolve("grpo"))
    counted(range(1))  # what is made once
    few, many = counted(range(1, 2)), counted(range(2, 5))
    per_row = {f: (many[f] - few[f]) / 2 for f in sorted(many.keys() | few.keys())}
    return {"waits": {f: n for f, n in per_row.items() if n}, "half sums": sorted(seen.half_sums)}


def handles() -> list[tuple[Any, ...]]:
    """Tensors of another process by their handles: (sum, device there, sum there, first number after a write there)."""
    ours, theirs = socket.socketpair()
    if not os.fork():  # before this process uses the GPU
        ours.close()
        _receive(theirs)
        os._exit(0)
    theirs.close()
    results = []
    whole = torch.arange(300.0, device="cuda").to(torch.bfloat16)
    with ours.makefile("rw") as other:
        for tensor in (torch.arange(1000.0, device="cuda"), whole[100:200], torch.ones(7, 500_000, device="cuda").T):
            line = {"handle": export(tensor), "shape": list(tensor.shape), "dtype": str(tensor.dtype)[6:]}
            total = float(tensor.double().sum())
            print(json.dumps(line), file=other, flush=True)
            results.append((total, *json.loads(other.readline()), float(tensor.flatten()[0])))
    return results


def _receive(channel: socket.socket) -> None:
    with channel.makefile("rw") as other:
        for text in other:
            line = json.loads(text)
            tensor = open_tensor(line["handle"], line["shape"], getattr(torch, line["dtype"]))
            total = float(tensor.double().sum())
            tensor[(0,) * tensor.dim()] = -5.0
            print(json.dumps([str(tensor.device), total]), file=other, flush=True)


RUNS = {
    "tokens that are chosen, the full KL, checkpoints beside": (
        "algo.name=clip_cov", "algo.cov_share=0.2", "algo.kl_coef=0.1", "algo.kl=full", "checkpoint.asynchronous=true"
    ),
    "greedy baseline, adapter, KL in the reward": (
        "algo.name=remax", "lora.rank=4", "algo.kl_coef=0.1", "algo.kl_in=reward", "optim.lr=1e-3"
    ),
    "critic, several updates, sampling that cuts": (
        "algo.name=ppo", "train.updates_per_step=2",
        "rollout.top_p=0.9", "rollout.top_k=50", "rollout.allow_filtered_sampling=true"
    ),
    "supervised": (),
}  # fmt: skip
"""Name -> overrides of a run on the CPU and of the same on the GPU."""


def runs(place: str) -> dict[str, Any]:
    """Run each of `RUNS` with the recipes of a place, as PLACE/DEVICE/NAME; return what the deep check says there."""
    from small_runs import train

    from vlmrl.evaluate.deep_check import deep_check
    from vlmrl.recipe.load import load_recipe

    for name, overrides in RUNS.items():
        for device in ("cpu", "cuda"):
            kind = "sft" if name == "supervised" else "rl"
            train(Path(place), Path(place) / device / name, f"model.device={device}", *overrides, kind=kind)
    recipe = load_recipe(Path(place) / "rl.toml", kind="rl", overrides=["model.device=cuda"]).recipe
    found = deep_check(recipe, Path(place), prompts=2)
    return {"agrees": found.agrees, "gradient": found.gradient, "logp_max": found.logp_max}


def memory(recipe: str, runs: str) -> None:
    """Train on a GPU that has no free memory during the second step's update, and enough otherwise."""
    from vlmrl.cli.app import main
    from vlmrl.train import rl

    run, calls, taken = rl.update, [], []

    def limited(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["tokens_per_row"])
        if len(calls) == 2:
            free, total = torch.cuda.mem_get_info()
            os.environ["PRETEND_GIB"] = str((total - free) / 2**30)
            for size in (2**21, 2**16, 2**9):  # what the allocator has cached is taken, too
                with suppress(torch.OutOfMemoryError):
                    while True:
                        taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        try:
            return run(*args, **kwargs)
        finally:
            taken.clear()
            os.environ.pop("PRETEND_GIB", None)

    rl.update = limited
    sys.argv = ["vlmrl", "train", recipe, "--runs", runs]
    main()


if __name__ == "__main__":
    case, words = sys.argv[1], sys.argv[2:]
    if case in ("gaps", "waits"):
        words[1] = getattr(torch, words[1])  # type: ignore[call-overload]
    gc.freeze()  # as in tests/conftest.py: a run collects garbage
    result = globals()[case](*words)
    if result is not None:
        print(json.dumps(result))
