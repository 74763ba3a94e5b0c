"""`vlmrl try`: sample and score several responses to each of some prompts; nothing is trained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, say, say_origin, show_warnings
from vlmrl.cli.show.progress import counter
from vlmrl.cli.show.trial import show_kept, show_trial, trial_fields
from vlmrl.errors import RecipeError

if TYPE_CHECKING:
    from vlmrl.inference.trial import Keep
    from vlmrl.recipe.schema import Recipe


Prompts = Annotated[
    int | None,
    typer.Option(min=1, help="Number of prompts; default: 20, with --filter every row.", show_default=False),
]
Samples = Annotated[
    int | None,
    typer.Option(min=1, help="Responses per prompt; default: rollout.samples_per_prompt.", show_default=False),
]
Solved = Annotated[
    str | None,
    typer.Option(
        help="Condition for a right response, such as 'acc>=1': a part of the reward, or `reward` for the score.",
        show_default=False,
    ),
]
Filter = Annotated[
    str | None,
    typer.Option(
        "--filter",
        help="Write the rows with a solve rate in this range, such as 0.1:0.9, to --out.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder that --filter writes; if the rows come from a table, a file (.parquet is added).",
        show_default=False,
    ),
]
Show = Annotated[int, typer.Option(min=0, help="Number of prompts to show with their responses.")]


def register(app: typer.Typer) -> None:
    app.command("try", short_help="Sample and score some prompts; train nothing.")(try_)


def try_(
    ctx: typer.Context,
    recipe: options.RecipeName,
    prompts: Prompts = None,
    samples: Samples = None,
    solved: Solved = None,
    filter_: Filter = None,
    out: Out = None,
    show: Show = 3,
    overrides: options.Set = None,
    runs: options.Runs = None,
    debug: options.Debug = False,
    as_json: options.Json = False,
) -> None:
    """Sample responses as training would, and score them. Nothing is trained.

    It shows the first prompt verbatim, the images, truths, rewards and dead groups.

    Example: vlmrl try recipes/digits_im.toml --set model.path=digits-sft

    The solve rate of a row is the share of its responses that are right: those for which --solved holds, or else those
    that are right by the accuracy of the task or the reward. Without an accuracy, it is the mean reward on the scale
    that the reward declares (RANGES). Without such a scale, only the spread of the rewards is shown.

    --filter 0.1:0.9 --out DIR writes the rows worth training on: those that are neither always nor never solved. A
    trial that fails leaves no run. An interrupted trial leaves the responses that were scored.
    """
    from vlmrl.inference.solve_rate import parse_solved
    from vlmrl.inference.trial import run_trial, trial_run
    from vlmrl.process import give_terminal
    from vlmrl.setup.checked_recipe import load_checked
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import command_line

    bounds = _bounds(filter_, out)
    condition = parse_solved(solved) if solved is not None else None
    root = runs_root(runs)
    loaded, warnings = load_checked(Path(recipe), overrides or [], None, root, trains=False)
    show_warnings(warnings)
    if debug:
        give_terminal()
    keep = _keep(loaded.recipe, bounds, out)
    number = prompts if prompts is not None or keep else 20
    n = samples or loaded.recipe.rollout.samples_per_prompt
    with trial_run(loaded, root, ["vlmrl", *options.typed_words(ctx)]) as run:
        say_origin(loaded.recipe.model.path, run.manifest.parent)
        trial = run_trial(
            loaded.recipe,
            run,
            root,
            prompts=number,
            samples=n,
            keep=keep,
            solved=condition,
            progress=counter("sampling", sys.stderr),
        )
    result = trial_fields(run, trial)
    if as_json:
        return emit(result, as_json)
    show_trial(trial, result, show)
    show_kept(result)
    say(f"rollouts: {run.dir}   report: {command_line(('report',), run.dir, None)}")


def _bounds(filter_: str | None, out: Path | None) -> tuple[float, float] | None:
    """Return the lowest and the highest solve rate to keep; None without --filter. Raises: RecipeError."""
    from vlmrl.inference.trial import parse_filter

    if (filter_ is None) != (out is None):
        missing = "--out: where to write the rows" if out is None else "--filter: which rows to write"
        raise RecipeError(f"{missing} is missing", hint="vlmrl try RECIPE --filter 0.1:0.9 --out data/worth-it")
    return parse_filter(filter_) if filter_ is not None else None


def _keep(recipe: Recipe, bounds: tuple[float, float] | None, out: Path | None) -> Keep | None:
    """Return the solve rates of the rows to write, and where; None = none. Raises: DataError for an unusable `out`."""
    from vlmrl.inference.filtered_dataset import check_target
    from vlmrl.inference.trial import Keep
    from vlmrl.tasks.source import open_source

    if bounds is None or out is None:
        return None
    return Keep(*bounds, check_target([open_source(data, recipe.reward) for data in recipe.data], out))
