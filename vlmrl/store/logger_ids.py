"""Records of a run's loggers in `sinks.json`: for each logger, the id and the address of the remote run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from vlmrl.errors import StoreError
from vlmrl.redaction.redact import redact_value
from vlmrl.store import layout
from vlmrl.store.files import write_json
from vlmrl.store.manifest import read_record
from vlmrl.store.metrics import encode

SCHEMA = 1


@cache
def _model() -> Any:
    from pydantic import Field, TypeAdapter, create_model  # at the first use: importing it is slow

    schema: Any = (Literal[1], Field(alias="schema"))
    return TypeAdapter(create_model("Sinks", schema_=schema, sinks=(dict[str, dict[str, Any]], ...)))


def read_remote(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return logger -> the values that its `open` returned; {} for a run without loggers.

    Raises: StoreError if the file is damaged or of a newer schema.
    """
    path = run_dir / layout.SINKS
    return read_record(path, _model(), layout.SINKS, hint=_HINT)["sinks"] if os.path.lexists(path) else {}


def write_remote(run_dir: Path, sink: str, kept: Mapping[str, Any]) -> None:
    """Write the values that a logger's `open` returned. The values of other loggers stay.

    Secrets are hidden. A damaged file is replaced.

    Raises: StoreError if the write fails; TypeError if a value is not JSON.
    """
    try:
        before = read_remote(run_dir)
    except StoreError:
        before = {}
    sinks = {**before, sink: redact_value(encode(kept))}
    write_json(run_dir / layout.SINKS, {"schema": SCHEMA, "sinks": sinks})


_HINT = "delete it: the loggers then begin new runs"
