"""Where the files are that a recipe names: relative paths, and what they are relative to."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from vlmrl.recipe.key_fields import key_name, marked_keys
from vlmrl.recipe.key_rules import FILE, NamesFile
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.toml_lines import Key

_MARKS = marked_keys(Recipe, NamesFile)


def is_path_key(key: Key) -> bool:
    """Return whether the value at this place of a recipe may name a file or folder."""
    return key_name(key) in _MARKS


def names_file(key: Key, value: str) -> bool:
    """Return whether this very value of a path key can name a file or folder, and is no plain name."""
    mark = _MARKS.get(key_name(key), FILE)
    return bool(value) and (not mark.or_name or "/" in value or "." in value)


def candidates(value: str, recipe_folder: Path | None, first: Path | None = None) -> list[Path]:
    """Return where a path of a recipe may lead, the place to prefer first; one path if it is absolute.

    Args:
        recipe_folder: of the file that it is written in; None for a `--set`: only the current directory.
        first: a folder that goes before both: where the run was started that is opened again.
    """
    path = Path(value).expanduser()
    if path.is_absolute():
        return [path]
    folders = [folder for folder in (first, recipe_folder) if folder is not None]
    return list(dict.fromkeys([*(folder / path for folder in folders), path]))


def locate(value: str, tried: Iterable[Path]) -> tuple[str, list[Path]]:
    """Return the first of the paths that exists, and the others that exist and are another file or folder.

    Nothing exists, or what is taken is what the value leads to from here: the value as it was written. `file.py:name`
    keeps its name.
    """
    file, colon, function = value.rpartition(":") if ".py:" in value else (value, "", "")
    there = [path for path in tried if os.path.exists(path)]
    if not there:
        return value, []
    taken, others = there[0], [path for path in there[1:] if not os.path.samefile(path, there[0])]
    if os.path.exists(file) and os.path.samefile(taken, file):
        return value, others
    return f"{taken}{colon}{function}", others


def file_part(value: str) -> str:
    """Return the file of `file.py:name`; any other value as it is."""
    return value.rpartition(":")[0] if ".py:" in value else value
