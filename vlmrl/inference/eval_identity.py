"""Identity of an evaluation: the facts on which two evaluations of the same thing agree, and a free name for one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.evaluate.scoring_rewards import scored_alike, scored_by
from vlmrl.redaction.redact import excerpt
from vlmrl.store import layout
from vlmrl.store.evaluated_rows import read_summary
from vlmrl.tasks.prompt import same_prompt

IDENTITY = (
    "model",
    "endpoint",
    "checkpoint",
    "split",
    "source",
    "dataset",
    "reward",
    "prompt_sha256",
    "sampling",
    "max_rows",
    "seed",
    "images",
)
"""Keys of `meta` that are equal in two evaluations of the same thing."""


def agrees_on(key: str, before: Mapping[str, Any], meta: Mapping[str, Any]) -> bool:
    """Return whether a fact of two evaluations is the same; rewards and prompts are compared by their identity."""
    if key == "reward":
        return scored_alike(before, meta) is True
    return same_prompt(_prompt(before), _prompt(meta)) if key == "prompt_sha256" else before.get(key) == meta.get(key)


def _prompt(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {"sha256": meta.get("prompt_sha256"), "earlier": meta.get("prompt_earlier")}


def _words(key: str, meta: Mapping[str, Any]) -> str:
    """Return a fact of `meta` for a message.

    A reward is shown by name, version and arguments, a dataset by its path, another table as a line of `name value`.
    """
    value = meta.get(key)
    if key == "reward" and isinstance(value, Mapping):
        return f"{scored_by(meta):.400}"
    if isinstance(value, Mapping):
        shown = value.get("path") or ", ".join(f"{name} {inner}" for name, inner in value.items())
        return f"{shown:.200}"
    return excerpt(str(value), 80)


def require_name(folder: Path, meta: Mapping[str, Any], force: bool) -> None:
    """Raise StoreError if the name belongs to an evaluation of training, or, without `force`, of something else.

    An evaluation of the same thing may be made again.
    """
    if not (folder / layout.EVAL_SUMMARY).is_file():
        return
    before = read_summary(folder).get("meta", {})
    if before.get("during"):
        raise StoreError(
            f"the evaluation `{folder.name}` was made by training", where=str(folder), hint="choose another --name"
        )
    other = [key for key in IDENTITY if not agrees_on(key, before, meta)]
    if other and not force:
        earlier = _words(other[0], before)
        raise StoreError(
            f"the evaluation `{folder.name}` exists and was made with another {other[0]}: {earlier}",
            where=str(folder),
            hint="choose another --name, or replace it with --force",
        )
