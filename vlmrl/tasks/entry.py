"""The class TaskEntry: what a task's folder registers."""

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
        make: dataset.json of a dataset, and for a task with variants the requested one or None -> the task.
        summary: its line in `vlmrl recipe list --tasks`.
        variants: what `[[data]] variant` may name.
        main: the variant that `im` names, and the default where the dataset has the truth for it.
        profiles: what `[reward] profile` may name.
        truth_form: (truth of the first row, unparsed, columns of the table) -> how a table of responses holds the
            task's truths.
        prep: `vlmrl prep` of the task; None = there is none.
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
