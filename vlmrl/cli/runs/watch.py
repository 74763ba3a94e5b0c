"""`vlmrl runs watch`: follow a run from another terminal. It reads the run's folder and nothing else."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import console, emit, say
from vlmrl.cli.show.step_table import columns, step_of, step_table, waiting_text
from vlmrl.untrusted import visible

if TYPE_CHECKING:
    from vlmrl.store.summary import Followed


def watch(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The run: a unique prefix of its id, its name, or its folder.")
    ] = "last",
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two updates.")] = 2.0,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Watch a run from another terminal.

    It draws a live table, or prints a line per step if stdout is no terminal. It ends when the run ends.

    Example: vlmrl runs watch last
    """
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import find
    from vlmrl.store.summary import Followed, resume_command

    followed = Followed(find(runs_root(runs), run))
    if as_json:
        _wait(followed, every)
    elif sys.stdout.isatty():
        _live(followed, every)
    else:
        _plain(followed, every)
    train = followed.lines()
    emit(
        {
            "run": followed.run.id,
            "status": followed.run.status,
            "steps": len(train),
            "of": followed.steps,
            "last": train[-1] if train else None,
        },
        as_json,
    )
    if not as_json:
        ended = followed.run.status
        resume = resume_command(followed.run, ended)
        again = f"; continue with: {resume}" if resume else ""
        say(f"{followed.run.id}: {ended} after {len(train)} step(s){again}")


def _wait(followed: Followed, every: float) -> None:
    while followed.look():
        time.sleep(every)


def _plain(followed: Followed, every: float) -> None:
    """Print the lines of all earlier steps, then one line per new step as soon as it exists."""
    from vlmrl.store.metrics import counted

    shown: set[tuple[int, int]] = set()
    going, waiting = True, ""
    while going:
        going = followed.look()
        for line in followed.lines():
            if (key := (line["attempt"], line["step"])) not in shown:
                shown.add(key)
                cells = [f"{name} {text}" for name, text in columns(line).items() if text]
                text = "  ".join([f"step {step_of(counted(line['step']), followed.steps)}", *cells])
                print(visible(text), flush=True)
        before, waiting = waiting, waiting_text(followed)
        if waiting not in ("", before):
            print(visible(waiting), flush=True)
        if going:
            time.sleep(every)


def _live(followed: Followed, every: float) -> None:
    """Draw a table of the last steps every `every` seconds until the run ends."""
    from rich.live import Live

    out = console(stderr=False)
    with Live(console=out, auto_refresh=False, screen=False) as live:
        going = True
        while going:
            going = followed.look()
            live.update(step_table(followed, out.height), refresh=True)
            if going:
                time.sleep(every)
