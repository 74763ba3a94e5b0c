"""Differences between a recipe and the recipe of the run that is resumed with it.

Each key declares in the schema what a resume may do with it (`key_facts.OnResume`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vlmrl.key_facts import OnResume
from vlmrl.recipe.key_fields import field_at, is_path_key, key_name, mark_of, split_file
from vlmrl.recipe.load import LoadedRecipe, leaves, with_defaults
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.tables import MOVED, SOURCES
from vlmrl.recipe.toml_lines import Key, dotted


@dataclass(frozen=True)
class Change:
    """Difference between the values of a run and those that it would be resumed with.

    Args:
        what: a dotted key, or a text for something outside the recipe that it refers to (a reward file).
        old, new: JSON values; None = not set.
        where: file and line of the new value; "" = no file sets it.
        diff: unified diff of the old and the new text; "" if one of them is unknown.
        unfit: reason why the checkpoint does not fit this value, although other changes of the key are possible; "" =
            it fits.
    """

    what: str
    old: Any
    new: Any
    rule: OnResume
    where: str = ""
    diff: str = ""
    unfit: str = ""

    @property
    def kind(self) -> Literal["free", "asked", "refused"]:
        return "refused" if self.unfit else self.rule.kind

    @property
    def reason(self) -> str:
        return self.unfit or self.rule.reason

    def record(self) -> dict[str, Any]:
        """Return the change as the manifest stores it."""
        entry = {"what": self.what, "old": self.old, "new": self.new, "kind": self.kind, "why": self.reason}
        return entry | ({"restarts": list(self.rule.restarts)} if self.rule.restarts else {})


def rule_of(key: Key) -> OnResume:
    """Return the rule for changes of a key: its own rule, or that of the innermost table around it.

    Raises: KeyError when neither the key nor a table around it is in the schema.
    """
    for length in range(len(key), 0, -1):
        if rule := mark_of(field_at(Recipe, key[:length]), OnResume):
            return rule
    raise KeyError(f"no rule for {dotted(key)}")


def compare_recipes(old: Mapping[str, Any], loaded: LoadedRecipe, base: Path, hidden: str = "") -> list[Change]:
    """Return the differences between the recipe of a run and a new one.

    Args:
        old: values in the run's `resolved.json`; for missing keys see `with_defaults`.
        base: folder to which relative paths in `old` are relative. Two paths to the same file are no change.
        hidden: text that replaces secrets in `old`, as a whole value or as a part of one. The replaced part is not
            compared; "" = no text is replaced.
    """
    old, new = with_defaults(old), loaded.resolved["recipe"]
    before, after = dict(leaves(old)), dict(leaves(new))
    if len(old["data"]) != len(new["data"]):
        old_paths, new_paths = ([source["path"] for source in values["data"]] for values in (old, new))
        sources = [Change("data", old_paths, new_paths, SOURCES, loaded.where(("data",)))]
        common = range(min(len(old["data"]), len(new["data"])))
    else:
        sources, common = [], range(len(new["data"]))
    return sources + [
        Change(dotted(key), before.get(key), after.get(key), _rule(key, before, after), loaded.where(key))
        for key in _keys(before, after)
        if not (key[0] == "data" and key[1] not in common)
        and not (hidden and hides(before.get(key), after.get(key), hidden))
        and not _same(key, before.get(key), after.get(key), base)
    ]


def _rule(key: Key, before: Mapping[Key, Any], after: Mapping[Key, Any]) -> OnResume:
    """Return the rule of a change. If only the path of a reward's file is different, it is the rule for moved files."""
    if key_name(key) not in ("reward.name", "data.reward", "rewards.name", "data.rewards.name"):
        return rule_of(key)
    (_, old), (_, new) = (split_file(str(values.get(key))) for values in (before, after))
    return MOVED if old and old == new else rule_of(key)


def _keys(before: Mapping[Key, Any], after: Mapping[Key, Any]) -> Iterator[Key]:
    """Yield every key once: those of the newer recipe in its order, then those that only the older one has."""
    yield from after
    yield from (key for key in before if key not in after)


def _same(key: Key, old: Any, new: Any, base: Path) -> bool:
    """Return whether two values mean the same. An empty table with names that users choose means "not set".

    So does an empty list where the other recipe has tables, whose keys are compared.
    """
    if old == new or {repr(old), repr(new)} in ({"None", "{}"}, {"None", "[]"}):
        return True
    if not is_path_key(key) or not isinstance(old, str) or not isinstance(new, str):
        return False
    (old_file, old_rest), (new_file, new_rest) = split_file(old), split_file(new)
    return old_rest == new_rest and (base / old_file).resolve() == Path(new_file).resolve()


def hides(old: Any, new: Any, hidden: str) -> bool:
    """Return whether the old value contains `hidden` and equals the new one except for what `hidden` replaces."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return old != new and all(a == b or hides(a, b, hidden) for a, b in zip(old, new, strict=True))
    if old == hidden:
        return True
    if not isinstance(old, str) or not isinstance(new, str) or hidden not in old:
        return False
    return re.fullmatch(".*".join(map(re.escape, old.split(hidden))), new, re.DOTALL) is not None
