"""`vlmrl runs diagnose`: find out why a run does not learn."""

from __future__ import annotations

from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit
from vlmrl.cli.show.diagnosis import show_diagnosis


def diagnose(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="The run: a unique prefix of its id, its name, its folder, or `last`: the last run that trained.",
        ),
    ] = "last",
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Find out why a run does not learn.

    It prints ranked causes, each with figures, responses that show it, and the next command.

    Example: vlmrl runs diagnose last

    It reads only the run's folder, also while the run trains. A note is not a fault. The exit code is 0, whatever it
    finds.
    """
    from vlmrl.diagnose.run import diagnose as look
    from vlmrl.store.layout import runs_root
    from vlmrl.store.runs import open_run

    diagnosis = look(open_run(runs_root(runs), run, trained=True))
    emit(diagnosis.as_dict(), as_json)
    if not as_json:
        show_diagnosis(diagnosis)
