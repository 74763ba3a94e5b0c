r"""Rows of published problems, each checked: its text and image marks, its images, its boxed answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from vlmrl.data.cells import show, split_images, text_of
from vlmrl.data.columns import IMAGES as IMAGE_COLUMNS
from vlmrl.data.image_scan import EXAMINER
from vlmrl.data.parallel_parts import write_lines
from vlmrl.data.row_images import RowPlace, RowReader, look_at_cell
from vlmrl.data.table_files import LINED
from vlmrl.data.table_pieces import RowFiles, TablePiece, read_piece
from vlmrl.errors import DataError
from vlmrl.rewards.math.answer_text import BOX, MOST_ANSWER_CHARS, last_box
from vlmrl.rewards.math.policy import Policy
from vlmrl.rewards.text_parsing import tagged_text
from vlmrl.tasks import table_rows
from vlmrl.tasks.prompt_template import IMAGE
from vlmrl.tasks.table_rows import IMAGES, TEST
from vlmrl.untrusted import plural

SPELLINGS = {
    IMAGES: IMAGE_COLUMNS,
    "problem": ("problem", "question", "prompt"),
    "solution": ("solution",),
    "answer": ("answer", "ground_truth", "reward_model"),
    "shown": ("target",),
}
"""Role -> column names. `shown` holds worked solutions beside an answer that is known apart from them."""


class Answer(NamedTuple):
    """Answer of a row.

    Args:
        text: what is graded.
        solution: the published solution; None = the table has none.
        differs: whether the answer column spells another answer than the box of the solution.
    """

    text: str
    solution: str | None
    differs: bool = False


def find_columns(table: RowFiles, *, figures: bool = True) -> dict[str, str]:
    """Return role -> column of a table. Raises: DataError when the problem, the images or every answer is missing.

    Args:
        figures: whether the rows have images; else they are text alone, and a column of images is not read.
    """
    images = "images (or image), " if figures else ""
    required = [("problem",), *([(IMAGES,)] if figures else []), ("solution", "answer")]
    form = f"rows have problem (or question), {images}and solution, answer or both"
    columns = table_rows.find_columns(table, SPELLINGS, required, form)
    return {role: column for role, column in columns.items() if figures or role != IMAGES}


def read_answer(solution: Any, answer: Any, *, has_solution: bool) -> Answer:
    r"""Return the answer of a row: the last box of its solution, else its answer, unboxed if it is a box.

    Args:
        solution, answer: cells.
        has_solution: whether the table has a solution column; then every row needs a box.
    Raises: DataError that says what is missing.
    """
    if has_solution:
        if not isinstance(solution, str):
            raise DataError(f"`solution` is {show(solution, 60)}, not a text")
        tagged, _ = tagged_text(solution, "answer")
        if tagged is not None and tagged.strip() and not BOX.search(solution):
            return Answer(_short(tagged.strip()), None)
        text = _boxed(solution, "solution")
        plain = _plain(answer)
        differs = bool(plain) and _spelling(last_box(plain).text or plain) != _spelling(text)
        return Answer(text, solution, differs)
    text = _plain(answer)
    if BOX.search(text):
        text = _boxed(text, "answer")
    if not text:
        raise DataError(f"`answer` is {show(answer, 60)}, and there is no solution")
    return Answer(_short(text), None)


def _boxed(text: str, column: str) -> str:
    content, reason = last_box(text)
    if content is None:
        raise DataError(f"`{column}`: {reason}, at the end {show(text[-40:], 60)}")
    return _short(content)


def _short(text: str) -> str:
    if len(text) > MOST_ANSWER_CHARS:
        raise DataError(f"the answer has {len(text):,} characters; the limit is {MOST_ANSWER_CHARS}")
    from vlmrl.rewards.math.grader import gold_problem  # it loads SymPy

    if problem := gold_problem(text, Policy()):
        raise DataError(f"the answer {show(text, 60)} cannot be graded: {problem}")
    return text


def shown_solution(cell: Any, answer: Answer) -> Answer:
    """Return the answer with a worked solution of the table, if there is one whose last box is the answer."""
    text = text_of(cell)
    box = last_box(text).text if text else None
    if box is None or answer.solution is not None or _spelling(box) != _spelling(answer.text):
        return answer
    return Answer(answer.text, text)


def problem_text(cell: Any) -> str:
    """Return the problem of a cell: a text, or a chat with one message of a user; a system's message is left out.

    Raises: DataError for anything else.
    """
    turns = cell if isinstance(cell, list) else [{"role": "user", "content": cell}]
    questions = [turn for turn in turns if isinstance(turn, Mapping) and turn.get("role") != "system"]
    if len(questions) != 1 or questions[0].get("role", "user") != "user":
        raise DataError(f"it is a chat of {len(questions)} messages, where one of a user is expected")
    text = questions[0].get("content")
    if not isinstance(text, str) or not text.replace(IMAGE, "").strip():
        raise DataError(f"it is {show(text, 60)}, not a text")
    return text


def _plain(answer: Any) -> str:
    if isinstance(answer, Mapping):
        answer = answer.get("ground_truth")
    is_plain = isinstance(answer, (str, int, float)) and not isinstance(answer, bool)
    return str(answer).strip() if is_plain else ""


def _spelling(text: str) -> str:
    return "".join(text.split()).replace("$", "")


def place_marks(problem: str, num_images: int) -> str:
    """Return a problem with one image mark per image; without any mark, they are put in front.

    Raises: DataError when it has marks, but not one per image.
    """
    marks = problem.count(IMAGE)
    if marks not in (0, num_images):
        raise DataError(f"{num_images} image{plural(num_images)}, but {marks} {IMAGE} mark{plural(marks)}")
    return problem.strip() if marks else f"{IMAGE * num_images}{problem.strip()}"


class ChosenPiece(NamedTuple):
    """Piece of a table that is read.

    Args:
        table: number of the table.
        number: of the piece in its table.
        piece: the piece, under the split that its rows get.
    """

    table: int
    number: int
    piece: TablePiece


def choose_pieces(tables: Sequence[RowFiles]) -> list[ChosenPiece]:
    """Return the pieces to read: all of the first table; with a second one, that is the test split.

    Raises: DataError when it is not clear which split of the second table is meant.
    """
    chosen = [ChosenPiece(0, number, piece) for number, piece in enumerate(tables[0].pieces)]
    if len(tables) == 1:
        return chosen
    split = table_rows.split_for_test(tables[1])
    other = [(number, piece) for number, piece in enumerate(tables[1].pieces) if piece.split == split]
    return [
        *(one for one in chosen if one.piece.split != TEST),
        *(ChosenPiece(1, number, replace(piece, split=TEST)) for number, piece in other),
    ]


@dataclass(frozen=True)
class ScanProblems:
    """Writer of the part of a piece of one of the tables: one JSON line per row. See data/parallel_parts.py.

    A line has problem, answer, solution, differs, images and where; or wrong (a list of faults) and where.
    """

    tables: Sequence[RowFiles]
    columns: Sequence[Mapping[str, str]]

    def __call__(self, chosen: ChosenPiece, part: Path) -> None:
        table, columns = self.tables[chosen.table], self.columns[chosen.table]
        lines = []
        for index, row in enumerate(read_piece(chosen.piece, list(columns.values()))):
            line, faults = _line(row, columns, table.root)
            if faults:
                line = {"wrong": faults}
            lines.append({**line, "where": place_in(table, chosen.piece, index)})
        write_lines(part, lines)


def place_in(table: RowFiles, piece: TablePiece, index: int) -> str:
    """Return the place of a row for messages; in a folder with a text file per split, the split and the line."""
    if piece.numbers and not table.label.lower().endswith(LINED):
        return f"{piece.split} line {piece.numbers[index]}"
    return table.where(piece, index)


def _line(row: Mapping[str, Any], columns: Mapping[str, str], root: Path | None) -> tuple[dict[str, Any], list[str]]:
    faults: list[str] = []
    line: dict[str, Any] = {}
    cells = {role: row.get(column) for role, column in columns.items()}
    values = split_images(cells.get(IMAGES))
    if IMAGES in cells and not values:
        faults.append("no image")
    try:
        problem = problem_text(cells["problem"])
        if values or IMAGES not in cells:
            line["problem"] = place_marks(problem, len(values))
    except DataError as error:
        faults.append(f"`{columns['problem']}`: {error.message}")
    try:
        answer = read_answer(cells.get("solution"), cells.get("answer"), has_solution="solution" in cells)
        line |= shown_solution(cells.get("shown"), answer)._asdict()
    except DataError as error:
        faults.append(error.message)
    line["images"] = [look_at_cell(value, root, EXAMINER) for value in values]
    reasons = [(number, image["reason"]) for number, image in enumerate(line["images"], start=1) if "reason" in image]
    faults += [f"image {number}: {reason}" for number, reason in reasons]
    return line, faults


class TablePlace(NamedTuple):
    """Place of an image: the table, and its place there."""

    table: int
    place: RowPlace


@dataclass(frozen=True)
class TablesReader:
    """Reader of image files by their place in several tables, for `write_shards`."""

    readers: Sequence[RowReader]

    def files(self, places: Sequence[TablePlace]) -> Iterator[bytes]:
        for number, members in groupby(places, key=lambda place: place[0]):
            yield from self.readers[number].files([RowPlace(*place[1]) for place in members])
