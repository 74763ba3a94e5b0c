"""A recipe that samples with the real vLLM on the CPU, and the command that trains it; for tests of several files."""

from __future__ import annotations

from pathlib import Path

from command_line import Done, own_process
from small_runs import make_place

RECIPE = """
rollout.engine = "vllm"
rollout.kv_cache_gib = 0.25
rollout.prompts_per_step = 4
rollout.samples_per_prompt = 3
rollout.max_prompt_tokens = 300
rollout.max_new_tokens = 12
rollout.temperature = 0.9
train = {steps = 3, tokens_per_row = 400}
optim.lr = 1e-3
eval = {every_steps = 2, max_rows = 4}
"""


def vllm_place(folder: Path, model: Path) -> Path:
    """A folder with the recipe `rl.toml` and its data."""
    return make_place(folder, model, RECIPE)


def train(place: Path, *more: str) -> Done:
    """Run `vlmrl train` in that folder, with `--json`."""
    return own_process("train", "rl.toml", "--json", "--runs", "runs", *more, cwd=place)
