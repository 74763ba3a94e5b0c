"""`vlmrl eval`: evaluate a model on rows that training did not see, with 95% intervals.

The model is loaded here, or named at a server with `--endpoint` and `--model`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, say, say_origin, show_table, show_warnings, tell
from vlmrl.cli.progress import counter
from vlmrl.errors import Problem, RecipeError
from vlmrl.untrusted import plural

if TYPE_CHECKING:
    from vlmrl.dist.world import World
    from vlmrl.evaluate.eval import EvalSettings, PlannedEvaluation
    from vlmrl.evaluate.eval_rows import ChosenRecipe, EvalRows
    from vlmrl.evaluate.records import Evaluation
    from vlmrl.launch.request import AnswerRequest
    from vlmrl.recipe.schema import Recipe
    from vlmrl.services.client import EndpointClient, EndpointOptions
    from vlmrl.setup.model_origin import ModelOrigin


MEASURES_LEGEND = (
    "all responses: those that cannot be measured count as the worst value; ceiling: the truth beside itself; share: "
    "all responses / ceiling"
)


def show_evaluations(results: Sequence[dict[str, Any]], others: Sequence[Path | None]) -> None:
    """Print the metrics of evaluations. Notes that are the same for several are printed once, at the end.

    Args:
        others: for each one, folder of the evaluation that it is compared with.
    """
    legends: dict[str, None] = {}
    for result, other in zip(results, others, strict=True):
        legends |= dict.fromkeys(_show_evaluation(result, other))
    for legend in legends:
        tell(legend)


def _show_evaluation(result: dict[str, Any], other: Path | None) -> list[str]:
    """Print the metrics of one evaluation and what holds for it alone. Return the notes on how to read the table."""
    from vlmrl.evaluate.measures import measure_lines, measured_names
    from vlmrl.evaluate.metrics import task_problems
    from vlmrl.evaluate.over_training import published_here
    from vlmrl.evaluate.repeated import BEGINNINGS
    from vlmrl.store.evaluated_rows import image_condition, role_label
    from vlmrl.tasks.reflection import PREFIX

    meta = result["meta"]
    numbers = published_here(meta.get("paper") or {}, meta)
    baselines, differences = result["baselines"], result.get("differences", {})
    headers = ["metric", "value", "95% interval", "n"]
    headers += ["blind baseline"] * bool(baselines) + ["paper"] * bool(numbers) + ["difference"] * bool(other)
    rows, left_out = [], _empty_group(result) | (measured_names(result) if measure_lines(result) else set())
    for name, m in result["metrics"].items():
        row = [name, number(m["value"]), interval(m), f"{m['n']:,}"]
        row += [number(baselines.get(name, {}).get("value"))] if baselines else []
        row += [str(numbers.get(name, "-"))] if numbers else []
        row += [difference(differences.get(name))] if other else []
        if name not in left_out:
            rows.append(row)
    show_table(_heading(result), headers, rows)
    show_measures(result)
    if episodes := result.get("episodes"):
        tell(episode_words(episodes))
    undefined = (result.get("set_metrics") or {}).get("undefined") or ()
    if _empty_group(result):
        tell(f"{PREFIX.rstrip('/')}: none in these answers")
    elif undefined:
        tell(f"not defined on these answers: {', '.join(undefined)}")
    if result["rows"] > result["prompts"] and not any(name.startswith(BEGINNINGS) for name in result["metrics"]):
        tell(
            "pass@k, maj@k and mean@k need an accuracy: name the part that is 1 for a right answer: "
            "--set reward.accuracy=PART"
        )
    if other:
        tell(f"difference: this minus {other}, on the rows both have; * = its interval excludes 0")
        if not result.get("scored_alike", True):
            ours = ", nor is accuracy, which is one of the parts" if "accuracy_of" in result else ""
            tell(f"the two were scored by different rewards: `reward` and `part/...` are not comparable{ours}")
    if (same := result.get("one_text")) and not image_condition(meta):
        say(f"warning: {same}: the numbers say nothing of what the model sees")
    for problem in task_problems(result):
        say(f"warning: {problem}")
    if probe := result.get("blind_probe"):
        show_blind_probe(probe)
    label = role_label(meta)
    if label:
        tell(f"these are {label}")
    say(f"saved in {result['folder']}")
    return _legends(result, [name for name in result["metrics"] if name not in left_out], bool(numbers))


def _heading(result: Mapping[str, Any]) -> str:
    """Return model, rows and sampling. Example: im step-000020 on digits/test: 40 prompts, 80 images, greedy."""
    from vlmrl.store.evaluated_rows import image_condition, sampling_words

    meta = result["meta"]
    of = meta["model"] if meta["checkpoint"] is None else f"{meta['model']} {meta['checkpoint']}"
    of += f" at {meta['endpoint']}" if meta.get("endpoint") else ""
    counts = [f"{result['prompts']:,} prompt{plural(result['prompts'])}"]
    counts += [f"{result['rows']:,} responses"] * (result["rows"] != result["prompts"])
    counts += [f"{result['images']:,} image{plural(result['images'])}"] * bool(result["images"])
    counts += [f"shown: {changed}"] if (changed := image_condition(meta)) else []
    place = meta.get("file") or f"{meta['source']}/{meta['split']}"
    return f"{of} on {place}: {', '.join(counts)}, {sampling_words(meta)}"


def episode_words(metrics: Mapping[str, float]) -> str:
    """Return the turns, calls, tool errors and endings of episodes in one line."""
    from vlmrl.store.metrics import ended_by

    words = [f"turns {metrics['episode/turns']:.1f}", f"calls {metrics['episode/calls']:.1f}"]
    words += [f"tool errors {metrics['episode/tool_errors']:.0%}"] if "episode/tool_errors" in metrics else []
    endings = {
        name.removeprefix(ended_by("")): share for name, share in metrics.items() if name.startswith(ended_by(""))
    }
    words += [f"{ending.replace('_', ' ')} {share:.0%}" for ending, share in endings.items()]
    return f"episodes: {'  '.join(words)}"


def _empty_group(result: Mapping[str, Any]) -> set[str]:
    """Return the metrics of reflection if all of them are 0: one line says so."""
    from vlmrl.tasks.reflection import PREFIX

    names = {name for name in result["metrics"] if name.startswith(PREFIX)}
    return names if all(result["metrics"][name]["value"] == 0 for name in names) else set()


def _legends(result: Mapping[str, Any], names: Sequence[str], has_paper: bool) -> list[str]:
    """Return the notes on how to read the metrics `names` of a table."""
    from vlmrl.evaluate.estimates import METHOD, NO_INTERVAL
    from vlmrl.evaluate.repeated import BEGINNINGS
    from vlmrl.store.evaluated_rows import method_of, set_method_of

    metrics = {name: result["metrics"][name] for name in names}
    legends = []
    if any(name.startswith(BEGINNINGS) for name in names):
        legends.append("n counts responses; for pass@k, maj@k and mean@k it counts prompts")
    dash = f"; - = none: {NO_INTERVAL}" if any(interval(m) == "-" for m in metrics.values()) else ""
    method = method_of(result)
    legends.append(f"intervals: {'95%, see `vlmrl eval --help`' if method == METHOD else method}{dash}")
    if (of_sets := set_method_of(result)) and metrics.keys() & set(result["set_metrics"]["names"]):
        legends.append(f"intervals {of_sets}")
    if has_paper:
        legends.append(f"paper: {result['meta']['paper'].get('source', 'no source named')}")
    if "accuracy_of" in result:
        legends.append(f"accuracy is {result['accuracy_of']}")
    return legends


def show_measures(result: Mapping[str, Any]) -> None:
    """Print the measures of a task side by side, and which ones are absent."""
    from vlmrl.evaluate.measures import absent_words, measure_lines

    lines = measure_lines(result)
    if lines:
        cells = []
        for x in lines:
            ceiling = number(x.ceiling["value"] if x.ceiling else None)
            cells.append([x.name, *_cells(x.every), *_cells(x.valid), ceiling, number(x.share)])
        show_table("", ["measure", "all responses", "n", "the valid ones", "n", "ceiling", "share"], cells)
        tell(MEASURES_LEGEND)
    for line in absent_words(result):
        tell(line)


def _cells(m: Mapping[str, Any] | None) -> list[str]:
    """Return a metric such as `0.812 [0.790, 0.831]`, and its number of responses."""
    return ["-", "-"] if m is None else [f"{number(m['value'])} {interval(dict(m))}", f"{m['n']:,}"]


def show_blind_probe(probe: dict[str, Any]) -> None:
    """Print how much of the metrics needs the images."""
    from vlmrl.evaluate.significance import leading_metrics
    from vlmrl.store.evaluated_rows import changed_thing

    tell("")
    rows = []
    for name in leading_metrics(probe["metrics"]):
        m, share = probe["metrics"][name], probe["metrics"][name]["share"]
        part = "-" if share is None else f"{number(share['value'])} {interval(share)}"
        chance = number(m["chance"]["value"]) if m["chance"] else "-"
        needed = difference({"value": m["difference"], "low": m["low"], "high": m["high"]})
        rows.append([name, number(m["normal"]), number(m["changed"]), needed, part, chance])
    what = changed_thing(probe["images"])
    headers = ("metric", f"with {what}", f"without ({probe['images']})", f"needs the {what}", "share", "chance")
    show_table(f"Blind probe against {probe['normal']}", headers, rows)
    for text in probe["conclusion"]:
        tell(text)


def number(value: float | None) -> str:
    """Return a number with three decimals if it is below 10, else with one; a dash for None."""
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def interval(m: dict[str, Any]) -> str:
    """Return an interval such as `[0.676, 1.000]`; a dash if there is none."""
    return "-" if m["low"] is None or m["high"] is None else f"[{number(m['low'])}, {number(m['high'])}]"


def difference(m: dict[str, Any] | None) -> str:
    """Return a difference such as `+0.021 [+0.004, +0.037] *`. The star means that the interval excludes zero."""
    from vlmrl.evaluate.estimates import excludes_zero

    if m is None:
        return "-"
    ends = "" if m["low"] is None else f" [{m['low']:+.3f}, {m['high']:+.3f}]"
    return f"{m['value']:+.3f}{ends}{' *' if excludes_zero(m['low'], m['high']) else ''}"


def result_fields(folder: Path, evaluation: Evaluation, other: Path | None) -> dict[str, Any]:
    """Return one evaluation for `--json`: its summary, its folder, and differences to another evaluation."""
    from vlmrl.evaluate.blind_probe import probe_of
    from vlmrl.evaluate.compare import differences
    from vlmrl.evaluate.paired import scored_alike
    from vlmrl.evaluate.records import read_evaluation
    from vlmrl.rollout.episodes import metrics_of_episodes
    from vlmrl.store.rollouts import read_turns

    result = {"name": folder.name, "folder": str(folder), **evaluation.summary, "one_text": evaluation.one_text}
    if "set_metrics" in result:
        result["set_metrics"] = {name: value for name, value in result["set_metrics"].items() if name != "replicates"}
    episodes = [
        SimpleNamespace(ending=row["ending"], turns=read_turns(row["turns"]), measured=row.get("measured") or {})
        for row in evaluation.rows
        if row.get("ending")
    ]
    if episodes:
        result["episodes"] = metrics_of_episodes(episodes)
    if (probe := probe_of(folder, evaluation)) is not None:
        result["blind_probe"] = probe
    if other is not None:
        before = read_evaluation(other)
        metas = [e.summary.get("meta") or {} for e in (before, evaluation)]
        result["scored_alike"] = scored_alike(*metas) is not False
        _, result["differences"] = differences(evaluation, before)
    return result


def endpoint_of(
    endpoint: str | None,
    served: str | None,
    key_env: str | None,
    concurrency: int,
    *,
    model: str | None,
    gpus: str | None,
) -> EndpointOptions | None:
    """Return the endpoint that a command's options name, or None if its model is loaded here.

    Args:
        served: value of `--model`.
        model: the command's argument.
    Raises: RecipeError when the options do not go together; EndpointError for an unusable address.
    """
    if endpoint is None:
        if served is not None or key_env is not None:
            raise RecipeError("--model and --key-env belong to --endpoint", hint="add --endpoint URL")
        if model is None:
            raise RecipeError("no model is named", hint="name a run, a model folder or a hub name, or use --endpoint")
        return None
    if model is not None:
        raise RecipeError(f"`{model}` and --endpoint both name a model", hint="leave one of them out")
    if not served:
        raise RecipeError("--endpoint needs the name of the model there", hint="add --model NAME")
    if gpus is not None:
        raise RecipeError("--gpus is for a model that is loaded here, not for --endpoint", hint="leave out --gpus")
    from vlmrl.services.client import EndpointOptions, base_url

    return EndpointOptions(base_url(endpoint), served, key_env, concurrency)


def origin_named(request: AnswerRequest, endpoint: EndpointOptions | None, root: Path) -> ModelOrigin:
    """Return the model that answers: the endpoint's, or that of the request. Nothing large is imported.

    Raises: as `find_model`; StoreError when there is no such run or model folder.
    """
    from vlmrl.setup.model_origin import ModelOrigin, find_model, require_there

    if endpoint is not None:
        return ModelOrigin(endpoint.model, endpoint=endpoint.url)
    origin = find_model(request.model, root, request.checkpoint)
    if origin.checkpoint is None:
        require_there(origin.path, root)
    return origin


def open_answering(
    request: AnswerRequest, origin: ModelOrigin, root: Path
) -> tuple[ChosenRecipe, Recipe, list[Problem]]:
    """Return the recipe of the model that answers, as chosen and as filled for this machine, and warnings about it.

    Raises: as `choose_recipe` and `fill_for_answers`.
    """
    from vlmrl.evaluate.eval_rows import choose_recipe
    from vlmrl.setup.auto_choice import fill_for_answers

    chosen = choose_recipe(
        origin,
        root,
        recipe=request.recipe,
        data=request.data,
        task=None if request.has_images else request.task,
        images=request.has_images,
        overrides=list(request.overrides),
    )
    filled, warnings = (chosen.recipe, []) if origin.endpoint else fill_for_answers(chosen.recipe, origin.files)
    return chosen, filled, warnings


Split = Annotated[
    str | None,
    typer.Option(
        help="Split, or table file such as rows.jsonl; default: test, else the rows of validation in training, else "
        "training rows, with a warning."
    ),
]
Name = Annotated[str | None, typer.Option(help="Name of the evaluation; default: rows, source and step.")]
Compare = Annotated[
    str | None, typer.Option(help="Print paired differences to another evaluation: folder, RUN/NAME, or RUN.")
]
Images = Annotated[
    str | None,
    typer.Option(
        metavar="CHANGES",
        help="Also evaluate with changed images, and say how much of the accuracy needs them: blank (grey), noise, "
        "shuffled (of other rows), low or low:N (scaled down to 32 or N pixels), masked, masked:N or masked:N:S (a "
        "share S, or 0.6, of the patches of N, or 14, pixels blackened). Several: blank,low.",
    ),
]
Normal = Annotated[
    str | None,
    typer.Option(
        help="With --images or --tools: evaluation with both as they are, a folder or RUN/NAME; default: the run's. "
        "With --images, it is made if there is none."
    ),
]
Tools = Annotated[
    Literal["off", "blank"] | None,
    typer.Option(
        help="Evaluate with one turn and no tools (off), or with tools that show grey images (blank), and say how much "
        "of the accuracy of the normal evaluation needs the tools."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an evaluation of the same name.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--settings",
        metavar="NAME",
        help="Only this one of the recipe's [eval.settings.NAME]; may be repeated. Default: all of them.",
    ),
]


def register(app: typer.Typer) -> None:
    app.command("eval", short_help="Evaluate a run or a model, with 95% intervals.")(eval_)


def eval_(
    ctx: typer.Context,
    model: options.AnsweringModel = None,
    recipe: options.RecipeOrRun = None,
    data: options.OtherData = None,
    split: Split = None,
    source: options.OneSource = None,
    task: options.PromptTask = None,
    checkpoint: options.EvalCheckpoint = "best",
    temperature: options.Sample = None,
    samples: options.Samples = 1,
    max_rows: options.MaxRows = None,
    seed: options.EvalSeed = 0,
    name: Name = None,
    compare: Compare = None,
    images: Images = None,
    normal: Normal = None,
    tools: Tools = None,
    settings: Settings = None,
    overrides: options.Set = None,
    force: Force = False,
    gpus: options.ModelGpus = None,
    endpoint: options.Endpoint = None,
    served: options.Served = None,
    key_env: options.KeyEnv = None,
    concurrency: options.Concurrency = 16,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Evaluate a run or a model with the prompt, parser and reward of training; every number has its 95% interval.

    Example: vlmrl eval last

    Example: vlmrl eval last --split rows.jsonl --gpus 4

    Example: vlmrl eval models/merged

    Example: vlmrl eval --endpoint https://api.openai.com/v1 --model NAME --key-env OPENAI_API_KEY --data data/digits

    A recipe with eval.sets is evaluated on these sets and on the split test, and under each [eval.settings.NAME].
    Without such tables, sampling is greedy unless --sample is given.

    An answer that cannot be parsed counts as wrong. Results are written to the run's folder eval/. For a model that is
    not a run, they are written to a new run of kind eval.

    Measures that a task has beside its reward, such as distances of pictures, are taken too: eval.measures and
    eval.weights of the recipe. One whose weights are not there is named as absent, with the reason.

    With --images, the same rows are evaluated a second time, and the model sees changed images; the reward still gets
    the true ones. The normal evaluation is taken from the run, or made first. The difference, row by row, is the part
    of the accuracy that needs the images. A low image is scaled up again to its size, so that a prompt has as many
    tokens and a coordinate means the same place. An image is shuffled with one of the same size where there is one.

    With --tools, a run whose responses are episodes is evaluated with one turn without tools, or with tools that show
    grey images. Compared with its normal evaluation, that is the part of the accuracy that needs the tools.

    With --endpoint, each response is kept as soon as it is there. After an outage or a kill, the same command goes on
    and asks for nothing twice. A prompt that the endpoint refuses counts as wrong, and its row says so. If the recipe
    has an [environment], whole episodes are run: the tools here, the model there.

    Intervals are Wilson's score intervals (next to 0 and 1, Poisson's limit where it is wider) at the effective sample
    size of rows that share images. They are never outside the range of a metric. A metric without a declared range
    counts as one from 0 to 1 if all its values are. Otherwise it has Student's t interval of the same clusters, as
    lengths always have. A single row has no interval.
    """
    from vlmrl.data.blinded_images import parse_changes
    from vlmrl.dist.world import launched, recorded_command
    from vlmrl.launch.request import EvalRequest
    from vlmrl.store.layout import check_eval_name, runs_root
    from vlmrl.store.runs import open_evaluation

    options.check_sampling(samples, temperature)
    check_eval_name(name)
    changes = parse_changes(images)
    if sum(map(bool, (changes, compare, tools))) > 1:
        raise RecipeError("--images, --tools and --compare each add a comparison", hint="leave all but one out")
    if normal and not (changes or tools):
        raise RecipeError("--normal belongs to --images and --tools", hint="add --images blank")
    endpoint_options = endpoint_of(endpoint, served, key_env, concurrency, model=model, gpus=gpus)
    request = options.request_of(EvalRequest, ctx, model=model or str(served))
    root, argv = runs_root(runs), recorded_command(request.argv)
    origin = origin_named(request, endpoint_options, root)
    for other in filter(None, (compare, normal)):
        open_evaluation(root, other)
    # Imported here: a wrong name is reported before large libraries are loaded.
    from vlmrl.evaluate import eval as work
    from vlmrl.evaluate.eval_plan import with_changed_tools
    from vlmrl.evaluate.eval_rows import find_evaluation, rows_to_evaluate
    from vlmrl.evaluate.shared_rows import with_shared

    chosen, filled, warnings = open_answering(request, origin, root)
    how = work.EvalSettings(temperature or None, samples, name, seed, force, changes, tools=tools or "")
    if not launched():
        show_warnings(warnings)
    rows = with_shared(rows_to_evaluate(filled, chosen.seen, split, max_rows, source), chosen.seen.run_dir)
    if tools:
        rows = [with_changed_tools(one, tools) for one in rows]
    if normal and len(rows) > 1:
        raise RecipeError("--normal is of one source, and there are several", hint="name it: --source NAME")
    if normal:
        shown = rows[0].source
        how = replace(how, normal=find_evaluation(normal, root, shown.split, shown.name, option="--normal"))
    every = work.chosen_settings(filled, how, settings or ())
    planned = work.plan(filled, origin, rows, chosen.run_dir, every, argv)
    others = None
    if compare is not None:
        others = [find_evaluation(compare, root, one.meta["split"], one.meta["source"], one.meta) for one in planned]
    if not launched():
        say_origin(request.model, origin.parent)
        _announce(planned)
        _warn_of_reward(filled, planned)
        if chosen.run_dir is not None and not (recipe or data or task or overrides):
            _warn_of_changes(chosen.run_dir, planned)
        if gpus is not None and (evaluated := _launch(gpus, request, filled, planned, chosen.run_dir, root)):
            _show(*evaluated, others, as_json)
            return
    done = _evaluate(endpoint_options, filled, origin, planned, chosen.run_dir, root, how, argv)
    if not launched():
        _show([d.folder for d in done], [d.evaluation for d in done], others, as_json)


def rows_line(rows: EvalRows) -> str:
    """Return which rows are answered in one line: a warning if the model was trained on some of them."""
    seen = rows.shared or ("training rows" if rows.role == "training" else "")
    return f"warning: {rows.described} ({seen})" if seen else rows.described


def _announce(planned: Sequence[PlannedEvaluation]) -> None:
    """Print which rows will be evaluated. If they are training rows, also print which other rows could be chosen."""
    from vlmrl.store.evaluated_rows import sampling_words

    names = {one.name for one in planned}
    for one in planned:
        rows = one.rows
        if one.change is not None:
            normal = one.meta["normal"]
            how = "which is evaluated first" if normal in names else "which exists"
            say(f"{rows.source.name}: the same rows with {one.change.described}, compared with {normal}, {how}")
            continue
        if one.settings.tools:
            how = one.meta.get("normal", "no normal evaluation: make it first, without --tools, to see the difference")
            say(f"{rows.source.name}: tools {one.settings.tools}, compared with {how}")
        under = f", {sampling_words(one.meta)}" if one.settings.setting else ""
        say(rows_line(rows) + under)
        if rows.role == "training":
            splits = f"; splits there: {', '.join(rows.others)}" if rows.others else ""
            say(f"hint: name other rows with --split, a split or a file such as rows.jsonl{splits}")


def _warn_of_reward(recipe: Recipe, planned: Sequence[PlannedEvaluation]) -> None:
    """Print a warning if a built-in reward pays no right answer to the rows; no other reward is called for this."""
    from vlmrl.recipe.load import LoadedRecipe
    from vlmrl.setup.rows import check_reward

    for source in {id(one.rows): one.rows.source for one in planned}.values():  # rows may be evaluated several times
        if source.reward.is_cheap:
            loaded = LoadedRecipe(recipe, "", Path(source.dataset.path), {}, {})
            problems = check_reward(loaded, source, source.dataset.path).problems
            show_warnings([problem for problem in problems if problem.level == "warning"])


def _warn_of_changes(run_dir: Path, planned: Sequence[PlannedEvaluation]) -> None:
    """Print a warning if a task, reward or prompt has changed since the run that the recipe comes from."""
    from vlmrl.setup.run_records import changed_since
    from vlmrl.store.runs import open_run

    run = open_run(run_dir.parent, run_dir.name)
    sources = {id(one.rows): one.rows.source for one in planned}  # rows may be evaluated several times
    if changed := changed_since(run, list(sources.values())):
        say(f"warning: changed since the run was made: {', '.join(changed)}")
        say("hint: these numbers are not comparable with those of its training; its code is in its folder kept/")


def _launch(
    gpus: str, request: Any, recipe: Recipe, planned: Sequence[PlannedEvaluation], run_dir: Path | None, root: Path
) -> tuple[list[Path], list[Evaluation]] | None:
    """Evaluate in several processes. Return folders and evaluations; None if this process must do the evaluation."""
    from vlmrl.evaluate.records import read_evaluation
    from vlmrl.launch.start import evaluate_on_ranks
    from vlmrl.store.layout import eval_dir

    ending = evaluate_on_ranks(gpus, request, recipe, run_dir, root, say)
    if ending.code:
        raise typer.Exit(ending.code)
    if ending.run_dir is None:
        return None
    folders = [eval_dir(ending.run_dir, p.name) for p in planned]
    return folders, [read_evaluation(folder) for folder in folders]


def _evaluate(
    endpoint: EndpointOptions | None,
    recipe: Recipe,
    origin: ModelOrigin,
    planned: Sequence[PlannedEvaluation],
    run_dir: Path | None,
    root: Path,
    settings: EvalSettings,
    argv: Sequence[str],
) -> list[Any]:
    """Evaluate in this process, which is either the only one or a rank of a launcher."""
    from vlmrl.dist.world import join_evaluation
    from vlmrl.evaluate import eval as work
    from vlmrl.store.layout import eval_log_path

    with joined(recipe, endpoint, "evaluating") as (world, client, tell, progress), ExitStack() as stack:
        folder = run_dir
        if client is not None:
            answerer = work.endpoint_answerer(recipe, client, [p.rows.source for p in planned])
        else:

            def make() -> Path:
                run = work.create_eval_run(root, recipe, origin, planned, argv)
                return stack.enter_context(run).dir

            folder, log_name = run_dir or world.from_main(make), planned[0].name
            join_evaluation(folder, log_name)
            log = (lambda process: eval_log_path(folder, log_name, process)) if world.size > 1 else None
            answerer = work.load_answerer(
                recipe, origin, settings, tell, sources=[p.rows.source for p in planned], world=world, log=log
            )
        stack.callback(answerer.close)
        return work.run_evaluation(
            recipe,
            origin,
            answerer,
            planned,
            folder,
            root,
            argv,
            progress=progress,
            say=tell,
            world=world,
            own_run=run_dir is None,
        )


@contextmanager
def joined(
    recipe: Recipe, endpoint: EndpointOptions | None, doing: str
) -> Iterator[tuple[World, EndpointClient | None, Callable[[str], Any], Callable[[int, int], Any]]]:
    """Join the processes that answer with a model, or connect to the endpoint that answers.

    Yields: the processes, the client of the endpoint, and what takes messages and progress for the user.
    """
    from vlmrl.dist.world import ALONE, join_world, stderr
    from vlmrl.evaluate.responses import learn_key
    from vlmrl.services.client import EndpointClient

    if endpoint is not None:
        learn_key(endpoint.key_env)
        with EndpointClient(endpoint, notify=say) as client:
            yield ALONE, client, say, counter(doing, stderr())
        return
    with join_world(recipe.model.device, recipe.parallel.timeout_seconds) as world:
        if world.is_main:
            yield world, None, say, counter(doing, stderr())
        else:
            yield world, None, lambda text: None, lambda done, total: None


def _show(
    folders: Sequence[Path], evaluations: Sequence[Evaluation], others: Sequence[Path] | None, as_json: bool
) -> None:
    against: Sequence[Path | None] = others or [None] * len(folders)
    results = [result_fields(*each) for each in zip(folders, evaluations, against, strict=True)]
    compared = None if others is None else str(others[0]) if len(others) == 1 else [str(o) for o in others]
    for result in results:
        lost = {"failed": result["reward_errors"], "was unavailable": result.get("reward_unavailable", 0)}
        for words, count in lost.items():
            if count:
                say(
                    f"warning: the reward, or an environment, {words} for {count:,} of {result['rows']:,} responses of "
                    f"{result['name']}: only `response_tokens` and `truncated` count them; `error` in its rows says why"
                )
    if not emit({"evaluations": results, "compared_with": compared}, as_json):
        show_evaluations(results, against)
