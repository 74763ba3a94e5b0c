"""Training for `vlmrl train` and `vlmrl sft`: check, train here or in several processes, print how the run ended."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, say, show_warnings
from vlmrl.errors import Interruption

if TYPE_CHECKING:
    from vlmrl.launch.request import TrainRequest
    from vlmrl.launch.train_plan import Plan


def training_command(kind: Literal["rl", "sft"]) -> Callable[..., None]:
    """Return the function of `vlmrl train` or `vlmrl sft`, which have the same options."""

    def command(
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
        from vlmrl.launch.request import Machines, TrainRequest

        run_training(
            TrainRequest(
                kind,
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
        )

    return command


def run_training(request: TrainRequest) -> None:
    """Check the request, train, and print the next commands.

    With `--gpus` this process starts one process per GPU, with the same command without `--gpus`, and waits for them.
    """
    from vlmrl.launch.train_plan import prepare
    from vlmrl.store.layout import runs_root

    request.check()
    root = runs_root(request.runs)
    plan, warnings = prepare(request, root)
    show_warnings(warnings)
    if request.needs_launcher:
        _launch(request, plan, root)
    _train_here(request, plan, root)


def _launch(request: TrainRequest, plan: Plan, root: Path) -> None:
    """Start the ranks and exit with their exit code. Return only if this process is the only rank."""
    from vlmrl.launch.agent import torchrun_line
    from vlmrl.launch.train_plan import describe_changes
    from vlmrl.launch.train_ranks import plan_ranks, run_ranks

    ranks = plan_ranks(request, plan, root)
    if not request.dry_run and ranks.is_one_process:
        os.environ.update(ranks.job.env)
        return
    for line in describe_changes(plan):
        say(line)
    if request.dry_run:
        line = torchrun_line(ranks.job)
        emit({"command": line}, request.as_json)
        if not request.as_json:
            print(line)
        raise typer.Exit
    raise typer.Exit(run_ranks(request, ranks, root, say))


def _train_here(request: TrainRequest, plan: Plan, root: Path) -> None:
    """Train in this process, which is either the only one or a rank of a launcher."""
    from vlmrl.cli.show.progress import ConsoleWatcher
    from vlmrl.cli.show.training_end import show_end
    from vlmrl.dist.world import is_main_process, join_world, launched, recorded_command, stderr
    from vlmrl.launch.train_plan import begin_run, recipe_of
    from vlmrl.launch.train_ranks import resume_command
    from vlmrl.process import give_terminal, patience
    from vlmrl.store.runs import open_run
    from vlmrl.train.start import run_session, share_run

    is_main, recipe, debug_rank = is_main_process(), recipe_of(plan), request.machines.debug_rank
    argv = recorded_command(request.argv)
    if debug_rank is not None:
        give_terminal(debug_rank)
    with join_world(recipe.model.device, patience(recipe.parallel.timeout_seconds)) as world:
        run, recipe, checkpoint = share_run(world, lambda: begin_run(request, plan, root, argv, say))
        # A rank's output goes only to its log, except for rank 0.
        is_shown = not request.quiet and (is_main or launched())
        watcher = ConsoleWatcher(stderr() if is_shown else open(os.devnull, "w"))  # noqa: SIM115
        try:
            status = run_session(run, recipe, root, watcher, checkpoint, world)
        except KeyboardInterrupt:
            if launched():
                raise
            saved = [path.name for path in run.checkpoint_dirs()]
            kept = f"its last checkpoint is {saved[-1]}" if saved else "it has no checkpoint yet"
            what = f"{request.command} of run {run.id}"
            raise Interruption(what, kept, resume_command(request, run.dir)) from None
    if is_main:
        # The run is opened again to read the numbers from its metrics file, which is complete now.
        show_end(open_run(root, run.id), status, resume_command(request, run.dir), request.as_json)
    if status == "interrupted":
        raise typer.Exit(130)
