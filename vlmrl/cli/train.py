"""`vlmrl train`: reinforcement learning."""

from __future__ import annotations

import typer

from vlmrl.cli import options
from vlmrl.cli.training import run_training


def register(app: typer.Typer) -> None:
    app.command("train", short_help="Train with reinforcement learning (GRPO family).")(train)


def train(
    ctx: typer.Context,
    recipe: options.TrainRecipe = None,
    overrides: options.Set = None,
    resume: options.Resume = None,
    accept_changes: options.AcceptChanges = False,
    fork: options.From = None,
    name: options.Name = None,
    tag: options.Tag = None,
    note: options.Note = "",
    runs: options.Runs = None,
    gpus: options.Gpus = None,
    nnodes: options.Nnodes = 1,
    node_rank: options.NodeRank = 0,
    rdzv_endpoint: options.RendezvousEndpoint = None,
    debug_rank: options.DebugRank = None,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Train with reinforcement learning (GRPO family): sample, score, update.

    Example: vlmrl train recipes/digits_im.toml --set train.steps=100 --gpus 2

    Ctrl-C finishes the step, saves a checkpoint and prints how to resume.

    --resume RUN --set train.steps=200 continues a run, even a finished one. The number of steps, the intervals of
    validations and checkpoints, the GPUs and the engine's memory may change freely. A change of the algorithm, a reward
    file, a prompt or a dataset is shown, and needs --accept-changes. A change that does not fit the checkpoint is
    refused. --from RUN@100 --set optim.lr=1e-6 begins a new run with everything in that checkpoint.
    """
    from vlmrl.launch.request import Machines, TrainRequest

    request = TrainRequest(
        "rl",
        recipe,
        tuple(overrides or ()),
        resume,
        fork,
        accept_changes,
        name,
        tuple(tag or ()),
        note,
        runs,
        Machines(gpus, nnodes, node_rank, rdzv_endpoint, debug_rank),
        quiet,
        as_json,
        dry_run,
        options.typed_words(ctx),
    )
    run_training(request)
