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
    int | None, typer.Option(min=1, help="Prompts to try; default 20, with --filter every row.", show_default=False)
]
Samples = Annotated[
    int | None,
    typer.Option(min=1, help="Responses for each; default rollout.samples_per_prompt.", show_default=False),
]
Solved = Annotated[
    str | None,
    typer.Option(
        help="When a response is solved: 'acc>=1'; a part of the reward, or `reward` for the score.",
        show_default=False,
    ),
]
Filter = Annotated[
    str | None,
    typer.Option("--filter", help="Keep rows by solve rate, such as 0.1:0.9; write them to --out.", show_default=False),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Where --filter writes: a folder; rows of a table become a file (.parquet is added).",
        show_default=False,
    ),
]
Show = Annotated[int, typer.Option(min=0, help="Number of prompts to show with their responses.")]


def register(app: typer.Typer) -> None:
    app.command("try", short_help="Sample and score 20 prompts, no update.")(try_)


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
    """Sample prompts as training would and score them: the prompt verbatim, the images, truths, rewards, dead groups.

    Example: vlmrl try recipes/digits_im.toml --prompts 20 --set model.path=digits-sft

    The solve rate of a row is the share of its responses that are right, by the accuracy that the task or the reward
    gives; without one, its mean reward on the scale that the reward declares (RANGES); or the share for which --solved
    holds. Where nothing says it, only the spread of the rewards is shown.

    With --filter 0.1:0.9 --out DIR the rows worth training on are written: those that are neither always nor never
    solved. A trial that fails leaves no run; an interrupted one leaves the responses that were scored.
    """
    from vlmrl.inference.solve_rate import parse_solved
    from vlmrl.inference.trial import run_trial, trial_run
    from vlmrl.process import give_terminal
    from vlmrl.setup.checked_recipe import load_checked
    from vlmrl.store.layout import runs_root
    from vlmrl.store.printed_names import command_line

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
    """Return which rows to write, and where; None = none. Raises: DataError if they cannot be written to `out`."""
    from vlmrl.inference.filtered_dataset import check_target
    from vlmrl.inference.trial import Keep
    from vlmrl.tasks.source import open_source

    if bounds is None or out is None:
        return None
    return Keep(*bounds, check_target([open_source(data, recipe.reward) for data in recipe.data], out))
