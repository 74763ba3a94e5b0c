"""Birds: do two photographs show the same species?"""

from __future__ import annotations

from vlmrl.tasks.taxonrl.domain import BASELINE, Domain, Variant

NAMED = ("order", "family", "genus")

BIRD = Domain(
    name="bird",
    summary="birds, same species or not: order, family and genus of both, a probability (`vlmrl prep bird`)",
    about="Birds, same species or not: order, family and genus of both.",
    subject="bird",
    target="species",
    variants=(
        Variant(BASELINE),
        Variant("im_basic", "verdicts", NAMED, "lfw_bird_im_basic:compute_score_gemini"),
        Variant("im_concrete", "names", NAMED, "lfw_bird_im_concrete:compute_score_gemini"),
    ),
    main="im_concrete",
    layout="bird",
    datasets=("maxvonk/bird-pairs-v2-im-800px",),
)
