"""Draft of a recipe, made from another system's settings: values that are taken over, changed and left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vlmrl.recipe.explain import toml_value
from vlmrl.recipe.schema import Recipe
from vlmrl.redaction.redact import excerpt

PLACEHOLDERS = {"model.path": "path/to/model", "data.path": "path/to/rows.jsonl"}
TABLES = tuple(Recipe.model_fields)


@dataclass(frozen=True)
class RecipeValue:
    """Recipe value and the settings that it came from.

    Args:
        key: dotted recipe key.
        source: names of the settings, joined by " and "; "a placeholder" if there are none.
        why: difference between its meaning here and in the other system; "" = there is no difference.
    """

    key: str
    value: Any
    source: str
    why: str = ""


@dataclass
class Draft:
    """Recipe under construction, from another system's settings.

    Args:
        system: name of the other system, for messages.
        given: settings that are written in the configuration: dotted key -> value.
        defaults: the system's own defaults: dotted key -> value.
        taken: recipe key -> its value and sources.
        left: setting -> reason why it is left out of the recipe.
        todo: tasks for the user.
        used: settings that the import has read, taken over or left out.
        unfilled: setting -> its text, which contains a variable that the file does not set.
        last: the setting that was read last, for error messages.
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
        """Return the value of a setting: as written, else the system's default, else None. Mark the setting as used."""
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
        """Take over settings with the same meaning in both systems. `names`: the other system's name -> recipe key."""
        for source, key in names.items():
            if (value := self.get(source)) is not None:
                self.put(key, value, source)

    def put_table(self, key: str, start: str) -> None:
        """Set a recipe key whose value is a table, from all settings whose names begin with `start`.

        The table may contain tables, but these may not contain further ones: such settings are left out.
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
        """Record why a setting is left out, if the configuration writes it."""
        if self.written(key):
            self.used.add(key)
            self.left[key] = why

    def leave_all(self, reasons: Mapping[str, str]) -> None:
        """Leave out all unused settings with these names; a name with a dot at its end is a table (`worker.ref.`)."""
        for start, why in reasons.items():
            for key in [k for k in self.given if k == start or (start.endswith(".") and k.startswith(start))]:
                if key not in self.used:
                    self.leave(key, why)

    def drop_unfilled(self) -> None:
        """Remove numbers and switches whose text is a `$VARIABLE` without a value: use defaults, and add notes."""
        for key, value in list(self.given.items()):
            default = self.defaults.get(key)
            if isinstance(value, str) and "$" in value and isinstance(default, (bool, int, float)):
                del self.given[key]
                self.unfilled[key] = value
                shown = excerpt(value, 80)
                self.left[key] = f"`{shown}` is filled in elsewhere: {self.system}'s default {default} was taken"
                self.todo.append(f"set {key}: its value `{shown}` is filled in elsewhere")

    def finish(self) -> None:
        """Record the settings that the import does not know, and set placeholders for required keys without a value."""
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
        """Return the recipe as TOML. `about`: its first comment. A comment behind each value names its source."""
        tables: dict[str, list[RecipeValue]] = {}
        for taken in self.taken.values():
            table, _, name = taken.key.partition(".")
            tables.setdefault(table if name else "", []).append(taken)
        lines = [_comment(about), *(_comment(f"To do: {todo}.") for todo in self.todo)]
        for table in ("", *TABLES):
            entries = tables.get(table)
            if entries:
                lines += ["", f"[[{table}]]" if table == "data" else f"[{table}]"] if table else [""]
                lines += [_line(taken, table) for taken in entries if taken.key != "rewards"]
        if rewards := self.taken.get("rewards"):
            for reward in rewards.value:
                lines += ["", f"[[rewards]]  {_comment(rewards.source)}"]
                lines += [f"{name} = {toml_value(value)}" for name, value in reward.items()]
        return "\n".join(lines) + "\n"

    def report(self) -> dict[str, Any]:
        """Return the report as JSON values: mapped, changed, left_out, as_here (not needed in a recipe), todo."""
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
    """Convert `value` to a number. Return None if it is not a number or is below `lowest` (-1 often means "off")."""
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

    Comments contain names and values of the imported file, so unprintable characters are replaced by `?`.
    """
    return "# " + "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
