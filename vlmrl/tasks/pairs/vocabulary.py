"""Closed vocabulary: the names that a field may hold, and their other spellings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from vlmrl.rewards.text_parsing import normalise_name


@dataclass(frozen=True)
class Vocabulary:
    """Names that a field may hold. `aliases`: other spelling -> name; `codes`: name -> its code in the data.

    Case, `-`, `_` and blanks have no effect: `sub-adult` is `SubAdult`.
    """

    names: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    codes: Mapping[str, str] = field(default_factory=dict)

    def find(self, text: str) -> str | None:
        """Return the name for a text, which may have another spelling; None if the text is no name of the list."""
        return self._spelt.get(_squeezed(text))

    @cached_property
    def _spelt(self) -> dict[str, str]:
        codes = {code: name for name, code in self.codes.items()}
        spelt = {**self.aliases, **codes, **{name: name for name in self.names}}
        return {_squeezed(other): name for other, name in spelt.items()}


def _squeezed(text: str) -> str:
    return normalise_name(text).replace(" ", "")
