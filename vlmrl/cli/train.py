from __future__ import annotations

from pathlib import Path

import typer

from vlmrl.cli.sft import JSON, NAME, NOTE, QUIET, RECIPE, RESUME, RUNS, SET, TAG, train_command


def register(app: typer.Typer) -> None:
    app.command("train", short_help="Reinforcement learning (GRPO family).")(train)


def train(
    recipe: Path | None = RECIPE, overrides: list[str] = SET, resume: str | None = RESUME, name: str | None = NAME,
    tag: list[str] = TAG, note: str = NOTE, runs: Path | None = RUNS, quiet: bool = QUIET, json: bool = JSON,
) -> None:  # fmt: skip
    """Reinforcement learning with the GRPO family: sample, score, update.

    Example: vlmrl train recipes/digits_im.toml --name im --set train.steps=100

    Ctrl-C finishes the step, saves a checkpoint and says how to resume.
    """
    train_command("rl", recipe, overrides, resume, (name, tag, note), runs, quiet, json)
