"""Chimpanzees: do two photographs show the same individual?"""

from __future__ import annotations

from vlmrl.tasks.taxonrl.domain import BASELINE, Domain, Variant

CHIMP = Domain(
    name="chimp",
    summary="chimpanzees, same individual or not: the age group of both, a probability (`vlmrl prep chimp`)",
    about="Chimpanzees, same individual or not: the age group of both.",
    subject="chimpanzee",
    target="individual",
    variants=(
        Variant(BASELINE),
        Variant("im", "labels", ("age_group",), "lfw_intermediate:compute_score_gemini"),
        Variant("im_named", "named_labels", ("age_group",), "lfw_intermediate:compute_score_chatgpt"),
    ),
    main="im",
    layout="chimp",
    datasets=(
        "maxvonk/chimp-pairs-v2-800px-meta-data-fixed-names",
        "maxvonk/chimp-pairs-v2-800px-meta-data-fixed-names-im",
    ),
)
