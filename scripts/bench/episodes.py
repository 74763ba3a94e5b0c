"""Episodes with tools: are their tokens exact, does a slow tool hold up others, and does vLLM reuse what it has seen?

    python scripts/bench/episodes.py [--cases torch,ranks,lora,hybrid,vllm] [--json] [--smoke]

Each case is a training run of a tiny random model in float32 on a CPU, with episodes of up to five turns whose tools
show texts, images and control tokens. `gap_max`: largest `policy/sampler_gap_max` of all steps, in nats; `sampled`:
tokens of the policy in the case. Where vLLM is installed, there are also `others_ratio`: 64 episodes, of which one
calls a tool of 30 s; the time until the other 63 have ended, over the time without that tool. And `cached`: the
smallest share of whole blocks, of all that a turn before has computed, that vLLM took from its cache. `growth_mib`: how
much the memory of the trainer's process and of the one with the user's file grew from episode 200 to episode 1,000.
`holds`: all gaps are below 2e-5 over at least 2,000 tokens a case, others_ratio is at most 1.2, cached is 1, neither
process grew by more than 8 MiB.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from vlmrl.data.turns import TurnEncoder
from vlmrl.model.load import banned_ids_of, share_prefix
from vlmrl.model.policy import Policy
from vlmrl.model.tiny import build_tiny
from vlmrl.rollout.engine import SamplingRequest
from vlmrl.rollout.weight_sync import PolicyWeights
from vlmrl.store.runs import open_run
from vlmrl.types import SamplingParams

TESTS = Path(__file__).resolve().parents[2] / "tests"
"""Folder with the tiny models and their environments."""
BOUND, LEAST_TOKENS, MOST_RATIO, MOST_GROWTH = 2e-5, 2000, 1.2, 8.0
TEXTS = ("same or different?", "0 1 2 3 4 5 6 7 8 9 yes no", "here call seed of always")
RECIPE = """
environment = {name = "PLACE/wild.py:Shows", tokens = 700, turns = 5, images = 12}
rollout = {prompts_per_step = 8, samples_per_prompt = 4, max_new_tokens = 12, temperature = 0.9, stop = ["e", "a"]}
train = {steps = 5, tokens_per_row = 1500}
optim.lr = 1e-4
eval = {every_steps = 0, at_start = false, max_rows = 2}
checkpoint = {every_steps = 0}
"""
REWARD = """
def score(x):
    return {"letters": min(1.0, len(set(x.response)) / 40), "looks": x.measured["reward"] / 4}
"""
VLLM = ("rollout.engine=vllm", "rollout.max_prompt_tokens=600", "rollout.kv_cache_gib=0.25")
CASES = {
    "torch": (),
    "ranks": ("--gpus", "2"),
    "lora": ("lora.rank=4",),
    "hybrid": ("model.path=HYBRID",),
    "vllm": VLLM,
}
"""Case -> settings of its run, or words of its command."""


def hybrid(folder: Path) -> Path:
    """Write a tiny model with layers of linear attention (Qwen3.5), and return its folder."""
    from tinyfamilies import build
    from tinyprocessors import encoder_of

    encoder, model = encoder_of("qwen3_5"), build("qwen3_5", wide=True).model
    model.resize_token_embeddings(len(encoder.tokenizer) + 4)  # reading the tokenizer back adds an end of text
    model.save_pretrained(folder)
    encoder.processor.save_pretrained(folder)
    return folder


def case(name: str, steps: int) -> dict[str, Any]:
    """Train a case in a process of its own, and return its gap and its number of sampled tokens."""
    from small_runs import make_place
    from wild_tools import SHOWS, WILD

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = build_tiny(place / "model", TEXTS, vocabulary=300, hidden=64, layers=2)
        make_place(place, model, RECIPE.replace("PLACE", folder), reward=REWARD)
        (place / "wild.py").write_text(WILD + SHOWS)
        words = list(CASES[name])
        if "model.path=HYBRID" in words:
            words = [f"model.path={hybrid(place / 'hybrid')}"]
        words += ["rollout.prompts_per_step=2", "train.rehearsal=false"] if steps == 1 else []
        settings = [part for word in [*words, f"train.steps={steps}"] if "=" in word for part in ("--set", word)]
        command = ["train", str(place / "rl.toml"), "--runs", str(place / "runs")]
        command += [*settings, *(word for word in words if "=" not in word)]
        done = subprocess.run([sys.executable, "-m", "vlmrl", *command], capture_output=True, text=True, cwd=place)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr[-3000:]}")
        run = open_run(place / "runs", "last")
        groups = [group for step in range(steps) for group in run.read_rollouts(step)]
        samples = [sample for group in groups for sample in group.samples]
        return {
            "gap_max": max(line["policy/sampler_gap_max"] for line in run.metrics("train")),
            "sampled": sum(sample.trajectory.num_sampled_tokens for sample in samples),
            "episodes": len(samples),
            "most_turns": max(sum(turn.role == "assistant" for turn in sample.turns) for sample in samples),
            "images": sum(len(segment.media) for sample in samples for segment in sample.trajectory.segments),
        }


SLOW = """
class Slow(Look):
    slow = True

    def reset(self, images, seed, **row) -> None:
        super().reset(images)
        self.seed = seed

    def look(self, x: int):
        if self.slow and self.seed == 7000 and not self.count:
            time.sleep(30)
        return super().look(x)

class Quick(Slow):
    slow = False
"""
"""Environments of 64 episodes, one of which has a slow tool; and the same without it."""


class Counted:
    """Counts of vLLM's cache by turn: (whole blocks of the turns before, those of them that it did not compute)."""

    def __init__(self, engine: Any) -> None:
        self.known: dict[tuple[int, ...], int] = {}
        self.counts: list[tuple[int, int]] = []
        self.block = engine._llm.llm_engine.vllm_config.cache_config.block_size
        self._samples = engine._samples
        engine._samples = self.samples

    def samples(self, request: Any, output: Any, params: Any) -> Any:
        prompt, before = tuple(request.prompt.prompt_ids), 0
        for length in range(len(prompt) - 1, 0, -1):
            if prompt[:length] in self.known:
                before = self.known[prompt[:length]]
                break
        samples = self._samples(request, output, params)
        for sample in samples:  # the last token that is sampled is not computed
            self.known[prompt + sample.token_ids] = len(prompt + sample.token_ids) - 1
        whole = before // self.block
        if whole:
            self.counts.append((whole, min(whole, output.num_cached_tokens // self.block)))
        return samples


def vllm_episodes(num_episodes: int = 64) -> dict[str, Any]:
    """Return how much one slow tool holds up other episodes in vLLM, and how much of their turns it had computed."""
    from tinyfamilies import build
    from tinyprocessors import encoder_of
    from tinyworld import encoded, sampler_gap
    from wild_tools import WILD

    from vlmrl.environments.base import EnvironmentLimits
    from vlmrl.environments.processes import EnvironmentPool, load_environment
    from vlmrl.rollout.episodes import EpisodeEngine, EpisodeKind, EpisodeLimits
    from vlmrl.rollout.vllm.engine import VllmEngine
    from vlmrl.rollout.vllm.settings import EngineSettings

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "wild.py").write_text(WILD + SLOW)
        encoder, model = encoder_of("qwen2_5_vl"), build("qwen2_5_vl", wide=True).model
        model.save_pretrained(folder)
        encoder.processor.save_pretrained(folder)
        share_prefix(model)
        banned = banned_ids_of(model, encoder.tokenizer)
        policy = Policy(model, temperature=0.9, banned_ids=banned)
        settings = EngineSettings(folder, "float32", "cpu", 2000, 2**29, encoder.image_arguments)
        inner = VllmEngine(
            PolicyWeights(model, torch.float32, folder), encoder.tokenizer, settings, say=lambda text: None
        )
        inner.load_weights(0)
        counted, turns = Counted(inner), TurnEncoder(encoder)
        params = SamplingParams(0.9, max_new_tokens=40, banned_ids=banned, stop=("e", "a"))
        prompts = [encoded(encoder, f"row {i}: " + "same or different? " * 20, [(56, 84)]) for i in range(num_episodes)]
        prompts = [replace(prompt, row=replace(prompt.row, source="s")) for prompt in prompts]
        requests = [SamplingRequest(prompt, 1, 7000 + i) for i, prompt in enumerate(prompts)]
        limits = EpisodeLimits(turns=5, tokens=1200, images=12, observation_tokens=64, seconds=300)
        seconds, gap = {}, 0.0
        for name in ("Quick", "Slow", "Quick", "Slow"):  # the faster of two
            pool = EnvironmentPool(
                load_environment(f"{folder}/wild.py:{name}", {}), "hermes", EnvironmentLimits(tool_seconds=40)
            )
            engine = EpisodeEngine(inner, {"s": EpisodeKind(pool, limits, lambda row: turns)}, encoder.tokenizer)
            inner._forget()
            counted.known.clear()
            begin, ended = time.monotonic(), {}
            with engine.round():
                numbers = [engine.submit(request, params) for request in requests]
                while len(ended) < num_episodes:
                    for number, samples in engine.poll(1.0):
                        ended[number] = (time.monotonic() - begin, samples)
            pool.close()
            others = max(taken for number, (taken, _) in ended.items() if number != numbers[0])
            seconds[name] = min(seconds.get(name, others), others)
            gap = max(gap, sampler_gap(policy, requests, [ended[number][1] for number in numbers], encoder=encoder))
        inner.close()
    return {
        "others_ratio": seconds["Slow"] / seconds["Quick"],
        "seconds": seconds,
        "cached": min(got / whole for whole, got in counted.counts),
        "cached_turns": len(counted.counts),
        "gap_max": gap,
    }


def growth(episodes: int) -> dict[str, float]:
    """Return how much memory a fifth of the episodes to all of them add to the trainer and to the user's process."""
    from wild_tools import SHOWS, WILD

    from vlmrl.environments.base import EnvironmentLimits
    from vlmrl.environments.processes import Beginning, EnvironmentPool, load_environment

    sizes: dict[str, list[float]] = {"trainer": [], "user_file": []}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "wild.py").write_text(WILD + SHOWS)
        pool = EnvironmentPool(load_environment(f"{folder}/wild.py:Shows", {}), "hermes", EnvironmentLimits())
        picture = Image.new("RGB", (640, 480))
        for number in range(episodes):
            pool.begin(number, Beginning({"level": number}, {}, [picture], [], number, "what?"))
            pool.advance()
            for text in ("a look", "one more"):
                pool.turn(number, text)
                pool.advance()
            pool.drop(number)
            if number + 1 in (episodes // 5, episodes):
                for name, pid in (("trainer", os.getpid()), ("user_file", pool._forks.pids()[0])):
                    fields = Path(f"/proc/{pid}/status").read_text()
                    sizes[name].append(int(fields.split("VmRSS:")[1].split()[0]) / 1024)
        pool.close()
    return {name: last - first for name, (first, last) in sizes.items()}


def main() -> None:
    """Parse the arguments, run the cases one after the other, and print what they give."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_vllm = importlib.util.find_spec("vllm") is not None
    parser.add_argument("--cases", default=",".join(name for name in CASES if name != "vllm" or has_vllm))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--smoke", action="store_true", help="a toy size in seconds, to see that it runs; its figures mean nothing"
    )
    options = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    names, steps = (["torch"], 1) if options.smoke else (options.cases.split(","), options.steps)
    result: dict[str, Any] = {"cases": {}}
    for name in names:
        result["cases"][name] = case(name, steps)
        if not options.json:
            print(name, json.dumps(result["cases"][name]), flush=True)
    result["growth_mib"] = growth(20 if options.smoke else 1000)
    if "vllm" in names:
        result |= {"vllm": vllm_episodes()}
    cases = [*result["cases"].values(), *([result["vllm"]] if "vllm" in result else [])]
    result["gap_max"] = max(one["gap_max"] for one in cases)
    enough = all(one["sampled"] >= LEAST_TOKENS for one in result["cases"].values())
    of_vllm = result.get("vllm", {"others_ratio": 0.0, "cached": 1.0})
    result["holds"] = (
        result["gap_max"] < BOUND
        and enough
        and of_vllm["others_ratio"] <= MOST_RATIO
        and of_vllm["cached"] == 1.0
        and max(result["growth_mib"].values()) <= MOST_GROWTH
    )
    print(
        json.dumps(result)
        if options.json
        else f"holds: {result['holds']}  {json.dumps({**of_vllm, 'growth_mib': result['growth_mib']})}"
    )


if __name__ == "__main__":
    main()
