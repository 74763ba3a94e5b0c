"""Metrics of a whole set of responses for which each response is examined once, such as an average precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlmrl.tasks.pooled import Verdict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Metrics = Mapping[str, float | None]


@dataclass(frozen=True)
class AccumulatedMetrics:
    """Metrics that are accumulated from facts about single responses.

    As `Task.set_metrics`, a resample examines no response again. Without this class, each of the 400 resamples would.

    Args:
        examine: response -> facts about it.
        accumulate: facts about all responses, in their order -> function from how often each response is taken, [N], to
            the metrics by name; None = not defined.
        reflected: range of the metrics, if they are biased for few responses, as an average precision is. Resamples
            repeat this bias, so the percentiles are reflected at the value and cut to this range. None = they are not.
    """

    examine: Callable[[Verdict], Any]
    accumulate: Callable[[Sequence[Any]], Callable[[NDArray[np.int64]], Metrics]]
    reflected: tuple[float, float] | None = None

    def __call__(self, verdicts: Sequence[Verdict]) -> Metrics:
        """Return the metrics of responses, at least one."""
        import numpy as np

        facts = [self.examine(verdict) for verdict in verdicts]
        return self.accumulate(facts)(np.ones(len(facts), dtype=np.int64))
