"""Measures of a task: numbers that `vlmrl eval` takes of responses beside their reward, such as distances of pictures.

A measure is taken in evaluations alone, never in training: it may need a model of its own. Measures that have weights
are absent where the weights are, and the summary says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vlmrl.errors import RecipeError, listed, unknown
from vlmrl.types import RewardInput

VALID, CEILING = "valid", "ceiling"
"""Last words of metrics: `<measure>/valid` is over the responses that can be measured at all, as papers give it;
`<measure>/ceiling` is the measure of the truth beside itself. `<measure>` alone is over all responses, with the worst
value for those that cannot be measured."""
EVERYTHING = "all"
"""Name in `eval.measures` that means every measure of the task."""
Numbers = Mapping[str, "float | None"]


@dataclass(frozen=True)
class MeasureSettings:
    """Measures that are to be taken, and with what.

    Args:
        names: measures of the task.
        weights: measure -> folder, or model of the hub, in place of the task's own (`eval.weights`).
        device: as `model.device` of a recipe.
        timeout_seconds, memory_mb, workers: limits and number of worker processes, as of a reward.
    """

    names: tuple[str, ...]
    weights: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"
    timeout_seconds: float = 10.0
    memory_mb: int = 4096
    workers: int = 1


class Measurer(Protocol):
    """Measures that are ready."""

    @property
    def absent(self) -> Mapping[str, str]:
        """Name of each measure that was to be taken and cannot be -> why."""
        ...

    @property
    def problems(self) -> Sequence[str]:
        """Reasons why responses were not measured through no fault of theirs, one text for each."""
        ...

    def measure(self, inputs: Sequence[RewardInput]) -> Sequence[Numbers]:
        """Return the metrics of each response by name."""
        ...

    def close(self) -> None:
        """End the worker processes, and forget the models."""
        ...


@dataclass(frozen=True)
class Measures:
    """Measures of a task. The facts about their metrics stand in `Task.metrics`, by the name of the measure.

    Args:
        names: all of them, in the order in which they are shown.
        default: those that are taken if a recipe names none: they need no weights.
        weights: measure -> its weights, a model of the hub or "" if a recipe must name them.
        open: settings -> measurer.
    """

    names: tuple[str, ...]
    default: tuple[str, ...]
    weights: Mapping[str, str]
    open: Callable[[MeasureSettings], Measurer]

    def chosen(self, names: Sequence[str] | None, weights: Mapping[str, str], task: str) -> tuple[str, ...]:
        """Return the measures that a recipe asks for, in the order of `names`.

        Args:
            names: `eval.measures`; None = the default ones, and those whose weights the recipe names.
            weights: `eval.weights`.
            task: name of the task, for messages.
        Raises: RecipeError for a measure that the task does not have, or that has no weights.
        """
        for name in [name for name in names or () if name != EVERYTHING]:
            if name not in self.names:
                raise unknown("measure", name, (*self.names, EVERYTHING), whose=f" of task `{task}`")
        for name in weights:
            if name not in self.weights:
                hint = listed(name, self.weights, "those with weights")
                raise RecipeError(f"eval.weights names `{name}`, no measure with weights of task `{task}`", hint=hint)
        if names is None:
            return tuple(name for name in self.names if name in self.default or name in weights)
        return tuple(name for name in self.names if name in names or EVERYTHING in names)
