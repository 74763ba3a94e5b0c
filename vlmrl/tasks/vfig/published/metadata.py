"""Published description of a reference, `{"entities": {...}}`, read with its defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vlmrl.redaction.redact import excerpt
from vlmrl.tasks.vfig.published.document import refuse
from vlmrl.tasks.vfig.published.outlines import Box
from vlmrl.tasks.vfig.published.truth_arrows import BLACK, TruthArrow
from vlmrl.tasks.vfig.published.truth_shapes import TruthShape


def read_metadata(metadata: Mapping[str, Any]) -> tuple[dict[str, TruthShape], list[TruthArrow]]:
    """Return shapes and arrows of a description.

    Raises: Unscorable for an entity without what the published code needs.
    """
    entities = metadata.get("entities") if isinstance(metadata, Mapping) else None
    if not isinstance(entities, Mapping):
        refuse("the metadata have no `entities`")
    shapes: dict[str, TruthShape] = {}
    arrows: list[TruthArrow] = []
    for key, entity in entities.items():
        if not isinstance(entity, Mapping):
            refuse(f"{key} of the metadata is no object")
        if "type" not in entity:
            refuse(f"{key} of the metadata has no `type`")
        if entity["type"] == "arrow":
            arrows.append(_arrow(key, entity))
        else:
            shapes[key] = _shape(key, entity)
    return shapes, sorted(arrows, key=lambda arrow: _number(arrow.key))


def _number(key: str) -> int:
    """Return the number at the end of a key such as `arrow_3`."""
    parts = key.split("_")
    if len(parts) < 2:
        refuse(f"the arrow {key!r} of the metadata has no number")
    try:
        return int(parts[1]) if parts[1].isdigit() else 0
    except ValueError:
        refuse(f"the arrow {key!r} of the metadata has no number")


def _text(key: str, entity: Mapping[str, Any], name: str, default: str | None = "") -> str:
    """Return a text of an entity; "" for null, 0 and the like."""
    if name not in entity:
        if default is None:
            refuse(f"{key} of the metadata has no `{name}`")
        return default
    value = entity[name] or ""
    if not isinstance(value, str):
        refuse(f"`{name}` of {key} in the metadata is no text: {excerpt(str(value), 80)}")
    return value


def _shape(key: str, entity: Mapping[str, Any]) -> TruthShape:
    return TruthShape(
        key=key,
        kind=entity["type"] if isinstance(entity["type"], str) else None,
        box=_box(key, entity.get("bounds")),
        label=_text(key, entity, "label", None),
        font=_text(key, entity, "font"),
        fill=_text(key, entity, "fillColor"),
        fill_style=_text(key, entity, "fillStyle", "solid"),
        stroke=_text(key, entity, "strokeColor"),
        border=_text(key, entity, "borderStyle", "solid"),
    )


def _box(key: str, bounds: Any) -> Box:
    is_box = isinstance(bounds, list | tuple) and len(bounds) >= 4
    if not is_box or not all(isinstance(edge, int | float) and math.isfinite(edge) for edge in bounds[:4]):
        refuse(f"`bounds` of {key} in the metadata are not four numbers")
    left, top, right, bottom = (float(edge) for edge in bounds[:4])
    return left, top, right, bottom


def _arrow(key: str, entity: Mapping[str, Any]) -> TruthArrow:
    return TruthArrow(
        key=key,
        source=_text(key, entity, "from", None),
        target=_text(key, entity, "to", None),
        colour=_text(key, entity, "color", BLACK),
        is_curved=_text(key, entity, "style") == "curved",
    )
