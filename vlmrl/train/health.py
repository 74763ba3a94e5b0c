"""The health of a run while it trains: the numbers of each step, and what the steps so far warn of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlmrl.diagnose.health import WARNING, Sampled, measure_health
from vlmrl.diagnose.signs import find_signs, warning_of
from vlmrl.diagnose.trends import is_watched
from vlmrl.store.runs import Run
from vlmrl.types import Group


class Health:
    """The train lines of a run so far, those of earlier attempts too. Only the process that writes the run measures."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lines: list[dict[str, Any]] | None = None
        self._validation: list[dict[str, Any]] = []

    def measure(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the `health/...` metrics of a step."""
        return measure_health(list(samples_of(groups))) if self._run.writable else {}

    def note_validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Note a validation of the run."""
        self._validation.append({"step": step, **metrics})

    def warn(self, step: int, metrics: Mapping[str, Any]) -> dict[str, str]:
        """Note the line of a step. Return its warning in words, as a metric; {} without one."""
        if not self._run.writable:
            return {}
        if self._lines is None:
            self._lines = [_watched(line) for line in self._run.metrics("train")]
            self._validation = [*self._run.metrics("validation")] if self._lines else self._validation
        self._lines.append(_watched({"step": step, **metrics}))
        warning = warning_of(find_signs(self._lines, self._validation))
        return {WARNING: warning} if warning else {}


def samples_of(groups: Sequence[Group]) -> Iterator[Sampled]:
    """Yield the responses of groups as `measure_health` takes them."""
    for number, group in enumerate(groups):
        truth = json.dumps(dict(group.row.truth), sort_keys=True, default=str) if group.row.truth else ""
        for s in group.samples:
            formed = all(value != 0 for name, value in s.score.parts.items() if "format" in name.lower())
            score = s.score.value if s.score.error is None else None
            yield Sampled(
                number, group.row.prompt_id, truth, s.text, s.trajectory.num_sampled_tokens,
                s.trajectory.finish == "length", score, formed,
            )  # fmt: skip


def _watched(line: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a line that signs are found in; a long run keeps no more of it in memory."""
    return {name: value for name, value in line.items() if is_watched(name)}
