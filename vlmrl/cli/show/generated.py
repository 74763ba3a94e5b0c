"""Result of `vlmrl generate` on the screen: how many responses there are, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from vlmrl.cli.output import emit, say, tell
from vlmrl.untrusted import one_line, plural

if TYPE_CHECKING:
    from vlmrl.inference.generate import Answered

LEFT_OUT = 4
"""Exit code of a command that left out images."""
MOST_LINES = 5
"""Maximum number of images, or of reasons, that are listed."""


def show_generated(done: Answered, about_images: bool, as_json: bool) -> None:
    """Print the result. Raises: typer.Exit with code 4 when images were left out."""
    written = done.written
    facts: dict[str, Any] = {
        "out": str(done.out),
        "rows": done.rows,
        "responses": written.responses,
        "refused": written.refused,
    }
    if about_images:
        facts["left_out"] = [asdict(one) for one in written.left_out]
        facts |= {"files": written.files, "no_file": written.no_file, "not_drawn": written.not_drawn}
    emit(facts, as_json)
    if not as_json:
        to = f"{done.rows:,} image{plural(done.rows)}" if about_images else f"{done.rows:,} rows"
        tell(f"{done.out}: {written.responses:,} response{plural(written.responses)} to {to}")
        if written.files is not None:
            tell(f"{written.files:,} with {written.kind}")
            _reasons(f"without {written.kind}", written.no_file)
            _reasons("that cannot be drawn", written.not_drawn)
        if written.refused:
            say(f"warning: the endpoint refused {written.refused:,} of them; their lines have `refusal`")
    if written.left_out:
        count = len(written.left_out)
        say(f"warning: {count:,} image{plural(count)} left out:")
        for one in written.left_out[:MOST_LINES]:
            say(f"  {one_line(one.image)}: {one_line(one.reason)}")
        if count > MOST_LINES:
            say(f"  ... and {count - MOST_LINES:,} more")
        raise typer.Exit(LEFT_OUT)


def _reasons(what: str, numbers: Mapping[str, int]) -> None:
    """Print how many responses lack something, and why; the most frequent reasons first."""
    if not numbers:
        return
    tell(f"{sum(numbers.values()):,} {what}:")
    ordered = sorted(numbers.items(), key=lambda item: (-item[1], item[0]))
    for reason, count in ordered[:MOST_LINES]:
        tell(f"  {count:,}: {one_line(reason)}")
    if len(ordered) > MOST_LINES:
        tell(f"  ... and {len(ordered) - MOST_LINES:,} more reasons")
