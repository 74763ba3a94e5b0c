"""`vlmrl check`: find the problems of a recipe, its data and this machine, and show the plan of the run."""

from __future__ import annotations

from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit
from vlmrl.cli.show.check_plan import show_each, show_parity, show_plan, show_problems


def register(app: typer.Typer) -> None:
    app.command("check", short_help="Find all problems before training.")(check)


def check(
    recipe: options.RecipeName,
    overrides: options.Set = None,
    runs: options.Runs = None,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Also load the model, and compare packed rows with its own forward pass."),
    ] = False,
    deep_prompts: Annotated[int, typer.Option(min=1, help="With --deep: number of prompts, 3 responses each.")] = 4,
    gpus: Annotated[
        str | None,
        typer.Option(help="Plan for this number of GPUs, as `train --gpus`; default: one process.", show_default=False),
    ] = None,
    nnodes: options.Nnodes = 1,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            help="Plan for other GPUs than this machine's: GiB (80), a name (H100) or a MIG slice (3g.40gb).",
            show_default=False,
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Check a recipe, its data and this machine, and show the plan of the run. Exit code 2 if it cannot run.

    Example: vlmrl check recipes/digits_im.toml --set train.steps=200

    Example: vlmrl check fungi_im --gpus 8 --gpu-memory H100

    The memory plan is an estimate. It says what each GPU holds in each phase of a run. If that does not fit, it names
    the smallest change that makes it fit.

    --deep takes a few of your rows, packed as in training, and compares their log-probs and gradients with the model's
    own forward pass of each response alone. If rows disagree, it names them, and the exit code is 2. Whether the
    largest packed row fits in memory is tested by `train` and `sft` before their first step.
    """
    from vlmrl.inference.full_check import check_everything
    from vlmrl.store.layout import runs_root

    result = check_everything(
        recipe,
        overrides or [],
        runs_root(runs),
        gpus=gpus,
        nnodes=nnodes,
        gpu_memory=gpu_memory,
        deep_prompts=deep_prompts if deep else None,
        show_first=(lambda problems: None) if as_json else show_each,
    )
    is_ok = not any(p.level == "error" for p in result.problems)
    problems = [{"level": p.level, "message": p.message, "where": p.where, "hint": p.hint} for p in result.problems]
    fields = {"ok": is_ok, "recipe": recipe, "problems": problems, "plan": result.plan}
    emit(fields | ({"deep": result.parity} if deep else {}), as_json)
    if not as_json:
        show_plan(result.plan)
        if result.parity is not None:
            show_parity(result.parity)
        show_problems(result.problems, shown=result.shown)
    if not is_ok:
        raise typer.Exit(2)
