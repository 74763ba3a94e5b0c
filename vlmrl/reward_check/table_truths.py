"""Reading of a table's ground truths as truths of a task: from typed fields, or from a text in the task's form."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from vlmrl.data.table_values import plain
from vlmrl.errors import RewardError
from vlmrl.redaction.redact import quoted
from vlmrl.tasks.truth_kinds import CONTRADICTS, TruthForm
from vlmrl.tasks.user_task import is_own
from vlmrl.untrusted import parse_json

PLAIN_FIELDS = ("answer", "ground_truth")
"""Truth fields for a ground truth that is a single value. Training sets the first field; a check sets both."""
TruthReading = tuple[Mapping[str, Any], str, str]
"""(truth, reason why it cannot be used or "", reason why it is doubtful or "")."""


@dataclass(frozen=True)
class TruthRule:
    """Rule for reading the ground truths of a table.

    Args:
        task: name of the task; "" = no task: a mapping is the whole truth, any other cell fills PLAIN_FIELDS.
        form: form of the task's truths in a table.
        variant: variant of the task.
        lenient: keep a truth that breaks its form unchanged and report it as doubtful; for rewards that accept any
            text.
    """

    task: str = ""
    form: TruthForm = field(default_factory=TruthForm)
    variant: str | None = None
    lenient: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the rule for another process, which creates the rule of a user's task again from the task's file."""
        if is_own(self.task):
            return _own_rule, (self.task, self.variant, self.lenient)
        return TruthRule, (self.task, self.form, self.variant, self.lenient)

    def fields_in(self, row: Mapping[str, Any]) -> bool:
        """Return whether at least one truth field is filled as a column of the row."""
        return any(row.get(name) is not None for name in self.form.fields)

    def read(self, cell: Any, row: Mapping[str, Any]) -> TruthReading:
        """Return the truth of a row from its ground-truth cell or, with a task, from columns named as truth fields."""
        if isinstance(cell, str) and cell.lstrip()[:1] == "{":
            try:
                cell = parse_json(cell)
            except ValueError as error:
                if self.task:  # without a task, any text is allowed, such as the set {1, 2}
                    return {}, f"the ground truth looks like JSON and is not: {error}", ""
        if isinstance(cell, Mapping):
            cell = plain(cell)
            inner = cell.get("ground_truth")
            is_truth = any(name in cell for name in self.form.fields[:1])
            nested = not is_truth and isinstance(inner, (str, int, float, Mapping))
            return self.read(inner, row) if nested and self.task else self._checked(cell)
        if self.fields_in(row):
            typed = {name: _typed(row[name]) for name in self.form.fields if row.get(name) is not None}
            return self._checked(typed)
        if self.form.read is not None:
            return self._from_text(cell, self.form.read)
        if self.task and not self.form.fields and cell is not None:
            return self._checked({"answer": plain(cell)})
        if self.task:
            return {}, f"the ground truth is {quoted(cell, 60)}, not a mapping of truth fields", ""
        return ({} if cell is None else dict.fromkeys(PLAIN_FIELDS, plain(cell))), "", ""

    def _from_text(self, cell: Any, read: Callable[[str], Mapping[str, Any]]) -> TruthReading:
        """Return the truth that `read`, the parser of the task's form, reads from the text of a cell."""
        text = str(int(cell)) if isinstance(cell, bool) else str(cell)
        try:
            if cell is None:
                raise RewardError("there is no ground truth")
            return {**read(text), "ground_truth": cell}, "", ""
        except RewardError as error:
            why = error.message + (f" ({error.hint})" if error.hint else "")
            return ({"ground_truth": cell}, "", why) if self.lenient else ({}, why, "")

    def _checked(self, truth: Mapping[str, Any]) -> TruthReading:
        """Check a typed truth against the task's schema, and return it."""
        if self.task:
            validate = _validator(self.task, json.dumps(self.form.settings), self.variant)
            if validate is not None and (faults := validate(truth)):
                problem = f"the ground truth breaks the task `{self.task}`: {'; '.join(faults)}"
                return self._as_text(truth, problem) if self.lenient else ({}, problem, "")
        return truth, "", ""

    def _as_text(self, truth: Mapping[str, Any], problem: str) -> TruthReading:
        """Return a typed truth that breaks the schema, with its text in the task's form, which lenient rewards score.

        If the truth cannot be written as a text, it cannot be used, and `problem` is the reason.
        """
        if self.form.write is None or self.form.read is None:
            return {}, problem, ""
        text = ""
        try:
            text = self.form.write(truth)
            self.form.read(text)
        except RewardError as error:
            if CONTRADICTS not in error.message:
                return {}, problem, ""
            return {**truth, "ground_truth": text}, "", error.message
        return {**truth, "ground_truth": text}, "", problem


def _own_rule(task: str, variant: str | None, lenient: bool) -> TruthRule:
    from vlmrl.tasks import find_task

    return TruthRule(task, find_task(task).truth_form({}, ()), variant, lenient)


@lru_cache(maxsize=8)
def _validator(task: str, settings: str, variant: str | None) -> Callable[[Mapping[str, Any]], list[str]] | None:
    from vlmrl.reward_check.scoring import TaskRef

    instance = TaskRef(task, {"name": task, **parse_json(settings)}, variant).make()
    return instance.validate if instance is not None else None


def _typed(cell: Any) -> Any:
    """Return the value of a typed cell. A text from CSV is parsed: `true`, `0`, `["a", "b"]`, or `a; b` for a list."""
    if not isinstance(cell, str):
        return plain(cell)
    text = cell.strip()
    if text.lower() in ("true", "false", "1", "0", "1.0", "0.0"):
        return text.lower() in ("true", "1", "1.0")
    if text.startswith("["):
        try:
            return parse_json(text)
        except ValueError:
            return text
    return [name.strip() or None for name in text.split(";")] if ";" in text else text
