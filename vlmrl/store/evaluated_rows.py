"""Which rows an evaluation was made on, as its summary says: test rows, rows that training validated on, or its own.

`vlmrl eval` chooses and labels them (inference/eval_rows.py); compare, report and the model card show the label.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from vlmrl.errors import StoreError
from vlmrl.json_text import parse_json
from vlmrl.store.layout import EVAL_SUMMARY, eval_name, step_name

SCHEMA = 1
"""Of the files of an evaluation."""
Role = Literal["test", "validation", "training", "held out"]
"""test: the split of that name. validation: training chose its checkpoint by these rows. training: the model was
trained on them. held out: none of these, as far as the records say."""
ROLES: tuple[Role, ...] = ("test", "held out", "validation", "training")
"""Those whose rows say most about new ones first."""

TRAINING_STEP = re.compile(r"-step-(\d{6,})(?=-|$)")
"""The step in the name of an evaluation's folder."""
LABELS: Mapping[Role, str] = {
    "test": "",
    "validation": "rows that training validated on: its checkpoint was chosen by them",
    "training": "training rows: they do not say how well it does on new ones",
    "held out": "",
}
"""What must stand beside the numbers; empty where nothing must."""


def read_summary(folder: Path) -> dict[str, Any]:
    """Return summary.json of an evaluation. Raises: StoreError when it is missing, damaged or of a newer schema."""
    path = folder / EVAL_SUMMARY
    try:
        summary = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise StoreError("there is no finished evaluation", where=str(folder)) from None
    except (OSError, ValueError) as error:
        raise StoreError(f"the evaluation's summary is damaged: {error}", where=str(path)) from error
    if not isinstance(summary, dict) or not isinstance(summary.get("metrics"), dict):
        raise StoreError("this file is no summary of an evaluation", where=str(path))
    if summary.get("schema") != SCHEMA:
        message = f"this evaluation has schema {summary.get('schema')!r}; this vlmrl reads {SCHEMA}"
        raise StoreError(message, where=str(path), hint="upgrade vlmrl")
    return summary


def role_of(meta: Mapping[str, Any]) -> Role:
    """The role of the rows of an evaluation, from the `meta` of its summary.

    Evaluations of older versions name their split alone; `train` was what they took where a table had no other.
    """
    for role in ROLES:
        if meta.get("role") == role:
            return role
    by_split: dict[str, Role] = {"test": "test", "validation": "validation", "train": "training"}
    return "validation" if meta.get("during") else by_split.get(str(meta.get("split")), "held out")


def role_label(meta: Mapping[str, Any]) -> str:
    """What must stand beside the numbers of an evaluation; empty where nothing must."""
    return LABELS[role_of(meta)]


def method_of(summary: Mapping[str, Any]) -> str:
    """How the intervals of a summary were made, in words; those of older versions were bootstrapped."""
    return str(summary.get("intervals") or "bootstrap over images (of an older version)")


def set_method_of(summary: Mapping[str, Any]) -> str:
    """Return how the intervals of a summary's metrics of the whole split were made, in words; "" without any."""
    sets = summary.get("set_metrics") or {}
    names = sets.get("names") or ()
    return f"of {', '.join(names)}: {sets.get('method')}" if names else ""


def without_step(name: str) -> str:
    """The name of an evaluation's folder without its step: what those of several checkpoints have in common."""
    return TRAINING_STEP.sub("", name)


def names_a_step(name: str) -> bool:
    """Whether a name ends as training's own do: a later step of the run might take it."""
    return re.search(r"-step-\d+$", name) is not None


def training_name(split: str, source: str, step: int) -> str:
    """The folder of a validation during training. `vlmrl eval` makes no such name of the same rows."""
    return eval_name(split, source, step_name(step))


def same_rows_key(meta: Mapping[str, Any]) -> str | None:
    """What evaluations of the same rows, sampled alike, have in common; None where the summary does not say."""
    if not meta.get("split") or not meta.get("source"):
        return None
    how = meta.get("sampling") or {}
    sampled = "" if meta.get("greedy", True) else f"T{how.get('temperature')}-n{how.get('samples')}"
    return "-".join(str(w) for w in (meta["split"], meta["source"], sampled, meta.get("max_rows")) if w)
