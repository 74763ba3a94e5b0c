"""The modules of a model that are gathered one at a time when it is sharded over several processes."""

from __future__ import annotations

from typing import Any

from torch import nn


def units_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformers model that it says must not be split: of its text model and its vision tower."""
    names = {n for m in model.modules() for n in (getattr(m, "_no_split_modules", None) or ())}
    return [m for m in model.modules() if type(m).__name__ in names]


def sharded_units(model: Any, sharing: str) -> list[nn.Module]:
    """Return the units of a sharded policy; everything else is one more, gathered for the whole of a row.

    None where a layer runs as often as a row's groups ask for (a forked cache, the padded path): processes would
    disagree about how often to gather it.
    """
    return units_of(model) if sharing == "packed" else []
