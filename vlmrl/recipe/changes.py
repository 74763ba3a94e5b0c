"""Changes of a recipe against that of a run which is resumed.

Each key declares in the schema what a resume may do with it (`key_facts.OnResume`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vlmrl.key_facts import OnResume
from vlmrl.recipe.key_fields import field_at, key_name, mark_of
from vlmrl.recipe.key_rules import MOVED, SOURCES
from vlmrl.recipe.load import LoadedRecipe, leaves, with_defaults
from vlmrl.recipe.paths import is_path_key
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.toml_lines import Key, dotted


@dataclass(frozen=True)
class Change:
    """One thing that would be other than it was.

    Args:
        what: a dotted key, or words for something behind the recipe (a reward file).
        old, new: JSON values; None = not set.
        where: where the new value was written, when it was.
        diff: a unified diff, when both texts are known.
        unfit: why the checkpoint does not fit this very change, of a key whose changes it fits otherwise.
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
        """As the manifest keeps it."""
        told = {"what": self.what, "old": self.old, "new": self.new, "kind": self.kind, "why": self.reason}
        return told | ({"restarts": list(self.rule.restarts)} if self.rule.restarts else {})


def rule_of(key: Key) -> OnResume:
    """Return the rule of a place in a recipe: its own, or that of the innermost table around it.

    Raises: KeyError where neither the key nor a table around it is in the schema.
    """
    for length in range(len(key), 0, -1):
        if rule := mark_of(field_at(Recipe, key[:length]), OnResume):
            return rule
    raise KeyError(f"no rule for {dotted(key)}")


def compare_recipes(old: Mapping[str, Any], loaded: LoadedRecipe, base: Path, hidden: str = "") -> list[Change]:
    """What a recipe changes against a run's.

    Args:
        old: the values of the run's `resolved.json`; for keys that it lacks see `with_defaults`.
        base: where relative paths of `old` began. A path that leads to the same place is no change.
        hidden: what stands in `old`, or in a part of a text there, for a secret, which cannot be compared.
    """
    old, new = with_defaults(old), loaded.resolved["recipe"]
    before, after = dict(leaves(old)), dict(leaves(new))
    if len(old["data"]) != len(new["data"]):
        was, is_now = ([source["path"] for source in values["data"]] for values in (old, new))
        sources = [Change("data", was, is_now, SOURCES, loaded.where(("data",)))]
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
    """Return the rule of a change: a function whose file has moved is known by its source."""
    if key_name(key) not in ("reward.name", "data.reward"):
        return rule_of(key)
    (_, old), (_, new) = (_split(str(values.get(key))) for values in (before, after))
    return MOVED if old and old == new else rule_of(key)


def _keys(before: Mapping[Key, Any], after: Mapping[Key, Any]) -> Iterator[Key]:
    """Every key of either, once, in the order of the newer."""
    yield from after
    yield from (key for key in before if key not in after)


def _same(key: Key, old: Any, new: Any, base: Path) -> bool:
    """Whether two values mean the same. `{}` is a table of one's own with nothing in it: not set."""
    if old == new or {repr(old), repr(new)} == {"None", "{}"}:
        return True
    if not is_path_key(key) or not isinstance(old, str) or not isinstance(new, str):
        return False
    (old_file, old_rest), (new_file, new_rest) = _split(old), _split(new)
    return old_rest == new_rest and (base / old_file).resolve() == Path(new_file).resolve()


def hides(old: Any, new: Any, hidden: str) -> bool:
    """Whether the old value has `hidden` in it, and is the new one but for what that hides."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return old != new and all(a == b or hides(a, b, hidden) for a, b in zip(old, new, strict=True))
    if old == hidden:
        return True
    if not isinstance(old, str) or not isinstance(new, str) or hidden not in old:
        return False
    return re.fullmatch(".*".join(map(re.escape, old.split(hidden))), new, re.DOTALL) is not None


def _split(value: str) -> tuple[str, str]:
    """(file, function) of `file.py:function`; (value, "") of any other."""
    file, _, function = value.rpartition(":") if ".py:" in value else (value, "", "")
    return file, function
