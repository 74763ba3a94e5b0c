"""Help of recipe keys, JSON Schema, list of recipes, and output of a loaded recipe as TOML."""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from vlmrl.algo.algo_keys import CELLS
from vlmrl.errors import RecipeError, nearest
from vlmrl.key_facts import OnResume
from vlmrl.recipe.files import present_name, read_layer, read_layers, shipped_folder
from vlmrl.recipe.key_fields import key_name, leaf_fields, literal_choices, mark_of, table_class
from vlmrl.recipe.load import LoadedRecipe, leaves, value_at
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.tables import ReadBy, values_by_row
from vlmrl.recipe.toml_lines import Key, dotted, parse_dotted
from vlmrl.recipe.validation_messages import FOREIGN_KEYS, foreign_hint, shown_bound
from vlmrl.untrusted import visible

TYPE_WORDS = {int: "whole number", float: "number", str: "string", bool: "true or false"}
BOUND_WORDS = (("gt", "> {}"), ("ge", ">= {}"), ("lt", "< {}"), ("le", "<= {}"))
FREE_TABLE = "table with names of your own"


@dataclass(frozen=True)
class Use:
    """Place in a shipped recipe that sets a key."""

    where: str
    value: Any


@dataclass(frozen=True)
class Explained:
    """Help of a recipe key, or of a table of keys.

    Args:
        key: dotted name without list positions.
        help: its help text, one paragraph.
        type: its type, in words.
        default: its default as a JSON value; None = there is no default, or the default is "not set".
        required: whether a recipe must set it.
        range: its bounds, in words; "" = no bounds.
        choices: the only allowed values; empty = any value.
        keys: keys of a table; empty for a key.
        uses: places in shipped recipes that set it.
        by_row: row -> default, for a key of `[algo]` whose default depends on the row `algo.name`; else empty.
        on_resume: rule for its change on resume, {"kind", "reason", "restarts"}; None for a table.
        run_kind: the only kind of run that reads it, "rl" or "sft"; "" = both kinds.
    """

    key: str
    help: str
    type: str
    default: Any
    required: bool
    range: str
    choices: tuple[Any, ...]
    keys: tuple[str, ...]
    uses: tuple[Use, ...]
    by_row: Mapping[str, Any]
    on_resume: OnResume | None
    run_kind: str


def explain(key: str) -> Explained:
    """Return the help of a key (`algo.clip_high`), of a table (`algo`), or of a key without its table (`clip_high`).

    Raises: RecipeError when there is no such key, or when several tables have one; the hint lists similar keys.
    """
    parts = parse_dotted(key)
    names = list(present_name([p for p in parts or () if not p.isdigit()]))
    if len(names) == 1 and names[0] not in Recipe.model_fields:
        names = _full_name(names[0])
    if not names:
        raise _unknown(key)
    model = table_class(Recipe, tuple(names[:-1]))
    field = model.model_fields.get(names[-1]) if model else None
    if field is None and len(names) > 1:
        # A name that users choose, as in `reward.args.x`: explain the key of its table (`reward.args`).
        outer = table_class(Recipe, tuple(names[:-2]))
        field = outer.model_fields.get(names[-2]) if outer else None
        if field is None or not _is_free(field):
            raise _unknown(key)
        names = names[:-1]
    if field is None:
        raise _unknown(key)
    return _explained(tuple(names), field)


def all_keys() -> list[str]:
    """Return every key that a recipe may set, dotted, in the order of the schema."""
    return [dotted(key) for key, _ in leaf_fields(Recipe)]


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a recipe file (`extends` included), for editors."""
    schema = Recipe.model_json_schema()
    words = "Parent recipe, or a list of them, relative to this file's folder; a later one overrides those before it."
    extends = {"type": ["string", "array"], "items": {"type": "string"}, "description": words}
    schema["properties"] = {"extends": extends, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


@dataclass(frozen=True)
class ListedRecipe:
    """Recipe in the list of recipes.

    Args:
        name: name or path that a user types to select the recipe.
        kind: "rl" or "sft"; "base" for a recipe that others extend; "?" if it cannot be read.
        comment: first comment of the file.
        error: reason why it cannot be read; "" = it can be read.
    """

    name: str
    path: Path
    kind: str
    comment: str
    error: str = ""


def list_recipes(folder: Path | None = None) -> list[ListedRecipe]:
    """Return the shipped recipes, then those in `folder` and its subfolder `recipes`; base recipes come last."""
    shipped = shipped_folder()
    files = {path.resolve(): str(path.relative_to(shipped).with_suffix("")) for path in sorted(shipped.rglob("*.toml"))}
    if folder is not None:
        for path in [*sorted(folder.glob("*.toml")), *sorted((folder / "recipes").glob("*.toml"))]:
            if path.name != "pyproject.toml":
                files.setdefault(path.resolve(), str(path.relative_to(folder)))
    listed = [_listed(name, path, path.parent == (shipped / "base").resolve()) for path, name in files.items()]
    return sorted(listed, key=lambda r: r.kind == "base")


def first_comment(text: str) -> str:
    """Return the comment block at the top of a recipe as one paragraph; "" if there is none."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("#").strip())
    return " ".join(line for line in lines if line)


def first_sentence(text: str) -> str:
    """Return the first sentence of a comment without its full stop, for a list."""
    return re.split(r"(?<=[a-z0-9)%])(?<!\bDr)\.(?:\s|$)", text, maxsplit=1)[0]


def _listed(name: str, path: Path, is_base: bool) -> ListedRecipe:
    try:
        layers = read_layers(path)
        kinds = [layer.raw["kind"] for layer in layers if "kind" in layer.raw]
    except RecipeError as error:
        return ListedRecipe(name, path, "?", "", error.message)
    kind = "base" if is_base else str(kinds[-1] if kinds else "rl")
    return ListedRecipe(name, path, kind, first_comment(layers[-1].text))


def _explained(names: tuple[str, ...], field: FieldInfo) -> Explained:
    model = table_class(Recipe, names)
    default = None if field.default is PydanticUndefined else field.default
    if isinstance(default, BaseModel):
        default = None
    cell = CELLS.get(names[-1]) if names[0] == "algo" else None
    by_row = values_by_row(cell.name) if cell is not None and cell.of_row else {}
    if len({repr(value) for value in by_row.values()}) == 1:  # all rows have the same default
        default, by_row = next(iter(by_row.values())), {}
    reader = mark_of(field, ReadBy)
    return Explained(
        key=".".join(names),
        help=" ".join((field.description or (model.__doc__ if model else "") or "").split()),
        type=_type_words(field.annotation),
        default=default,
        required=field.is_required(),
        range=" and ".join(dict.fromkeys(_bounds(field))),
        choices=_names(field) if cell is None else tuple(cell.choices),
        keys=tuple(model.model_fields) if model else (),
        uses=() if model else tuple(_uses(names)),
        by_row=by_row,
        on_resume=None if model else mark_of(field, OnResume),
        run_kind=reader.kind if reader else "",
    )


def _names(field: FieldInfo) -> tuple[Any, ...]:
    return () if _is_more_than_choices(field.annotation) else tuple(literal_choices(field.annotation))


def _uses(names: tuple[str, ...]) -> Iterator[Use]:
    """Yield the places in shipped recipes that set a key."""
    shipped = shipped_folder()
    for path in sorted(shipped.rglob("*.toml")):
        try:
            layer = read_layer(path)
        except RecipeError:
            continue  # `vlmrl recipe list` shows the recipe with its error
        for key, line in sorted(layer.lines.items(), key=lambda item: item[1]):
            if tuple(p for p in key if isinstance(p, str)) == names and isinstance(key[-1], str):
                yield Use(f"{path.relative_to(shipped.parent)}:{line}", value_at(layer.raw, key))


def _full_name(name: str) -> list[str]:
    keys = [key for key in all_keys() if key.rpartition(".")[2] == name]
    for table in ("data.rewards.", "rewards.", "judge."):  # tables with keys that more important tables have too
        keys = [key for key in keys if not key.startswith(table)] or keys
    if len(keys) > 1:
        raise RecipeError(f"`{name}` is a key of several tables", hint=f"give the full name: {', '.join(keys)}")
    return keys[0].split(".") if keys else []


def _unknown(key: str) -> RecipeError:
    if key in FOREIGN_KEYS:
        return RecipeError(f"there is no key `{key}`", hint=foreign_hint(key))
    known = all_keys()
    near = nearest(key, known) or nearest(key.rpartition(".")[2], (k.rpartition(".")[2] for k in known))
    tables = ", ".join(Recipe.model_fields)
    hint = f"did you mean `{near}`?  tables: {tables}" if near else f"tables: {tables}; `vlmrl recipe explain TABLE`"
    return RecipeError(f"there is no key `{key}` in a recipe", hint=hint)


def _is_free(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is dict


def _type_words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if literal_choices(annotation) and _is_more_than_choices(annotation):
        return " or ".join(
            " or ".join(map(toml_value, a.__args__)) if literal_choices(a) else _type_words(a) for a in arguments
        )
    if literal_choices(annotation) and origin is not list:
        return "one of the choices"
    if origin is typing.Annotated:
        return _type_words(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_words(a) for a in arguments if a is not type(None)) + ", or left out"
    if origin is list:
        inner = arguments[0]
        is_table = isinstance(inner, type) and issubclass(inner, BaseModel)
        return (
            "list of tables"
            if is_table
            else f"list of {_type_words(inner)}s".replace("one of the choicess", "the choices")
        )
    if origin is dict:
        return FREE_TABLE
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    return TYPE_WORDS.get(annotation, "any value")


def _is_more_than_choices(annotation: Any) -> bool:
    """Return whether a union has members besides fixed choices and None, such as a list or a bool."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return False
    return any(a is not type(None) and not literal_choices(a) for a in typing.get_args(annotation))


def _bounds(field: FieldInfo) -> Iterator[str]:
    for item in (*field.metadata, *_metadata(field.annotation)):
        for attribute, words in BOUND_WORDS:
            bound = getattr(item, attribute, None)
            if bound is not None:
                yield words.format(shown_bound(bound))


def _metadata(annotation: Any) -> Iterable[Any]:
    """Yield the constraints inside `Annotated`, at any depth of unions."""
    for item in getattr(annotation, "__metadata__", ()):
        yield item
        yield from getattr(item, "metadata", ())
    for inner in typing.get_args(annotation):
        if typing.get_args(inner):
            yield from _metadata(inner)


def toml_lines(loaded: LoadedRecipe, *, origin: bool) -> list[str]:
    """Return a loaded recipe as lines of TOML that load to the same values.

    Args:
        origin: whether to write defaults too, and the origin of each value as a comment behind it.
    """
    tables: dict[Key, list[str]] = {(): []}
    for key, value in leaves(loaded.resolved["recipe"]):
        source, name = loaded.origins[dotted(key)], dotted((key[-1],))
        if value is None:
            text = f"# {name} is not set" if origin else ""
        elif origin:
            text = f"{name} = {toml_value(value)}".ljust(48) + f"  # {source}"
        else:
            text = "" if source == "default" else f"{name} = {toml_value(value)}"
        if text:
            tables.setdefault(key[:-1], []).append(text)
    lines = list(tables.pop(()))
    for table, texts in tables.items():
        lines += ["", _header(table), *texts]
    return lines if lines[0] else lines[1:]


def diff_recipes(left: LoadedRecipe, right: LoadedRecipe) -> list[dict[str, Any]]:
    """Return `{"key", "left", "right"}` for each key whose values differ; None = that recipe does not have the key."""
    values = [{dotted(key): value for key, value in leaves(side.resolved["recipe"])} for side in (left, right)]
    keys = [*values[0], *(key for key in values[1] if key not in values[0])]
    rows = [{"key": key, "left": values[0].get(key), "right": values[1].get(key)} for key in keys]
    return [row for row in rows if row["left"] != row["right"]]


def _header(table: Key) -> str:
    if table and isinstance(table[-1], int):
        return f"[[{key_name(table)}]]"
    return f"[{dotted(tuple(p for p in table if isinstance(p, str)))}]"


def toml_value(value: Any) -> str:
    """Return a recipe's value as TOML, in one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return visible(json.dumps(value, ensure_ascii=False))
    if isinstance(value, list):
        return f"[{', '.join(toml_value(v) for v in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{dotted((k,))} = {toml_value(v)}" for k, v in value.items()) + "}"
    return repr(value)
