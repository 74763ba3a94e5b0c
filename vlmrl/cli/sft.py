"""`vlmrl sft`: supervised start."""

from __future__ import annotations

import typer

from vlmrl.cli import options
from vlmrl.cli.training import run_training


def register(app: typer.Typer) -> None:
    app.command("sft", short_help="Train on given responses (supervised start).")(sft)


def sft(
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
    """Train on given responses (supervised start): the rows' own responses, or the task's templated traces.

    Example: vlmrl sft recipes/digits_sft.toml --name digits-sft
    """
    from vlmrl.launch.request import Machines, TrainRequest

    request = TrainRequest(
        "sft",
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
