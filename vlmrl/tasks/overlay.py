"""Boxes of truth and answers over an image, as tasks offer them to commands and pages that name no task."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from vlmrl.data.images import encode_png
from vlmrl.errors import StoreError
from vlmrl.rewards.boxes.drawing import ANSWER_COLOUR, TRUTH_COLOUR, draw_boxes
from vlmrl.rewards.boxes.overlap import match_boxes
from vlmrl.rewards.boxes.planes import MEANINGS, Box, Plane, Space, convert
from vlmrl.store.files import write_atomic
from vlmrl.types import Media, RewardInput

SHARES = Plane("unit", 1.0, 1.0)
"""Plane of marks: shares of the image's width and height."""
COLOURS = {"truth": TRUTH_COLOUR, "answer": ANSWER_COLOUR}
COLOUR_WORDS = "green: the truth; magenta: the answer"
CLEARLY = 0.1
"""Least difference of mean overlaps from which answers are said to fit another space."""
LEAST_ANSWERS = 4
"""Least number of answers with a box from which this is said."""


class Mark(NamedTuple):
    """Box over an image.

    Args:
        role: whose box it is.
        box: in shares of the image's width and height, in [0, 1].
        label: text beside the box, written by a dataset or a model; "" = none.
        image: number of the image in the prompt, from 0.
    """

    role: Literal["truth", "answer"]
    box: Box
    label: str = ""
    image: int = 0


@dataclass(frozen=True)
class Positions:
    """Reading of positions from a task's responses.

    Args:
        space: coordinate space that is declared for answers.
        spaces: spaces in which an answer can be read, the declared one included.
        marks: (input of the reward, space) -> true boxes, and the boxes of the response, read in this space. An image
            whose seen size is unknown counts as not resized.
    """

    space: Space
    spaces: tuple[Space, ...]
    marks: Callable[[RewardInput, Space], Sequence[Mark]]

    def fit(self, inputs: Sequence[RewardInput]) -> Fit:
        """Return how well responses fit the truth in each space.

        A response without a box to a row without one says nothing of spaces, and does not count.
        """
        read: dict[Space, list[float | None]] = {
            space: [overlap(marks) for x in inputs if (marks := self.marks(x, space))] for space in self.spaces
        }
        means: dict[Space, float] = {
            space: fmean(v or 0.0 for v in values) if values else 0.0 for space, values in read.items()
        }
        return Fit(self.space, len(inputs), max(sum(v is not None for v in values) for values in read.values()), means)


@dataclass(frozen=True)
class Fit:
    """Overlap of answers and truth, in each coordinate space in which the answers can be read.

    Args:
        space: the declared space.
        responses, answers: number of responses, and of those with a box in any one space.
        overlaps: space -> mean overlap, in [0, 1]; a response without a box has 0.
    """

    space: Space
    responses: int
    answers: int
    overlaps: Mapping[Space, float]

    @property
    def better(self) -> Space | None:
        """The space that the answers fit clearly better than the declared one; None if there is none."""
        if self.answers < LEAST_ANSWERS:
            return None
        best = max(self.overlaps, key=lambda space: self.overlaps[space])
        return best if self.overlaps[best] - self.overlaps[self.space] >= CLEARLY else None

    @property
    def words(self) -> str:
        """Result as one line."""
        declared = f"in the declared space `{self.space}` the mean IoU with the truth is {self._of(self.space)}"
        if not self.answers:
            return f"no response has a box in the space `{self.space}` ({MEANINGS[self.space]}) or in another one"
        if self.better is not None:
            fits = f"these boxes would fit the space `{self.better}` ({MEANINGS[self.better]}) at IoU "
            return f"{fits}{self._of(self.better)}; {declared}"
        others = ", ".join(f"{space} {self._of(space)}" for space in self.overlaps if space != self.space)
        return f"{declared}; read in another space: {others}" if others else declared

    def _of(self, space: Space) -> str:
        return f"{self.overlaps[space]:.2f}"

    def fields(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "space": self.space,
            "responses": self.responses,
            "answers": self.answers,
            "overlaps": dict(self.overlaps),
            "better": self.better,
            "words": self.words,
        }


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


def shares_of(numbers: Any, plane: Plane) -> Box | None:
    """Return a saved box in shares of the image, cut at its edges; None for a value that is no box with an area.

    Args:
        numbers: JSON value of a file that may be damaged; a box has x1, y1, x2, y2 in the numbers of `plane`.
    """
    if not isinstance(numbers, list) or len(numbers) != 4:
        return None
    if not all(isinstance(n, (int, float)) and not isinstance(n, bool) and math.isfinite(n) for n in numbers):
        return None
    box = Box(*(min(1.0, max(0.0, share)) for share in convert(Box(*numbers), plane, SHARES)))
    return box if box.x1 < box.x2 and box.y1 < box.y2 else None


def draw_marks(image: Any, marks: Sequence[Mark]) -> Any:
    """Return a copy of a PIL image, at most 512 pixels wide and high, with marks over it; answers are on top."""
    ordered = sorted(marks, key=lambda mark: mark.role != "truth")
    return draw_boxes(image, SHARES, [(mark.box, COLOURS[mark.role]) for mark in ordered])


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make the folder: {error.strerror}", where=str(folder)) from error


def save_overlays(
    folder: Path, name: str, media: Sequence[Media], marks: Sequence[Mark], image_of: Callable[[Media], Any]
) -> list[Path]:
    """Write each image that has marks, with the marks over it, as `NAME.png` (a second image: `NAME-2.png`).

    Args:
        folder: it is created.
        media: images of a row.
        image_of: returns a PIL image.
    Returns: the files, in the order of the images.
    Raises: DataError for an image that cannot be read, StoreError if a file cannot be written.
    """
    paths: list[Path] = []
    for number, one in enumerate(media):
        own = [mark for mark in marks if mark.image == number]
        if own:
            _make_folder(folder)
            paths.append(folder / (f"{name}.png" if number == 0 else f"{name}-{number + 1}.png"))
            write_atomic(paths[-1], encode_png(draw_marks(image_of(one), own)))
    return paths
