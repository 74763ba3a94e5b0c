"""`vlmrl runs show`: show the facts of a run, or some of its responses."""

from __future__ import annotations

from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit


def show(
    run: options.RunRef,
    rollout: Annotated[
        str | None,
        typer.Option(
            metavar="STEP[/PROMPT[/SAMPLE]]",
            help="Show responses instead: of a step, of one of its prompts, or one.",
            show_default=False,
        ),
    ] = None,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Show the facts of a run, or some of its responses.

    The facts are how it ended, the last numbers, the checkpoints, how to continue, and more.

    Example: vlmrl runs show last --rollout 12
    """
    from vlmrl.cli.show.run_facts import print_facts
    from vlmrl.store.layout import runs_root
    from vlmrl.store.open_run import open_run
    from vlmrl.store.summary import describe

    opened = open_run(runs_root(runs), run)
    if rollout is not None:
        from vlmrl.cli.show.rollout_facts import show_rollout

        return show_rollout(opened, rollout, as_json)
    about = describe(opened)
    emit(about, as_json)
    if not as_json:
        print_facts(about)
