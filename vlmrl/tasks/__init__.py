"""The table of tasks. A task is made for a dataset: `make_task(name, dataset.info, variant)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vlmrl.tasks.base import Task, unknown
from vlmrl.tasks.digits.task import SUMMARY as DIGITS_SUMMARY
from vlmrl.tasks.digits.task import digits_task
from vlmrl.tasks.kinds import TEXTS, RowKind, Truth, TruthForm
from vlmrl.tasks.pairs.kind import PAIRS
from vlmrl.tasks.pairs.kind import truth_form as pair_truth_form
from vlmrl.tasks.pairs.task import SUMMARY as PAIRS_SUMMARY
from vlmrl.tasks.pairs.task import pair_task
from vlmrl.tasks.table.task import SUMMARY as TABLE_SUMMARY
from vlmrl.tasks.table.task import table_task
from vlmrl.tasks.taxonrl.domain import MAIN
from vlmrl.tasks.taxonrl.domain_task import PROFILES, domain_task
from vlmrl.tasks.taxonrl.domains import DOMAINS
from vlmrl.tasks.taxonrl.kind import SPECIES_PAIRS
from vlmrl.tasks.taxonrl.kind import truth_form as domain_truth_form


@dataclass(frozen=True)
class TaskEntry:
    """A task in the table.

    Args:
        make: dataset.json of a dataset, and where the task has variants the wanted one or None -> the task.
        summary: its line in `vlmrl recipe list --tasks`.
        variants: what `[[data]] variant` may name.    main: the one that `im` names, and the default where the
            dataset has the truth for it.
        profiles: what `[reward] profile` may name.
        truth_form: (truth of the first row as it stands, columns of the table) -> how a table of responses holds the
            task's truths.
    """

    make: Callable[..., Task]
    summary: str
    variants: tuple[str, ...] = ()
    main: str | None = None
    profiles: tuple[str, ...] = ("default",)
    truth_form: Callable[[Truth, Sequence[str]], TruthForm] = lambda truth, columns: TruthForm()

    @property
    def variant_names(self) -> tuple[str, ...]:
        """Every name of a variant, `im` included."""
        return (*self.variants, *((MAIN,) if self.main not in (None, MAIN) else ()))


TASKS: dict[str, TaskEntry] = {
    "digits": TaskEntry(digits_task, DIGITS_SUMMARY, truth_form=pair_truth_form),
    "pairs": TaskEntry(pair_task, PAIRS_SUMMARY, truth_form=pair_truth_form),
    "table": TaskEntry(table_task, TABLE_SUMMARY),
    **{
        name: TaskEntry(
            partial(domain_task, domain),
            domain.summary,
            domain.variant_names,
            domain.main,
            PROFILES,
            partial(domain_truth_form, name),
        )
        for name, domain in DOMAINS.items()
    },
}


KINDS = (SPECIES_PAIRS, PAIRS, TEXTS)
"""Kinds of rows that are known by their truth, the first that matches."""


def kind_of(truth: Truth) -> RowKind:
    """Return the kind of rows with such a truth, whatever task they come from."""
    return next(kind for kind in KINDS if kind.matches(truth))


def find_task(name: str) -> TaskEntry:
    """Return a task of the table. Raises: RecipeError with the nearest name when there is none of that name."""
    if name not in TASKS:
        raise unknown("task", name, list(TASKS))
    return TASKS[name]


def make_task(name: str, info: Mapping[str, Any], variant: str | None = None) -> Task:
    """The task of that name for a dataset.

    Args:
        info: the dataset's dataset.json.
        variant: how much is asked for; None = the most that the dataset has the truth for.
    Raises: RecipeError with the nearest name when there is no such task or variant; DataError when the dataset lacks
        what the task or the variant needs.
    """
    entry = find_task(name)
    if variant is not None and variant not in entry.variant_names:
        raise unknown("variant", variant, list(entry.variant_names), f" of task `{name}`")
    return entry.make(info, variant) if entry.variants else entry.make(info)
