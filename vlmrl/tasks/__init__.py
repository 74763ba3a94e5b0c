"""Table of tasks. A task is made for a dataset: `make_task(name, dataset.info, variant)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vlmrl.data.dataset import Dataset
from vlmrl.errors import RecipeError, unknown
from vlmrl.tasks.base import Task
from vlmrl.tasks.digits import PREP as DIGITS_PREP
from vlmrl.tasks.digits import SUMMARY as DIGITS_SUMMARY
from vlmrl.tasks.digits import digits_task
from vlmrl.tasks.options import PrepCommand
from vlmrl.tasks.own_task import is_own, load_own
from vlmrl.tasks.pairs.command import PREP as PAIRS_PREP
from vlmrl.tasks.pairs.task import SUMMARY as PAIRS_SUMMARY
from vlmrl.tasks.pairs.task import pair_task
from vlmrl.tasks.pairs.truth_kind import PAIRS
from vlmrl.tasks.pairs.truth_kind import truth_form as pair_truth_form
from vlmrl.tasks.table import SUMMARY as TABLE_SUMMARY
from vlmrl.tasks.table import table_task
from vlmrl.tasks.taxonrl.command import prep_command
from vlmrl.tasks.taxonrl.domain import MAIN
from vlmrl.tasks.taxonrl.domain_task import PROFILES, domain_task
from vlmrl.tasks.taxonrl.domains import DOMAINS
from vlmrl.tasks.taxonrl.truth_kind import SPECIES_PAIRS
from vlmrl.tasks.taxonrl.truth_kind import truth_form as domain_truth_form
from vlmrl.tasks.truth_kinds import TEXTS, RowKind, Truth, TruthForm


@dataclass(frozen=True)
class TaskEntry:
    """Task in the table.

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


TASKS: dict[str, TaskEntry] = {
    "digits": TaskEntry(digits_task, DIGITS_SUMMARY, truth_form=pair_truth_form, prep=DIGITS_PREP),
    "pairs": TaskEntry(pair_task, PAIRS_SUMMARY, truth_form=pair_truth_form, prep=PAIRS_PREP),
    "table": TaskEntry(table_task, TABLE_SUMMARY),
    **{
        name: TaskEntry(
            partial(domain_task, domain),
            domain.summary,
            domain.variant_names,
            domain.main,
            PROFILES,
            partial(domain_truth_form, name),
            prep_command(domain),
        )
        for name, domain in DOMAINS.items()
    },
}


DEFAULT = "table"
"""Task where none is named: the rows have their own prompt, and the user provides the reward."""
KINDS = (SPECIES_PAIRS, PAIRS, TEXTS)
"""Kinds of rows that their truth identifies; the first that matches is used."""


def kind_of(truth: Truth) -> RowKind:
    """Return the kind of rows with such a truth, whatever task they come from."""
    return next(kind for kind in KINDS if kind.matches(truth))


def task_of(dataset: Dataset, named: str | None = None, variant: str | None = None) -> Task:
    """Return the task of an open dataset: the one that the user names, else the dataset's own.

    Raises: RecipeError when the dataset itself names a file, because such a file runs only if the user names it; else
        as `make_task`.
    """
    named = None if named == DEFAULT else named
    own = str(getattr(dataset, "task", DEFAULT))
    if named is None and is_own(str(dataset.info.get("task", ""))):
        raise RecipeError(
            f"{dataset.path} was made by the task `{dataset.info['task']}`, a file; data may run no code",
            hint=f'name it: [[data]] task = "{dataset.info["task"]}", or --task {dataset.info["task"]}',
        )
    return make_task(named or own, dataset.info, variant)


def find_task(name: str) -> TaskEntry:
    """Return a task of the table; for a user's own task a new entry.

    Raises: RecipeError with the nearest name when there is none of that name.
    """
    if is_own(name):
        own = load_own(name, {})
        return TaskEntry(partial(load_own, name), own.summary, truth_form=lambda *_: own.truths or TruthForm())
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]


def make_task(name: str, info: Mapping[str, Any], variant: str | None = None) -> Task:
    """Return the task of that name for a dataset: one of the table, or the user's `path/to/file.py:function`.

    Args:
        info: the dataset's dataset.json.
        variant: which variant; None = the largest that the dataset has the truth for.
    Raises: RecipeError with the nearest name when there is no such task or variant; DataError when the dataset lacks
        what the task or the variant needs.
    """
    if is_own(name):
        if variant is not None:
            raise unknown("variant", variant, [], whose=f" of task `{name}`")
        return load_own(name, info)
    entry = find_task(name)
    if variant is not None and variant not in entry.variant_names:
        raise unknown("variant", variant, entry.variant_names, whose=f" of task `{name}`")
    return entry.make(info, variant) if entry.variants else entry.make(info)
