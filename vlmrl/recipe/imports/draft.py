"""A recipe in the making, out of another system's settings: what was taken over, what was changed, what was left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vlmrl.recipe.explain import toml_value
from vlmrl.recipe.schema import Recipe

PLACEHOLDERS = {"model.path": "path/to/model", "data.path": "path/to/rows.jsonl"}
TABLES = tuple(Recipe.model_fields)


@dataclass(frozen=True)
class Taken:
    """A recipe value and where it came from; `why`: what it means here that it did not mean there."""

    key: str
    value: Any
    source: str
    why: str = ""


@dataclass
class Draft:
    """What an import makes.

    Args:
        system: whose settings these are, as people call it.
        given: the settings that were written.      defaults: what the system does where nothing is written.
        taken: recipe key -> its value.      left: setting -> why it has no place here.      todo: for the user to do.
        unfilled: settings whose value stands in a variable that is not set in the file.      last: setting looked at.
    """

    system: str
    given: dict[str, Any]
    defaults: Mapping[str, Any]
    taken: dict[str, Taken] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    todo: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    unfilled: dict[str, str] = field(default_factory=dict)
    last: str = ""

    def get(self, key: str) -> Any:
        """A setting as written, else the system's default, else None. It counts as seen."""
        self.used.add(key)
        self.last = key
        return self.given.get(key, self.defaults.get(key))

    def written(self, key: str) -> bool:
        return key in self.given

    def put(self, key: str, value: Any, *sources: str, why: str = "") -> None:
        """Set a recipe key from these settings."""
        self.used.update(sources)
        told = [s if self.written(s) else f"{s}, {self.system}'s default" for s in sources]
        self.taken[key] = Taken(key, value, " and ".join(told), why)

    def same(self, names: Mapping[str, str]) -> None:
        """Take over settings that mean the same: name there -> key here."""
        for source, key in names.items():
            if (value := self.get(source)) is not None:
                self.put(key, value, source)

    def put_table(self, key: str, start: str) -> None:
        """Set a recipe key, a table, from the settings below `start`, whatever they are called."""
        table: dict[str, Any] = {}
        told = []
        for source in [name for name in self.given if name.startswith(f"{start}.")]:
            *path, last = source.removeprefix(f"{start}.").split(".")
            inner = table if not path else table.setdefault(path[0], {}) if len(path) == 1 else None
            if not isinstance(inner, dict):
                self.leave(source, f"too deep for `{key}`, or below a plain value: use a flat key")
            elif isinstance(inner.get(last), dict):
                self.leave(source, f"a plain value where `{key}` has a table of the same name")
            else:
                inner[last] = self.given[source]
                told.append(source)
        if told:
            self.put(key, table, *told)

    def leave(self, key: str, why: str) -> None:
        """Say that a written setting has no counterpart."""
        if self.written(key):
            self.used.add(key)
            self.left[key] = why

    def leave_all(self, reasons: Mapping[str, str]) -> None:
        """As `leave`, for names and for whole tables (`worker.ref.`)."""
        for start, why in reasons.items():
            for key in [k for k in self.given if k == start or (start.endswith(".") and k.startswith(start))]:
                if key not in self.used:
                    self.leave(key, why)

    def drop_unfilled(self) -> None:
        """Numbers and switches that are still a `$VARIABLE` say nothing: the default is taken, and that is told."""
        for key, value in list(self.given.items()):
            default = self.defaults.get(key)
            if isinstance(value, str) and "$" in value and isinstance(default, (bool, int, float)):
                del self.given[key]
                self.unfilled[key] = value
                self.left[key] = f"`{value[:80]}` is filled in elsewhere: {self.system}'s default {default} was taken"
                self.todo.append(f"say what {key} is: `{value[:80]}` is filled in elsewhere")

    def finish(self) -> None:
        """What nobody asked for is unknown; what a recipe cannot do without is a placeholder."""
        for key in self.given:
            if key not in self.used:
                self.left[key] = "no counterpart is known"
        for key, value in PLACEHOLDERS.items():
            if key not in self.taken:
                self.taken[key] = Taken(key, value, "a placeholder")
                self.todo.append(f"set `{key}`: the configuration names none")

    @property
    def changed(self) -> list[Taken]:
        return [t for t in self.taken.values() if t.why]

    def toml(self, about: str) -> str:
        """The recipe; behind each value the setting it came from."""
        tables: dict[str, list[Taken]] = {}
        for taken in self.taken.values():
            table, _, name = taken.key.partition(".")
            tables.setdefault(table if name else "", []).append(taken)
        lines = [_comment(about), *(_comment(f"To do: {todo}.") for todo in self.todo)]
        for table in ("", *TABLES):
            found = tables.get(table)
            if found:
                lines += ["", f"[[{table}]]" if table == "data" else f"[{table}]"] if table else [""]
                lines += [_line(taken, table) for taken in found]
        return "\n".join(lines) + "\n"

    def report(self) -> dict[str, Any]:
        """As JSON values: mapped, changed, left_out, as_here (settings that a recipe need not write), todo."""
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
    """`value` as a number, or None when it is none or too small to mean anything (-1 for "off")."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (lowest is not None and value < lowest):
        return None
    return convert(value)


def names(values: Iterable[Any]) -> list[str]:
    return [str(v) for v in values]


def _line(taken: Taken, table: str) -> str:
    name = taken.key.partition(".")[2] if table else taken.key
    return f"{name} = {toml_value(taken.value)}".ljust(40) + f"  {_comment(taken.source)}"


def _comment(text: str) -> str:
    """A comment in one line, whatever the text holds: names and values of the imported file stand in comments too."""
    return "# " + "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
