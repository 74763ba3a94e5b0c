"""`vlmrl check`: everything wrong with a recipe, its data and this machine, and the plan of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmrl.cli.memory_table import show_memory
from vlmrl.cli.output import JSON_HELP, console, emit
from vlmrl.errors import Problem, ProblemsError, VlmrlError, gib
from vlmrl.visible import visible

if TYPE_CHECKING:
    from vlmrl.preflight.memory import Target


def register(app: typer.Typer) -> None:
    app.command("check", short_help="Find everything wrong before training.")(check)


def check(
    recipe: Annotated[str, typer.Argument(help="A TOML file, or the name of a shipped recipe.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Override one key: --set optim.lr=1e-5.")] = None,
    runs: Annotated[Path | None, typer.Option(help="Folder of the runs; default: $VLMRL_RUNS, else ./runs.")] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also load the model, and compare rows as trained with its own forward.")
    ] = False,
    deep_prompts: Annotated[int, typer.Option(min=1, help="With --deep: how many prompts, 3 responses each.")] = 4,
    gpus: Annotated[
        str | None,
        typer.Option(help="Plan for so many GPUs, as `train --gpus`; default: one process.", show_default=False),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(help="Plan for GPUs that this machine lacks: GiB (80), a name (H100) or a MIG slice (3g.40gb).",
                     show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:  # fmt: skip
    """Check a recipe, its data and this machine; show what a run would do and need. Exit code 2 when it cannot run.

    Example: vlmrl check recipes/digits_im.toml --set train.steps=200

    Example: vlmrl check fungi_im --gpus 8 --gpu-memory H100    (a machine that is not there)

    The plan of memory says what each GPU holds in each phase of a run, and, where it does not fit, the smallest change
    that makes it fit. It is an estimate.

    With --deep, log-probs and gradients of a few of your rows, packed as training packs them, are compared with the
    model's own forward of each response alone; rows that disagree are named. Exit code 2 when any does. Whether the
    largest row fits in memory, `train` and `sft` find out before their first step.
    """
    from vlmrl.preflight.model_path import check_location
    from vlmrl.recipe.load import load_recipe
    from vlmrl.store.layout import runs_root

    problems: list[Problem] = []
    missing: list[Problem] = []
    plan: Mapping[str, Any] = {}
    parity: Mapping[str, Any] | None = None
    root = runs_root(runs)
    try:
        loaded, warnings = load_recipe(recipe, overrides=overrides or []), []
        model_files, missing = find_model_files(loaded.recipe.model.path, root, loaded.where(("model", "path")))
        missing = missing or check_location(loaded, model_files)
        if missing and not as_json:  # at once: to look at the rest may take minutes
            _show_each(missing)
        from vlmrl.preflight.run import preflight
        from vlmrl.setup.open_values import choices_of, settle_for_run

        target = parse_target(gpus, gpu_memory)
        if not missing:  # else nothing can be chosen for it
            loaded, warnings = settle_for_run(loaded, root, target)
        found = preflight(loaded, runs_folder=root, model_files=model_files, target=target, missing=missing)
        problems, plan = [*warnings, *found.problems], found.plan | {"chosen": choices_of(loaded)}
        if deep and not any(p.level == "error" for p in problems):
            parity = _compare(loaded, root, deep_prompts)
            problems = [*problems, *_disagreements(parity, loaded.where(("model", "path")))]
    except ProblemsError as error:
        problems = list(error.problems)
    except VlmrlError as error:
        problems = [Problem(error.message, error.where, error.hint)]
    errors = [p for p in problems if p.level == "error"]
    as_dicts = [{"level": p.level, "message": p.message, "where": p.where, "hint": p.hint} for p in problems]
    result = {"ok": not errors, "recipe": recipe, "problems": as_dicts, "plan": plan}
    emit(result | ({"deep": parity} if deep else {}), as_json)
    if not as_json:
        _show_plan(plan)
        if parity is not None:
            _show_parity(parity)
        _show_problems(problems, shown=missing)
    if errors:
        raise typer.Exit(2)


def parse_target(gpus: str | None, gpu_memory: str | None = None) -> Target:
    """Where a run is to run, as `--gpus` and `--gpu-memory` say. Raises: LaunchError, RecipeError."""
    from vlmrl.launch.gpu_assignment import parse_gpus
    from vlmrl.preflight.gpu_models import parse_gpu
    from vlmrl.preflight.memory import Target

    count, chosen = parse_gpus(gpus) if gpus is not None else (1, ())
    return Target(len(chosen) or count, None if gpu_memory is None else parse_gpu(gpu_memory))


def find_model_files(path: str, root: Path, where: str) -> tuple[str | None, list[Problem]]:
    """Where the configuration and processor of the recipe's model are, or what is wrong."""
    from vlmrl.setup.model_origin import find_model

    try:
        return find_model(path, root).files, []
    except VlmrlError as error:
        return None, [Problem(error.message, where, error.hint)]


def _compare(loaded: Any, root: Path, prompts: int) -> Mapping[str, Any]:
    from vlmrl.inference.parity import deep_check

    return deep_check(loaded.recipe, root, prompts=prompts).as_dict()


def _disagreements(parity: Mapping[str, Any], where: str) -> list[Problem]:
    """An error for each row that disagrees, and one for the gradient."""
    allowed, reference = parity["tolerance"], "the model's own forward of each response alone"
    hint = f"{allowed['why']}. Until it is understood, train with --set model.shared_prefix=false, the reference"
    found = [
        Problem(
            f"{row['row']}: log-probs as trained differ from {reference} by {row['logp_max']:.2g} nats (mean "
            f"{row['logp_mean']:.2g}); allowed are {allowed['logp_max']:g} (mean {allowed['logp_mean']:g})",
            where, hint,
        )
        for row in parity["rows"] if not row["agrees"]
    ]  # fmt: skip
    if parity["gradient"] is not None and not parity["gradient"] <= allowed["gradient"]:
        found.append(
            Problem(
                f"the gradient as trained differs from that of {reference} by {parity['gradient']:.2g} of its norm; "
                f"allowed is {allowed['gradient']:g}", where, hint,
            )
        )  # fmt: skip
    return found


def _show_parity(parity: Mapping[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    allowed = parity["tolerance"]
    gradient = parity["gradient_note"] if parity["gradient"] is None else f"{parity['gradient']:.1e}"
    lines = [
        ("deep", f"{parity['path']}; {parity['dtype']}; against the stock forward of each response alone"),
        ("", f"log-prob difference at most {parity['logp_max']:.1e} nats (allowed {allowed['logp_max']:g}); "
             f"gradient {gradient} (allowed {allowed['gradient']:g})"),
        ("", f"allowed because {allowed['why']}"),
    ]  # fmt: skip
    if parity["sampler_gap"] is not None:
        lines.append(("", f"built-in engine against trainer: at most {parity['sampler_gap']:.1e} nats"))
    for row in parity["rows"]:
        lengths = "+".join(map(str, row["response_tokens"]))
        sizes = f"{row['prompt_tokens']} tokens ({row['image_tokens']} of images), responses {lengths}"
        verdict = "" if row["agrees"] else "  DISAGREES"
        lines.append(("", f"{row['row']}: {sizes}: {row['logp_max']:.1e}{verdict}"))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in lines:
        table.add_row(Text(name, style="bold"), Text(value))
    console(stderr=False).print(table)


def _show_plan(plan: Mapping[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in _plan_lines(plan):
        table.add_row(Text(name, style="bold"), Text(value))
    if table.row_count:
        console(stderr=False).print(table)
    if "memory" in plan:
        show_memory(plan["memory"])


def _plan_lines(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, data in plan.get("data", {}).items():
        others = "".join(f", {split} {other['rows']:,}" for split, other in data["other_splits"].items())
        task = data["task"] + (f", variant {data['variant']}" if data["variant"] else "")
        yield f"data {name}", f"{data['split']} {data['rows']:,} rows{others}; {data['images']:,} images; task {task}"
    for name, prompts in plan.get("prompts", {}).items():
        yield from _prompt_lines(name, prompts)
    for name, reward in plan.get("reward", {}).items():
        weights = ", ".join(f"{part} {weight:g}" for part, weight in reward["weights"].items()) or "no weights"
        profile = f" (profile {reward['profile']})" if reward["profile"] else ""
        yield f"reward {name}", f"{reward['name']}{profile}: {weights}"
        if reward["accuracy"]:
            yield "", f"accuracy: {reward['accuracy']}"
        told = [f"{label} {reward[key]:.3g}" for label, key in _ANSWERS if reward[key] is not None]
        if told:
            most = "" if reward["largest"] is None else f"; the most possible is {reward['largest']:g}"
            yield "", f"{', '.join(told)}{most}"
    if "run" in plan:
        yield "run", _run_line(plan["run"])
        epochs = ", ".join(f"{name} {epochs:.2f}" for name, epochs in plan["run"]["epochs"].items())
        yield "", f"passes over the data: {epochs or 'not known'}; {plan['run']['validations']} validations"
    yield from _machine_lines(plan)


_ANSWERS = (("a correct answer scores", "correct_response"), ("an empty response earns", "empty_response"))


def _prompt_lines(name: str, prompts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    images = f", {prompts['image_tokens_mean']:.0f} of them image tokens" if prompts["images"] else ""
    yield (
        f"prompts {name}",
        f"{prompts['tokens_mean']:.0f} tokens on average{images}; longest {prompts['tokens_max']:,}",
    )
    most = max(count for _, _, count in prompts["histogram"])
    if len(prompts["histogram"]) > 1:
        for low, high, count in prompts["histogram"]:
            yield "", f"{low:>7,} - {high:<7,} {'#' * round(30 * count / most)} {count}"
    if prompts["images"]:
        sizes = " to ".join([prompts["image_sizes"][0], *prompts["image_sizes"][1:][-1:]])
        resized = f"{prompts['images_enlarged']} enlarged, {prompts['images_shrunk']} shrunk of {prompts['images']}"
        yield "", f"images as the model sees them: {sizes}; {resized} sampled"


def _run_line(run: Mapping[str, Any]) -> str:
    if "responses" not in run:
        return f"{run['steps']:,} steps x {run['rows_per_step']} rows; {run['checkpoints']} checkpoints"
    return (
        f"{run['steps']:,} steps x {run['prompts_per_step']} prompts x {run['samples_per_prompt']} samples = "
        f"{run['responses']:,} responses, {run['updates']:,} updates, {run['checkpoints']} checkpoints"
    )


def _machine_lines(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "model" not in plan:
        return
    model, disk = plan["model"], plan["disk"]
    yield (
        "model",
        f"{model['type']}, {model['parameters'] / 1e6:,.1f} M parameters, {model['trained'] / 1e6:,.1f} M trained",
    )
    for choice in plan.get("chosen", []):
        yield "chosen", f"{choice['key']} = {choice['value']}: {choice['reason']}"
    if "attention" in plan:
        yield from _attention_lines(plan["attention"])
    yield (
        "disk",
        (
            f"{disk['checkpoints_at_once']} checkpoints of {gib(disk['checkpoint_bytes'])} at once, rollouts at most "
            f"{gib(disk['rollouts_bytes_at_most'])}, merged {gib(disk['merged_bytes'])}; "
            f"{gib(disk['free_bytes'])} free in {disk['folder']}"
        ),
    )


def _attention_lines(attention: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    text, images = attention["text"], attention["images"]
    yield "attention", text if text == images else f"{text}; of images {images}"
    if attention["missing"]:
        yield "", f"flash-attn is not installed and would be used instead: {attention['missing']}"


def _show_problems(problems: Sequence[Problem], shown: Sequence[Problem] = ()) -> None:
    """Show what was found, errors first, and count it. Args: shown: what the screen has already."""
    from rich.text import Text

    _show_each([p for p in problems if p not in shown])
    counts = ", ".join(f"{n} {word}{'' if n == 1 else 's'}" for n, word in _counts(problems)) or "nothing is wrong"
    console(stderr=False).print(Text(f"\n{counts}"))


def _show_each(problems: Sequence[Problem]) -> None:
    from rich.text import Text

    from vlmrl.errors import format_error

    out = console(stderr=False)
    for p in sorted(problems, key=lambda p: p.level != "error"):
        text = Text("\n" + visible(format_error(p.message, p.where, p.hint, p.level)))
        text.stylize("bold red" if p.level == "error" else "bold yellow", 1, 2 + len(p.level))
        out.print(text)


def _counts(problems: Sequence[Problem]) -> list[tuple[int, str]]:
    found = [(sum(p.level == level for p in problems), level) for level in ("error", "warning")]
    return [(n, level) for n, level in found if n]
