"""Faces: do two photographs show the same person?"""

from __future__ import annotations

from vlmrl.tasks.taxonrl.domain import BASELINE, Domain, Variant

HUMAN = Domain(
    name="human",
    summary="faces, same person or not: a probability (`vlmrl prep human`)",
    about="Faces, same person or not (LFW, CPLFW).",
    subject="person",
    target="individual",
    variants=(Variant(BASELINE),),
    datasets=("maxvonk/lfw", "maxvonk/cplfw_normal", "maxvonk/cplfw_aligned"),
)
