"""`vlmrl train`: reinforcement learning."""

from __future__ import annotations

import typer

from vlmrl.cli.training import training_command

HELP = """Train with reinforcement learning (GRPO family): sample, score, update.

    Example: vlmrl train recipes/digits_im.toml --set train.steps=100 --gpus 2

    Ctrl-C finishes the step, saves a checkpoint and prints how to resume.

    --resume RUN --set train.steps=200 continues a run, even a finished one. The number of steps, the intervals of
    validations and checkpoints, the GPUs and the engine's memory may change freely. A change of the algorithm, a reward
    file, a prompt or a dataset is shown, and needs --accept-changes. A change that does not fit the checkpoint is
    refused. --from RUN@100 --set optim.lr=1e-6 begins a new run with everything in that checkpoint.
    """


def register(app: typer.Typer) -> None:
    short_help = "Train with reinforcement learning (GRPO family)."
    app.command("train", help=HELP, short_help=short_help)(training_command("rl"))
