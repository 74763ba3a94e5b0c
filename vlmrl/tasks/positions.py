"""Positions in responses: the boxes that a task reads, and how well they would fit the truth in other coordinates.

A model that states boxes in another space or order than the prompt asks for earns nearly nothing, whatever it sees.
The numbers alone do not show it; the truth beside them does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from vlmrl.rewards.boxes.overlap import match_boxes
from vlmrl.rewards.boxes.planes import Box
from vlmrl.rewards.boxes.reading import COORDINATES, Coordinates
from vlmrl.tasks.overlay import Mark
from vlmrl.types import RewardInput

CLEARLY = 0.1
"""Least difference of mean overlaps from which answers are said to fit other coordinates."""
GOOD = 0.3
"""Least mean overlap of the answers in these other coordinates."""
LEAST_ANSWERS = 4
"""Least number of different answers from which this is said."""
CHANCE = 0.001
"""Largest probability that a difference at least as large comes from chance alone (Student's t, one-sided)."""
MOST_FITTED = 500
"""Largest number of responses that are read in all coordinates."""


@dataclass(frozen=True)
class Positions:
    """Reading of positions from a task's responses.

    Args:
        declared: coordinates that are declared for answers.
        marks: (input of the reward, coordinates) -> true boxes, and the boxes of the response, read in these
            coordinates. An image whose seen size is unknown counts as not resized.
        others: coordinates in which an answer can be read as well.
    """

    declared: Coordinates
    marks: Callable[[RewardInput, Coordinates], Sequence[Mark]]
    others: tuple[Coordinates, ...] = COORDINATES

    def fit(self, inputs: Iterable[RewardInput]) -> Fit:
        """Return how well responses fit the truth in each of the coordinates.

        A response without a box to a row without one says nothing of coordinates, and does not count.
        """
        inputs = list(inputs)
        read = {c: [self.marks(x, c) for x in inputs] for c in dict.fromkeys((self.declared, *self.others))}
        counted = [i for i in range(len(inputs)) if any(marks[i] for marks in read.values())]
        overlaps = {c: [overlap(marks[i]) for i in counted] for c, marks in read.items()}
        answers = max(sum(value is not None for value in values) for values in overlaps.values())
        each = {c: [value or 0.0 for value in values] for c, values in overlaps.items()}
        different = max(len({_answer(marks) for marks in texts if _answer(marks)}) for texts in read.values())
        return Fit(self.declared, len(inputs), answers, different, each)


def _answer(marks: Sequence[Mark]) -> tuple[Box, ...]:
    return tuple(mark.box for mark in marks if mark.role == "answer")


@dataclass(frozen=True)
class Fit:
    """Overlap of answers and truth, in each of the coordinates in which the answers can be read.

    Args:
        declared: the declared coordinates.
        responses, answers: number of responses, and of those with a box in any one of the coordinates.
        different: number of different answers: the same box for every image says nothing of coordinates.
        each: coordinates -> overlap of each response that counts, in [0, 1]; a response without a box has 0.
    """

    declared: Coordinates
    responses: int
    answers: int
    different: int
    each: Mapping[Coordinates, Sequence[float]]

    @property
    def overlaps(self) -> dict[Coordinates, float]:
        """Coordinates -> mean overlap, in [0, 1]; 0 where nothing counts."""
        return {coordinates: fmean(values) if values else 0.0 for coordinates, values in self.each.items()}

    @property
    def better(self) -> Coordinates | None:
        """The coordinates that the answers fit clearly better than the declared ones; None if there are none.

        They are said to fit better if there are at least `LEAST_ANSWERS` different answers, the mean overlap is at
        least `GOOD`, it is at least `CLEARLY` above that in the declared coordinates, and chance explains this
        difference with a probability below `CHANCE`.
        """
        if self.different < LEAST_ANSWERS:
            return None
        means = self.overlaps
        best = max(means, key=lambda coordinates: means[coordinates])
        if means[best] < GOOD or means[best] - means[self.declared] < CLEARLY:
            return None
        gains = [b - d for b, d in zip(self.each[best], self.each[self.declared], strict=True)]
        return best if _is_sure(gains) else None

    @property
    def words(self) -> str:
        """Result as one line."""
        means, own = self.overlaps, self.declared
        declared = f"in the declared {_short(own)} the mean IoU with the truth is {means[own]:.2f}"
        if not self.answers:
            return f"no response has a box in {own.words} or in other coordinates"
        if self.better is not None:
            return f"these boxes would fit {self.better.words} at IoU {means[self.better]:.2f}; {declared}"
        best: dict[str, float] = {}
        for other, value in means.items():
            if other.space != own.space:
                best[other.space] = max(value, best.get(other.space, 0.0))
        others = ", ".join(f"{space} {value:.2f}" for space, value in best.items())
        return f"{declared}; read in another space: {others}" if others else declared

    @property
    def advice(self) -> str:
        """Next steps for the user if there are better coordinates; else ""."""
        better = self.better
        if better is None:
            return ""
        steps = []
        if better.space != self.declared.space:
            steps.append(
                f"declare the space: the variant of [[data]] that asks for `{better.space}` (with a prompt of your "
                "own: reward.args.space)"
            )
        if better.order != self.declared.order:
            steps.append(f'declare the order: reward.args.order = "{better.order}", and ask for it in your prompt')
        return "if the model speaks so, " + "; ".join(steps)

    def fields(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "space": self.declared.space,
            "order": self.declared.order,
            "responses": self.responses,
            "answers": self.answers,
            "overlaps": {coordinates.name: value for coordinates, value in self.overlaps.items()},
            "better": None if self.better is None else {"space": self.better.space, "order": self.better.order},
            "words": self.words,
            "advice": self.advice,
        }


def _short(coordinates: Coordinates) -> str:
    order = "" if coordinates.order == "xyxy" else f" and order {coordinates.order}"
    return f"space `{coordinates.space}`{order}"


def _is_sure(gains: Sequence[float]) -> bool:
    """Return whether a mean gain above 0 is more than chance; see `CHANCE`."""
    from scipy.stats import t

    error = stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
    return fmean(gains) > error * float(t.isf(CHANCE, max(1, len(gains) - 1)))


def overlap(marks: Sequence[Mark]) -> float | None:
    """Return the IoU of answers and truths: the sum over the best pairs, divided by the larger number of boxes.

    Returns: in [0, 1]; None if there is no answer.
    Example: one true box, two answers with an IoU of 0.8 and 0 -> 0.4.
    """
    sides: dict[str, dict[int, list[Box]]] = {"truth": {}, "answer": {}}
    for mark in marks:
        sides[mark.role].setdefault(mark.image, []).append(mark.box)
    truths, answers = sides["truth"], sides["answer"]
    if not answers:
        return None
    total = sum(match.iou for image in answers for match in match_boxes(answers[image], truths.get(image, ())))
    return total / max(sum(map(len, truths.values())), sum(map(len, answers.values())))
