"""Result of one pass over saved responses."""

from __future__ import annotations

from dataclasses import dataclass, field

from vlmrl.reward_check.response_columns import Broken, ResponseColumns
from vlmrl.reward_check.scores import Floats, Scores


@dataclass
class ScoredResponses:
    """Result of one pass: columns over the rows that could be read.

    Args:
        stored: scores that were saved with the responses; None = no scores were saved.
        sides: new scores, one entry per requested reward.
        seconds: time for each row in seconds, one entry per requested reward.
        right_N: accuracy of each response, 1 = right; NaN if it is not known.
        texts: row of the input -> response, for about MAX_TEXTS rows spread over the input, with whole groups.
        broken: rows that could not be read; only the first ones.
        doubts: doubtful truths, see `Decoded`; only the first ones.
        num_broken, num_doubts: number of all broken rows and of all doubtful truths.
        num_contradictions: number of doubtful truths that contradict themselves.
    """

    facts: ResponseColumns
    stored: Scores | None
    sides: list[Scores]
    seconds: list[Floats]
    right_N: Floats
    texts: dict[int, str]
    broken: list[Broken] = field(default_factory=list)
    doubts: list[Broken] = field(default_factory=list)
    num_broken: int = 0
    num_doubts: int = 0
    num_contradictions: int = 0
