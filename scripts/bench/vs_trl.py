"""One GRPO step of vlmrl and of TRL's GRPOTrainer on the same model, prompts, sampling and loss, each in a process:

    python scripts/bench/vs_trl.py [--json] [--steps 6] [--batches 4 8 16] [--out /tmp/vs_trl] [--smoke]

Needs TRL (the `dev` extra). 43 M parameters, about 516 prompt tokens with two images, 16 samples of 96 tokens, fp32 on
the CPU. TRL runs at each per-device batch with as much accumulation as 16 samples need; its fastest counts. Medians
over the steps after the first. Peak memory is the largest resident size of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SAMPLES, RESPONSE = 16, 96
SMOKE = {"samples": 2, "response": 4, "steps": 2, "batches": [2], "words": 4}
RECIPE = """
[model]
path = "{out}/model"
dtype = "float32"
device = "cpu"
min_pixels = 153664
max_pixels = 153664
gradient_checkpointing = "vision"
[[data]]
path = "{out}/rows.jsonl"
[reward]
name = "{out}/reward.py:score"
[rollout]
prompts_per_step = 1
samples_per_prompt = {samples}
max_new_tokens = {response}
max_prompt_tokens = 1024
[train]
steps = {steps}
tokens_per_row = 4096
[optim]
lr = 1e-6
[eval]
every_steps = 0
[checkpoint]
every_steps = 0
"""


def run_vlmrl(out: Path, steps: int, samples: int, response: int) -> dict[str, Any]:
    """`vlmrl train` as a person would run it; times from its metrics."""
    recipe = out / "recipe.toml"
    recipe.write_text(RECIPE.format(out=out, samples=samples, response=response, steps=steps))
    sys.argv = ["vlmrl", "train", str(recipe), "--runs", str(out / "runs"), "--name", f"speed-{time.time_ns()}"]
    from vlmrl.cli.app import main

    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
    newest = sorted((out / "runs").iterdir())[-1]
    lines = [json.loads(line) for line in (newest / "metrics.jsonl").read_text().splitlines()]
    lines = [n for n in lines if "time/update_seconds" in n][1:]
    return {
        "step_s": statistics.median(n["time/step_seconds"] for n in lines),
        "update_s": statistics.median(n["time/update_seconds"] for n in lines),
        "generate_s": statistics.median(n["time/rollout_seconds"] for n in lines),
        "run": str(newest),
    }


def run_trl(out: Path, steps: int, samples: int, response: int, batch: int) -> dict[str, Any]:
    """TRL's GRPOTrainer with the same settings."""
    import torch
    from datasets import Dataset
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    sys.path.insert(0, str(out))
    from reward import score  # type: ignore[import-not-found]

    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    data = Dataset.from_list([{"prompt": _chat(r), "images": [str(out / n) for n in r["images"]]} for r in rows])
    data = data.with_transform(lambda b: {**b, "images": [[Image.open(p) for p in paths] for paths in b["images"]]})

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [score(_Response(c[0]["content"] if isinstance(c, list) else c)) for c in completions]

    processor = AutoProcessor.from_pretrained(out / "model")
    model = AutoModelForImageTextToText.from_pretrained(out / "model", dtype=torch.float32)
    special = processor.tokenizer.convert_tokens_to_ids(
        ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    )
    settings = GRPOConfig(
        output_dir=str(out / "trl"),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=samples // batch,
        num_generations=samples,
        max_completion_length=response,
        max_steps=steps,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        shuffle_dataset=False,
        generation_kwargs={"suppress_tokens": special},
        disable_tqdm=True,
    )
    times: dict[str, list[float]] = {"step": [], "generate": []}

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()
            times["generate"].append(0.0)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times["step"].append(time.perf_counter() - self.start)

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=data,
        processing_class=processor,
        callbacks=[Clock()],
    )
    inner = trainer._generate_single_turn

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        made = inner(*args, **kwargs)
        times["generate"][-1] += time.perf_counter() - start
        return made

    trainer._generate_single_turn = timed
    trainer.train()
    step, generate = (times[k][1:] for k in ("step", "generate"))
    return {
        "step_s": statistics.median(step),
        "update_s": statistics.median(a - b for a, b in zip(step, generate, strict=True)),
        "generate_s": statistics.median(generate),
        "batch": batch,
    }


class _Response:
    def __init__(self, response: str) -> None:
        self.response = response


def _chat(row: dict[str, Any]) -> list[dict[str, Any]]:
    text = row["problem"].replace("<image>", "")
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": text}]
    return [{"role": "user", "content": content}]


def parity(out: Path, run: Path) -> dict[str, Any]:
    """The shared-prefix update of one saved group against the same packed without sharing; see `compare_paths`."""
    from speed_world import compare_paths

    from vlmrl.model.load import load_model, load_processor
    from vlmrl.model.packing import PromptTokens, TrainItem
    from vlmrl.recipe.load import load_recipe
    from vlmrl.rollout.sample import encode_prompt
    from vlmrl.setup.model import make_encoder
    from vlmrl.store.runs import open_run
    from vlmrl.tasks.source import open_source

    recipe = load_recipe(out / "recipe.toml").recipe
    group = open_run(run.parent, run.name).read_rollouts(0)[0]
    processor, model = load_processor(recipe.model), load_model(recipe.model)
    source = open_source(recipe.data[0], recipe.reward)
    prompt = encode_prompt(source, group.row, 0, make_encoder(recipe.model, processor), 1024)
    tokens = PromptTokens.of(prompt.encoded)
    items = [TrainItem(tokens, 0, s.trajectory.segments, k) for k, s in enumerate(group.samples)]
    return compare_paths(model, processor, items)


def run_side(options: argparse.Namespace) -> dict[str, Any]:
    """One side in this process."""
    size = options.steps, options.samples, options.response
    found = {
        "vlmrl": lambda: run_vlmrl(options.out, *size),
        "trl": lambda: run_trl(options.out, *size, options.batch),
        "parity": lambda: parity(options.out, Path(options.run)),
    }[options.side]()
    return found | {"peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def measure(options: argparse.Namespace, side: str, **more: Any) -> dict[str, Any]:
    """One side in a process of its own (not with --smoke): its figures, and its peak memory."""
    if options.smoke:
        return run_side(argparse.Namespace(**{**vars(options), "side": side, **more}))
    command = [sys.executable, __file__, "--side", side, "--out", str(options.out), "--steps", str(options.steps)]
    command += [word for key, value in more.items() for word in (f"--{key}", str(value))]
    print(f"{side} {more or ''}", file=sys.stderr)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {side} failed\n{done.stderr[-3000:]}")
    print(f"  {done.stdout.strip().splitlines()[-1]}", file=sys.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8, 16], help="TRL's per-device batch sizes")
    parser.add_argument("--out", type=Path, default=Path("/tmp/vs_trl"))
    parser.add_argument("--side", choices=["vlmrl", "trl", "parity"], help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=SAMPLES, help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--smoke", action="store_true", help="a toy size in seconds, to see that it runs; its figures mean nothing"
    )
    parser.set_defaults(samples=SAMPLES, response=RESPONSE, words=None)
    options = parser.parse_args()
    if options.smoke:
        vars(options).update(SMOKE)
    if options.side:
        print(json.dumps(run_side(options)))
        return
    from speed_world import SMOKE_MODEL, TEXT_WORDS, make_model, make_rows

    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.out / "model" / "config.json").is_file():
        make_model(options.out / "model", **(SMOKE_MODEL if options.smoke else {}))
    make_rows(options.out, options.steps, words=options.words or TEXT_WORDS)
    ours = measure(options, "vlmrl")
    run = ours.pop("run")
    theirs = [measure(options, "trl", batch=b) for b in options.batches]
    proof = measure(options, "parity", run=run)
    proof.pop("peak_rss_mb")
    best = min(theirs, key=lambda t: t["step_s"])
    names = ("step_s", "update_s", "generate_s", "peak_rss_mb")
    result = {
        "vlmrl": ours,
        "trl": best | {"leanest_peak_rss_mb": min(t["peak_rss_mb"] for t in theirs)},
        "ratio": {n.removesuffix("_s"): best[n] / ours[n] for n in names},
        "parity": {n: proof.pop(n) for n in ("logp_max_abs", "grad_rel")},
        "packed": proof,
        "trl_batches": theirs,
    }
    if options.json:
        print(json.dumps(result))
        return
    for n in names:
        told = f"TRL (batch {best['batch']}) {best[n]:9.2f}   ratio {best[n] / ours[n]:.1f}"
        print(f"{n:12} vlmrl {ours[n]:9.2f}   {told}")
    print("parity       log-prob {logp_max_abs:.1e}   gradient {grad_rel:.1e}".format(**result["parity"]))
    u = result["packed"]
    told = f"counted FLOPs promise {u['flops_ratio']:.1f} ({u['reached']:.0%} reached)"
    print(f"packed, each response behind its own prompt: {u['ratio']:.1f} times slower; {told}")


if __name__ == "__main__":
    main()
