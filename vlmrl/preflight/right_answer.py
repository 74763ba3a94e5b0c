"""Trial of one right answer per sampled row: the form of the truth, and whether the reward pays what looks right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmrl.errors import Problem
from vlmrl.redaction.redact import excerpt, quoted
from vlmrl.tasks.answer_forms import answer_forms
from vlmrl.types import RewardInput, Row, Score

TYPES = {bool: "true or false", int: "an integer", float: "a number", str: "text", list: "a list", dict: "a mapping"}


def truth_form(row: Row) -> str:
    """Return the type and value of each field of a row's truth. Example: ``answer is an integer, such as 3``."""
    return "; ".join(
        f"`{name}` is {TYPES.get(type(value), type(value).__name__)}, such as {excerpt(str(value), 60)}"
        for name, value in row.truth.items()
    )


@dataclass
class TruthScan:
    """Scan of truths: the number of rows, and field -> type in words -> (number of rows, the first of them)."""

    rows: int = 0
    kinds: dict[str, dict[str, tuple[int, Row]]] = field(default_factory=dict)

    def look(self, row: Row) -> None:
        """Note the types of a row's truth. An integer and a float are both numbers; a field may be None."""
        self.rows += 1
        for name, value in row.truth.items():
            kinds = self.kinds.setdefault(name, {})
            if value is not None:
                kind = float if type(value) is int else type(value)
                number, first = kinds.get(words := TYPES.get(kind, kind.__name__), (0, row))
                kinds[words] = (number + 1, first)

    def problems(self, source: Any, where: str) -> list[Problem]:
        """Return warnings for truths that are all empty, and for fields that have another type in other rows."""
        of = f"of `{source.name}` ({source.split})"
        if self.rows and not self.kinds:
            message = f"the truth {of} is empty in all {self.rows:,} rows that were read: no answer to compare with"
            hint = f'name its column: `columns = {{answer = "..."}}`; the columns: {", ".join(source.rows[0].columns)}'
            return [Problem(message, where, hint, "warning")]
        problems = []
        for name, kinds in self.kinds.items():
            if len(kinds) > 1:
                usual = max(kinds, key=lambda kind: kinds[kind][0])
                other, (_, row) = next((kind, at) for kind, at in kinds.items() if kind != usual)
                message = (
                    f"`{name}` {of} is {usual} in most rows, but {other} in {row.place}: {quoted(row.truth[name])}"
                )
                problems.append(Problem(message, where, "give it one type: the number 3 is not the text 3", "warning"))
        return problems


def trial_of(source: Any, row: Row) -> list[str]:
    """Return responses to a row: the right answer in each form, then a wrong one in each; [] without a plain answer."""
    answer = row.truth.get("answer")
    if answer is None or isinstance(answer, (list, dict)):
        return []
    prompt = "\n".join(message.content for message in source.messages(row))
    x = RewardInput("", row.truth, row.columns, prompt=prompt)
    forms = answer_forms([x])
    return [*(form.around(form.text(x)) for form in forms), *(form.around(form.wrong(x, [])) for form in forms)]


def paid(scores: Sequence[Score]) -> float | None:
    """Return the best score of a right answer that earns more than a wrong one of its form; None if there is none.

    Args:
        scores: of the responses of `trial_of`.
    """
    half = len(scores) // 2
    pairs = zip(scores[:half], scores[half:], strict=True)
    return max((right.value for right, wrong in pairs if right.value > wrong.value), default=None)


def unpaid(name: str, row: Row, where: str) -> Problem:
    """Return the warning that no right answer that was tried earns more than a wrong one of its form."""
    message = (
        f"on `{name}` no right answer that was tried earns more than a wrong one of the same form; "
        f"the truth: {truth_form(row)}"
    )
    is_text = all(isinstance(value, str) for value in row.truth.values())
    hint = "tried: the truth alone, in tags, in a box, as JSON, and in the forms that the prompt shows"
    hint += "" if is_text else '; a truth keeps the type of its table: compare str(x.truth["answer"]) with text'
    return Problem(message, where, f"{hint}; see the parts: `vlmrl try RECIPE`", "warning")


def differing_parts(name: str, pairs: Sequence[tuple[Row, Score]], where: str) -> list[Problem]:
    """Return a warning if the reward returns other parts for other rows."""
    places: dict[tuple[str, ...], str] = {}
    for row, score in pairs:
        if score.parts:
            places.setdefault(tuple(sorted(score.parts)), row.place)
    if len(places) < 2:
        return []
    shown = "; ".join(f"{', '.join(parts)} for {place}" for parts, place in list(places.items())[:3])
    message = f"the reward of `{name}` returns other parts for other rows: {shown}"
    hint = "return every part for every row: None for one that does not apply, so that its weight goes to the others"
    return [Problem(message, where, hint, "warning")]
