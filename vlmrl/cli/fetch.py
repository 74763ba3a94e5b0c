"""`vlmrl fetch`: download a recipe's model and data from the hub, so that runs need no network."""

from __future__ import annotations

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, say, tell


def register(app: typer.Typer) -> None:
    app.command("fetch", short_help="Download a recipe's model and data.")(fetch)


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
    emit({"needs": states}, as_json)
    if not as_json:
        say("everything is on this machine: runs of this recipe need no network")
