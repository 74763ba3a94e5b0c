"""Comparisons of evaluations whose models saw the images as they are, or changed ones (`vlmrl eval --images`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.evaluate.blind_probe import blind_probe
from vlmrl.evaluate.records import Evaluation
from vlmrl.store.evaluated_rows import images_of, read_summary, role_label, role_of, shown_label


def require_shown_alike(*folders: Path) -> None:
    """Raise a StoreError if evaluations differ in the images that the models saw."""
    changes = {images_of(read_summary(folder).get("meta") or {}) for folder in folders}
    if len(changes) > 1:
        words = " and ".join(sorted(change or "true" for change in changes))
        raise StoreError(
            f"the models saw {words} images, and that is no difference between models; to see how much needs the "
            "images, name the folders of both evaluations"
        )


def label_of_both(metas: Sequence[Mapping[str, Any]]) -> str:
    """Return the label of the rows of two evaluations; "" if no label is needed."""
    a, b = metas
    words = [str(meta.get("shared") or f"{role_of(meta)} rows") for meta in metas]
    label = role_label(a) if words[0] == words[1] else f"{words[0]} for A and {words[1]} for B"
    shown = [shown_label(meta) for meta in metas]
    if shown[0] != shown[1]:
        return f"rows with {images_of(a) or 'true'} images for A and {images_of(b) or 'true'} images for B"
    return ", ".join(filter(None, (shown[0], label)))


def probe_between(left: Evaluation, right: Evaluation) -> dict[str, Any] | None:
    """Return the blind probe of two evaluations; None unless exactly one of them was made with changed images."""
    changed = [images_of(e.summary.get("meta") or {}) is not None for e in (left, right)]
    if changed[0] == changed[1]:
        return None
    return blind_probe(left, right) if changed[1] else blind_probe(right, left)


def family_of(evaluation: Mapping[str, Any]) -> str:
    """Return the family of an evaluation's tests for Holm's correction: the role of its rows, and changed images."""
    return " ".join([evaluation["role"], *filter(None, evaluation["shown"])])
