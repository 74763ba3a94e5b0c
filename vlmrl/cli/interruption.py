"""The last line of a command that Ctrl-C or SIGTERM ended: what is kept, and the command to go on with."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from vlmrl.errors import Interruption

KEPT = {
    "fetch": "what has arrived is kept",
    "eval": "evaluations that were finished are kept",
    "demo": "the commands that were finished leave their files",
    "runs": "what it has already done stays done",
}
"""Command -> what an interruption leaves. The others leave nothing: their files appear when they are complete."""
READERS = {
    ("compare",): "", ("runs", "list"): "", ("runs", "show"): "", ("runs", "diagnose"): "",
    ("runs", "watch"): "stopped watching",
}  # fmt: skip
"""First words of commands that only read -> the whole line that is printed when they are interrupted."""


def describe_interruption(error: KeyboardInterrupt, command: str, typed: Sequence[str]) -> str:
    """Return the line for people: what was interrupted, what is kept, and how to go on. "" where nothing needs saying.

    Args:
        command: the subcommand that ran; used where the error itself says nothing.
        typed: the words that the user typed after `vlmrl`.
    """
    from vlmrl.store.secrets.redact import redact_argv

    for words, line in READERS.items():
        if command == words[0] and tuple(typed[: len(words)]) == words:
            return line
    if not isinstance(error, Interruption):
        error = Interruption(command, KEPT.get(command, "nothing half written is left"))
    if error.again is None:
        error = Interruption(error.what, error.kept, shlex.join(["vlmrl", *redact_argv(typed)]))
    return str(error)
