"""Progress of a run: the counters that a checkpoint saves, and those that start anew in a fork or after a change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from vlmrl.store.manifest import Manifest


@dataclass
class Progress:
    """Counters of a run. A checkpoint saves all of them in its data.json.

    Args:
        step: number of steps done, which is the policy version.
        best_step, best_value: step and value of the best validation metric; None before the first validation.
        stale: number of validations since the best.
        validated: step of the last validation; -1 before the first.
        samples, reward_errors: number of samples and of failed rewards since the run began.
        seconds: seconds of training, over all attempts.
        halved: token budgets that were halved because memory ran out: recipe key -> [its value in the recipe, its value
            now].
        kl_coef: current value of an adaptive KL coefficient; None = the recipe's.
    """

    step: int = 0
    best_step: int | None = None
    best_value: float | None = None
    stale: int = 0
    validated: int = -1
    samples: int = 0
    reward_errors: int = 0
    seconds: float = 0.0
    kl_coef: float | None = None
    halved: dict[str, list[int]] = field(default_factory=dict)

    def count_validation(self, value: float, goal: Literal["max", "min"]) -> bool:
        """Count a validation of this step. Return whether it is the best so far."""
        best = self._is_best(value, goal)
        self.validated = self.step
        self.stale = 0 if best else self.stale + 1
        if best:
            self.best_step, self.best_value = self.step, value
        return best

    def begun_anew(self, manifest: Manifest) -> Progress:
        """Return the counters of a checkpoint with which a run with this manifest continues.

        The best validation and its count start anew in a fork, and when validation measures something else now. The
        seconds start anew in a fork. An adaptive KL coefficient starts anew when the recipe's was changed.
        """
        forked, restarts = manifest.forked_at == self.step, manifest.restarts_since(self.step)
        names = ["best_step", "best_value", "stale", "validated"] if forked or "best" in restarts else []
        names += ["seconds"] if forked else []
        names += ["kl_coef"] if "kl" in restarts else []
        fresh = Progress()
        return replace(self, **{name: getattr(fresh, name) for name in names})

    def _is_best(self, value: float, goal: Literal["max", "min"]) -> bool:
        """Return whether a validation is the best so far.

        In a tie with the start weights (step 0), the trained model is the best: it is a checkpoint of the run.
        """
        best_so_far = self.best_value
        if math.isnan(value):
            return False
        if best_so_far is None or (value == best_so_far and self.best_step == 0):
            return True
        return value > best_so_far if goal == "max" else value < best_so_far
