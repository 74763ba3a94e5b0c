"""Loading of recipes: from a TOML file to a valid `Recipe`, with the origin of every value. No torch.

A recipe may name parents (`extends`), whose keys it overrides one by one. Two kinds of values replace a parent's value
as a whole: tables with names that users choose (`reward.weights`, `reward.args`, `data.columns`, `paper`), and lists
(`[[data]]`, `stop`). Then `--set` overrides all files. All problems are reported at once, with file and line.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vlmrl.errors import Problem, ProblemsError, RecipeError
from vlmrl.recipe.eval_table import AUTO
from vlmrl.recipe.files import Layer, find_recipe, read_layers
from vlmrl.recipe.key_fields import key_name, table_class
from vlmrl.recipe.key_place import AUTO_ORIGIN, KeyPlace
from vlmrl.recipe.overrides import (
    apply_override,
    notes_on_overrides,
    parse_override,
    present_override,
    refuse_remote_code,
)
from vlmrl.recipe.paths import candidates, file_part, is_path_key, locate, names_file
from vlmrl.recipe.raw_values import copy_values, drop_none, value_at
from vlmrl.recipe.renamed import with_present_names
from vlmrl.recipe.reward_list import ARGUMENTS, drop_replaced
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.step_counts import keep_one, written_in
from vlmrl.recipe.toml_lines import Key, dotted
from vlmrl.recipe.validation_messages import problems_of

MAX_TABLE_DEPTH = 2
MAX_NAME_BYTES = 255
"""Maximum length of the name of a file or folder, in bytes, on usual file systems."""
RESOLVED_SCHEMA = 1
SFT_METRIC_ORIGIN = "default of a supervised run"
"""Origin of `eval.metric = "auto"` of a supervised recipe that sets no metric."""
LORA_LR, LORA_LR_ORIGIN = 1e-5, "default with [lora]"
"""Learning rate, and its origin, of a recipe that has a `[lora]` table and sets no learning rate."""


@dataclass(frozen=True)
class LoadedRecipe:
    """Valid recipe, with the origin of every value.

    Args:
        recipe: the values, with defaults filled in and paths resolved.
        text: content of the file.
        path: path of the file.
        origins: dotted key of every value -> "default", "file.toml:12", "--set", or "auto: " and the reason.
        resolved: content of `resolved.json`: {"schema", "recipe": every value, "origins"}.
        parents: the files that it extends, and those that they extend, in the order in which they were merged.
        places: key -> file and line, or `--set`, that sets it; keys that are not set are absent.
        warnings: choices during loading that the user may not have intended.
    """

    recipe: Recipe
    text: str
    path: Path
    origins: Mapping[str, str]
    resolved: Mapping[str, Any]
    parents: tuple[Path, ...] = ()
    places: Mapping[Key, KeyPlace] = field(default_factory=dict, repr=False)
    warnings: tuple[Problem, ...] = ()

    def is_set(self, key: Key) -> bool:
        """Return whether the file, its parent or a `--set` sets this key."""
        return key in self.places

    def where(self, *keys: Key) -> str:
        """Return `file:line` of the first key that is set, else of the nearest table around a key, else the file."""
        place = next((self.places[k] for k in keys if k in self.places), None) or (
            _nearest_place(self.places, keys[0]) if keys else None
        )
        return place.where if place else str(self.path)

    def paths_tried(self, key: Key, value: str) -> list[Path]:
        """Return the paths that are tried for a relative path: in the recipe file's folder, then in the current one."""
        return _tried(value, self.places.get(key), self.path.parent)


def load_recipe(
    path: str | Path,
    *,
    overrides: Sequence[str] = (),
    kind: str | None = None,
    under: Mapping[str, Any] | None = None,
) -> LoadedRecipe:
    """Read, merge, override and validate a recipe. Open no data and no model. Rules about several keys: `checks.py`.

    Args:
        path: a TOML file, or the bare name of a shipped recipe.
        overrides: `key=value` texts in the order of the command line; the last one for a key counts.
        kind: kind of run that the caller starts, "rl" or "sft"; a recipe of the other kind is an error. None = any.
        under: values of another recipe, such as a run's, which the files override key by key.
    Raises: RecipeError when the file cannot be read; ProblemsError with all problems in it.
    """
    file = find_recipe(path)
    *parents, own = layers = read_layers(file)
    problems: list[Problem] = []
    raw: dict[str, Any] = copy_values(under or {})
    drop_none(raw)
    places: dict[Key, KeyPlace] = {}
    for layer in layers:
        for key in drop_replaced(raw, layer.raw):
            _forget(places, key)
        _merge(raw, places, layer, ())
        places.update({key: KeyPlace(layer.file, line) for key, line in layer.lines.items()})
        _keep_one(raw, places, written_in(layer.raw), file, problems)
    applied = [_override(raw, places, text, problems) for text in overrides]
    _keep_one(raw, places, {key for key in applied if key is not None}, file, problems)
    first = None if under is None else Path()
    (recipe, warnings), derived = _finish(raw, places, file, problems, kind, first), {}
    warnings = [*(note for layer in layers for note in layer.notes), *notes_on_overrides(overrides), *warnings]
    if recipe.lora is not None and ("optim", "lr") not in places and under is None:
        recipe = recipe.model_copy(update={"optim": recipe.optim.model_copy(update={"lr": LORA_LR})})
        derived["optim.lr"] = LORA_LR_ORIGIN
    if recipe.kind == "sft" and ("eval", "metric") not in places and under is None:
        recipe = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"metric": AUTO})})
        derived["eval.metric"] = SFT_METRIC_ORIGIN
    dump = recipe.model_dump(mode="json")
    origins = {dotted(key): _origin(key, raw, places) for key, _ in leaves(dump)} | derived
    resolved = {"schema": RESOLVED_SCHEMA, "recipe": dump, "origins": origins}
    files = tuple(layer.file for layer in parents)
    return LoadedRecipe(recipe, own.text, file, origins, resolved, files, places, tuple(warnings))


def reload_recipe(
    resolved: Mapping[str, Any],
    file: Path,
    text: str = "",
    *,
    overrides: Sequence[str] = (),
    kind: str | None = None,
    cwd: Path | None = None,
) -> LoadedRecipe:
    """Load the recipe of a `resolved.json` again, with `--set` on top. All other values and their origins are kept.

    Args:
        file: the resolved.json, for errors.
        text: content of the original recipe file.
        overrides, kind: as in `load_recipe`. Defaults are not applied again: a run keeps the values that it began with.
        cwd: folder in which the run was started. Relative paths are tried there first.
    Raises: RecipeError or ProblemsError, see `recipe_from_resolved` and `load_recipe`.
    """
    recipe_from_resolved(resolved, where=str(file))
    resolved = with_present_names(resolved)
    refuse_remote_code(resolved["recipe"], overrides, str(file))
    raw, earlier = copy_values(resolved["recipe"]), dict(resolved.get("origins") or {})
    places = {key: p for key, _ in leaves(raw) if (p := _place_of(str(earlier.get(dotted(key), "default"))))}
    drop_none(raw)
    problems: list[Problem] = []
    changed = [key for text_ in overrides if (key := _override(raw, places, text_, problems)) is not None]
    changed += _keep_one(raw, places, changed, file, problems)
    recipe, _ = _finish(raw, places, file, problems, kind, cwd or Path())
    dump = recipe.model_dump(mode="json")
    origins = {
        dotted(key): "--set" if any(key[: len(c)] == c for c in changed) else str(earlier.get(dotted(key), "default"))
        for key, _ in leaves(dump)
    }
    new = {"schema": RESOLVED_SCHEMA, "recipe": dump, "origins": origins}
    return LoadedRecipe(recipe, text, file, origins, new, (), places)


def _finish(
    raw: dict[str, Any],
    places: dict[Key, KeyPlace],
    file: Path,
    problems: list[Problem],
    kind: str | None,
    first: Path | None = None,
) -> tuple[Recipe, list[Problem]]:
    """Return the recipe for the merged values, and warnings. Raises: ProblemsError with all problems."""
    problems += _odd_values(raw, places, file)
    warnings = _find_paths(raw, places, file.parent, first)
    recipe = _validated(raw, places, file, problems)
    if recipe and kind and recipe.kind != kind:
        problems.append(_wrong_kind(recipe.kind, kind, places, file))
    if problems or recipe is None:
        raise ProblemsError(sorted(problems, key=_line_order))
    return recipe, warnings


def recipe_from_resolved(resolved: Mapping[str, Any], *, where: str) -> Recipe:
    """Return the recipe inside a `resolved.json`.

    Raises: RecipeError when it was written by another version of the format or does not fit the schema.
    """
    if resolved.get("schema") != RESOLVED_SCHEMA:
        raise RecipeError(
            f"this resolved recipe has schema {resolved.get('schema')!r}; this version reads {RESOLVED_SCHEMA}",
            where=where,
        )
    try:
        return Recipe.model_validate(with_present_names(resolved)["recipe"])
    except ValidationError as error:
        raise ProblemsError(problems_of(error.errors(), Recipe, lambda key: where)) from None


def with_defaults(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a `resolved.json`, with defaults for missing keys.

    A missing key was added to the schema after the file was written. Its default means what vlmrl did before the key
    existed, so adding it changes nothing in a run. Values that do not fit the schema, such as those of a newer version,
    are returned unchanged.
    """
    try:
        return Recipe.model_validate(with_present_names({"recipe": values})["recipe"]).model_dump(mode="json")
    except ValidationError:
        return values


def leaves(value: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield (key, value) of every leaf of a recipe's values: scalars, lists of scalars, and empty tables."""
    for name, inner in value.items():
        key = (*prefix, name)
        if isinstance(inner, Mapping) and inner:
            yield from leaves(inner, key)
        elif isinstance(inner, list) and inner and all(isinstance(i, Mapping) for i in inner):
            for number, element in enumerate(inner):
                yield from leaves(element, (*key, number))
        else:
            yield key, inner


def _merge(raw: dict[str, Any], places: dict[Key, KeyPlace], layer: Layer, prefix: Key) -> None:
    """Replace values in `raw` by those of a layer, and remove the places of the replaced values from `places`."""
    target, source = value_at(raw, prefix), value_at(layer.raw, prefix)
    for name, value in source.items():
        key = (*prefix, name)
        if isinstance(value, dict) and isinstance(target.get(name), dict) and table_class(Recipe, key):
            _merge(raw, places, layer, key)
            continue
        target[name] = copy_values(value)
        _forget(places, key)


def _override(raw: dict[str, Any], places: dict[Key, KeyPlace], text: str, problems: list[Problem]) -> Key | None:
    """Apply one `--set`. Return its key; if it is wrong, add a problem to `problems` and return None."""
    parsed = parse_override(text)
    applied = parsed if isinstance(parsed, Problem) else apply_override(raw, present_override(parsed))
    if isinstance(applied, Problem):
        problems.append(applied)
        return None
    _forget(places, applied)
    places.update({applied[:n]: KeyPlace(None, 0, text) for n in range(1, len(applied)) if applied[:n] not in places})
    places[applied] = KeyPlace(None, 0, text)
    return applied


def _keep_one(
    raw: dict[str, Any], places: dict[Key, KeyPlace], written: Collection[Key], file: Path, problems: list[Problem]
) -> list[Key]:
    """Remove the earlier of a number of steps and the key that it is counted from. Return the replaced keys."""
    tables = {str(key[0]): raw.get(str(key[0])) for key in written if len(key) == 1}
    where = lambda key: (_nearest_place(places, key) or KeyPlace(file, 1)).where  # noqa: E731
    replaced, conflicts = keep_one(raw, {*written, *written_in(tables)}, where)
    problems += conflicts
    for key in replaced:
        _forget(places, key)
    return replaced


def _forget(places: dict[Key, KeyPlace], key: Key) -> None:
    for inner in [k for k in places if k[: len(key)] == key]:
        del places[inner]


def _place_of(origin: str) -> KeyPlace | None:
    """Return the place that an origin refers to; None for a default and for a value that vlmrl chose."""
    if origin == "--set":
        return KeyPlace(None, 0, "")
    if origin.startswith(AUTO_ORIGIN):
        return None
    file, _, line = origin.rpartition(":")
    return KeyPlace(Path(file), int(line)) if file and line.isdigit() else None


def _odd_values(value: Any, places: Mapping[Key, KeyPlace], file: Path, key: Key = ()) -> list[Problem]:
    """Find values that are allowed in TOML but not in a recipe.

    They are dates, nan, inf, numbers that do not fit in 64 bits, tables in tables, and paths that no file system
    allows.
    """
    where = (_nearest_place(places, key) or KeyPlace(file, 1)).where
    if isinstance(value, dict):
        depth = sum(isinstance(part, str) for part in key) - (key_name(key[:3]) == "data.rewards")
        is_argument = key_name(key).startswith(ARGUMENTS)  # the value of an argument may be a table, such as aliases
        is_named = key[:2] in (("eval", "settings"), ("paper", "numbers"))  # tables of tables
        if depth > MAX_TABLE_DEPTH + (is_argument or is_named):
            hint = "use a flat key" + (", or a string that your function parses" if is_argument else "")
            within = " inside a table" * (depth - 1)
            return [Problem(f"`{dotted(key)}` is a table{within}, too deep for a recipe", where, hint)]
        return [p for name, inner in value.items() for p in _odd_values(inner, places, file, (*key, name))]
    if isinstance(value, list):
        return [p for number, inner in enumerate(value) for p in _odd_values(inner, places, file, (*key, number))]
    if isinstance(value, (datetime.date, datetime.time, datetime.datetime)):
        return [Problem(f"`{dotted(key)}` is a date; recipes hold no dates", where, f'write it as a string: "{value}"')]
    if isinstance(value, float) and not math.isfinite(value):
        return [Problem(f"`{dotted(key)}` is {value}; it must be a finite number", where)]
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return [Problem(f"`{dotted(key)}` is {str(value)[:24]}..., which does not fit in 64 bits", where)]
    if isinstance(value, str) and is_path_key(key) and not value.startswith("hub:"):
        path = value.rpartition(":")[0] if ".py:" in value else value
        longest = max(len(part.encode("utf-8", "replace")) for part in path.split("/"))
        if longest > MAX_NAME_BYTES:
            return [
                Problem(
                    f"`{dotted(key)}` holds a name of {longest} bytes; a file name has {MAX_NAME_BYTES} at most", where
                )
            ]
        if "\0" in path:
            return [Problem(f"`{dotted(key)}` holds a zero character; no path can hold one", where)]
    return []


def _find_paths(raw: dict[str, Any], places: Mapping[Key, KeyPlace], folder: Path, first: Path | None) -> list[Problem]:
    """Replace relative paths by paths of existing files (recipe/paths.py). `first`: folder that is tried first.

    Returns: a warning for each path that may mean either of two files.
    """
    warnings: list[Problem] = []

    def resolve(key: Key, value: Any) -> Any:
        if not isinstance(value, str) or not names_file(key, value):
            return value
        chosen, others = locate(value, _tried(value, places.get(key), folder, first))
        if others:
            message = f"`{dotted(key)}` is {value}, which exists in two places: {chosen} is used, not {others[0]}"
            hint = "a path is relative to the recipe that has it, a path in --set to the current directory"
            where = (_nearest_place(places, key) or KeyPlace(folder)).where
            warnings.append(Problem(message, where, hint, "warning"))
        return chosen

    for key, value in list(leaves(raw)):
        if is_path_key(key):
            is_list = isinstance(value, list)
            value_at(raw, key[:-1])[str(key[-1])] = [resolve(key, v) for v in value] if is_list else resolve(key, value)
    return warnings


def _tried(value: str, place: KeyPlace | None, folder: Path, first: Path | None = None) -> list[Path]:
    """Return the paths to try for the file of a value, in order. For a `--set`, the recipe's folder comes last."""
    file = file_part(value)
    if place is not None and place.file is None:
        return list(dict.fromkeys([*candidates(file, None), *candidates(file, folder)]))
    return candidates(file, place.file.parent if place and place.file else folder, first)


def _validated(
    raw: dict[str, Any], places: Mapping[Key, KeyPlace], file: Path, problems: list[Problem]
) -> Recipe | None:
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        where = lambda key: (_nearest_place(places, key) or KeyPlace(file, 1)).where  # noqa: E731
        reported = {(p.where, p.message.split(" ")[0]) for p in problems}  # (place, key in backticks)
        new_problems = problems_of(error.errors(), Recipe, where)
        problems += [p for p in new_problems if (p.where, p.message.split(" ")[0]) not in reported]
    return None


def _nearest_place(places: Mapping[Key, KeyPlace], key: Key) -> KeyPlace | None:
    return next((places[key[:n]] for n in range(len(key), 0, -1) if key[:n] in places), None)


def _wrong_kind(is_kind: str, required: str, places: Mapping[Key, KeyPlace], file: Path) -> Problem:
    command = {"rl": "train", "sft": "sft"}
    where = places[("kind",)].where if ("kind",) in places else str(file)
    return Problem(
        f'this recipe is for `vlmrl {command[is_kind]}` (kind = "{is_kind}"), not for `vlmrl {command[required]}`',
        where,
        f"run `vlmrl {command[is_kind]} {file}`, or add `--set kind={required}` if you mean it",
    )


def _origin(key: Key, raw: Mapping[str, Any], places: Mapping[Key, KeyPlace]) -> str:
    value: Any = raw
    for part in key:
        try:
            value = value[part]
        except (KeyError, IndexError):
            return "default"
    place = _nearest_place(places, key)
    return place.origin if place else "default"


def _line_order(problem: Problem) -> tuple[str, int]:
    name, _, line = (problem.where or "").rpartition(":")
    return (name, int(line)) if line.isdigit() else (problem.where or "", 0)
