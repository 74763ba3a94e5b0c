"""Built-in rewards of pair tasks, by name."""

from __future__ import annotations

from collections.abc import Mapping

from vlmrl.rewards import Builtin
from vlmrl.tasks.pairs import labels, taxonomy

REWARDS: Mapping[str, Builtin] = {
    "taxonomy": Builtin(
        taxonomy.taxonomy, "pairs: format, calibrated answer, one part per level of a hierarchy", version=1
    ),
    "taxonomy_relations": Builtin(
        taxonomy.taxonomy_relations,
        "pairs: the same with Same, Different or Uncertain per level instead of names",
        version=1,
    ),
    "pair_labels": Builtin(
        labels.pair_labels, "pairs: format, calibrated answer, a label of a vocabulary per image", version=1
    ),
    "pair_answer": Builtin(
        taxonomy.pair_answer,
        "pairs: format and calibrated answer, the baseline without levels",
        version=1,
        lacks="it scores the answer alone and has no levels",
    ),
}
