"""Search and reading of recipe files. Each file is a layer: the recipe itself and at most one parent."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmrl.errors import Problem, RecipeError, nearest
from vlmrl.recipe.renamed import rename_keys
from vlmrl.recipe.toml_lines import Key, key_lines

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

MAX_RECIPE_BYTES = 1 << 20
"""Maximum size of a recipe file, in bytes."""

_AT_LINE = re.compile(r" ?\(at line (\d+), column (\d+)\)")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the values of a TOML text. Raises: ValueError on a syntax error, RecursionError if nested too deeply."""
    return tomllib.loads(text)


def shipped_folder() -> Path:
    """Return the folder of the shipped recipes: in the installed package, or in the root folder of a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "shipped_recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def find_recipe(path: str | Path) -> Path:
    """Return the recipe file for a path, or for the bare name of a shipped recipe.

    Raises: RecipeError when the file does not exist, or when it is a folder.
    """
    file = Path(path)
    if file.is_file():
        return file
    if file.is_dir():
        inside = sorted(p.name for p in file.glob("*.toml"))[:8]
        raise RecipeError(
            f"{file} is a folder, not a recipe", hint=f"it holds: {', '.join(inside)}" if inside else None
        )
    shipped = {str(p.relative_to(shipped_folder()).with_suffix("")): p for p in shipped_folder().rglob("*.toml")}
    if str(file) in shipped:
        return shipped[str(file)]
    beside = [str(p) for p in file.parent.glob("*.toml")] if file.parent.is_dir() else []
    near = nearest(str(file), beside) or nearest(file.stem, shipped)
    hint = f"did you mean {near}?" if near else "`vlmrl recipe list` shows the shipped recipes and those in this folder"
    raise RecipeError(f"there is no recipe {file}", hint=hint)


@dataclass(frozen=True)
class Layer:
    """Values of one recipe file, and the line of each key. `notes`: warnings about keys that were renamed."""

    file: Path
    text: str
    raw: dict[str, Any]
    lines: dict[Key, int]
    notes: list[Problem] = field(default_factory=list)


def read_layer(file: Path) -> Layer:
    """Read a recipe file. Raises: RecipeError unless it is UTF-8 TOML, not empty, of at most `MAX_RECIPE_BYTES`."""
    text = _read_text(file)
    try:
        raw = parse_toml(text)
    except RecursionError:
        raise RecipeError("lists or tables are nested too deeply", where=str(file)) from None
    except ValueError as error:
        raise _syntax_error(file, text, str(error)) from None
    lines = key_lines(text)
    return Layer(file, text, raw, lines, rename_keys(raw, lines, file))


def _read_text(file: Path) -> str:
    try:
        size = file.stat().st_size
        data = file.read_bytes() if size <= MAX_RECIPE_BYTES else b""
    except OSError as error:
        raise RecipeError(f"cannot read the recipe: {error.strerror}", where=str(file)) from None
    if size > MAX_RECIPE_BYTES:
        raise RecipeError(f"this file has {size:,} bytes; a recipe has at most {MAX_RECIPE_BYTES:,}", where=str(file))
    if b"\0" in data:
        raise RecipeError("this is a binary file, not a recipe", where=str(file), hint="recipes are TOML text")
    try:
        text = data.decode("utf-8-sig")  # a byte order mark at the start is dropped
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"byte 0x{data[error.start]:02x} is not UTF-8"
        raise RecipeError(message, where=f"{file}:{line}", hint="save the file as UTF-8") from None
    if not text.strip():
        raise RecipeError(
            "the recipe is empty", where=str(file), hint="`vlmrl recipe list` shows recipes to start from"
        )
    return text


def _syntax_error(file: Path, text: str, message: str) -> RecipeError:
    match = _AT_LINE.search(message)
    lines = text.splitlines()
    number = int(match.group(1)) if match else len(lines)
    words = _AT_LINE.sub("", message).replace(" (at end of document)", " at the end of the file")
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    hint = f"the line is: {line[:100]}" if line else None
    value = line.partition("=")[2].strip()
    if words.startswith("Invalid value") and value[:1].isalpha():
        corrections = {"True": "true", "False": "false"}
        advice = f"write {corrections[value]}" if value in corrections else 'strings need quotes: "..."'
        advice = "there is no null in TOML: leave the key out" if value.lower() in ("none", "null") else advice
        hint = f"{advice} (the line is: {line[:100]})"
    return RecipeError(f"not valid TOML: {words[:1].lower()}{words[1:]}", where=f"{file}:{number}", hint=hint)


def parent_layer(own: Layer) -> list[Layer]:
    """Return the layer of the parent in `extends`, in a list; [] without `extends`. Remove this key from `own`.

    Raises: RecipeError when the parent does not exist, is the recipe itself, or has a parent too.
    """
    if "extends" not in own.raw:
        return []
    name, where = own.raw.pop("extends"), f"{own.file}:{own.lines[('extends',)]}"
    own.lines.pop(("extends",))
    if not isinstance(name, str) or not name:
        raise RecipeError(
            "`extends` must be the path of one recipe, as a string", where=where, hint='extends = "base/tiny.toml"'
        )
    file = own.file.parent / name
    if not file.is_file():
        near = nearest(file.stem, {p.stem: p for p in file.parent.glob("*.toml")}) if file.parent.is_dir() else None
        hint = (
            f"did you mean {near}.toml?" if near else "the path is relative to the folder of the recipe that extends it"
        )
        raise RecipeError(f"`extends` names {name}, but there is no file {file}", where=where, hint=hint)
    if file.resolve() == own.file.resolve():
        raise RecipeError("the recipe extends itself", where=where)
    parent = read_layer(file)
    if "extends" in parent.raw:
        line = parent.lines[("extends",)]
        hint = f"copy what you need from {parent.raw['extends']} into {file}, or extend {parent.raw['extends']} itself"
        message = f"{own.file} extends {file}, which itself extends {parent.raw['extends']}; only one level is allowed"
        raise RecipeError(message, where=f"{file}:{line}", hint=hint)
    return [parent]
