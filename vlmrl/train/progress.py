"""What a run has to remember besides weights, and what of it begins anew in a fork or after a change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from vlmrl.store.manifest import Manifest


@dataclass
class Progress:
    """What a run has to remember besides weights: all of it goes into a checkpoint's data.json.

    Args:
        step: policy version = steps taken.
        best_step, best_value: of the validation metric; None before the first validation.
        stale: validations since the best.
        validated: step of the last validation; -1 before the first.
        samples, reward_errors: since the run began.
        seconds: of training, over all attempts.
        halved: token budgets that memory had no room for: recipe key -> [its value in the recipe, what it is now].
        kl_coef: the KL coefficient as steered so far; None = the recipe's, untouched.
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
        """Note a validation of this step. Returns whether it is the best so far."""
        best = self._is_best(value, goal)
        self.validated = self.step
        self.stale = 0 if best else self.stale + 1
        if best:
            self.best_step, self.best_value = self.step, value
        return best

    def begun_anew(self, manifest: Manifest) -> Progress:
        """The counters of a checkpoint as a run with this manifest goes on with them.

        A fork counts its own validations and seconds; so does a run whose validation measures another thing now. A
        steered KL coefficient begins anew when the recipe's was changed.
        """
        forked, restarts = manifest.forked_at == self.step, manifest.restarts_since(self.step)
        names = ["best_step", "best_value", "stale", "validated"] if forked or "best" in restarts else []
        names += ["seconds"] if forked else []
        names += ["kl_coef"] if "kl" in restarts else []
        first = Progress()
        return replace(self, **{name: getattr(first, name) for name in names})

    def _is_best(self, value: float, goal: Literal["max", "min"]) -> bool:
        """A tie with the model the run started from goes to the trained one, which is a checkpoint of the run."""
        before = self.best_value
        if math.isnan(value):
            return False
        if before is None or (value == before and self.best_step == 0):
            return True
        return value > before if goal == "max" else value < before
