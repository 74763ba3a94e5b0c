"""Facts that a recipe key declares beside its type: the range of its number, and what a resume may do with it.

The keys of `[algo]` are declared in algo/algo_keys.py, all others in recipe/schema.py and recipe/tables.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MOST = 1_000_000_000
"""Default upper limit of a recipe key whose value is a whole number. A key may declare another limit."""


@dataclass(frozen=True)
class Range:
    """Bounds of a number. `gt` and `lt` are exclusive, all others inclusive. None = no such bound."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None


POSITIVE_INT = Range(gt=0, le=MOST)
MOST_PATCH = 4096
PATCH = Range(gt=0, le=MOST_PATCH)
"""Side of a patch of an image, in pixels."""
COUNT = Range(ge=0, le=MOST)
NUMBER = Range(ge=-1e9, le=1e9)
NOT_NEGATIVE = Range(ge=0, le=1e9)
POSITIVE = Range(ge=1e-9, le=1e9)
ABOVE_ONE = Range(gt=1, le=1e9)
FRACTION = Range(ge=0, le=1)
POSITIVE_FRACTION = Range(ge=1e-9, le=1)


@dataclass(frozen=True)
class OnResume:
    """Rule that says whether a recipe key may change when a run is resumed.

    Args:
        kind: "free": the result of the training does not depend on the key (except for rounding), so a change is
            accepted silently. "asked": the result depends on the key; the change is listed and needs --accept-changes
            (a fork, `--from`, only lists it). "refused": the checkpoint cannot be used with another value.
        reason: the reason in the words that the user reads; for a refused key also the alternative.
        restarts: state that begins anew after a change: "best" = the best validation and its patience, "kl" = the
            steered KL coefficient.
    """

    kind: Literal["free", "asked", "refused"]
    reason: str
    restarts: tuple[Literal["best", "kl"], ...] = ()
