"""Loggers besides metrics.jsonl. `BUILTIN` is the table of built-in loggers; base.py has the protocol of loggers."""

from __future__ import annotations

BUILTIN = {"tensorboard": "TensorBoardSink", "wandb": "WandbSink", "trackio": "TrackioSink"}
"""Built-in logger -> its class in builtin.py. The library that it needs, and vlmrl's extra for that, have its name."""


def file_and_class(name: str) -> tuple[str, str] | None:
    """Return (file, class) of a user's logger, `path/to/file.py:Class`; None for any other name."""
    file, colon, class_name = name.rpartition(":")
    return (file, class_name) if colon and file.endswith(".py") else None


def short_name(name: str) -> str:
    """Return a logger's name for messages and file names: the name of a built-in, or the class of a user's logger."""
    own = file_and_class(name)
    return own[1] if own else name
