"""Memory of each process while a sharded run loads a model of several GB: its share, not the whole model.

    python scripts/bench/sharded_loading.py [--gigabytes 3] [--ranks 3] [--case adapter] [--whole] [--json] [--smoke]

A model folder with random bfloat16 weights is made tensor by tensor. Then so many processes (gloo, on the CPU) load it
as a run with several processes does, up to the sharded policy: to train all weights (the shards are float32), beside a
reference for the KL divergence (bfloat16), and to train an adapter on frozen weights. Each case has processes of its
own. Prints for each the share of a process, the growth of its memory at the peak (VmHWM of /proc/self/status, minus the
memory before), and the seconds. Everything that was made is deleted.

The shards of all processes must fit into the free memory of this machine. If they do not, the case is not started. If
memory runs out all the same, Linux ends these processes first.

`holds`: no process grew by more than its share and 2 GB. The exit code is 1 if it does not hold. `--whole` loads the
model whole in each process before it is sharded, for comparison. With `--smoke` the model has a few MB, and the 2 GB
are 0.2 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from large_model import SIZES, SMOKE_SIZES, write_config, write_weights

CASES = ("all weights", "with a reference", "adapter")
SPARE_BYTES, SMOKE_SPARE_BYTES = 2 * 10**9, 2 * 10**8


def memory(line: str) -> int:
    """Bytes of a line of /proc/self/status. Not getrusage: its peak begins at that of the process that started this."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith(f"{line}:")) * 1024


def measure(folder: Path, case: str, whole: bool) -> dict[str, Any]:
    """Load the model as one of the processes. Returns the largest growth of all of them, and the share of this one."""
    import torch

    from vlmrl.dist.fsdp import own_part
    from vlmrl.dist.world import join_world
    from vlmrl.recipe.schema import Data, Lora, Model, Recipe
    from vlmrl.setup.model import load_for_training, make_policy
    from vlmrl.setup.model_origin import ModelOrigin
    from vlmrl.train.session import shard_policy

    Path("/proc/self/oom_score_adj").write_text("1000")
    torch.set_num_threads(1)
    model = Model(path=str(folder), dtype="bfloat16", device="cpu")
    recipe = Recipe(kind="rl", model=model, data=[Data(path="d")], lora=Lora(rank=16) if case == "adapter" else None)
    with join_world("cpu") as world:
        import peft  # noqa: F401  # what is imported later would be counted
        import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl  # noqa: F401

        before, begin, share = memory("VmRSS"), time.perf_counter(), 0
        policies = []
        for is_reference in (False, True)[: 1 + (case == "with a reference")]:
            loaded, processor, _ = load_for_training(recipe, ModelOrigin(str(folder)), None if whole else world)
            policy = make_policy(model, loaded.requires_grad_(False) if is_reference else loaded, processor, 1.0)
            shard_policy(policy, recipe, world)
            share += sum(own_part(p).nbytes for p in policy.parameters())
            policies.append(policy)
            del loaded
        seconds = round(time.perf_counter() - begin, 1)
        growth = max(world.gather(memory("VmHWM") - before))
        return {"share_bytes": max(world.gather(share)), "growth_bytes": growth, "seconds": seconds}


def refuse_too_large(needed_bytes: int) -> None:
    """End the script unless so much memory is free: other programs of this machine need theirs."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free_bytes = next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable:")) * 1024
    if needed_bytes > free_bytes:
        raise SystemExit(f"needs {needed_bytes / 1e9:.1f} GB of free memory; there are {free_bytes / 1e9:.1f} GB")


def run_ranks(ranks: int, words: list[str]) -> dict[str, Any]:
    """The figures of so many processes of this script."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, __file__, *words]
    processes = [
        subprocess.Popen(command, env=common | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit(f"a process failed; exit codes: {[process.returncode for process in processes]}")
    return json.loads(outputs[0].splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=3.0, help="size of the model's files")
    parser.add_argument("--ranks", type=int, default=3, help="number of processes")
    parser.add_argument("--folder", type=Path, default=None, help="where to work; default: a temporary folder")
    parser.add_argument("--case", choices=CASES, help="only this case")
    parser.add_argument("--whole", action="store_true", help="load the model whole in each process, for comparison")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    parser.add_argument("--smoke", action="store_true", help="a toy size in seconds, to see that it runs")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(Path(options.measure[0]), options.measure[1], options.whole)))
        return 0
    place = Path(tempfile.mkdtemp(prefix="vlmrl-load-", dir=options.folder))
    ranks = 2 if options.smoke else options.ranks
    try:
        model = place / "model"
        write_config(model, 0.0 if options.smoke else options.gigabytes, **(SMOKE_SIZES if options.smoke else SIZES))
        write_weights(model, model)
        facts: dict[str, Any] = {
            "model_bytes": sum(p.stat().st_size for p in model.glob("*.safetensors")),
            "ranks": ranks,
            "cores": os.cpu_count(),
        }
        more = ["--whole"] if options.whole else []
        cases = CASES[-1:] if options.smoke else [options.case] if options.case else CASES
        for case in cases:
            # Shards in float32, a reference in bfloat16, or frozen weights in bfloat16; 1 GB per process for libraries.
            copies = {"all weights": 2, "with a reference": 3, "adapter": 1}[case] + (ranks if options.whole else 0)
            refuse_too_large(copies * facts["model_bytes"] + ranks * 10**9)
            facts[case] = run_ranks(ranks, ["--measure", str(model), case, *more])
    finally:
        shutil.rmtree(place, ignore_errors=True)
    spare = SMOKE_SPARE_BYTES if options.smoke else SPARE_BYTES
    found = [facts[case] for case in CASES if case in facts]
    facts["holds"] = all(one["growth_bytes"] <= one["share_bytes"] + spare for one in found)
    print(json.dumps(facts) if options.json else "\n".join(f"{name}: {json.dumps(v)}" for name, v in facts.items()))
    return 0 if facts["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
