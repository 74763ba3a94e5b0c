"""Import of modules by file name from the folders of all tasks."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent


def modules_of_folders(name: str) -> list[ModuleType]:
    """Import the module `<name>.py` from every task folder that contains it.

    Returns: the modules in the order of their folders' names.
    """
    files = sorted(HERE.glob(f"*/{name}.py"))
    return [import_module(f"{__package__}.{file.parent.name}.{name}") for file in files]
