"""Gorillas: do two photographs show the same individual?"""

from __future__ import annotations

from vlmrl.tasks.taxonrl.domain import BASELINE, Domain, Variant

GORILLA = Domain(
    name="gorilla",
    summary="gorillas, same individual or not: the type of both, a probability (`vlmrl prep gorilla`)",
    about="Gorillas, same individual or not: the type of both (silverback, adult female, ...).",
    subject="gorilla",
    target="individual",
    variants=(Variant(BASELINE), Variant("im", "labels", ("type",), "lfw_intermediate_gorilla:compute_score_gemini")),
    main="im",
    layout="gorilla",
    datasets=(
        "maxvonk/gorilla-pairs-v3-30k-800px",
        "maxvonk/gorilla-pairs-v3-30k-800px-im",
        "maxvonk/gorilla-pairs-v4-800px-cv",
        "maxvonk/gorilla-pairs-v4-800px-notcv",
        "maxvonk/gorilla-pairs-v4-800px-cv-im",
    ),
)
