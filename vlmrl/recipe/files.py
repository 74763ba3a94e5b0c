"""Search and reading of recipe files. Each file is a layer: the recipe itself, and its parents (`extends`).

Keys that were renamed are read by their old name, too: old recipes, runs and command lines go on working.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from vlmrl.errors import Problem, RecipeError, nearest
from vlmrl.recipe.toml_lines import Key, dotted, key_lines
from vlmrl.redaction.redact import excerpt
from vlmrl.untrusted import run_around

RENAMED: Mapping[tuple[str, ...], tuple[str, ...]] = {("reward", "on_unavailable"): ("reward", "outage")}
"""Old key -> present key. Both are (table, key), and an old value means under the new key what it meant before."""


def present_name(key: Sequence[str]) -> tuple[str, ...]:
    """Return the present name of a key, which is the same if it was not renamed."""
    table_and_name = tuple(key[:2])
    return RENAMED.get(table_and_name, table_and_name) + tuple(key[2:])


def rename_keys(raw: dict[str, Any], lines: dict[Key, int], file: Path) -> list[Problem]:
    """Rename the old keys of a recipe file in its values and lines. Return a warning for each.

    Raises: RecipeError when the file has both names of a key.
    """
    notes = []
    for old, new in RENAMED.items():
        (table, name), (new_table, new_name) = old, new
        if not isinstance(raw.get(table), dict) or name not in raw[table]:
            continue
        where = f"{file}:{lines.get(old, 1)}"
        if isinstance(raw.get(new_table), dict) and new_name in raw[new_table]:
            raise RecipeError(f"`{dotted(old)}` is the old name of `{dotted(new)}`, and both are set", where=where)
        raw.setdefault(new_table, {})[new_name] = raw[table].pop(name)
        for key in [key for key in lines if key[:2] == old]:
            lines[(*new, *key[2:])] = lines.pop(key)
        notes.append(rename_note(old, new, where))
    return notes


def with_present_names(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a `resolved.json` with the present names of its keys, in its values and origins."""
    values, origins = dict(resolved.get("recipe") or {}), dict(resolved.get("origins") or {})
    for (table, name), new in RENAMED.items():
        inner = values.get(table)
        if isinstance(inner, Mapping) and name in inner:
            values[table] = {key: value for key, value in inner.items() if key != name}
            values[new[0]] = {new[1]: inner[name], **(values.get(new[0]) or {})}
        if dotted((table, name)) in origins:
            origins.setdefault(dotted(new), origins.pop(dotted((table, name))))
    return {**resolved, "recipe": values, "origins": origins}


def rename_note(old: Sequence[str], new: Sequence[str], where: str) -> Problem:
    """Return the warning about the old name of a key."""
    message = f"`{dotted(tuple(old))}` is now called `{dotted(tuple(new))}`; the old name still works"
    return Problem(message, where, f"write {dotted(tuple(new))}", "warning")


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

REMOTE_CODE = "model.trust_remote_code"
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


_TABLE = "a table is named in a recipe ([[data]] path); `vlmrl data show {0}` shows it, `vlmrl init` writes a recipe"
_CONFIG = "`vlmrl recipe import {0} --out recipe.toml` makes a recipe of another system's configuration"
OTHER_FILES = {
    **dict.fromkeys((".jsonl", ".csv", ".parquet"), _TABLE),
    **dict.fromkeys((".yaml", ".yml", ".json", ".sh", ".py"), _CONFIG),
}
"""Ending of files that are no recipes -> what to do with such a file."""


def find_recipe(path: str | Path) -> Path:
    """Return the recipe file for a path, or for the bare name of a shipped recipe.

    Raises: RecipeError when the file does not exist, or when it is a folder.
    """
    file = Path(path)
    if file.is_file() and (hint := OTHER_FILES.get(file.suffix.lower())):
        raise RecipeError(f"{file} is not a recipe: recipes are TOML files", hint=hint.format(quote(str(file))))
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
    listing = "`vlmrl recipe list` shows the shipped recipes and those in this folder; `vlmrl runs show` and `vlmrl "
    hint = f"did you mean {near}?" if near else f"{listing}compare` take runs"
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
    notes, model = rename_keys(raw, lines, file), raw.get("model")
    if isinstance(model, dict) and "trust_remote_code" in model and run_around(file):  # it may be a stranger's run
        message = f"`{REMOTE_CODE} = {model.pop('trust_remote_code')}` is not used, because the recipe lies in a run"
        where = f"{file}:{lines.pop(('model', 'trust_remote_code'))}"
        notes.append(Problem(message, where, f"to run that code: --set {REMOTE_CODE}=true"))
    return Layer(file, text, raw, lines, notes)


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
    hint = f"the line is: {excerpt(line, 100)}" if line else None
    value = line.partition("=")[2].strip()
    if words.startswith("Invalid value") and value[:1].isalpha():
        corrections = {"True": "true", "False": "false"}
        advice = f"write {corrections[value]}" if value in corrections else 'strings need quotes: "..."'
        advice = "there is no null in TOML: leave the key out" if value.lower() in ("none", "null") else advice
        hint = f"{advice} (the line is: {excerpt(line, 100)})"
    return RecipeError(f"not valid TOML: {words[:1].lower()}{words[1:]}", where=f"{file}:{number}", hint=hint)


MAX_LAYERS = 16
"""Maximum number of files of a recipe: itself and all its parents."""


def read_layers(file: Path) -> list[Layer]:
    """Read a recipe file and all its parents; the file itself is the last. Raises: as `read_layer`, `parent_layers`."""
    own = read_layer(file)
    return [*parent_layers(own), own]


def has_table(layers: Iterable[Layer], table: str) -> bool:
    """Return whether a recipe's file or one of its parents sets a table."""
    return any(table in layer.raw for layer in layers)


def text_of_base(path: str | Path) -> str | None:
    """Return the text of a recipe that others extend, which lacks `[model]` or `[[data]]`; None for a whole recipe.

    Raises: as `find_recipe` and `read_layers`.
    """
    layers = read_layers(find_recipe(path))
    return None if all(has_table(layers, table) for table in ("model", "data")) else layers[-1].text


def parent_layers(own: Layer) -> list[Layer]:
    """Return the layers of all parents in `extends`, and of their parents, in the order in which they are merged.

    A file's own values replace those of its parents, and those of a parent replace those of a parent named before it. A
    file that several others extend is merged once, where it is first named. The key `extends` is removed from `own`.

    Raises: RecipeError when a parent does not exist, a recipe extends itself, or there are more than `MAX_LAYERS`.
    """
    layers: dict[Path, Layer] = {}
    _collect_parents(own, (own.file.resolve(),), layers)
    return list(layers.values())


def _collect_parents(own: Layer, children: tuple[Path, ...], layers: dict[Path, Layer]) -> None:
    """Add the parents of a file to `layers`, each after its own parents.

    Args:
        children: the file and all that extend it, to find a circle.
    """
    if "extends" not in own.raw:
        return
    value, where = own.raw.pop("extends"), f"{own.file}:{own.lines[('extends',)]}"
    for key in [key for key in own.lines if key[0] == "extends"]:
        own.lines.pop(key)
    names = value if isinstance(value, list) and value else [value]
    for name in names:
        if not isinstance(name, str) or not name:
            raise RecipeError(
                "`extends` must be the path of one recipe, as a string, or a list of such paths",
                where=where,
                hint='extends = "base/tiny.toml"',
            )
        file = own.file.parent / name
        if not file.is_file():
            near = nearest(file.stem, {p.stem: p for p in file.parent.glob("*.toml")}) if file.parent.is_dir() else None
            path_words = "the path is relative to the folder of the recipe that extends it"
            hint = f"did you mean {near}.toml?" if near else path_words
            raise RecipeError(f"`extends` names {name}, but there is no file {file}", where=where, hint=hint)
        place = file.resolve()
        if place in children:
            through = "" if place == children[-1] else f", through {name}"
            raise RecipeError(f"the recipe extends itself{through}", where=where)
        if place in layers:
            continue
        if len(layers) + len(children) >= MAX_LAYERS:
            raise RecipeError(f"the recipe extends more than {MAX_LAYERS - 1} files", where=where)
        parent = read_layer(file)
        _collect_parents(parent, (*children, place), layers)
        layers[place] = parent
