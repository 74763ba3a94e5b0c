"""Built-in rewards of TaxonRL's tasks, by name. The rewards of pair tasks are in tasks/pairs/rewards.py."""

from __future__ import annotations

from collections.abc import Mapping

from vlmrl.rewards import Builtin
from vlmrl.tasks.taxonrl.published import taxonrl

REWARDS: Mapping[str, Builtin] = {
    "taxonrl": Builtin(
        taxonrl,
        "pairs: a reward that TaxonRL published, to the digit, to reproduce its runs",
        version=1,
        any_truth=True,
    ),
}
