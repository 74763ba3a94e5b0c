"""Choice of the layers whose activations are computed again in the backward pass, from `model.gradient_checkpointing`.

Activations of a recomputed layer are not kept from its forward pass to its backward pass, only its input is. Of the
text model the first layers are chosen: the backward pass reaches them last, when the activations that the other layers
kept are freed already. So the peak of an update is lowest for a given number of recomputed layers. The numbers of a run
are the same bit for bit for every choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

KEY = "model.gradient_checkpointing"
Setting = bool | str | float
"""Value of KEY: false, "vision", a share of the text model's layers, or true."""
STEPS: tuple[Setting, ...] = (False, "vision", 0.25, 0.5, 0.75, True)
"""Settings that a memory plan chooses from, those with the least recomputation first."""
UPDATE_SHARE = 1 / 3
"""Share of an update's time that recomputing all layers adds: the forward pass once more, beside a backward pass that
takes twice as long as it."""


@dataclass(frozen=True)
class Recomputed:
    """Recomputed layers of a model.

    Args:
        vision: whether those of the vision tower are recomputed, all of them.
        text: number of the text model's first layers that are recomputed.
    """

    vision: bool
    text: int


def recomputed_layers(setting: Setting, layers: int) -> Recomputed:
    """Return the layers that a setting recomputes.

    Args:
        setting: a share between 0 and 1 is rounded up to whole layers, and includes the vision tower. "auto" is an open
            value: until a run chooses one, nothing is recomputed.
        layers: number of layers of the text model.
    """
    if setting is True:
        return Recomputed(True, layers)
    if setting is False or setting == "auto":
        return Recomputed(False, 0)
    if setting == "vision":
        return Recomputed(True, 0)
    return Recomputed(True, math.ceil(float(setting) * layers))


def stricter(setting: Setting) -> tuple[Setting, ...]:
    """Return the settings of `STEPS` that recompute more than this one, those with the least recomputation first."""
    return tuple(step for step in STEPS if share_of(step) > share_of(setting))


def share_of(setting: Setting) -> float:
    """Return the share of the text model's layers that a setting recomputes; the vision tower counts a little."""
    if isinstance(setting, str):
        return {"auto": 0.0, "vision": 1e-3}[setting]
    return float(setting)
