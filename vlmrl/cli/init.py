"""`vlmrl init`: make a folder for a task of your own."""

from __future__ import annotations

import shlex
from pathlib import Path

import typer

from vlmrl.cli import options
from vlmrl.cli.output import console, emit


def register(app: typer.Typer) -> None:
    app.command("init", short_help="Make a folder for a task of your own.")(init)


def init(
    name: Path = typer.Argument(..., help="Folder to make."),
    task: bool = typer.Option(
        False, "--task", help="Make a whole task in one file: truth, prompt, data preparation, reward and attacks."
    ),
    tools: bool = typer.Option(
        False, "--tools", help="Give the model a tool that it may call before it answers, with tests of it."
    ),
    style: str = typer.Option("vlmrl", help="Signature of the reward: vlmrl, trl, verl or easyr1."),
    model: str = typer.Option(
        "Qwen/Qwen2.5-VL-3B-Instruct", help="Model for the recipe: a folder, a hub name or a run."
    ),
    as_json: options.Json = False,
) -> None:
    """Make a task folder: prompt, reward, recipe, a few rows with images, and a test that passes.

    With --task the folder has no table of rows but a task of your own, whose data `vlmrl prep` makes. With --tools a
    response has several turns: tools.py has a tool that enlarges a part of the image, and the recipe an [environment].

    Example: vlmrl init squares --style trl

    Example: vlmrl init squares --tools

    Example: vlmrl init --task squares
    """
    from vlmrl.tasks.scaffold import write_task

    written = write_task(name, style=style, model=model, whole=task, tools=tools)
    recipe = shlex.quote(f"{name}/recipe.toml")
    commands = [
        f"pytest {shlex.quote(str(name))}",
        *([shlex.join(["vlmrl", "prep", f"{name}/task.py:task", "--out", f"{name}/data"])] if task else []),
        *(f"vlmrl {verb} {recipe}" for verb in ("check", "try", "train")),
    ]
    err = console()
    err.print(f"{name}: " + ", ".join(path.relative_to(name).as_posix() for path in written if path.suffix != ".png"))
    change = "change task.py to your task" if task else "put your rows into rows.jsonl and your rules into reward.py"
    if tools:
        change = change.replace(" and", ",") + ", and your tools into tools.py"
    err.print(f"next: {change}, then")
    for command in commands:
        err.print(f"  {command}")
    err.print(f"without a GPU: vlmrl demo --model-only tiny --data {recipe}, then --set model.path=tiny")
    emit({"path": str(name), "files": [str(path) for path in written], "next": commands}, as_json)
