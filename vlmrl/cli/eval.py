"""`vlmrl eval`: a model on a split, with intervals that resample images."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from vlmrl.cli.output import JSON_HELP, emit, say, show_table
from vlmrl.errors import RecipeError, StoreError


def register(app: typer.Typer) -> None:
    app.command("eval", short_help="Evaluate with 95% intervals.")(eval_)


def eval_(
    model: Annotated[str, typer.Argument(help="Run (id, prefix, name, `last`), Hugging Face folder or hub name.")],
    recipe: Annotated[
        str | None,
        typer.Option(help="Recipe with the data and reward; default: the run's own.", show_default=False),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Dataset to evaluate on instead of the recipe's: a folder or a table.", show_default=False),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Default: test, else validation, else the only one there is.", show_default=False),
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="Of a run: best, last, or a step.")] = "best",
    sample: Annotated[
        float | None,
        typer.Option(help="Sample at this temperature; default: greedy.", min=0.0, show_default=False),
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Responses a prompt; above 1 it needs --sample.")] = 1,
    max_rows: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many rows of each source.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling and of the intervals.")] = 0,
    name: Annotated[
        str | None, typer.Option(help="Name of the evaluation; default: split, source, step.", show_default=False)
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(help="Another evaluation (folder, RUN/NAME, or RUN): paired differences.", show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key of the recipe. May be repeated.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an evaluation of that name.")] = False,
    runs: Annotated[Path | None, typer.Option(help="Folder of the runs; default: $VLMRL_RUNS, else ./runs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Evaluate a run or a model: same prompt, parser and reward as in training, every number with its 95% interval.

    Example: vlmrl eval last --split test   or   vlmrl eval models/merged --recipe recipes/digits_im.toml

    Greedy unless --sample is given. An answer that cannot be parsed counts as wrong. Results are kept in the run's
    folder eval/; for a model that is no run, in a new run of kind eval.
    """
    from vlmrl.store.layout import runs_root
    from vlmrl.train import evaluation as work
    from vlmrl.train.origin import find_model

    if n > 1 and not sample:
        raise RecipeError(f"--n {n} needs --sample: greedy gives the same answer {n} times", hint="--sample 1.0")
    if name is not None and (name.startswith(".") or "/" in name or "\\" in name or not name.strip()):
        raise StoreError(f"`{name}` cannot be the name of an evaluation", hint="a plain name without slashes")
    root, argv = runs_root(runs), ["vlmrl", *sys.argv[1:]]
    origin = find_model(model, root, int(checkpoint) if checkpoint.isdigit() else checkpoint)
    settings = work.EvalSettings(split, sample or None, n, max_rows, name, seed, force)
    chosen = work.choose_recipe(origin, recipe=recipe, data=data, overrides=overrides or [])
    sources = work.open_splits(chosen, split)
    other = work.find_evaluation(compare, root, sources[0].split) if compare else None
    run_dir = origin.run_dir
    if run_dir is not None:
        work.check_names(chosen, origin, sources, run_dir, settings)
    with ExitStack() as stack:
        answerer = work.load_answerer(chosen, origin, settings, say)
        stack.callback(answerer.engine.close)
        if run_dir is None:
            run_dir = stack.enter_context(work.create_eval_run(root, chosen, origin, sources, argv)).dir
        found = work.run_evaluation(
            chosen, origin, answerer, sources, run_dir, settings, argv=argv, progress=progress_line("evaluating")
        )
    results = [_result(entry, other) for entry in found]
    emit({"evaluations": results, "compared_with": str(other) if other else None}, as_json)
    if not as_json:
        for result in results:
            _show(result, other)


def progress_line(what: str) -> Callable[[int, int], None]:
    """A counter on one line of a terminal; silent where stderr is no terminal."""

    def tell(done: int, total: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r  {what} {done}/{total}" + ("\n" if done == total else ""))
            sys.stderr.flush()

    return tell


def _result(entry: Any, other: Path | None) -> dict[str, Any]:
    """What --json prints of one evaluation: its summary, where it is, and the differences to another one."""
    from vlmrl.evaluate.metrics import paired_differences
    from vlmrl.evaluate.records import read_evaluation

    summary = entry.evaluation.summary
    result = {"name": entry.folder.name, "folder": str(entry.folder), **summary}
    if other is not None:
        result["differences"] = paired_differences(entry.evaluation.rows, read_evaluation(other).rows)
    return result


def _show(result: dict[str, Any], other: Path | None) -> None:
    meta, sampling = result["meta"], result["meta"]["sampling"]
    of = meta["model"] if meta["checkpoint"] is None else f"{meta['model']} {meta['checkpoint']}"
    how = "greedy" if sampling["greedy"] else f"T={sampling['temperature']:g}, {sampling['samples']} samples a prompt"
    numbers = (meta.get("paper") or {}).get("numbers") or {}
    baselines, differences = result["baselines"], result.get("differences", {})
    headers = ["metric", "value", "95% interval", "rows"]
    headers += ["without looking"] * bool(baselines) + ["paper"] * bool(numbers) + ["difference"] * bool(other)
    rows = []
    for name, m in result["metrics"].items():
        row = [name, number(m["value"]), interval(m), f"{m['n']:,}"]
        row += [number(baselines.get(name, {}).get("value"))] if baselines else []
        row += [str(numbers.get(name, ""))] if numbers else []
        row += [difference(differences.get(name))] if other else []
        rows.append(row)
    title = f"{of} on {meta['source']}/{meta['split']}: {result['prompts']} prompts, {result['images']} images, {how}"
    show_table(title, headers, rows)
    if numbers:
        say(f"paper: {meta['paper'].get('source', 'no source named')}")
    if other:
        say(f"difference: this minus {other}, on the rows both have; * = its interval excludes 0")
    if "accuracy_of" in result:
        say(f"accuracy is {result['accuracy_of']}")
    if result["reward_errors"]:
        say(f"the reward failed for {result['reward_errors']} of {result['rows']} answers: they are not in `reward`")
    if meta["split"] != "test":
        say(f"this is the split `{meta['split']}`, not a test split")
    say(f"kept in {result['folder']}")


def number(value: float | None) -> str:
    """Three decimals below 10, one above; empty for None."""
    if value is None:
        return ""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def interval(m: dict[str, Any]) -> str:
    return "" if m["low"] is None or m["high"] is None else f"[{number(m['low'])}, {number(m['high'])}]"


def difference(m: dict[str, Any] | None) -> str:
    """`+0.021 [+0.004, +0.037] *`; the star says that the interval excludes zero."""
    if m is None:
        return ""
    star = " *" if m["low"] is not None and (m["low"] > 0 or m["high"] < 0) else ""
    ends = "" if m["low"] is None else f" [{m['low']:+.3f}, {m['high']:+.3f}]"
    return f"{m['value']:+.3f}{ends}{star}"
