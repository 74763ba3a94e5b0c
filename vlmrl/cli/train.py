from __future__ import annotations

from pathlib import Path

import typer

from vlmrl.cli.sft import (
    DRY_RUN,
    ENDPOINT,
    GPUS,
    JSON,
    NAME,
    NNODES,
    NODE_RANK,
    NOTE,
    QUIET,
    RECIPE,
    RESUME,
    RUNS,
    SET,
    TAG,
    Machines,
    train_command,
)  # fmt: skip


def register(app: typer.Typer) -> None:
    app.command("train", short_help="Reinforcement learning (GRPO family).")(train)


def train(
    recipe: Path | None = RECIPE, overrides: list[str] = SET, resume: str | None = RESUME, name: str | None = NAME,
    tag: list[str] = TAG, note: str = NOTE, runs: Path | None = RUNS, gpus: str | None = GPUS, nnodes: int = NNODES,
    node_rank: int = NODE_RANK, rdzv_endpoint: str | None = ENDPOINT, dry_run: bool = DRY_RUN, quiet: bool = QUIET,
    json: bool = JSON,
) -> None:  # fmt: skip
    """Reinforcement learning with the GRPO family: sample, score, update.

    Example: vlmrl train recipes/digits_im.toml --name im --set train.steps=100 --gpus 2

    Ctrl-C finishes the step, saves a checkpoint and says how to resume.
    """
    machines = Machines(gpus, nnodes, node_rank, rdzv_endpoint, dry_run)
    train_command("rl", recipe, overrides, resume, (name, tag, note), runs, quiet, json, machines)
