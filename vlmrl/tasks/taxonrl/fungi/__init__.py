"""Fungi: do two photographs show the same species?"""

from __future__ import annotations

from vlmrl.tasks.taxonrl.domain import BASELINE, Domain, Variant

FUNGI = Domain(
    name="fungi",
    summary="fungi, same species or not: order, family and genus of both, a probability (`vlmrl prep fungi`)",
    about="Fungi, same species or not: order, family, genus and species of both.",
    subject="fungus",
    target="species",
    variants=(
        Variant(BASELINE),
        Variant("im_concrete", "names", ("order", "family", "genus"), "lfw_fungi_im:compute_score_gemini"),
    ),
    main="im_concrete",
    layout="fungi",
    datasets=("maxvonk/danish-fungi-2024-pairs-800px",),
)
