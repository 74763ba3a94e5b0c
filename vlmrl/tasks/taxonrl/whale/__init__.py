"""Whales: do two photographs show the same individual?"""

from __future__ import annotations

from vlmrl.tasks.taxonrl.domain import BASELINE, Domain, Variant

WHALE = Domain(
    name="whale",
    summary="whales, same individual or not: a probability (`vlmrl prep whale`)",
    about="Whales, same individual or not.",
    subject="whale",
    target="individual",
    variants=(Variant(BASELINE),),
    datasets=("maxvonk/whale-pairs-v1-800px",),
)
