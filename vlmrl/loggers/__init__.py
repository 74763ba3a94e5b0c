"""Loggers besides metrics.jsonl. `BUILTIN` is the table of built-in loggers; base.py has the protocol of loggers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Builtin:
    """Built-in logger.

    Args:
        package: library that it needs.
        extra: optional dependency group of vlmrl that installs this library.
    """

    module: str
    class_name: str
    package: str
    extra: str


BUILTIN: dict[str, Builtin] = {
    "tensorboard": Builtin("vlmrl.loggers.builtin", "TensorBoardSink", "tensorboard", "tensorboard"),
    "wandb": Builtin("vlmrl.loggers.builtin", "WandbSink", "wandb", "wandb"),
    "trackio": Builtin("vlmrl.loggers.builtin", "TrackioSink", "trackio", "trackio"),
}


def file_and_class(name: str) -> tuple[str, str] | None:
    """Return (file, class) of a user's logger, `path/to/file.py:Class`; None for any other name."""
    file, colon, class_name = name.rpartition(":")
    return (file, class_name) if colon and file.endswith(".py") else None


def short_name(name: str) -> str:
    """Return a logger's name for messages and file names: the name of a built-in, or the class of a user's logger."""
    own = file_and_class(name)
    return own[1] if own else name
