"""Loading of recipes: from a TOML file to a valid `Recipe`, with the origin of every value. No torch.

A recipe may name parents (`extends`), whose keys it overrides one by one. Two kinds of values replace a parent's value
as a whole: tables with names that users choose (`reward.weights`, `reward.args`, `data.columns`, `paper`), and lists
(`[[data]]`, `stop`). Then `--set key=value` overrides all files; its values are TOML, and a bare word is a string. All
problems are reported at once, with file and line. Some numbers of steps are counted when a run begins.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vlmrl.errors import Problem, ProblemsError, RecipeError
from vlmrl.recipe.files import (
    REMOTE_CODE,
    Layer,
    find_recipe,
    parse_toml,
    present_name,
    read_layers,
    rename_note,
    with_present_names,
)
from vlmrl.recipe.key_fields import candidates, is_path_key, key_name, locate, names_file, split_file, table_class
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.tables import ARGUMENTS, AUTO, drop_replaced
from vlmrl.recipe.toml_lines import AUTO_ORIGIN, Key, KeyPlace, dotted, parse_dotted
from vlmrl.recipe.validation_messages import fields_at, problems_of, unknown_key

LISTS_OF_TABLES = ("data", "rewards", "data.rewards")
"""Keys that are lists of tables, without positions: `data.0.path` is the path in the first element."""

MOST_PARTS = 20
"""Maximum number of parts of a key. Code that reads a recipe recurses once per part, and Python's limit is about 1000
levels."""


@dataclass(frozen=True)
class Override:
    """Parsed `--set`: parts of its key, value, and original text."""

    parts: tuple[str, ...]
    value: Any
    text: str


def parse_override(text: str) -> Override | Problem:
    """Parse `algo.clip_high=0.3`.

    The value is read as TOML (`0.3`, `true`, `[1, 2]`, `"quoted"`). A text that is not TOML and does not begin like a
    string, list or table is used as a string, so that `model.path=demo/model` needs no quotes.
    """
    where = f"--set {text}"
    name, equals, value = text.partition("=")
    if not equals:
        return Problem("`--set` needs a key and a value", where, "write --set algo.clip_high=0.3")
    parts, usage = parse_dotted(name.strip()), "write --set table.key=value, such as algo.clip_high=0.3"
    if parts and len(parts) > MOST_PARTS:
        finding = f"the key has {len(parts):,} parts; no key of a recipe has more than {MOST_PARTS}"
        return Problem(finding, f"--set {dotted(parts[:3])}...", usage)
    if not parts:
        return Problem(f"`{name.strip()}` is not a key", where, usage)
    parsed = _value(value.strip())
    if parsed is None:
        hint = """quote for the shell as well: --set 'rollout.stop=["a", "b"]'"""
        return Problem(f"the value {value.strip()!r} is not a complete TOML string, list or table", where, hint)
    return Override(parts, parsed[0], text)


def apply_override(raw: dict[str, Any], override: Override) -> Key | Problem:
    """Set the value in `raw`; create missing tables. Return the key of the value, or a problem."""
    where = f"--set {override.text}"
    container: Any = raw
    key: Key = ()
    for i, part in enumerate(override.parts):
        is_last = i == len(override.parts) - 1
        if isinstance(container, list):
            is_index = part.isascii() and part.isdigit() and len(part) < 6
            if not is_index or (index := int(part)) > len(container):
                rest = override.parts[i + part.lstrip("-").isdigit() :] or ("path",)
                if (known := fields_at(Recipe, (*key, 0))) and rest[0] not in known:
                    message, hint = unknown_key((*key, 0, rest[0]), override.value, Recipe)
                    return Problem(message, where, hint)
                example = dotted((*key, 0, *rest))
                hint = f"positions count from 0; {dotted(key)} has {len(container)}: --set {example}=..."
                return Problem(f"`{part}` is not a position in the list `{dotted(key)}`", where, hint)
            key = (*key, index)
            if is_last:
                container[index : index + 1] = [override.value]  # replace an element, or append one at the end
                return key
            if index == len(container):
                container.append({})
            container = container[index]
        elif isinstance(container, dict):
            key = (*key, part)
            if is_last:
                container[part] = override.value
                return key
            container = container.setdefault(part, [] if key_name(key) in LISTS_OF_TABLES else {})
        else:
            return Problem(f"`{dotted(key)}` is a single value, not a table", where)
    return Problem("`--set` needs a key", where)


def notes_on_overrides(overrides: Sequence[str]) -> list[Problem]:
    """Return a warning for each `--set` that uses the old name of a key."""
    notes = []
    for text in overrides:
        parsed = parse_override(text)
        if not isinstance(parsed, Problem) and (name := present_name(parsed.parts)) != parsed.parts:
            notes.append(rename_note(parsed.parts, name, f"--set {text}"))
    return notes


def refuse_remote_code(values: Mapping[str, Any], overrides: Sequence[str], where: str) -> None:
    """Refuse the settings of a run, maybe a stranger's, that run the code of a model, unless a `--set` repeats it.

    Raises: RecipeError.
    """
    keys = [dotted(parsed.parts) for text in overrides if not isinstance(parsed := parse_override(text), Problem)]
    if values.get("model", {}).get("trust_remote_code") and REMOTE_CODE not in keys:
        raise RecipeError(
            f"the run would execute Python code that its model's folder holds ({REMOTE_CODE} = true)",
            where=where,
            hint=f"a run never turns this on by itself: read that code, then add --set {REMOTE_CODE}=true",
        )


def _value(text: str) -> tuple[Any] | None:
    """Return the value in a tuple of one; None if the text begins like a TOML string, list or table but is invalid."""
    try:
        table = parse_toml(f"value = {text}")
    except (ValueError, RecursionError):
        table = {}
    dates = (datetime.date, datetime.time, datetime.datetime)
    if set(table) == {"value"} and not isinstance(table["value"], dates):
        return (table["value"],)
    return None if text[:1] in ('"', "'", "[", "{") else (text,)


def value_at(raw: Mapping[str, Any], key: Key) -> Any:
    """Return the value of a key. Raises: KeyError or IndexError without one."""
    value: Any = raw
    for part in key:
        value = value[part]
    return value


def copy_values(value: Any) -> Any:
    """Return a copy of a value, with copies of all tables and lists in it."""
    if isinstance(value, dict):
        return {name: copy_values(inner) for name, inner in value.items()}
    return [copy_values(inner) for inner in value] if isinstance(value, list) else value


def drop_none(value: Any) -> None:
    """Remove keys whose value is None, because TOML has no null. Then `--set` can add a table that was left out."""
    if isinstance(value, dict):
        for name in [n for n, inner in value.items() if inner is None]:
            del value[name]
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        drop_none(inner)


COUNTED: Mapping[tuple[str, str], tuple[str, str]] = {
    ("train", "steps"): ("train", "epochs"),
    ("optim", "warmup_steps"): ("optim", "warmup_ratio"),
    ("eval", "every_steps"): ("eval", "every_epochs"),
}
"""Key of a number of steps -> key from which it is counted. If the second key is set, the first one is 0 until the
steps are counted (recipe/auto_values.py); `eval.every_steps` stays 0, because its steps need not be evenly spaced."""


def written_in(values: Mapping[Any, Any]) -> set[Key]:
    """Return the keys in `COUNTED`, from both sides of it, that these values of a recipe contain."""
    keys = [*COUNTED, *COUNTED.values()]
    return {(table, name) for table, name in keys if isinstance(t := values.get(table), Mapping) and name in t}


def keep_one(
    raw: dict[str, Any], written: Collection[Key], where: Callable[[Key], str]
) -> tuple[list[Key], list[Problem]]:
    """Keep only one key of each pair in `COUNTED`: the one that is written last replaces the other one.

    Args:
        raw: values of the recipe; changed in place.
        written: keys that one file, or all `--set` together, set.
        where: function that returns the place of a key, for messages.
    Returns: (keys whose written value is replaced, an error for each pair of which `written` contains both keys).
    """
    replaced: list[Key] = []
    problems: list[Problem] = []
    for steps, source in COUNTED.items():
        table = raw.get(steps[0])
        if not isinstance(table, dict):
            continue
        # 0 steps together with the other key are no contradiction: the steps of this recipe are not counted yet.
        if source in written and steps in written and table.get(steps[1]) != 0:
            message = f"`{dotted(steps)}` and `{dotted(source)}` are both set, but each gives the number of steps alone"
            problems.append(Problem(message, where(source), "leave one of the two out"))
        elif source in written:
            table[steps[1]] = 0
            replaced.append(steps)
        elif steps in written and source[1] in table:
            del table[source[1]]
            replaced.append(source)
    return replaced, problems


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
        place = next((self.places[k] for k in keys if k in self.places), None)
        place = place or (_nearest_place(self.places, keys[0]) if keys else None)
        return place.where if place else str(self.path)

    def paths_tried(self, key: Key, value: str) -> list[Path]:
        """Return the paths that are tried for a relative path: in the recipe file's folder, then in the current one."""
        return _tried(value, self.places.get(key), self.path.parent)


def load_recipe(
    path: str | Path, *, overrides: Sequence[str] = (), kind: str | None = None, under: Mapping[str, Any] | None = None
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
        is_for, other = (f"vlmrl {'train' if one == 'rl' else one}" for one in (recipe.kind, kind))
        message = f'this recipe is for `{is_for}` (kind = "{recipe.kind}"), not for `{other}`'
        hint = f"run `{is_for} {file}`, or add `--set kind={kind}` if you mean it"
        where = places[("kind",)].where if ("kind",) in places else str(file)
        problems.append(Problem(message, where, hint))
    if problems or recipe is None:
        raise ProblemsError(sorted(problems, key=_line_order))
    return recipe, warnings


def recipe_from_resolved(resolved: Mapping[str, Any], *, where: str) -> Recipe:
    """Return the recipe inside a `resolved.json`.

    Raises: RecipeError when it was written by another version of the format or does not fit the schema.
    """
    if resolved.get("schema") != RESOLVED_SCHEMA:
        message = f"this resolved recipe has schema {resolved.get('schema')!r}; this version reads {RESOLVED_SCHEMA}"
        raise RecipeError(message, where=where)
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
    if isinstance(parsed, Override):
        parsed = replace(parsed, parts=present_name(parsed.parts))
    applied = parsed if isinstance(parsed, Problem) else apply_override(raw, parsed)
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
        path = split_file(value)[0]
        longest = max(len(part.encode("utf-8", "replace")) for part in path.split("/"))
        if longest > MAX_NAME_BYTES:
            finding = f"`{dotted(key)}` holds a name of {longest} bytes; a file name has {MAX_NAME_BYTES} at most"
            return [Problem(finding, where)]
        if "\0" in path:
            return [Problem(f"`{dotted(key)}` holds a zero character; no path can hold one", where)]
    return []


def _find_paths(raw: dict[str, Any], places: Mapping[Key, KeyPlace], folder: Path, first: Path | None) -> list[Problem]:
    """Replace relative paths by paths of existing files (recipe/key_fields.py). `first`: folder that is tried first.

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
    file = split_file(value)[0]
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


def _origin(key: Key, raw: Mapping[str, Any], places: Mapping[Key, KeyPlace]) -> str:
    try:
        value_at(raw, key)
    except (KeyError, IndexError):
        return "default"
    place = _nearest_place(places, key)
    return place.origin if place else "default"


def _line_order(problem: Problem) -> tuple[str, int]:
    name, _, line = (problem.where or "").rpartition(":")
    return (name, int(line)) if line.isdigit() else (problem.where or "", 0)
