"""Time and peak memory of `vlmrl merge` on a model of several GB, beside loading it as a whole.

python scripts/bench/merge.py [--gigabytes 2.7] [--max-shard-size 500MB] [--folder DIR] [--smoke]

A checkpoint with random bfloat16 weights is made tensor by tensor and merged three times, each in a process of its own:
streaming, streaming with the proof in its second process, and loading everything at once. Prints one JSON object; exit
code 1 when the streaming merge took more than 1.3 x the largest weight file + 1 GB. Everything made is deleted. At most
two copies of the model are on the disk at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from large_model import SIZES, SMOKE_SIZES, write_config, write_weights

WORKER = """
import json, sys, time
from pathlib import Path
from vlmrl.checkpoint import merge
from vlmrl.checkpoint.merge_weights import CannotStreamError
checkpoint, out, size, how = sys.argv[1:]
if how == "whole":
    def refuse(*_): raise CannotStreamError("the benchmark asks for it")
    merge.write_streaming = refuse
begin = time.perf_counter()
done = merge.merge(Path(checkpoint), Path(out), max_shard_size=size, skip_proof=how != "proven")
# Not getrusage: its peak begins at that of the process that started this one.
(line,) = [x for x in open("/proc/self/status") if x.startswith("VmHWM")]
peak = int(line.split()[1]) * 1024
print(json.dumps({"seconds": round(time.perf_counter() - begin, 1), "peak_bytes": peak, "logp_gap": done.logp_gap,
                  "largest_file": max(p.stat().st_size for p in Path(out).glob("*.safetensors"))}))
"""
STEP = "step-000001"


def make_checkpoint(folder: Path, gigabytes: float, sizes: dict[str, int]) -> Path:
    """A checkpoint of about this size; at no time is more than one tensor in memory."""
    checkpoint = folder / "run" / "checkpoints" / STEP
    write_config(checkpoint / "hf", gigabytes, **sizes)
    write_weights(checkpoint / "hf", checkpoint / "model")
    from safetensors.torch import save_file

    save_file({}, checkpoint / "proof.safetensors")
    seal(checkpoint)
    return checkpoint


def seal(checkpoint: Path) -> None:
    """meta.json and COMPLETE for the files as they are."""
    from vlmrl.store.checkpoints import sha256_of

    for name in ("meta.json", "COMPLETE"):
        (checkpoint / name).unlink(missing_ok=True)
    table = {
        p.relative_to(checkpoint).as_posix(): {"bytes": p.stat().st_size, "sha256": sha256_of(p)}
        for p in sorted(checkpoint.rglob("*"))
        if p.is_file()
    }
    meta = {
        "schema": 1,
        "step": 1,
        "dtype": "bfloat16",
        "policy": {"temperature": 1.0, "banned_ids": []},
        "files": table,
    }
    (checkpoint / "meta.json").write_text(json.dumps(meta))
    (checkpoint / "COMPLETE").write_text(hashlib.sha256((checkpoint / "meta.json").read_bytes()).hexdigest())


def write_proof(checkpoint: Path, merged: Path) -> None:
    """Log-probs of eight rollouts of random tokens, from the weights as merged (mapped, not copied)."""
    import torch
    from safetensors.torch import save_file

    from vlmrl.checkpoint.proof import make_proof
    from vlmrl.model.load import load_model
    from vlmrl.model.packing import PromptTokens, TrainItem, make_row
    from vlmrl.model.policy import Policy
    from vlmrl.recipe.schema import Model
    from vlmrl.types import Segment

    model = load_model(Model(path=str(merged), dtype="bfloat16", device="cpu"))
    policy = Policy(model, temperature=1.0, shared_prefix=False)
    tokens = torch.randint(300, 1000, (8, 24), generator=torch.Generator().manual_seed(1)).tolist()
    prompt = PromptTokens(tuple(tokens[0][:16]), (0,) * 16, {}, 0)
    items = [TrainItem(prompt, 0, (Segment("assistant", tuple(row), True),), i) for i, row in enumerate(tokens)]
    saved = make_proof(items, [policy(make_row([item], policy.device)).logp for item in items])
    proof = {name: value.contiguous().clone() for name, value in saved.items()}
    save_file(proof, checkpoint / "proof.safetensors")
    seal(checkpoint)


def run_here(checkpoint: Path, out: Path, size: str, how: str) -> dict[str, Any]:
    """Merge in this process, for --smoke: its memory is that of all before it."""
    said, words = io.StringIO(), sys.argv
    sys.argv = ["worker", str(checkpoint), str(out), size, how]
    with contextlib.redirect_stdout(said):
        exec(WORKER, {})
    sys.argv = words
    return json.loads(said.getvalue().splitlines()[-1])


def run_worker(checkpoint: Path, out: Path, size: str, how: str, here: bool = False) -> dict[str, Any]:
    """Merge in a new process, or in this one (`here`).

    Returns: its figures, and the peak of its proof's own memory: of what is not a page of a mapped file.
    """
    shutil.rmtree(out, ignore_errors=True)
    if here:
        return run_here(checkpoint, out, size, how)
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(checkpoint), str(out), size, how], stdout=subprocess.PIPE, text=True
    )
    peaks = {"own": 0, "mapped": 0}
    watcher = threading.Thread(target=_watch_child, args=(worker, peaks), daemon=True)
    watcher.start()
    told, _ = worker.communicate()
    if worker.returncode:
        raise SystemExit(f"the {how} merge failed")
    watcher.join()
    extra = {"proof_own_bytes": peaks["own"], "proof_mapped_bytes": peaks["mapped"]} if how == "proven" else {}
    return json.loads(told.splitlines()[-1]) | extra


def _watch_child(worker: subprocess.Popen[str], peaks: dict[str, int]) -> None:
    while worker.poll() is None:
        try:
            children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
            for child in children:
                lines = Path(f"/proc/{child}/status").read_text().splitlines()
                values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}
                peaks["own"] = max(peaks["own"], values.get("RssAnon", 0))
                peaks["mapped"] = max(peaks["mapped"], values.get("RssFile", 0))
        except OSError:
            pass
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=2.7)
    parser.add_argument("--max-shard-size", default="500MB")
    parser.add_argument("--folder", type=Path, default=None, help="where to work; default: a temporary folder")
    parser.add_argument(
        "--smoke", action="store_true", help="a toy size in seconds, to see that it runs; its figures mean nothing"
    )
    options = parser.parse_args()
    if options.smoke:
        options.gigabytes = 0.0
    place = Path(tempfile.mkdtemp(prefix="vlmrl-merge-", dir=options.folder))
    try:
        checkpoint = make_checkpoint(place, options.gigabytes, SMOKE_SIZES if options.smoke else SIZES)
        size = sum(p.stat().st_size for p in (checkpoint / "model").glob("*.safetensors"))
        out = place / "merged"
        found: dict[str, Any] = {"model_bytes": size, "cores": os.cpu_count()}
        found["streaming"] = run_worker(checkpoint, out, options.max_shard_size, "streaming", options.smoke)
        write_proof(checkpoint, out)
        found["proven"] = run_worker(checkpoint, out, options.max_shard_size, "proven", options.smoke)
        found["whole"] = run_worker(checkpoint, out, options.max_shard_size, "whole", options.smoke)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    found["bound_bytes"] = int(1.3 * found["streaming"]["largest_file"] + 1e9)
    found["within_bound"] = all(found[how]["peak_bytes"] <= found["bound_bytes"] for how in ("streaming", "proven"))
    print(json.dumps(found, indent=1))
    return 0 if options.smoke or found["within_bound"] else 1


if __name__ == "__main__":
    sys.exit(main())
