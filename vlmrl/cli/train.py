"""`vlmrl train`: reinforcement learning. `vlmrl sft`: supervised start.

The recipe is checked, training runs here or in several processes, and the last lines say how the run ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, say, show_warnings
from vlmrl.errors import Interruption, VlmrlError

if TYPE_CHECKING:
    from vlmrl.launch.request import TrainRequest
    from vlmrl.launch.start import Plan
    from vlmrl.store.runs import Run


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
        tags: options.Tag = None,
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

        machines = Machines(gpus, nnodes, node_rank, rdzv_endpoint, debug_rank)
        run_training(options.request_of(TrainRequest, ctx, kind=kind, machines=machines))

    return command


def run_training(request: TrainRequest) -> None:
    """Check the request, train, and print the next commands.

    With `--gpus` this process starts one process per GPU, with the same command without `--gpus`, and waits for them.
    """
    from vlmrl.launch.start import prepare
    from vlmrl.store.layout import runs_root

    request.check()
    root = runs_root(request.runs)
    plan, warnings = prepare(request, root)
    show_warnings(warnings)
    if request.needs_launcher:
        _launch(request, plan, root)
    from vlmrl.cli.progress import ConsoleWatcher
    from vlmrl.dist.world import is_main_process, join_world, launched, recorded_command, stderr
    from vlmrl.launch.start import begin_run, recipe_of, resume_command
    from vlmrl.process import give_terminal, patience
    from vlmrl.store.runs import open_run
    from vlmrl.train.journal import SilentWatcher
    from vlmrl.train.start import run_session, share_run

    is_main, recipe, debug_rank = is_main_process(), recipe_of(plan), request.machines.debug_rank
    argv = recorded_command(request.argv)
    if debug_rank is not None:
        give_terminal(debug_rank)
    with join_world(recipe.model.device, patience(recipe.parallel.timeout_seconds)) as world:
        run, recipe, checkpoint = share_run(world, lambda: begin_run(request, plan, root, argv, say))
        # A rank's output goes only to its log, except for rank 0.
        is_shown = not request.quiet and (is_main or launched())
        watcher = ConsoleWatcher(stderr()) if is_shown else SilentWatcher()
        try:
            status = run_session(run, recipe, root, watcher, checkpoint, world)
        except KeyboardInterrupt:
            if launched():
                raise
            what, again = f"{request.command} of run {run.id}", resume_command(request, run.dir)
            raise Interruption(what, _kept(run) or "it has no checkpoint yet", again) from None
        except VlmrlError as error:
            if not launched() and (kept := _kept(run)):
                again = f"{kept}; continue with: {resume_command(request, run.dir)}"
                error.hint = "\n".join(filter(None, (error.hint, again)))
            raise
    if is_main:
        # The run is opened again to read the numbers from its metrics file, which is complete now.
        show_end(open_run(root, str(run.dir)), status, resume_command(request, run.dir), request.as_json)
    if status == "interrupted":
        raise typer.Exit(130)


def _kept(run: Run) -> str:
    """Return in words which checkpoint of a run is the last; "" if it has none."""
    saved = run.checkpoint_dirs()
    return f"its last checkpoint is {saved[-1].name}" if saved else ""


def _launch(request: TrainRequest, plan: Plan, root: Path) -> None:
    """Start the ranks and exit with their exit code. Return only if this process is the only rank."""
    from vlmrl.launch.ranks import torchrun_line
    from vlmrl.launch.start import describe_changes, plan_ranks, run_ranks

    ranks = plan_ranks(request, plan, root)
    if not request.dry_run and ranks.is_one_process:
        os.environ.update(ranks.job.env)
        return
    for line in describe_changes(plan):
        say(line)
    if request.dry_run:
        line = torchrun_line(ranks.job)
        if not emit({"command": line}, request.as_json):
            print(line)
        raise typer.Exit
    raise typer.Exit(run_ranks(request, ranks, root, say))


TRAIN_HELP = """Train with reinforcement learning (GRPO family): sample, score, update.

    Example: vlmrl train recipes/digits_im.toml --set train.steps=100 --gpus 2

    Ctrl-C finishes the step, saves a checkpoint and prints how to resume.

    --resume RUN --set train.steps=200 continues a run, even a finished one. The number of steps, the intervals of
    validations and checkpoints, the GPUs and the engine's memory may change freely. A change of the algorithm, a reward
    file, a prompt or a dataset is shown, and needs --accept-changes. A change that does not fit the checkpoint is
    refused. --from RUN@100 --set optim.lr=1e-6 begins a new run with everything in that checkpoint.
    """


SFT_HELP = """Train on given responses (supervised start): the rows' own responses, or the task's templated traces.

    Example: vlmrl sft recipes/digits_sft.toml --name digits-sft
    """


def register(app: typer.Typer) -> None:
    short_help = "Train with reinforcement learning (GRPO family)."
    app.command("train", help=TRAIN_HELP, short_help=short_help)(training_command("rl"))
    short_help = "Train on given responses (supervised start)."
    app.command("sft", help=SFT_HELP, short_help=short_help)(training_command("sft"))


def show_end(done: Run, status: str, resume_command: str, as_json: bool) -> None:
    """Print how a run ended, also as JSON; for an interrupted run, the command that resumes it."""
    from vlmrl.dist.world import launched

    if as_json:
        emit(result_fields(done), as_json)
    if status != "interrupted":
        say(closing_lines(done))
        return
    say(f"saved {done.checkpoint_dirs()[-1].name}")
    if not launched():  # else the launcher prints the command, with the number of GPUs
        say(f"continue with: {resume_command}")


def closing_lines(done: Run) -> str:
    """Return the folder of a run, its best validation, its warnings, and the next commands.

    The commands have `--checkpoint last` if the best checkpoint does not exist.
    """
    from vlmrl.diagnose.run_facts import unbeaten_start, with_update
    from vlmrl.evaluate.eval_rows import only_training_rows
    from vlmrl.store.listing import command_line
    from vlmrl.store.runs import checkpoint_option

    best, best_text, which = done.manifest.best, "", checkpoint_option(done)
    if best:
        best_text = f"; best {best.metric} {best.value:.4f} at step {best.step}"
        if which:
            best_text += ", the model it started from" if best.step == 0 else " (not kept)"
        if unbeaten_start(done):
            best_text += f"{', as at step 0' if best.step else ''}: no later validation was better than the start"
    # If there are no test or validation rows, eval would score training rows.
    rows = ("--split", "ROWS.jsonl") if only_training_rows(done.dir) else ()
    verbs = {"eval": (*which, *rows), "merge": which, "report": ()}
    verbs = verbs if done.manifest.rewards else {"merge": which, "report": ()}  # without a reward, eval scores nothing
    commands = [command_line((verb,), done.dir, done.manifest.name, *options) for verb, options in verbs.items()]
    missing = "\n      ROWS.jsonl: rows that training has not seen; the data has no test and no validation rows"
    train, outcome = done.metrics("train"), "done"
    if train and not with_update(train):
        outcome = f"ended, but nothing was learned: none of the {len(train):,} steps updated the model"
    end = f"{outcome}: {done.dir}{best_text}{_warnings(done)}"
    return f"{end}\nnext: {'   '.join(commands)}{missing if rows else ''}"


def _warnings(done: Run) -> str:
    """Return the warnings about the run's metrics, as an addition to the line about its end; "" for none."""
    from vlmrl.diagnose.run_facts import with_update
    from vlmrl.diagnose.signs import find_signs, since
    from vlmrl.store.listing import command_line

    train = done.metrics("train")
    signs = find_signs(train, done.metrics("validation"))
    words = "; ".join(f"{sign.words}{since(sign)}" for sign in signs)
    why = command_line(("runs", "diagnose"), done.dir, done.manifest.name)
    return f"{f'  ! {words}' if signs else ''}\nwhy: {why}" if signs or not with_update(train) else ""


def result_fields(run: Run) -> dict[str, Any]:
    """Return the facts about a finished run for `--json`."""
    from vlmrl.diagnose.signs import find_signs

    best = run.manifest.best
    train = run.metrics("train")
    signs = find_signs(train, run.metrics("validation"))
    return {
        "run": run.id,
        "dir": str(run.dir),
        "status": run.status,
        "steps": len(train),
        "best": {"step": best.step, "metric": best.metric, "value": best.value} if best else None,
        "checkpoints": [p.name for p in run.checkpoint_dirs()],
        "last": train[-1] if train else None,
        "warnings": [{"name": s.name, "what": s.what, "step": s.step} for s in signs],
    }
