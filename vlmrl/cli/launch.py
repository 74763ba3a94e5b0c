"""`vlmrl launch` writes files that start runs on other machines. `vlmrl fetch` downloads a recipe's model and data."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, say, show_warnings, tell

group = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Write a batch file that starts a run with Slurm."
)


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="launch")
    app.command("fetch", short_help="Download a recipe's model and data.")(fetch)


@group.callback()
def _group() -> None:
    pass


@group.command()
def slurm(
    recipe: options.RecipeFile,
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs on each machine.")] = 8,
    time: Annotated[str | None, typer.Option(help="Time limit, such as 24:00:00; default: the partition's.")] = None,
    stop_seconds: Annotated[
        int, typer.Option(min=1, help="Seconds before the limit at which the run saves and the job is requeued.")
    ] = 600,
    cpus: Annotated[int | None, typer.Option(min=1, help="Number of CPU cores per machine.")] = None,
    container: Annotated[str | None, typer.Option(help="Image for Slurm's container plugin (pyxis).")] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="Another #SBATCH line: --sbatch=--account=me. May be repeated.")
    ] = None,
    overrides: options.Set = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write; default: <recipe>.sbatch in this folder.")
    ] = None,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Write a Slurm batch file.

    It starts one launcher per machine. Before the time limit the run is saved; then the job is requeued and resumes it.

    Example: vlmrl launch slurm recipes/digits_im.toml --nodes 4 --time 24:00:00
    """
    from vlmrl.launch.slurm import SlurmJob, batch_file
    from vlmrl.setup.checked_recipe import load_checked
    from vlmrl.store.layout import runs_root

    changes = tuple(overrides or ())
    loaded, warnings = load_checked(recipe, changes, None, runs_root(runs), asks=False)
    show_warnings(warnings)
    target = output or Path(f"{loaded.path.stem}.sbatch")
    job = SlurmJob(
        recipe=recipe,
        folder=Path.cwd(),
        command="train" if loaded.recipe.kind == "rl" else "sft",
        nodes=nodes,
        gpus=gpus,
        time=time,
        stop_seconds=stop_seconds,
        cpus=cpus,
        container=container,
        sbatch=tuple(sbatch or ()),
        overrides=changes,
        runs=runs,
    )
    target.write_text(batch_file(job, target.name), encoding="utf-8")
    if not emit({"file": str(target), "nodes": nodes, "gpus": gpus}, as_json):
        say(f"wrote {target}; submit it with: sbatch {quote(str(target))}")
        say(f"nodes without a network: first run vlmrl fetch {quote(str(recipe))}")


def fetch(
    recipe: options.RecipeFile,
    overrides: options.Set = None,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Download the model and the data of a recipe into the local cache. Runs then need no network.

    Use it on a machine with a network, such as a login node.

    Example: vlmrl fetch recipes/digits_im.toml
    """
    from vlmrl.launch.hub_fetch import needs_of
    from vlmrl.recipe.load import load_recipe
    from vlmrl.store.layout import runs_root

    states = []
    for need in needs_of(load_recipe(recipe, overrides=overrides or []).recipe, runs_root(runs)):
        here = need.is_here()
        if not here:
            say(f"fetching {need.kind} {need.name} ...")
            need.fetch()
        state = "fetched" if not here else "in the cache" if need.on_hub else "local"
        (say if as_json else tell)(f"{need.kind} {need.name}: {state}")
        states.append({"kind": need.kind, "name": need.name, "state": state})
    if not emit({"needs": states}, as_json):
        say("everything is on this machine: runs of this recipe need no network")
