"""Draft of a recipe from another system's settings: the values taken over, changed and left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vlmrl.recipe.explain import toml_value
from vlmrl.recipe.schema import Recipe

PLACEHOLDERS = {"model.path": "path/to/model", "data.path": "path/to/rows.jsonl"}
TABLES = tuple(Recipe.model_fields)


@dataclass(frozen=True)
class RecipeValue:
    """Recipe value and the settings that it came from.

    Args:
        key: dotted recipe key.
        source: the settings, joined by " and "; "a placeholder" if there are none.
        why: how the meaning here differs from that in the other system; "" = it does not.
    """

    key: str
    value: Any
    source: str
    why: str = ""


@dataclass
class Draft:
    """Recipe that is being made from another system's settings.

    Args:
        system: name of the other system, as people write it.
        given: the settings that the configuration writes; dotted key -> value.
        defaults: the system's own values of settings that are not written.
        taken: recipe key -> its value.
        left: setting -> why the recipe does not have it.
        todo: tasks for the user.
        used: settings that the import has read, taken over or left out.
        unfilled: setting -> its text, with a variable that the file does not set.
        last: the setting that was read last; an error names it.
    """

    system: str
    given: dict[str, Any]
    defaults: Mapping[str, Any]
    taken: dict[str, RecipeValue] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    todo: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    unfilled: dict[str, str] = field(default_factory=dict)
    last: str = ""

    def get(self, key: str) -> Any:
        """Return a setting as written, else the system's default, else None. The setting is then used."""
        self.used.add(key)
        self.last = key
        return self.given.get(key, self.defaults.get(key))

    def written(self, key: str) -> bool:
        return key in self.given

    def put(self, key: str, value: Any, *sources: str, why: str = "") -> None:
        """Set a recipe key from these settings."""
        self.used.update(sources)
        labels = [s if self.written(s) else f"{s}, {self.system}'s default" for s in sources]
        self.taken[key] = RecipeValue(key, value, " and ".join(labels), why)

    def same(self, names: Mapping[str, str]) -> None:
        """Take over settings that mean the same in both systems: name in the other system -> recipe key."""
        for source, key in names.items():
            if (value := self.get(source)) is not None:
                self.put(key, value, source)

    def put_table(self, key: str, start: str) -> None:
        """Set a recipe key that is a table from all settings below `start`.

        Inner tables have one level; a setting below it is left out.
        """
        table: dict[str, Any] = {}
        sources = []
        for source in [name for name in self.given if name.startswith(f"{start}.")]:
            *path, last = source.removeprefix(f"{start}.").split(".")
            inner = table if not path else table.setdefault(path[0], {}) if len(path) == 1 else None
            if not isinstance(inner, dict):
                self.leave(source, f"too deep for `{key}`, or below a plain value: use a flat key")
            elif isinstance(inner.get(last), dict):
                self.leave(source, f"a plain value where `{key}` has a table of the same name")
            else:
                inner[last] = self.given[source]
                sources.append(source)
        if sources:
            self.put(key, table, *sources)

    def leave(self, key: str, why: str) -> None:
        """Note why a written setting is left out. A setting that is not written needs no note."""
        if self.written(key):
            self.used.add(key)
            self.left[key] = why

    def leave_all(self, reasons: Mapping[str, str]) -> None:
        """Leave out all settings of these names, and of whole tables (`worker.ref.`), that are not used yet."""
        for start, why in reasons.items():
            for key in [k for k in self.given if k == start or (start.endswith(".") and k.startswith(start))]:
                if key not in self.used:
                    self.leave(key, why)

    def drop_unfilled(self) -> None:
        """Remove numbers and switches that are still a `$VARIABLE`: the default is taken, and notes say so."""
        for key, value in list(self.given.items()):
            default = self.defaults.get(key)
            if isinstance(value, str) and "$" in value and isinstance(default, (bool, int, float)):
                del self.given[key]
                self.unfilled[key] = value
                self.left[key] = f"`{value[:80]}` is filled in elsewhere: {self.system}'s default {default} was taken"
                self.todo.append(f"set {key}: its value `{value[:80]}` is filled in elsewhere")

    def finish(self) -> None:
        """Note the settings that the import does not know, and put placeholders where a recipe needs a value."""
        for key in self.given:
            if key not in self.used:
                self.left[key] = "no counterpart is known"
        for key, value in PLACEHOLDERS.items():
            if key not in self.taken:
                self.taken[key] = RecipeValue(key, value, "a placeholder")
                self.todo.append(f"set `{key}`: the configuration does not name it")

    @property
    def changed(self) -> list[RecipeValue]:
        return [t for t in self.taken.values() if t.why]

    def toml(self, about: str) -> str:
        """Return the recipe as TOML: `about` is its first comment, and a comment behind each value names its source."""
        tables: dict[str, list[RecipeValue]] = {}
        for taken in self.taken.values():
            table, _, name = taken.key.partition(".")
            tables.setdefault(table if name else "", []).append(taken)
        lines = [_comment(about), *(_comment(f"To do: {todo}.") for todo in self.todo)]
        for table in ("", *TABLES):
            entries = tables.get(table)
            if entries:
                lines += ["", f"[[{table}]]" if table == "data" else f"[{table}]"] if table else [""]
                lines += [_line(taken, table) for taken in entries]
        return "\n".join(lines) + "\n"

    def report(self) -> dict[str, Any]:
        """Return mapped, changed, left_out, as_here (settings that a recipe need not write), todo: all JSON values."""
        sources = {word for t in self.taken.values() for word in t.source.split(" and ")}
        silent = [key for key in self.given if key not in sources and key not in self.left]
        return {
            "mapped": [{"key": t.key, "value": t.value, "from": t.source} for t in self.taken.values() if not t.why],
            "changed": [{"key": t.key, "value": t.value, "from": t.source, "why": t.why} for t in self.changed],
            "left_out": [
                {"key": k, "value": self.given.get(k, self.unfilled.get(k)), "why": why} for k, why in self.left.items()
            ],
            "as_here": silent,
            "todo": list(self.todo),
        }


def number(convert: Callable[[Any], Any], value: Any, lowest: float | None = None) -> Any:
    """Convert `value` to a number. Return None if it is no number, or below `lowest` (-1 often means "off")."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (lowest is not None and value < lowest):
        return None
    return convert(value)


def names(values: Iterable[Any]) -> list[str]:
    return [str(v) for v in values]


def _line(taken: RecipeValue, table: str) -> str:
    name = taken.key.partition(".")[2] if table else taken.key
    return f"{name} = {toml_value(taken.value)}".ljust(40) + f"  {_comment(taken.source)}"


def _comment(text: str) -> str:
    """Return a comment of one line.

    Names and values of the imported file stand in comments, too: unprintable characters become `?`.
    """
    return "# " + "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
