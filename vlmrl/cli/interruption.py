"""Last line of a command that Ctrl-C or SIGTERM ended: what is kept, and the command to continue with."""

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
"""Command -> what is kept after an interruption. Other commands keep nothing: their files appear when complete."""
READERS = {
    ("compare",): "",
    ("runs", "list"): "",
    ("runs", "show"): "",
    ("runs", "diagnose"): "",
    ("runs", "watch"): "stopped watching",
}
"""First words of commands that only read -> the whole line that is printed if they are interrupted."""


def describe_interruption(error: KeyboardInterrupt, command: str, typed: Sequence[str]) -> str:
    """Return the line that says what was interrupted, what is kept, and how to continue; "" = print nothing.

    Args:
        command: subcommand that ran; used if `error` is no Interruption, which has these facts itself.
        typed: words that the user typed after `vlmrl`.
    """
    from vlmrl.store.secrets.redact import redact_argv

    for words, line in READERS.items():
        if command == words[0] and tuple(typed[: len(words)]) == words:
            return line
    if not isinstance(error, Interruption):
        error = Interruption(command, KEPT.get(command, "no incomplete files are left"))
    if error.again is None:
        error = Interruption(error.what, error.kept, shlex.join(["vlmrl", *redact_argv(typed)]))
    return str(error)
