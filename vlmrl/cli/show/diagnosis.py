"""Screen of `vlmrl runs diagnose`: ranked causes, each with figures and responses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from vlmrl.cli.output import say, tell
from vlmrl.types import INAPPLICABLE, NO_SCORE
from vlmrl.untrusted import visible_json

if TYPE_CHECKING:
    from vlmrl.diagnose.run import Diagnosis
    from vlmrl.diagnose.thresholds import Cause


MOST_TEXT = 160
"""Maximum number of characters of a quoted response."""


def show_diagnosis(diagnosis: Diagnosis) -> None:
    tell(f"{diagnosis.run}: {diagnosis.status}; read: {diagnosis.read}")
    changes = [f"{name} {a:.3g} -> {b:.3g}" for name, (a, b) in diagnosis.figures.items()]
    if changes:
        tell(f"first third of the steps -> last third: {', '.join(changes)}")
    for note in diagnosis.notes:
        say(f"warning: {note}")
    explained = {name for cause in diagnosis.causes for name in cause.follows}
    for number, cause in enumerate(diagnosis.causes, 1):
        if cause.name in explained:
            tell(f"\n{number}. {cause.level}, explained by a cause above: {cause.what}")
        else:
            _show_cause(number, cause)
    if diagnosis.healthy:
        tell("\nno fault found" + ("; notes are not faults" if diagnosis.causes else ""))


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
    """Return a response on one line, in quotes. The middle of a long response is left out."""
    quoted = visible_json(json.dumps(text, ensure_ascii=False))
    return quoted if len(quoted) <= MOST_TEXT else f"{quoted[: MOST_TEXT // 2]} ... {quoted[-MOST_TEXT // 2 :]}"
