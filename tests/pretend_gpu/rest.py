"""Cases that the tests leave out, on a pretended GPU: `scripts/pretend-gpu --all [NAME ...]`; 20 minutes on two cores.

families: every family by each backend beside the CPU. runs: whole runs with LoRA, offload and PPO. graphs: rows of many
lengths compile FlexAttention's kernel once a length (Inductor, Triton and ptxas for sm_90).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "scripts/bench")]
RUNS = {
    "lora": ["lora.rank=4", "algo.kl_coef=0.1"],
    "offload": ["parallel.offload=true"],
    "ppo": ["algo.name=ppo", "train.updates_per_step=2"],
    "float32": ["model.dtype=float32", "algo.kl_coef=0.1", "algo.kl=full"],
    "kahan": ["optim.name=adamw_bf16_kahan", "checkpoint.asynchronous=true"],
}
"""Name -> overrides."""


def families() -> None:
    from gpu_cases import gaps, updates
    from parity import TOLERANCE
    from tinyfamilies import BUILDERS

    for name in BUILDERS:
        for dtype, backend, allowed in ((torch.float32, "sdpa", 2e-5), (torch.float32, "auto", 2e-5),
                                        (torch.bfloat16, "auto", 0.2)):  # fmt: skip
            gap = gaps(name, dtype, backend)
            print(f"{name:17} {str(dtype)[6:]:9} {gap}", flush=True)
            # Two roundings of one gradient are up to 1.4 times as far apart as each is from the exact one.
            assert gap["logp"] < allowed and gap["gradient"] < max(allowed, 1.4 * gap["rounding"]), name
        [distances] = updates(f"{name} lora").values()
        print(f"{name:17} adapter   {distances}", flush=True)
        assert max(distances) <= 2 * TOLERANCE, name  # each may be that far from the reference


def runs() -> None:
    from conftest import TINY_TEXTS
    from small_runs import make_place
    from test_pretend_gpu import on_gpu

    from vlmrl.model.tiny import build_tiny

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_tiny(folder / "model", TINY_TEXTS, vocabulary=300, hidden=64, layers=2)
        recipe = on_gpu(make_place(folder, model, ""))
        for case, overrides in RUNS.items():
            words = [word for pair in overrides for word in ("--set", pair)]
            command = [sys.executable, "-m", "vlmrl", "train", str(recipe), "--runs", str(folder / case), *words]
            subprocess.run(command, check=True)
            print(f"run {case}: done", flush=True)


def graphs() -> None:
    if os.environ.get("PRETEND_COMPILE") != "real":  # it is read when torch is imported
        subprocess.run([sys.executable, __file__, "graphs"], env=os.environ | {"PRETEND_COMPILE": "real"}, check=True)
        return
    from gpu_kernels import flex_graphs

    for record in flex_graphs(False):
        print(record, flush=True)


if __name__ == "__main__":
    for part in sys.argv[1:] or ("families", "runs", "graphs"):
        {"families": families, "runs": runs, "graphs": graphs}[part]()
