"""`vlmrl runs diagnose`: why a run does not learn."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from vlmrl.cli.output import emit, say, tell
from vlmrl.cli.runs import Json, Root
from vlmrl.types import INAPPLICABLE, NO_SCORE
from vlmrl.visible import visible_json

if TYPE_CHECKING:
    from vlmrl.diagnose.run import Diagnosis
    from vlmrl.diagnose.thresholds import Cause

MOST_TEXT = 160


def diagnose(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A unique prefix of its id, its name, its folder, or `last`: the last run that trained."
        ),
    ] = "last",
    runs: Root = None,
    as_json: Json = False,
) -> None:
    """Say why a run does not learn: ranked causes, each with figures, responses that show it, and the next command.

    Example: vlmrl runs diagnose last

    Reads the run's folder alone, also while it trains. A note is no fault. Exit code 0 whatever is found.
    """
    from vlmrl.diagnose.run import diagnose as look
    from vlmrl.store.layout import runs_root
    from vlmrl.store.runs import open_run

    found = look(open_run(runs_root(runs), run, trained=True))
    emit(found.as_dict(), as_json)
    if not as_json:
        _show(found)


def _show(found: Diagnosis) -> None:
    tell(f"{found.run}: {found.status}; read: {found.read}")
    told = [f"{name} {a:.3g} -> {b:.3g}" for name, (a, b) in found.figures.items()]
    if told:
        tell(f"first third of the steps -> last third: {', '.join(told)}")
    for note in found.notes:
        say(f"warning: {note}")
    explained = {name for cause in found.causes for name in cause.follows}
    for number, cause in enumerate(found.causes, 1):
        if cause.name in explained:
            tell(f"\n{number}. {cause.level}, explained by the above: {cause.what}")
        else:
            _show_cause(number, cause)
    if found.healthy:
        tell("\nno fault found" + ("; a note is none" if found.causes else ""))


def _show_cause(number: int, cause: Cause) -> None:
    tell(f"\n{number}. {cause.level}: {cause.what}")
    for line in cause.evidence:
        tell(f"   {line}")
    for row in cause.rows:
        note = f" ({_quoted(row['note'])[1:-1]})" if row["note"] else ""
        score = NO_SCORE.get(row["status"], INAPPLICABLE) if row["score"] is None else f"{row['score']:.3f}"
        tell(f"   {row['where']}: {score}{note}\n     {_quoted(row['text'])}")
    tell(f"   next: {cause.command}")


def _quoted(text: str) -> str:
    """Return a response in one line, in quotes, cut in the middle."""
    quoted = visible_json(json.dumps(text, ensure_ascii=False))
    return quoted if len(quoted) <= MOST_TEXT else f"{quoted[: MOST_TEXT // 2]} ... {quoted[-MOST_TEXT // 2 :]}"
