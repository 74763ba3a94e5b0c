from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vlmrl.cli.begin import Beginning, begin, prepare, recipe_of
from vlmrl.cli.output import JSON_HELP, emit, say
from vlmrl.errors import Interruption, LaunchError

if TYPE_CHECKING:
    from vlmrl.errors import Problem
    from vlmrl.recipe.load import LoadedRecipe
    from vlmrl.store.runs import Run

RECIPE = typer.Argument(
    None, help="Recipe file (TOML). With --resume or --from: what is to hold now; else the run's own.",
    show_default=False,
)  # fmt: skip
SET = typer.Option([], "--set", help="Override a key: --set optim.lr=1e-5. May be repeated.", show_default=False)
RUNS = typer.Option(None, "--runs", help="Folder of the runs. Default: $VLMRL_RUNS, else ./runs.", show_default=False)
NAME = typer.Option(None, "--name", help="A name; commands accept it instead of the id.", show_default=False)
TAG = typer.Option([], "--tag", help="A tag for `vlmrl runs list --tag`. May be repeated.", show_default=False)
NOTE = typer.Option("", "--note", help="A sentence for yourself, kept in the manifest.", show_default=False)
RESUME = typer.Option(
    None, "--resume", help="Go on with this run from its last checkpoint, also with more steps: --set train.steps=...",
    show_default=False,
)  # fmt: skip
ACCEPT = typer.Option(
    False, "--accept-changes", help="With --resume: go on although what is learned changes; recorded."
)
FROM = typer.Option(
    None, "--from", help="A new run that goes on from all of a run's checkpoint: RUN@STEP, RUN@best, RUN (the last).",
    show_default=False,
)  # fmt: skip
QUIET = typer.Option(False, "--quiet", help="No line a step.")
JSON = typer.Option(False, "--json", help=JSON_HELP)
GPUS = typer.Option(
    None, "--gpus", help="Cards, one process each: a number (4) or which (0,2,5). Without a card: CPU processes.",
    show_default=False,
)  # fmt: skip
NNODES = typer.Option(1, "--nnodes", min=1, help="Machines of this run; start the command on each.")
NODE_RANK = typer.Option(0, "--node-rank", min=0, help="Which machine this is, from 0; 0 hosts the meeting point.")
ENDPOINT = typer.Option(
    None, "--rdzv-endpoint", help="HOST:PORT where the machines meet: machine 0.", show_default=False
)
DEBUG_RANK = typer.Option(
    None, "--debug-rank", min=0, show_default=False,
    help="This rank gets the terminal, and its rewards too: breakpoint() works there, and nothing times out.",
)  # fmt: skip
DRY_RUN = typer.Option(False, "--dry-run", help="Check, print the torchrun line that would run, and stop.")


@dataclass(frozen=True)
class Machines:
    """The options that say where a run runs."""

    gpus: str | None = None
    nnodes: int = 1
    node_rank: int = 0
    endpoint: str | None = None
    dry_run: bool = False
    debug_rank: int | None = None

    def check_debugging(self, as_json: bool) -> None:
        """Raise a LaunchError where one rank of these cannot have the terminal."""
        if self.debug_rank is None:
            return
        if as_json:
            raise LaunchError("--debug-rank talks on the terminal, and --json wants nothing else there",
                              hint="leave one of them out")  # fmt: skip
        if self.nnodes > 1:
            raise LaunchError("--debug-rank is for one machine", hint="leave out --nnodes")
        if self.gpus is None and self.debug_rank:
            raise LaunchError(f"--debug-rank {self.debug_rank} of one process", hint="--debug-rank 0, or give --gpus N")

    @property
    def asked(self) -> bool:
        """Whether there is more to do than to train in this process."""
        return self.gpus is not None or self.nnodes > 1 or self.dry_run

    @property
    def words(self) -> list[str]:
        """The same options on a command line, but for --dry-run."""
        gpus = [] if self.gpus is None else ["--gpus", self.gpus]
        if self.nnodes == 1:
            return gpus
        place = ["--nnodes", str(self.nnodes), "--node-rank", str(self.node_rank)]
        return [*gpus, *place, "--rdzv-endpoint", str(self.endpoint)]


def resume_command(kind: str, run_dir: Path, machines: Machines) -> str:
    """Return the command that goes on with a run on these machines."""
    from vlmrl.store.manifest import read_manifest
    from vlmrl.store.printed_names import command_line

    command = "train" if kind == "rl" else "sft"
    return command_line((command, "--resume"), run_dir, read_manifest(run_dir).name, *machines.words)


def register(app: typer.Typer) -> None:
    app.command("sft", short_help="Supervised start.")(sft)


def sft(
    recipe: Path | None = RECIPE, overrides: list[str] = SET, resume: str | None = RESUME,
    accept_changes: bool = ACCEPT, from_: str | None = FROM, name: str | None = NAME, tag: list[str] = TAG,
    note: str = NOTE, runs: Path | None = RUNS, gpus: str | None = GPUS, nnodes: int = NNODES,
    node_rank: int = NODE_RANK, rdzv_endpoint: str | None = ENDPOINT, debug_rank: int | None = DEBUG_RANK,
    dry_run: bool = DRY_RUN, quiet: bool = QUIET, json: bool = JSON,
) -> None:  # fmt: skip
    """Supervised start: learn the rows' own responses, or the task's templated traces.

    Example: vlmrl sft recipes/digits_sft.toml --name digits-sft
    """
    machines = Machines(gpus, nnodes, node_rank, rdzv_endpoint, dry_run, debug_rank)
    asked = Beginning("sft", recipe, overrides, resume, from_, accept_changes, (name, tag, note))
    train_command(asked, runs, quiet, json, machines)


def train_command(asked: Beginning, runs: Path | None, quiet: bool, as_json: bool, machines: Machines) -> None:
    """What `sft` and `train` share: check, make or reopen the run, train, say what to do next.

    With `--gpus` this process starts one process a card, which run the same command without it, and waits for them.
    """
    from vlmrl.cli.progress import ConsoleWatcher
    from vlmrl.dist.rank_process import command_words, launched, stderr
    from vlmrl.dist.world import is_main_process, join_world
    from vlmrl.process import give_terminal, patience
    from vlmrl.store.layout import runs_root
    from vlmrl.store.runs import open_run
    from vlmrl.train.start import run_session, share_run

    asked.check()
    machines.check_debugging(as_json)
    kind, command, root = asked.kind, asked.command, runs_root(runs)
    if machines.asked:
        from vlmrl.cli.ranks import run_ranks

        ready = run_ranks(asked, runs, machines, as_json)
    else:
        ready = prepare(asked, root)
    talks, settings = is_main_process(), recipe_of(ready)
    if machines.debug_rank is not None:
        give_terminal(machines.debug_rank)
    with join_world(settings.model.device, patience(settings.parallel.timeout_seconds)) as world:
        run, settings, checkpoint = share_run(world, lambda: begin(asked, ready, root, command_words()))
        # In a rank of a launcher everything goes to the rank's own log, but what rank 0 says.
        watcher = ConsoleWatcher(stderr() if not quiet and (talks or launched()) else open(os.devnull, "w"))  # noqa: SIM115
        try:
            status = run_session(run, settings, root, watcher, checkpoint, world)
        except KeyboardInterrupt:
            if launched():
                raise
            saved = [path.name for path in run.checkpoint_dirs()]
            kept = f"its last checkpoint is {saved[-1]}" if saved else "it has no checkpoint yet"
            raise Interruption(f"{command} of run {run.id}", kept, resume_command(kind, run.dir, machines)) from None
    if talks:
        _say_how_it_ended(open_run(root, run.id), status, resume_command(kind, run.dir, machines), as_json)
    if status == "interrupted":
        raise typer.Exit(130)


def _say_how_it_ended(done: Run, status: str, go_on: str, as_json: bool) -> None:
    from vlmrl.dist.rank_process import launched

    if as_json:  # its figures are read from the metrics, as the last line's are
        emit(_result(done), as_json)
    if status != "interrupted":
        say(_closing(done))
        return
    say(f"saved {done.checkpoint_dirs()[-1].name}")
    if not launched():  # the launcher knows the number of cards, and says it
        say(f"go on with: {go_on}")


def _closing(done: Run) -> str:
    """Where the run is, its best validation, and the next commands: with `--checkpoint last` where no checkpoint is the
    best.
    """
    from vlmrl.inference.eval_rows import only_training_rows
    from vlmrl.store.layout import checkpoint_dir
    from vlmrl.store.printed_names import command_line

    best, told, which = done.manifest.best, "", ()
    if best:
        told = f"; best {best.metric} {best.value:.4f} at step {best.step}"
        if checkpoint_dir(done.dir, best.step) not in done.checkpoint_dirs():
            told += ", the model it started from: no later validation was better" if best.step == 0 else " (not kept)"
            which = ("--checkpoint", "last")
    # Without test and validation rows, eval would score what was trained on.
    rows = ("--split", "ROWS.jsonl") if only_training_rows(done.dir) else ()
    verbs = {"eval": (*which, *rows), "merge": which, "report": ()}
    commands = [command_line((verb,), done.dir, done.manifest.name, *options) for verb, options in verbs.items()]
    missing = "\n      ROWS.jsonl: rows that training has not seen; the data has no test and no validation rows"
    return f"done: {done.dir}{told}{_warnings(done)}\nnext: {'   '.join(commands)}{missing if rows else ''}"


def _warnings(done: Run) -> str:
    """Return what the metrics of the run warn of, for the line that says it is done; "" without any."""
    from vlmrl.diagnose.signs import find_signs, since
    from vlmrl.store.printed_names import command_line

    signs = find_signs(done.metrics("train"), done.metrics("validation"))
    words = "; ".join(f"{sign.words}{since(sign)}" for sign in signs)
    why = command_line(("runs", "diagnose"), done.dir, done.manifest.name)
    return f"  ! {words}\nwhy: {why}" if signs else ""


def load_checked(
    recipe: Path, overrides: list[str], kind: str | None, root: Path, trains: bool = True, gpus: str | None = None
) -> LoadedRecipe:
    """The recipe, after the quick part of `vlmrl check`: errors end here, warnings are shown. A rank does not check
    again what its launcher has checked.

    Args: trains: a run of it follows, for which disk and memory must have room.      gpus: as `--gpus` says.
    """
    from vlmrl.recipe.load import load_recipe

    return check_loaded(load_recipe(recipe, overrides=overrides, kind=kind), root, trains, gpus=gpus)


def check_loaded(
    loaded: LoadedRecipe, root: Path, trains: bool, files: str | None = None, gpus: str | None = None
) -> LoadedRecipe:
    """Run the quick part of `vlmrl check` on a recipe. Returns the recipe with nothing left open (recipe/settle.py).

    Args: files: the model's, where `model.path` does not lead there.      gpus: as `--gpus` says.
    """
    from vlmrl.cli.check import find_model_files, parse_target
    from vlmrl.dist.rank_process import launched
    from vlmrl.errors import ProblemsError
    from vlmrl.preflight.run import check_model, quick_look
    from vlmrl.setup.open_values import settle_for_run

    if launched():
        return settle_for_run(loaded, root)[0]
    (problems, prompts), missing = quick_look(loaded), []
    if not any(p.level == "error" for p in problems):
        if files is None:
            files, missing = find_model_files(loaded.recipe.model.path, root, loaded.where(("model", "path")))
        if not missing:
            loaded, warnings = settle_for_run(loaded, root)
            target = parse_target(gpus)
            problems += [
                *warnings,
                *check_model(loaded, files, root if trains else None, target=target, prompts=prompts),
            ]
        problems += missing
    errors = [p for p in problems if p.level == "error"]
    if errors:
        raise ProblemsError(errors)
    warn(problems)
    return loaded


def warn(problems: Sequence[Problem]) -> None:
    """Show problems that stop nothing."""
    from vlmrl.errors import format_error

    for p in problems:
        say(format_error(p.message, p.where, p.hint, "warning"))


def arithmetic(recipe) -> str:
    """What the numbers of a recipe add up to, in one line."""
    t, r = recipe.train, recipe.rollout
    if recipe.kind == "sft":
        return f"{t.steps} steps x {t.rows_per_step} rows = {t.steps * t.rows_per_step:,} examples"
    each = r.prompts_per_step * r.samples_per_prompt
    updates = f", {t.updates_per_step} update{'s' if t.updates_per_step > 1 else ''} a step"
    shape = f"{t.steps} steps x {r.prompts_per_step} prompts x {r.samples_per_prompt} samples"
    return f"{shape} = {t.steps * each:,} responses{updates}"


def _result(run: Run) -> dict:
    from vlmrl.diagnose.signs import find_signs

    best = run.manifest.best
    train = run.metrics("train")
    signs = find_signs(train, run.metrics("validation"))
    return {
        "run": run.id, "dir": str(run.dir), "status": run.status, "steps": len(train),
        "best": {"step": best.step, "metric": best.metric, "value": best.value} if best else None,
        "checkpoints": [p.name for p in run.checkpoint_dirs()],
        "last": train[-1] if train else None,
        "warnings": [{"name": s.name, "what": s.what, "step": s.step} for s in signs],
    }  # fmt: skip
