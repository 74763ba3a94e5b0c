"""Modules of the folders of tasks, found by their names."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent


def modules_of_folders(name: str) -> list[ModuleType]:
    """Import `<folder>/<name>.py` of every folder of tasks that has it.

    Returns: the modules in the order of their folders' names.
    """
    files = sorted(HERE.glob(f"*/{name}.py"))
    return [import_module(f"{__package__}.{file.parent.name}.{name}") for file in files]
