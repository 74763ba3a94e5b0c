"""`vlmrl runs show`: show the facts of a run, or some of its responses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit
from vlmrl.errors import VlmrlError


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
    from vlmrl.store.runs import open_run
    from vlmrl.store.summary import describe

    opened = open_run(runs_root(runs), run)
    if rollout is not None:
        from vlmrl.cli.show.rollout_facts import show_rollout

        return show_rollout(opened, rollout, as_json)
    about: dict[str, Any] = {**describe(opened), "judge": {}}
    try:
        about["judge"] = judge_costs(opened.dir)
    except VlmrlError as error:
        about["problems"].append(error.message)
    emit(about, as_json)
    if not as_json:
        print_facts(about)


def judge_costs(folder: Path) -> dict[str, Any]:
    """Return what a run and its evaluations asked a judge: account -> calls, cost, tokens, calls in flight."""
    from dataclasses import asdict

    from vlmrl.services.calls import spent_in
    from vlmrl.store.layout import VERDICTS

    return {account: asdict(spent) for account, spent in spent_in(folder / VERDICTS).items()}
