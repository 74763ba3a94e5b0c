"""Records of a run's loggers in `sinks.json`: for each logger, the id and the address of the remote run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.json_text import parse_json
from vlmrl.redaction.redact import redact_value
from vlmrl.regular_file import read_regular
from vlmrl.store import layout
from vlmrl.store.files import write_json
from vlmrl.store.metrics import encode

SCHEMA = 1


def read_remote(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return logger -> the values that its `open` returned; {} for a run without loggers.

    Raises: StoreError if the file is damaged or of a newer schema.
    """
    path = run_dir / layout.SINKS
    try:
        value = parse_json(read_regular(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StoreError(f"{layout.SINKS} cannot be read: {error}", where=str(path), hint=_HINT) from None
    sinks = value.get("sinks") if isinstance(value, dict) and value.get("schema") == SCHEMA else None
    if not isinstance(sinks, dict) or not all(isinstance(kept, dict) for kept in sinks.values()):
        raise StoreError(f"{layout.SINKS} does not have the form that this vlmrl writes", where=str(path), hint=_HINT)
    return sinks


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
