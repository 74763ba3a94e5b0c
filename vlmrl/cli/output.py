"""How commands speak: tables and bars on stderr for people, one JSON object on stdout for programs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

JSON_HELP = "Print one JSON object on stdout and nothing else there."


def console() -> Console:
    """A Rich console on stderr; plain text when stderr is not a terminal. Rich is imported here, not at start."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def emit(result: Any, as_json: bool) -> None:
    """With `--json`: the result as one JSON object on stdout. Without: nothing (the command has shown its table)."""
    if as_json:
        print(json.dumps(result, ensure_ascii=False, default=str, allow_nan=False), flush=True)
