"""Import of modules by file name from the folders of all tasks."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

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
