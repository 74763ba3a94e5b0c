"""`vlmrl try`: sample and score several responses to each of some prompts; nothing is trained."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmrl.cli import options
from vlmrl.cli.output import console, emit, line_of_code, say, say_origin, shorten, show_warnings
from vlmrl.cli.progress import counter
from vlmrl.errors import RecipeError
from vlmrl.untrusted import number_of, one_line, visible

if TYPE_CHECKING:
    from vlmrl.evaluate.trial import Keep
    from vlmrl.recipe.schema import Recipe


BAR_WIDTH = 30
"""Number of characters of the longest bar of a histogram."""
MAX_TRUTH = 200
"""Maximum number of characters of a truth that are shown."""


def trial_fields(run: Any, trial: Any) -> dict[str, Any]:
    from vlmrl.evaluate.trial import spread, summary
    from vlmrl.report.rollout_text import sample_fields
    from vlmrl.reward_check.run import finite

    first = trial.first
    groups = [
        {
            "prompt_id": group.row.prompt_id,
            "source": group.row.source,
            "truth": dict(group.row.truth),
            "solve_rate": rate,
            "spread": spread(group),
            "samples": [sample_fields(s) for s in group.samples],
            "boxes": [str(path) for path in trial.drawn.get(number, ())],
        }
        for number, (group, rate) in enumerate(zip(trial.groups, trial.solve_rates, strict=True))
    ]
    # If the processor cuts images into tiles, there are more pictures than images: then no file names are shown.
    pictures = trial.pictures if len(trial.pictures) == len(first.row.media) else [None] * len(first.row.media)
    return finite(
        {
            "run": run.id,
            "dir": str(run.dir),
            "prompt": first.text,
            "prompt_tokens": len(first.prompt_ids),
            "image_tokens": first.num_image_tokens,
            "images": [
                {"stored": [m.width, m.height], "seen": list(seen), "png": str(path) if path else None}
                for m, seen, path in zip(first.row.media, first.image_sizes, pictures, strict=True)
            ],
            "summary": summary(trial),
            "solve_rate_is": {name: rate.words if rate else None for name, rate in trial.rates.items()},
            "no_solve_rate": trial.no_rate,
            "stand_in": trial.stand_in,
            "boxes": {name: fit.fields() for name, fit in trial.fits.items()},
            "kept": {
                name: {"path": str(path) if path else None, "rows": rows} for name, (path, rows) in trial.kept.items()
            },
            "groups": groups,
        }
    )


def show_trial(trial: Any, result: dict[str, Any], show: int) -> None:
    from rich.rule import Rule
    from rich.text import Text

    out = console(stderr=False)
    out.print(Rule("the first prompt, verbatim"))
    out.print(Text(visible(result["prompt"])))
    out.print(Rule())
    out.print(Text(f"this prompt: {result['prompt_tokens']} tokens, {result['image_tokens']} of them image tokens"))
    for image in result["images"]:
        stored, seen = ("{} x {}".format(*image[key]) for key in ("stored", "seen"))
        out.print(Text(f"image {stored} pixels, seen as {seen}" + (f": {image['png']}" if image["png"] else "")))
    for group in result["groups"][:show]:
        out.print(Text(f"\n{one_line(group['prompt_id'])}  {_rate(group, result)}", style="bold"))
        if group["truth"]:
            out.print(Text(f"   truth  {_truth(group['truth'])}"))
        for sample in group["samples"]:
            out.print(Text(_sample_line(sample)))
        for path in group["boxes"]:
            out.print(Text(f"   boxes  {path}"))
    _show_summary(result)
    _show_boxes(result)
    if result["stand_in"]:
        out.print(Text(f"{'advantages':16} {result['stand_in']}"))


def _rate(group: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return the solve rate of a prompt with its definition; if there is none, the spread of its rewards."""
    if group["solve_rate"] is not None:
        return f"solve rate {group['solve_rate']:.2f} (here: {result['solve_rate_is'][group['source']]})"
    stats = group["spread"]
    if stats is None:
        return "no response was judged"
    return f"reward {stats['mean']:.3f} on average, {stats['min']:.3f} to {stats['max']:.3f}, std {stats['std']:.3f}"


def _truth(truth: Mapping[str, Any]) -> str:
    """Return a row's truth on one line: the value of its only field, or every field with its name."""
    texts = {
        name: "; ".join(map(str, value)) if isinstance(value, list) else str(value) for name, value in truth.items()
    }
    shown = next(iter(texts.values())) if len(texts) == 1 else ", ".join(f"{k}: {v}" for k, v in texts.items())
    return shorten(one_line(shown), MAX_TRUTH)


def _sample_line(sample: Mapping[str, Any]) -> str:
    from vlmrl.cli.progress import MAX_TEXT
    from vlmrl.report.rollout_text import ending_words, sample_lines

    parts = " ".join(f"{name} {'-' if v is None else f'{v:.2f}'}" for name, v in sample["parts"].items())
    text = [] if sample.get("turns") else [shorten(visible(sample["text"].replace("\n", "\\n")), MAX_TEXT)]
    score = " " * 5 + "-" if sample["error"] else f"{sample['score']:6.3f}"
    ending = f"  ({words})" if (words := ending_words(sample)) else ""
    message = line_of_code(sample["error"] or sample["note"])
    note = f"  [{message}]" if message else ""
    more = "".join(f"\n          {line}" for line in (*text, *sample_lines(sample)))
    return f"  {score}  {one_line(parts)}{ending}{note}{more}"


def _show_summary(result: Mapping[str, Any]) -> None:
    from rich.text import Text

    from vlmrl.store.metrics import other_limits

    out, summary = console(stderr=False), result["summary"]
    if "solve_rate/mean" in summary:
        words = "; ".join(dict.fromkeys(words for words in result["solve_rate_is"].values() if words))
        counts = summary["solve_rate/histogram"]
        title = f"\nsolve rate of {number_of(sum(counts), 'prompt')} (mean {summary['solve_rate/mean']:.2f}; {words})"
        out.print(Text(title, style="bold"))
        for i, count in enumerate(counts):
            bar = "#" * round(BAR_WIDTH * count / max(counts))
            out.print(Text(f"  {i / len(counts):.1f} - {(i + 1) / len(counts):.1f}  {bar} {count}"))
    for why in result["no_solve_rate"]:
        out.print(Text(f"\nno solve rate: {why}"))
    parts = [(name.rpartition("/")[2], value) for name, value in summary.items() if name.startswith("reward/part/")]
    ends = "".join(f"; {share:.0%} ended by the {limit}" for limit, share in other_limits(summary).items())
    limit = "a token limit" if "episode/turns" in summary else "rollout.max_new_tokens"
    longest, longest_prompt = (summary[f"rollout/{what}_tokens_max"] for what in ("response", "prompt"))
    span = f"{summary['reward/min']:.3f} to {summary['reward/max']:.3f}"
    rows = [
        ("reward", f"{summary['reward/mean']:.3f}   " + "  ".join(f"{name} {value:.3f}" for name, value in parts)),
        ("spread", f"{span}; std within a prompt {summary['reward/std_within_groups']:.3f} on average"),
        ("dead groups", f"{summary['rollout/dead_group_share']:.0%} teach nothing: all samples have the same score"),
        ("cut responses", f"{summary['rollout/truncated_share']:.0%} reached {limit}{ends}"),
        ("prompt tokens", f"{summary['rollout/prompt_tokens_mean']:.0f} on average, longest {longest_prompt:,}"),
        ("response tokens", f"{summary['rollout/response_tokens_mean']:.0f} on average, longest {longest}"),
        ("speed", f"{summary['rollout/tokens_per_second']:,.0f} tokens/s"),
    ]
    for name, value in rows:
        out.print(Text(f"{name:16} {value}"))


def _show_boxes(result: Mapping[str, Any]) -> None:
    """Print how well boxes fit the truth in each of the coordinates, and where the pictures of both are."""
    from rich.text import Text

    from vlmrl.tasks.positions import COLOUR_WORDS

    out = console(stderr=False)
    for name, fit in result["boxes"].items():
        out.print(Text(f"{'boxes':16} {one_line(name)}: {fit['words']}", style="bold yellow" if fit["better"] else ""))
        if fit["advice"]:
            out.print(Text(f"{'':16} {fit['advice']}"))
    if pictures := [path for group in result["groups"] for path in group["boxes"]]:
        out.print(Text(f"{'':16} {len(pictures)} pictures ({COLOUR_WORDS}) in {Path(pictures[0]).parent}"))


Prompts = Annotated[int | None, typer.Option(min=1, help="Number of prompts; default: 20, with --filter every row.")]
Samples = Annotated[int | None, typer.Option(min=1, help="Responses per prompt; default: rollout.samples_per_prompt.")]
Solved = Annotated[
    str | None,
    typer.Option(
        help="Condition for a right response, such as 'acc>=1': a part of the reward, or `reward` for the score."
    ),
]
Filter = Annotated[
    str | None,
    typer.Option("--filter", help="Write the rows with a solve rate in this range, such as 0.1:0.9, to --out."),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder that --filter writes; if the rows come from a table, a file (.parquet is added)."),
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
    from vlmrl.process import give_terminal
    from vlmrl.setup.checked_recipe import load_checked
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import command_line

    bounds = _bounds(filter_, out)
    root = runs_root(runs)
    loaded, warnings = load_checked(Path(recipe), overrides or [], None, root, trains=False)
    # Imported here: a wrong name is reported before large libraries are loaded.
    from vlmrl.evaluate.trial import parse_solved, run_trial, trial_run

    condition = parse_solved(solved) if solved is not None else None
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
    if emit(result, as_json):
        return
    show_trial(trial, result, show)
    for index, (name, kept) in enumerate(result["kept"].items()):
        if kept["path"] is None:
            say(f"{name}: no row has a solve rate in that range; nothing was written")
            continue
        say(f"{name}: {kept['rows']} rows kept in {kept['path']}")
        say(f"use them: --set data.{index}.path={kept['path']}")
    say(f"rollouts: {run.dir}   report: {command_line(('report',), run.dir, None)}")


def _bounds(filter_: str | None, out: Path | None) -> tuple[float, float] | None:
    """Return the lowest and the highest solve rate to keep; None without --filter. Raises: RecipeError."""
    if (filter_ is None) != (out is None):
        missing = "--out: where to write the rows" if out is None else "--filter: which rows to write"
        raise RecipeError(f"{missing} is missing", hint="vlmrl try RECIPE --filter 0.1:0.9 --out data/worth-it")
    if filter_ is None:
        return None
    low, _, high = filter_.partition(":")
    try:
        bounds = float(low), float(high)
    except ValueError:
        bounds = math.nan, math.nan
    if not 0 <= bounds[0] <= bounds[1] <= 1:
        hint = "write --filter 0.1:0.9: it keeps the rows with 10% to 90% of the responses solved"
        raise RecipeError(f"--filter {filter_} is not two numbers from 0 to 1, the smaller first", hint=hint)
    return bounds


def _keep(recipe: Recipe, bounds: tuple[float, float] | None, out: Path | None) -> Keep | None:
    """Return the solve rates of the rows to write, and where; None = none. Raises: DataError for an unusable `out`."""
    from vlmrl.evaluate.trial import Keep, check_target
    from vlmrl.tasks.source import open_source

    if bounds is None or out is None:
        return None
    return Keep(*bounds, check_target([open_source(data, recipe.reward) for data in recipe.data], out))
