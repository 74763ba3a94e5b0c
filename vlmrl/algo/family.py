"""The GRPO family as a table: name -> (advantage, ratio level, clip bounds, aggregation). No torch.

A recipe names a row (`algo.name`) and overrides single cells. A new member is a new row, or a new cell value with its
function in advantages.py, losses.py or aggregate.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vlmrl.algo.advantages import ESTIMATORS
from vlmrl.errors import RecipeError

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
"""Names of the aggregations in aggregate.py (kept here too because this file has no torch)."""


@dataclass(frozen=True)
class Algorithm:
    """One member of the family.

    Args:
        summary: one line for `vlmrl recipe list --algos`, with its source.
        advantage: key of advantages.ESTIMATORS.
        ratio: "token" (one ratio a token) or "sequence" (length-normalised ratio of the whole response).
        clip_low, clip_high: the ratio counts within [1 - clip_low, 1 + clip_high]; None = no clip.
        aggregation: key of aggregate.AGGREGATIONS.
    """

    name: str
    summary: str
    advantage: str
    ratio: str
    clip_low: float | None
    clip_high: float | None
    aggregation: str


ALGORITHMS: dict[str, Algorithm] = {
    a.name: a
    for a in (
        Algorithm("grpo", "group mean and std, token mean, clip 0.2/0.28 (arXiv:2402.03300 with DAPO's aggregation)",
                  "group_mean_std", "token", 0.2, 0.28, "token_mean"),
        Algorithm("grpo_paper", "as published: clip 0.2/0.2, mean of each response first (arXiv:2402.03300 eq. 3)",
                  "group_mean_std", "token", 0.2, 0.2, "sequence_mean"),
        Algorithm("dr_grpo", "no std, constant denominator: no bias by length or difficulty (arXiv:2503.20783)",
                  "group_mean", "token", 0.2, 0.2, "constant"),
        Algorithm("dapo", "clip-higher 0.2/0.28, token mean (arXiv:2503.14476, without dynamic re-sampling)",
                  "group_mean_std", "token", 0.2, 0.28, "token_mean"),
        Algorithm("gspo", "one length-normalised ratio a response, clip 3e-4/4e-4 (arXiv:2507.18071)",
                  "group_mean_std", "sequence", 3e-4, 4e-4, "sequence_mean"),
        Algorithm("rloo", "leave-one-out baseline, no clip (arXiv:2402.14740)",
                  "leave_one_out", "token", None, None, "token_mean"),
    )
}  # fmt: skip


def resolve(name: str, *, advantage: str | None = None, clip_low: float | None = None, clip_high: float | None = None,
            aggregation: str | None = None) -> Algorithm:  # fmt: skip
    """A row of the table with a recipe's overrides.

    Raises: RecipeError for a name, advantage or aggregation that does not exist, naming those that do.
    """
    for value, known, key in ((name, ALGORITHMS, "name"), (advantage, ESTIMATORS, "advantage"),
                              (aggregation, AGGREGATIONS, "aggregation")):  # fmt: skip
        if value is not None and value not in known:
            raise RecipeError(f"unknown algo.{key} `{value}`", hint=f"known: {', '.join(known)}")
    given = {"advantage": advantage, "clip_low": clip_low, "clip_high": clip_high, "aggregation": aggregation}
    return replace(ALGORITHMS[name], **{k: v for k, v in given.items() if v is not None})
