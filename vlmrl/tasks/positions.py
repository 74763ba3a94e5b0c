"""Boxes that a task reads in responses, their overlays on images, and how well they would fit in other coordinates.

A model that states boxes in another space or order than the prompt asks for earns nearly nothing, whatever it sees.
The numbers alone do not show it; the truth beside them does.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

from vlmrl.data.images import encode_png
from vlmrl.errors import StoreError
from vlmrl.rewards.boxes.planes import Box, Plane, convert, match_boxes
from vlmrl.rewards.boxes.reading import COORDINATES, Coordinates
from vlmrl.rewards.boxes.writing import ANSWER_COLOUR, TRUTH_COLOUR, draw_boxes
from vlmrl.store.files import write_atomic
from vlmrl.types import Media, RewardInput
from vlmrl.untrusted import one_line

SHARES = Plane("unit", 1.0, 1.0)
"""Plane of marks: shares of the image's width and height."""
COLOURS = {"truth": TRUTH_COLOUR, "answer": ANSWER_COLOUR}
COLOUR_WORDS = "green: the truth; magenta, dashed: the answer"
LEAST_SIDE = 256
"""Pixels to which the longer side of a small image is enlarged for a picture, at least."""
MOST_CAPTION = 200
"""Longest caption of a picture, in characters."""


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
    """Return a copy of a PIL image with marks over it, small ones enlarged by a whole factor; answers are on top."""
    factor = -(-LEAST_SIDE // max(image.size)) if max(image.size) < LEAST_SIDE else 1
    image = image.convert("RGB").resize((image.width * factor, image.height * factor), 0)  # 0: pixels stay squares
    ordered = sorted(marks, key=lambda mark: mark.role != "truth")
    return draw_boxes(image, SHARES, [(mark.box, COLOURS[mark.role]) for mark in ordered])


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make the folder: {error.strerror}", where=str(folder)) from error


def caption_of(columns: Mapping[str, Any]) -> str:
    """Return the texts of a dataset row in one line, such as the expression that a box is asked for."""
    texts = [one_line(value) for value in columns.values() if isinstance(value, str) and len(value) <= MOST_CAPTION]
    return "; ".join(texts)[:MOST_CAPTION]


def with_caption(picture: Any, caption: str) -> Any:
    """Return a picture with a text in a white strip below it, in lines as wide as the picture."""
    from PIL import Image, ImageDraw

    lines = textwrap.wrap(caption, max(10, picture.width // 6))
    page = Image.new("RGB", (picture.width, picture.height + 14 * len(lines) + 4 * bool(lines)), (255, 255, 255))
    page.paste(picture, (0, 0))
    draw = ImageDraw.Draw(page)
    for number, line in enumerate(lines):
        draw.text((3, picture.height + 2 + 14 * number), line, fill=(0, 0, 0), font_size=11)
    return page


def save_overlays(
    folder: Path,
    name: str,
    media: Sequence[Media],
    marks: Sequence[Mark],
    image_of: Callable[[Media], Any],
    caption: str = "",
) -> list[Path]:
    """Write each image that has marks, with the marks over it, as `NAME.png` (a second image: `NAME-2.png`).

    Args:
        folder: it is created.
        image_of: returns a PIL image.
        caption: text below each image; see `caption_of`.
    Returns: the files, in the order of the images.
    Raises: DataError for an image that cannot be read, StoreError if a file cannot be written.
    """
    paths: list[Path] = []
    for number, one in enumerate(media):
        own = [mark for mark in marks if mark.image == number]
        if own:
            _make_folder(folder)
            paths.append(folder / (f"{name}.png" if number == 0 else f"{name}-{number + 1}.png"))
            write_atomic(paths[-1], encode_png(with_caption(draw_marks(image_of(one), own), caption)))
    return paths


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
        from scipy.stats import t

        gains = [b - d for b, d in zip(self.each[best], self.each[self.declared], strict=True)]
        error = stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
        is_sure = fmean(gains) > error * float(t.isf(CHANCE, max(1, len(gains) - 1)))
        return best if is_sure else None

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
        return "if the model answers in these coordinates: " + "; ".join(steps)

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
