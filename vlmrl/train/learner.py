"""Learner: the policy in training and everything else that an update needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from vlmrl.dist.fsdp import can_repeat, end_failed_pass
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import OutOfMemoryError
from vlmrl.model.device_memory import give_back
from vlmrl.model.packing import TrainItem
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Recipe
from vlmrl.train.optim import Optimizer
from vlmrl.train.out_of_memory import ROWS, TokenBudgets
from vlmrl.train.reference import ReferencePolicy

T = TypeVar("T")


@dataclass
class Learner:
    """Policy in training, with its optimizer, reference and token budgets.

    Args:
        recipe: the run's recipe.
        policy: the policy in training.
        optimizer: the optimizer of its weights.
        budgets: the token budgets; one is halved when memory runs out.
        reference: the policy that a KL term compares with; None = there is no KL term.
        world: the ranks that share each update.
        filler: trajectory without loss (see `StepBatch`); None with a single rank.
    """

    recipe: Recipe
    policy: Policy
    optimizer: Optimizer
    budgets: TokenBudgets
    reference: Policy | ReferencePolicy | None = None
    world: World = ALONE
    filler: TrainItem | None = None

    @property
    def may_repeat(self) -> bool:
        """Whether this rank can repeat a pass that ran out of memory. One of several ranks cannot repeat it alone."""
        return self.world.size == 1 and can_repeat(self.policy)

    def start_over(self) -> None:
        """Clear everything that a pass has left, if it failed or not: gradients, gathered weights, unused memory."""
        for policy in (self.policy, self.reference) if self.may_repeat else ():
            if isinstance(policy, Policy):
                end_failed_pass(policy)
        self.optimizer.clear()
        give_back(self.policy.device)

    def in_rows(self, work: Callable[..., T]) -> T:
        """Return `work(tokens_per_row=...)`. If a packed row runs out of memory, try once more with half the tokens.

        The run keeps the halved budget. Gradients are cleared before the second try; `work` must not have changed
        weights.

        Raises: OutOfMemoryError when the budget cannot be halved, or not once more. With several ranks, one rank cannot
            repeat its work alone: it raises, and `error.halved` has the budget to start all ranks again with.
        """
        budget = self.budgets.of(ROWS)
        try:
            return work(tokens_per_row=budget)
        except OutOfMemoryError as error:
            load = error.load
            if load is None or load.budget != ROWS or load.responses == 1 or not self.budgets.may_halve(ROWS):
                raise
            if not self.may_repeat:
                error.halved = {ROWS: [budget, load.half(budget)]}
                raise
        # Out of the handler: the error's frames hold the packed row and everything computed from it.
        self.start_over()
        self.budgets.halve(load)
        return self.in_rows(work)
