"""`vlmrl demo`: run all steps of a project with a tiny model, and compare it before and after training."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import typer

from vlmrl.cli import options
from vlmrl.cli.output import console, emit
from vlmrl.errors import unknown


def show_demo(result: dict) -> None:
    from rich.table import Column, Table

    columns = (Column("metric"), *(Column(name, justify="right") for name in ("SFT", "GRPO")))
    table = Table(*columns, title=f"Test split, 95% intervals over {result['unit']}", title_justify="left")
    for name, pair in result["metrics"].items():
        cells = [f"{m['value']:.3f} [{m['low']:.3f}, {m['high']:.3f}]" for m in (pair["sft"], pair["grpo"])]
        table.add_row(name, *cells)
    out = console(stderr=False)
    out.print(table)
    for name, d in result["difference"].items():
        low, high = d["ci95"]
        words = "excludes 0" if low > 0 or high < 0 else "includes 0"
        out.print(f"{name}: GRPO - SFT = {d['mean']:+.3f}, 95% interval [{low:+.3f}, {high:+.3f}] {words}")
    out.print(f"\n{result['seconds']:.0f} s in all. Open the report: {result['report']}")


def register(app: typer.Typer) -> None:
    app.command("demo", short_help="Run all steps with a tiny model, in minutes.")(demo)


def demo(
    seed: int = typer.Option(1, "--seed", min=0, help="Seed of the model and of all training."),
    out: Path | None = typer.Option(
        None,
        "--out",
        help="Folder for data, model, runs and report; default: demo, or demo-TASK for another task than digits.",
    ),
    task: str | None = typer.Option(
        None,
        "--task",
        help="Task to learn: digits or geometry or boxes or counting or crop or python or figures; default: the first.",
    ),
    model_only: Path | None = typer.Option(
        None, "--model-only", help="Only make the tiny model, in this folder, for --data."
    ),
    data: Path = typer.Option(
        Path("data/digits"), "--data", help="With --model-only: a dataset made by `vlmrl prep`, a table, or a recipe."
    ),
    width: int = typer.Option(
        128, "--width", min=64, max=2048, help="With --model-only: hidden width, a multiple of 64; 192 = 3 million."
    ),
    as_json: options.Json = False,
) -> None:
    """Run all steps of a project on this machine in minutes: no download, no GPU.

    Example: vlmrl demo --seed 2

    A tiny vision-language model with random weights learns to compare real handwritten digits: supervised start,
    reinforcement learning, evaluation on held-out rows, merge, reward check and report. With --task it learns to find
    shaded areas on squared paper (geometry), the box of a shape (boxes), the number of shapes (counting), the
    SVG code of a figure (figures), or to look at the right place with a tool (crop).

    --model-only makes only the tiny model, for data of your own. With it, check, try, train and eval run on this
    machine before you pay for a GPU. If the columns of a table are not recognised, give the recipe instead of the
    table: it names the columns and the prompt.

    Example: vlmrl demo --model-only demo/model --data my_task/recipe.toml
    """
    from vlmrl.demo import DEMOS, make_model, run_demo
    from vlmrl.recipe.files import shipped_folder

    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    if model_only is not None:
        parameters = make_model(data, model_only, seed=seed, width=width)
        emit({"model": str(model_only), "parameters": parameters}, as_json)
        say(f"{model_only}: a tiny Qwen2.5-VL of {parameters:,} parameters, random weights")
        recipe = str(data) if data.suffix == ".toml" else "RECIPE.toml"
        say(f"next: vlmrl check {shlex.quote(recipe)} --set {shlex.quote(f'model.path={model_only}')}")
        return
    if task is not None and task not in DEMOS:
        raise unknown("task", task, DEMOS)
    usual = next(iter(DEMOS))
    folder = out or Path("demo" if task in (None, usual) else f"demo-{task}")
    result = run_demo(folder, seed, shipped_folder(), say, task or usual)
    if not emit(result, as_json):
        show_demo(result)
