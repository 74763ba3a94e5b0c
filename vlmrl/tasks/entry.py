"""The class TaskEntry: entry of a task in the table of tasks. A task's folder registers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vlmrl.tasks.base import Task
from vlmrl.tasks.options import PrepCommand
from vlmrl.tasks.truth_kinds import Truth, TruthForm

MAIN = "im"
"""Name of a task's main variant, in every task with variants."""


@dataclass(frozen=True)
class TaskEntry:
    """Task in the table of tasks.

    Args:
        make: returns the task for a dataset.json. A task with variants takes the name of a variant, or None, as its
            second argument.
        summary: its line in `vlmrl recipe list --tasks`.
        variants: names that `[[data]] variant` accepts.
        main: the variant that `im` selects. It is also the default if the dataset has the truth fields that it needs.
        profiles: names that `[reward] profile` accepts.
        truth_form: (truth of the first row, not parsed; column names of the table) -> form of the task's truths in a
            table of responses.
        prep: the command `vlmrl prep` of the task; None = the task has none.
    """

    make: Callable[..., Task]
    summary: str
    variants: tuple[str, ...] = ()
    main: str | None = None
    profiles: tuple[str, ...] = ("default",)
    truth_form: Callable[[Truth, Sequence[str]], TruthForm] = lambda truth, columns: TruthForm()
    prep: PrepCommand | None = None

    @property
    def variant_names(self) -> tuple[str, ...]:
        """Every name of a variant, `im` included."""
        return (*self.variants, *((MAIN,) if self.main not in (None, MAIN) else ()))
