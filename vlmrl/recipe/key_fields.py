"""The class of a table, the field of a key, its marks and choices; the files that relative paths in a recipe mean."""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.tables import FILE, NamesFile
from vlmrl.recipe.toml_lines import Key

Mark = TypeVar("Mark")
OWN_NAME = "NAME"
"""Stands in a dotted key for the name of a table that users choose: `eval.settings.NAME.samples`."""


def key_name(key: Key) -> str:
    """Return the dotted name of a key without list positions: `data.path` for `data.0.path`."""
    return ".".join(part for part in key if isinstance(part, str))


def table_class(root: type[BaseModel], table: Key) -> type[BaseModel] | None:
    """Return the class of a table (list positions are ignored); None if the schema has no class for it.

    For a table of tables with names of the user's own, such as `eval.settings`, it is the class of the inner tables.
    """
    return _descend(root, table)[0]


def _descend(root: type[BaseModel], table: Key) -> tuple[type[BaseModel] | None, bool]:
    """Return the class of a table, and whether a name of the user's own comes next (`eval.settings`)."""
    model, is_name_next = root, False
    for part in table:
        if isinstance(part, int):
            continue
        if is_name_next:
            is_name_next = False
            continue
        field = model.model_fields.get(part)
        inner = _model_in(field.annotation) if field else None
        if field is None or inner is None:
            return None, False
        model, is_name_next = inner, typing.get_origin(field.annotation) is dict
    return model, is_name_next


def field_at(root: type[BaseModel], key: Key) -> FieldInfo | None:
    """Return the field of a key (list positions are ignored); None if there is no such key."""
    names: Key = tuple(part for part in key if isinstance(part, str))
    model, is_name_next = _descend(root, names[:-1]) if names else (None, False)
    return model.model_fields.get(str(names[-1])) if model and not is_name_next else None


def leaf_fields(root: type[BaseModel], prefix: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    """Yield (key, field) of every key in the order of the schema. A table itself is not a key.

    OWN_NAME stands for a name of the user's own.
    """
    model, is_name_next = _descend(root, prefix)
    prefix = (*prefix, OWN_NAME) if is_name_next else prefix
    for name, field in model.model_fields.items() if model else ():
        if table_class(root, (*prefix, name)):
            yield from leaf_fields(root, (*prefix, name))
        else:
            yield (*prefix, name), field


def mark_of(field: FieldInfo | None, kind: type[Mark]) -> Mark | None:
    """Return the mark of class `kind` (tables.py) in a field's annotation; None if it has none."""
    return next((item for item in field.metadata if isinstance(item, kind)), None) if field else None


def marked_keys(root: type[BaseModel], kind: type[Mark]) -> dict[str, Mark]:
    """Return dotted key -> mark, for all keys that have a mark of class `kind`."""
    marks = ((key_name(key), mark_of(field, kind)) for key, field in leaf_fields(root))
    return {name: mark for name, mark in marks if mark is not None}


def literal_choices(annotation: Any) -> list[Any]:
    """Return all values that the `Literal` types in an annotation allow; [] if it has no `Literal`."""
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [c for part in typing.get_args(annotation) for c in literal_choices(part)]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((m for m in map(_model_in, typing.get_args(annotation)) if m), None)


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
    file = split_file(value)[0]
    existing = [path for path in tried if os.path.exists(path)]
    if not existing:
        return value, []
    chosen, others = existing[0], [path for path in existing[1:] if not os.path.samefile(path, existing[0])]
    if os.path.exists(file) and os.path.samefile(chosen, file):
        return value, others
    return f"{chosen}{value[len(file) :]}", others


def split_file(value: str) -> tuple[str, str]:
    """Return (file, name) of `file.py:name`, and (value, "") of any other value."""
    file, _, name = value.rpartition(":") if ".py:" in value else (value, "", "")
    return file, name
