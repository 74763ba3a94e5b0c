"""Sea stars: do two photographs show the same individual?"""

from __future__ import annotations

from vlmrl.tasks.taxonrl.domain import BASELINE, Domain, Variant

SEA_STAR = Domain(
    name="sea_star",
    summary="sea stars, same individual or not: the species of both, a probability (`vlmrl prep sea_star`)",
    about="Sea stars, same individual or not: the species of both.",
    subject="sea star",
    target="individual",
    variants=(Variant(BASELINE), Variant("im", "labels", ("species",), "lfw_sea_star_im:compute_score_gemini")),
    main="im",
    layout="sea_star",
    datasets=("maxvonk/sea-star-pairs-800px",),
)
