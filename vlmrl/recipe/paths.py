"""Search for the files of relative paths in a recipe: in several folders, in a fixed order."""

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
    """Return whether the value of this recipe key may be a path of a file or folder."""
    return key_name(key) in _MARKS


def names_file(key: Key, value: str) -> bool:
    """Return whether this value of a path key is a possible path and not a plain name."""
    mark = _MARKS.get(key_name(key), FILE)
    return bool(value) and (not mark.or_name or "/" in value or "." in value)


def candidates(value: str, recipe_folder: Path | None, first: Path | None = None) -> list[Path]:
    """Return the paths that a relative path in a recipe may mean, the preferred one first; an absolute path alone.

    Args:
        recipe_folder: folder of the recipe file with the path; None for a `--set`: only the current directory is tried.
        first: folder that is tried before both, if a run is opened again: the one in which the run was started.
    """
    path = Path(value).expanduser()
    if path.is_absolute():
        return [path]
    folders = [folder for folder in (first, recipe_folder) if folder is not None]
    return list(dict.fromkeys([*(folder / path for folder in folders), path]))


def locate(value: str, tried: Iterable[Path]) -> tuple[str, list[Path]]:
    """Return the first existing path, and all other existing paths that lead to a different file or folder.

    The value is returned unchanged if no path exists, or if it leads to the same file from the current directory. The
    `:name` of `file.py:name` is kept.
    """
    file, colon, function = value.rpartition(":") if ".py:" in value else (value, "", "")
    existing = [path for path in tried if os.path.exists(path)]
    if not existing:
        return value, []
    chosen, others = existing[0], [path for path in existing[1:] if not os.path.samefile(path, existing[0])]
    if os.path.exists(file) and os.path.samefile(chosen, file):
        return value, others
    return f"{chosen}{colon}{function}", others


def file_part(value: str) -> str:
    """Return `file.py` for `file.py:name`; return any other value unchanged."""
    return value.rpartition(":")[0] if ".py:" in value else value
