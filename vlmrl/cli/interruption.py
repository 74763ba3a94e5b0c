"""Last line of a command after Ctrl-C or SIGTERM: results that are kept, and the command that continues."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from vlmrl.errors import Interruption

KEPT = {
    "fetch": "what was downloaded is kept",
    "eval": "finished evaluations and responses are kept",
    "demo": "the files of finished commands are kept",
    "runs": "changes already made are kept",
}
"""Command -> text about the results that an interruption keeps. Other commands keep none: they write only complete
files."""
READERS = {
    ("compare",): "",
    ("runs", "list"): "",
    ("runs", "show"): "",
    ("runs", "diagnose"): "",
    ("runs", "watch"): "stopped watching",
}
"""First words of a command that only reads -> line that is printed if it is interrupted; "" = no line."""


def describe_interruption(error: KeyboardInterrupt, command: str, typed: Sequence[str]) -> str:
    """Return the line with the interrupted command, kept results, and how to continue; "" = print nothing.

    Args:
        command: subcommand that ran; used if `error` is not an Interruption, which has its own command and results.
        typed: words that the user typed after `vlmrl`.
    """
    from vlmrl.redaction.redact import redact_argv

    for words, line in READERS.items():
        if command == words[0] and tuple(typed[: len(words)]) == words:
            return line
    if not isinstance(error, Interruption):
        error = Interruption(command, KEPT.get(command, "no incomplete files are left"))
    if error.again is None:
        error = Interruption(error.what, error.kept, shlex.join(["vlmrl", *redact_argv(typed)]))
    return str(error)
