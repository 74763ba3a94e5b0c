"""The class TaskEntry, an entry in the table of tasks, and the import of the folders that register tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from vlmrl.tasks.base import Task
from vlmrl.tasks.prep_options import PrepCommand
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


HERE = Path(__file__).parent


def modules_of_folders(name: str) -> list[ModuleType]:
    """Import the module `<name>.py` from every task folder that contains it.

    Returns: the modules in the order of their folders' names.
    """
    files = sorted(HERE.glob(f"*/{name}.py"))
    return [import_module(f"{__package__}.{file.parent.name}.{name}") for file in files]


def entries_of(modules: Iterable[ModuleType], table: str) -> dict[str, Any]:
    """Return the entries of a table that each of the modules has, by name.

    Raises: ValueError for a name that two folders have.
    """
    entries: dict[str, Any] = {}
    for module in modules:
        own = getattr(module, table)
        if twice := sorted(entries.keys() & own.keys()):
            raise ValueError(f"{module.__name__}.{table} has `{twice[0]}`, which another folder of tasks has, too")
        entries |= own
    return entries
