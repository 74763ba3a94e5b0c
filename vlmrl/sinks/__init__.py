"""Loggers besides metrics.jsonl. `BUILTIN` is the table of those that come along; base.py is their protocol."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Builtin:
    """A logger that comes along. Args: package: the library it needs.    extra: of vlmrl, which installs that."""

    module: str
    class_name: str
    package: str
    extra: str


BUILTIN: dict[str, Builtin] = {
    "tensorboard": Builtin("vlmrl.sinks.tensorboard_sink", "TensorBoardSink", "tensorboard", "tensorboard"),
    "wandb": Builtin("vlmrl.sinks.wandb_sink", "WandbSink", "wandb", "wandb"),
    "trackio": Builtin("vlmrl.sinks.trackio_sink", "TrackioSink", "trackio", "trackio"),
}


def file_and_class(name: str) -> tuple[str, str] | None:
    """(file, class) of a logger of one's own, `path/to/file.py:Class`; None for any other name."""
    file, colon, class_name = name.rpartition(":")
    return (file, class_name) if colon and file.endswith(".py") else None


def short_name(name: str) -> str:
    """What a logger is called in messages and file names: a built-in by its name, one of one's own by its class."""
    own = file_and_class(name)
    return own[1] if own else name
