"""Form of the answers of a pair task, and functions that write such answers. Attacks on rewards are built from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vlmrl.tasks.attack import THOUGHT
from vlmrl.types import RewardInput

Kind = Literal["answer", "names", "verdicts", "labels", "named_labels"]
Pair = tuple[str, str]


@dataclass(frozen=True)
class FormField:
    """Truth field that an answer states.

    Args:
        name: name of the truth field.
        tag: name of its tag in answers.
        labels: the names that it may hold; () = any name.
        level: whether the field is a level of the hierarchy.
    """

    name: str
    tag: str
    labels: tuple[str, ...] = ()
    level: bool = True


@dataclass(frozen=True)
class AnswerForm:
    """Form `<think>...</think><answer>P</answer>` with one tag per field inside think.

    Args:
        kind: form of a tag's text; see `Form` in taxonrl/domain.py.
        fields: the fields in the order of their tags.
    """

    kind: Kind
    fields: tuple[FormField, ...]

    def stated(self, names: Mapping[str, Pair | None]) -> list[tuple[FormField, Pair]]:
        """Return the fields that an answer states, with their names: the known ones, down to the first that differs."""
        fields: list[tuple[FormField, Pair]] = []
        for field in self.fields:
            pair = names.get(field.name)
            if pair is None:
                continue
            fields.append((field, pair))
            if field.level and pair[0] != pair[1]:
                break
        return fields

    def value(self, pair: Pair) -> str:
        """Return the text of the tag that states these two names."""
        if self.kind == "verdicts":
            return "Same" if pair[0] == pair[1] else "Different"
        return f"Image1={pair[0]}; Image2={pair[1]}" if self.kind == "named_labels" else f"{pair[0]}; {pair[1]}"

    def tags(self, names: Mapping[str, Pair | None]) -> str:
        """Return the tags of an answer that states these names."""
        return "".join(f"\n<{f.tag}>{self.value(pair)}</{f.tag}>\n" for f, pair in self.stated(names))

    def write(self, names: Mapping[str, Pair | None], p: float | str) -> str:
        """Return a whole, well-formed answer."""
        return f"<think>\n{THOUGHT}{self.tags(names) or ' '}</think>\n<answer>{four(p)}</answer>"

    def names_of(self, x: RewardInput) -> dict[str, Pair | None]:
        """Return field -> the two true names of a row; None where a name is not known."""
        return {field.name: _pair(x.truth.get(field.name)) for field in self.fields}

    def commonest(self, rows: Sequence[RewardInput]) -> dict[str, Pair | None]:
        """Return field -> the most frequent name of image 1 and of image 2: the best guess without the images."""
        guess: dict[str, Pair | None] = {}
        for field in self.fields:
            pairs = [pair for x in rows if (pair := _pair(x.truth.get(field.name))) is not None]
            sides = [Counter(pair[side] for pair in pairs).most_common(1) for side in (0, 1)]
            guess[field.name] = (sides[0][0][0], sides[1][0][0]) if pairs else self._made_up(field)
        return guess

    def others(self, x: RewardInput, rows: Sequence[RewardInput]) -> dict[str, Pair | None]:
        """Return wrong names for a row: equal where the true names differ, and different where these are equal."""
        names: dict[str, Pair | None] = {}
        for field in self.fields:
            pair = _pair(x.truth.get(field.name))
            known = {name for y in rows for name in _pair(y.truth.get(field.name)) or ()} | {*field.labels}
            free = [*sorted(known - set(pair or ())), "Falsum", "Errorum"]
            same = pair is not None and pair[0] == pair[1]
            names[field.name] = (free[0], free[1]) if same else (free[0], free[0])
        return names

    def _made_up(self, field: FormField) -> Pair:
        return (field.labels[0], field.labels[0]) if field.labels else ("Alpha", "Alpha")


def form_of(levels: Sequence[str]) -> AnswerForm:
    """Return the form of answers with two names per level. Without levels, the form has no tags inside think."""
    return AnswerForm("names" if levels else "answer", tuple(FormField(name, name) for name in levels))


def four(p: float | str) -> str:
    """Return a probability with four decimals."""
    return p if isinstance(p, str) else f"{p:.4f}"


def _pair(value: Any) -> Pair | None:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    first, second = value
    return (first, second) if isinstance(first, str) and isinstance(second, str) and first and second else None
