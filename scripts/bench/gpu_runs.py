"""The command line on a GPU: `vlmrl train` with a random model of real shape, killed, resumed and short of memory, and
`vlmrl check --deep`. Needs what `vlmrl` needs, but no vLLM: the built-in engine generates.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_world import GIB, make_config

from vlmrl.model.tiny import build_tiny
from vlmrl.store.layout import COMPLETE, checkpoint_dir
from vlmrl.store.runs import Run, open_run

Row = dict[str, Any]
ROWS = 24
TEXT = "Do both photographs show the same species? Name its order, family, genus and species, then answer."
REWARD = """
def score(x):
    return {"length": min(1.0, x.num_tokens / 64), "letters": min(1.0, x.response.count("e") / 8)}
"""
SIZES = {
    True: {"dtype": "float32", "rank": 4, "prompts": 2, "samples": 4, "tokens": 16, "row": 120, "side": 56},
    False: {"dtype": "bfloat16", "rank": 64, "prompts": 4, "samples": 8, "tokens": 64, "row": 8192, "side": 800},
}
"""By `smoke`: the type of the weights, rank of the adapter, prompts and samples a step, tokens of a response and of a
packed row, side of an image in pixels."""
LIMITED = """
import sys, torch
limit, on_gpu = int(sys.argv.pop(1)), int(sys.argv.pop(1))
if on_gpu:
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
else:
    from vlmrl.model.policy import Policy
    run = Policy._states
    def states(self, row):
        if torch.is_grad_enabled() and row.input_ids_N.numel() > limit:
            torch.empty(1 << 60, dtype=torch.uint8)
        return run(self, row)
    Policy._states = states
from vlmrl.cli.app import main
main()
"""
"""`vlmrl` with so many bytes of the GPU; on a CPU rows of more tokens than the limit ask for too much memory."""


@dataclass(frozen=True)
class Place:
    """A folder with a model, a table and a recipe."""

    folder: Path
    smoke: bool

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def command(self, *words: object, limit: int | None = None) -> list[str]:
        """A command line of vlmrl."""
        start = ["-m", "vlmrl"] if limit is None else ["-c", LIMITED, str(limit), str(int(not self.smoke))]
        return [sys.executable, *start, *map(str, words), "--runs", str(self.runs)]

    def run(self, *words: object, limit: int | None = None) -> tuple[subprocess.CompletedProcess[str], float]:
        """(the finished command, seconds)."""
        start = time.perf_counter()
        done = subprocess.run(self.command(*words, limit=limit), capture_output=True, text=True, env=environment())
        print(f"$ vlmrl {' '.join(map(str, words))}: {done.returncode}\n{done.stdout}{done.stderr}", flush=True)
        return done, time.perf_counter() - start

    def train(self, name: str, limit: int | None = None) -> tuple[Run, Row]:
        """A training run of this name and what it took. Raises: VlmrlError when it did not even begin."""
        done, seconds = self.run("train", self.folder / "recipe.toml", "--name", name, limit=limit)
        run = open_run(self.runs, name)
        return run, {"exit_code": done.returncode, "seconds": seconds, "stderr": done.stderr, **figures(run)}


def environment() -> dict[str, str]:
    """This process's, with this checkout's vlmrl in place of an installed one."""
    root = str(Path(__file__).resolve().parents[2])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}


def make_place(folder: Path, model: str, smoke: bool) -> Place:
    """Write the model (random weights of this shape, a tokenizer of a few hundred words), its table and its recipe."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    size = SIZES[smoke]
    build_tiny(folder / "tiny", [TEXT], max_pixels=1_003_520)
    processor = AutoProcessor.from_pretrained(folder / "tiny")
    config, small = make_config(model, smoke), AutoModelForImageTextToText.from_pretrained(folder / "tiny").config
    for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        setattr(config, name, getattr(small, name))
    for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config.text_config, name, getattr(small.text_config, name))
    torch.manual_seed(0)
    with torch.device("cpu" if smoke else "cuda"):
        made = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, str(size["dtype"])))
    assert made.generation_config is not None
    made.generation_config.eos_token_id = small.text_config.eos_token_id
    made.save_pretrained(folder / "model", max_shard_size="2GB")
    processor.save_pretrained(folder / "model")
    (folder / "images").mkdir()
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for k in range(ROWS):
            side = size["side"]
            for name, shade in ((f"{k}-a", 5 * k), (f"{k}-b", 250 - 5 * k)):
                picture = Image.linear_gradient("L").resize((side, side)).point(lambda v, s=shade: (v + s) % 256)
                picture.convert("RGB").save(folder / "images" / f"{name}.png")
            images = [f"images/{k}-a.png", f"images/{k}-b.png"]
            file.write(json.dumps({"prompt": f"<image><image>{TEXT} ({k})", "images": images, "answer": "e"}) + "\n")
    (folder / "reward.py").write_text(REWARD)
    (folder / "recipe.toml").write_text(f'''
model = {{path = "{folder / "model"}", dtype = "{size["dtype"]}", gradient_checkpointing = true}}
lora.rank = {size["rank"]}
reward.name = "{folder / "reward.py"}:score"
train = {{steps = 2, tokens_per_row = {size["row"]}}}
eval.every_steps = 0
checkpoint = {{every_steps = 1, keep_last = 9}}
[rollout]
engine = "torch"
prompts_per_step = {size["prompts"]}
samples_per_prompt = {size["samples"]}
max_new_tokens = {size["tokens"]}
[[data]]
path = "{folder / "rows.jsonl"}"
''')
    return Place(folder, smoke)


def figures(run: Run) -> Row:
    """Seconds a step and in its update, tokens a second of sampling, peak memory: of the run's last steps."""
    lines = run.metrics("train")
    if not lines:
        return {}
    mean = lambda name: statistics.fmean(line[name] for line in lines if name in line)  # noqa: E731
    return {
        "steps": [line["step"] for line in lines],
        "step_seconds": mean("time/step_seconds"),
        "update_seconds": mean("time/update_seconds"),
        "rollout_tokens_per_s": mean("rollout/tokens_per_second"),
        "peak_gib": max(line["memory/peak_bytes"] for line in lines) / GIB,
    }


def commands(smoke: bool, model: str) -> Iterator[Row]:
    """Each command in a process of its own; a line says how it ended and whether that is right."""
    with tempfile.TemporaryDirectory() as name:
        place = make_place(Path(name), model, smoke)
        run, whole = place.train("whole")
        yield _row("train, two steps", whole, whole["exit_code"] == 0 and whole.get("steps") == [0, 1], "two steps")
        yield _resumed(place)
        yield from _short_of_memory(place, run)
        done, seconds = place.run("check", place.folder / "recipe.toml", "--deep", "--json")
        parity = json.loads(done.stdout)["deep"] if done.returncode == 0 else {}
        yield _row(
            "check --deep",
            {"exit_code": done.returncode, "seconds": seconds},
            parity.get("agrees", False),
            f"log-prob mean {parity.get('logp_mean')}, max {parity.get('logp_max')}, gradient {parity.get('gradient')}",
        )


def _row(case: str, row: Row, ok: bool, note: str) -> Row:
    kept = {key: value for key, value in row.items() if key not in ("stderr", "steps")}
    last = (row.get("stderr", "").strip().splitlines() or [""])[-1]
    return {"case": case, **kept, "ok": bool(ok), "note": note if ok else f"{note}: {last[:200]}"}


def _resumed(place: Place) -> Row:
    """A run that is killed at its first checkpoint and goes on."""
    words = ("train", place.folder / "recipe.toml", "--name", "killed", "--set", "train.steps=4")
    with open(os.devnull, "w") as nowhere:
        process = subprocess.Popen(place.command(*words), stdout=nowhere, stderr=nowhere, env=environment())
    while process.poll() is None and not _has_checkpoint(place, "killed"):
        time.sleep(0.005)
    killed = process.poll() is None
    process.kill()
    process.wait()
    run = open_run(place.runs, "killed")
    done, seconds = place.run("train", "--resume", run.id)
    run = open_run(place.runs, "killed")
    verified, _ = place.run("runs", "verify", run.id)
    row = {"exit_code": done.returncode, "seconds": seconds, "stderr": done.stderr, **figures(run)}
    whole = row.get("steps") == [0, 1, 2, 3] and checkpoint_dir(run.dir, 4).is_dir() and verified.returncode == 0
    note = "killed at its first checkpoint, went on to step 4, verified" if killed else "it ended before the kill"
    return _row("train, killed and resumed", row, killed and done.returncode == 0 and whole, note)


def _has_checkpoint(place: Place, name: str) -> bool:
    """Return whether the run of this name has its first checkpoint on the disk."""
    for manifest in place.runs.glob("*/manifest.json"):
        if json.loads(manifest.read_text("utf-8")).get("name") == name:
            return (checkpoint_dir(manifest.parent, 1) / COMPLETE).exists()
    return False


def _short_of_memory(place: Place, whole: Run) -> Iterator[Row]:
    """A run whose largest row does not fit, but half of it does; and one in which nothing fits."""
    [event] = [e for e in whole.metrics("event") if e.get("event") == "largest row rehearsed"]
    weights = sum(p.stat().st_size for p in (place.folder / "model").glob("*.safetensors"))
    room = event["peak_bytes"] - weights
    some, little = (int(0.75 * event["tokens"]), 1) if place.smoke else (weights + int(f * room) for f in (0.75, 0.1))
    run, row = place.train("half", limit=some)
    halved = [e for e in run.metrics("event") if e.get("event") == "out of memory: budget halved"]
    yield _row(
        "train, three quarters of the memory",
        row,
        row["exit_code"] == 0 and bool(halved),
        "the rows' token budget was halved once and the run ended well",
    )
    done, seconds = place.run("train", place.folder / "recipe.toml", "--name", "none", limit=little)
    row: Row = {"exit_code": done.returncode, "seconds": seconds, "stderr": done.stderr}  # no run is left of it
    yield _row(
        "train, a tenth of the memory",
        row,
        row["exit_code"] == 2 and "out of memory" in row["stderr"],
        "exit code 2, and the key to change",
    )
