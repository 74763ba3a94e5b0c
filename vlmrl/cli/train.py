from __future__ import annotations

from pathlib import Path

import typer

from vlmrl.cli.begin import Beginning
from vlmrl.cli.queue import Sweep, run_sweep
from vlmrl.cli.sft import (
    ACCEPT,
    DEBUG_RANK,
    DRY_RUN,
    ENDPOINT,
    FROM,
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
from vlmrl.errors import LaunchError

SEEDS = typer.Option(None, "--seeds", help="A run for each seed: --seeds 1,2,3.", show_default=False)
GRID = typer.Option([], "--grid", help="A run for each value: --grid optim.lr=1e-6,3e-6. May be repeated: all pairs.",
                    show_default=False)  # fmt: skip
GPUS_PER_RUN = typer.Option(1, "--gpus-per-run", min=1, help="Cards of each run of --seeds and --grid.")
GROUP = typer.Option(None, "--group", help="Tag of these runs; default: from the recipe.", show_default=False)


def register(app: typer.Typer) -> None:
    app.command("train", short_help="Reinforcement learning (GRPO family).")(train)


def train(
    recipe: Path | None = RECIPE, overrides: list[str] = SET, resume: str | None = RESUME,
    accept_changes: bool = ACCEPT, from_: str | None = FROM, name: str | None = NAME, tag: list[str] = TAG,
    note: str = NOTE, runs: Path | None = RUNS, gpus: str | None = GPUS, nnodes: int = NNODES,
    node_rank: int = NODE_RANK, rdzv_endpoint: str | None = ENDPOINT, debug_rank: int | None = DEBUG_RANK,
    dry_run: bool = DRY_RUN,
    seeds: str | None = SEEDS, grid: list[str] = GRID, gpus_per_run: int = GPUS_PER_RUN, group: str | None = GROUP,
    quiet: bool = QUIET, json: bool = JSON,
) -> None:  # fmt: skip
    """Reinforcement learning with the GRPO family: sample, score, update.

    Example: vlmrl train recipes/digits_im.toml --name im --set train.steps=100 --gpus 2

    Ctrl-C finishes the step, saves a checkpoint and says how to resume.

    --resume RUN --set train.steps=200 goes on with a run, a done one too. Its length, cadences, cards and engine memory
    may change freely; a changed algorithm, reward file, prompt or dataset is shown and wants --accept-changes; what the
    checkpoint does not fit is refused. --from RUN@100 --set optim.lr=1e-6 begins a new run with all of that checkpoint.

    --seeds and --grid make a queue of runs, as many at a time as --gpus holds; the same command again goes on where a
    queue was stopped.
    """
    sweep = Sweep(seeds, grid, gpus_per_run, group)
    if sweep.asked:
        if resume is not None or from_ is not None or name is not None or nnodes > 1 or debug_rank is not None:
            raise LaunchError("--seeds and --grid begin their runs and name them themselves, on one machine",
                              hint="leave out --resume, --from, --name, --nnodes and --debug-rank")  # fmt: skip
        run_sweep(recipe, overrides, sweep, gpus, runs, dry_run, json)
    machines = Machines(gpus, nnodes, node_rank, rdzv_endpoint, dry_run, debug_rank)
    asked = Beginning("rl", recipe, overrides, resume, from_, accept_changes, (name, tag, note))
    train_command(asked, runs, quiet, json, machines)
