"""`vlmrl eval`: a model on rows that training did not see, with 95% intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vlmrl.cli.eval_table import show_evaluation
from vlmrl.cli.output import JSON_HELP, emit, say, say_origin
from vlmrl.errors import RecipeError

if TYPE_CHECKING:
    from vlmrl.evaluate.records import Evaluation
    from vlmrl.inference.evaluation import EvalSettings, PlannedEvaluation
    from vlmrl.recipe.schema import Recipe
    from vlmrl.setup.model_origin import ModelOrigin


MODEL = typer.Argument(..., help="Run (id, prefix, name, `last`), Hugging Face folder or hub name.")
RECIPE = typer.Option(
    None, help="Recipe, or run, with the data and reward; default: the run's own.", show_default=False
)
DATA = typer.Option(
    None, help="Dataset to evaluate on instead of the recipe's: a folder or a table.", show_default=False
)
SPLIT = typer.Option(
    None, help="A split, or a table file such as rows.jsonl; default: test, else the rows that training validated on, "
    "else training rows, with a warning.", show_default=False,
)  # fmt: skip
SOURCE = typer.Option(None, help="Only this source of a recipe with several.", show_default=False)
CHECKPOINT = typer.Option("best", help="Of a run: best, last, or a step.")
SAMPLE = typer.Option(None, help="Sample at this temperature; default: greedy.", min=0.0, show_default=False)
SAMPLES = typer.Option(1, "--n", min=1, help="Responses a prompt; above 1 it needs --sample.")
MAX_ROWS = typer.Option(None, min=1, help="Only the first so many rows of each source.", show_default=False)
SEED = typer.Option(0, min=0, help="Seed of sampling.")
NAME = typer.Option(None, help="Name of the evaluation; default: rows, source, step.", show_default=False)
COMPARE = typer.Option(
    None, help="Another evaluation (folder, RUN/NAME, or RUN): paired differences.", show_default=False
)
SET = typer.Option([], "--set", help="Override one key of the recipe. May be repeated.", show_default=False)
FORCE = typer.Option(False, "--force", help="Replace an evaluation of that name.")
GPUS = typer.Option(
    None, help="GPUs, one process and one whole model each: a number (4) or which (0,2,5). Without a GPU: CPU "
    "processes. The numbers are those of one process.", show_default=False,
)  # fmt: skip
RUNS = typer.Option(None, help="Folder of the runs; default: $VLMRL_RUNS, else ./runs.", show_default=False)
JSON = typer.Option(False, "--json", help=JSON_HELP)


def register(app: typer.Typer) -> None:
    app.command("eval", short_help="Evaluate with 95% intervals.")(eval_)


def eval_(
    model: str = MODEL, recipe: str | None = RECIPE, data: str | None = DATA, split: str | None = SPLIT,
    source: str | None = SOURCE, checkpoint: str = CHECKPOINT, sample: float | None = SAMPLE, n: int = SAMPLES,
    max_rows: int | None = MAX_ROWS, seed: int = SEED, name: str | None = NAME, compare: str | None = COMPARE,
    overrides: list[str] = SET, force: bool = FORCE, gpus: str | None = GPUS, runs: Path | None = RUNS,
    as_json: bool = JSON,
) -> None:  # fmt: skip
    """Evaluate a run or a model: same prompt, parser and reward as in training, every number with its 95% interval.

    Example: vlmrl eval last   or   vlmrl eval last --split rows.jsonl --gpus 4   or   vlmrl eval models/merged

    Greedy unless --sample is given. An answer that cannot be parsed counts as wrong. Results are kept in the run's
    folder eval/; for a model that is no run, in a new run of kind eval.

    Intervals are Wilson's score interval at the effective sample size of rows that share images: never outside the
    range of a metric. A metric without a declared range counts as one from 0 to 1 while all its values are, and else
    has Student's t interval of the same clusters, as lengths always have. One row has none.
    """
    from vlmrl.cli.sft import warn
    from vlmrl.dist.rank_process import command_words, launched
    from vlmrl.inference import evaluation as work
    from vlmrl.inference.eval_recipe import choose_recipe, find_evaluation
    from vlmrl.inference.eval_rows import rows_to_evaluate
    from vlmrl.setup.model_origin import find_model
    from vlmrl.setup.open_values import settle_for_answers
    from vlmrl.store.layout import check_eval_name, eval_dir, runs_root

    if n > 1 and not sample:
        raise RecipeError(f"--n {n} needs --sample: greedy gives the same answer {n} times", hint="--sample 1.0")
    check_eval_name(name)
    root, argv = runs_root(runs), command_words()
    origin = find_model(model, root, int(checkpoint) if checkpoint.isdigit() else checkpoint)
    settings = work.EvalSettings(sample or None, n, name, seed, force)
    chosen = choose_recipe(origin, root, recipe=recipe, data=data, overrides=overrides)
    settled, warnings = settle_for_answers(chosen.recipe, origin.files)
    if not launched():
        warn(warnings)
    rows = rows_to_evaluate(settled, chosen.seen, split, max_rows, source)
    others = [find_evaluation(compare, root, r.source.split, r.source.name) for r in rows] if compare else None
    planned = work.plan(settled, origin, rows, chosen.run_dir, settings, argv)
    if not launched():
        say_origin(model, origin.parent)
        _announce(planned)
        if chosen.run_dir is not None and recipe is None and data is None and not overrides:
            _warn_of_changes(chosen.run_dir, planned)
        if gpus is not None:
            from vlmrl.cli.eval_ranks import evaluate_on

            run_dir = evaluate_on(gpus, settled, chosen.run_dir, root)
            if run_dir is not None:
                from vlmrl.evaluate.records import read_evaluation

                folders = [eval_dir(run_dir, p.name) for p in planned]
                _tell(folders, [read_evaluation(f) for f in folders], others, as_json)
                return
    found = _evaluate(settled, origin, planned, chosen.run_dir, root, settings, argv)
    if not launched():
        _tell([f.folder for f in found], [f.evaluation for f in found], others, as_json)


def _announce(planned: Sequence[PlannedEvaluation]) -> None:
    """Say which rows are evaluated, before any work; where they say nothing about new ones, what to do instead. What
    must be known of them is said once, beside the numbers.
    """
    for one in planned:
        rows = one.rows
        say(f"warning: {rows.described} (training rows)" if rows.role == "training" else rows.described)
        if rows.role == "training":
            there = f"; splits there: {', '.join(rows.others)}" if rows.others else ""
            say(f"hint: name other rows with --split, a split or a file such as rows.jsonl{there}")


def _warn_of_changes(run_dir: Path, planned: Sequence[PlannedEvaluation]) -> None:
    """Say which task, reward or prompt is not that of the run, whose own recipe is evaluated with."""
    from vlmrl.setup.run_records import changed_since
    from vlmrl.store.runs import open_run

    run = open_run(run_dir.parent, run_dir.name)
    if changed := changed_since(run, [one.rows.source for one in planned]):
        say(f"warning: changed since the run was made: {', '.join(changed)}")
        say("hint: these numbers do not compare with those of its training; the run's copies are in its folder kept/")


def _evaluate(
    recipe: Recipe, origin: ModelOrigin, planned: Sequence[PlannedEvaluation], run_dir: Path | None, root: Path,
    settings: EvalSettings, argv: Sequence[str],
) -> list[Any]:  # fmt: skip
    """Evaluate in this process: alone, or as one of those that a launcher started."""
    from vlmrl.dist.rank_process import join_evaluation
    from vlmrl.dist.world import join_world
    from vlmrl.inference import evaluation as work
    from vlmrl.store.layout import eval_log_path

    with join_world(recipe.model.device, recipe.parallel.timeout_seconds) as world, ExitStack() as stack:

        def make() -> Path:
            made = work.create_eval_run(root, recipe, origin, [p.rows for p in planned], argv)
            return stack.enter_context(made).dir

        place = world.from_main(make) if run_dir is None else run_dir
        log_name = planned[0].name
        join_evaluation(place, log_name)
        log = (lambda process: eval_log_path(place, log_name, process)) if world.size > 1 else None
        answerer = work.load_answerer(recipe, origin, settings, say if world.is_main else _silent, world=world, log=log)
        stack.callback(answerer.engine.close)
        progress = progress_line("evaluating") if world.is_main else _silent
        return work.run_evaluation(recipe, answerer, planned, place, settings, progress=progress, world=world)


def _silent(*words: Any) -> None:
    pass


def progress_line(what: str) -> Callable[[int, int], None]:
    """A counter on one line of a terminal; silent where stderr is no terminal."""
    from vlmrl.dist.rank_process import stderr

    def tell(done: int, total: int) -> None:
        stream = stderr()
        if stream.isatty():
            stream.write(f"\r  {what} {done}/{total}" + ("\n" if done == total else ""))
            stream.flush()

    return tell


def _tell(
    folders: Sequence[Path], evaluations: Sequence[Evaluation], others: Sequence[Path] | None, as_json: bool
) -> None:
    against: Sequence[Path | None] = others or [None] * len(folders)
    results = [_result(*each) for each in zip(folders, evaluations, against, strict=True)]
    compared = None if others is None else str(others[0]) if len(others) == 1 else [str(o) for o in others]
    emit({"evaluations": results, "compared_with": compared}, as_json)
    if not as_json:
        for result, other in zip(results, against, strict=True):
            show_evaluation(result, other)


def _result(folder: Path, evaluation: Evaluation, other: Path | None) -> dict[str, Any]:
    """What --json prints of one evaluation: its summary, where it is, and the differences to another one."""
    from vlmrl.evaluate.compare import differences
    from vlmrl.evaluate.records import read_evaluation
    from vlmrl.evaluate.scoring_rewards import scored_alike

    result = {"name": folder.name, "folder": str(folder), **evaluation.summary}
    if "set_metrics" in result:
        result["set_metrics"] = {name: value for name, value in result["set_metrics"].items() if name != "replicates"}
    if other is not None:
        before = read_evaluation(other)
        metas = [e.summary.get("meta") or {} for e in (before, evaluation)]
        result["scored_alike"] = scored_alike(*metas) is not False
        result["differences"] = differences(evaluation, before)
    return result
