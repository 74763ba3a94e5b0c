"""Reader of rows in TaxonRL's published form (`problem`, `images`, `answer`, `answer_im`): checks and typed truths."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmrl.data.cells import show, split_images
from vlmrl.data.columns import PAIRS, match_columns
from vlmrl.data.image_scan import EXAMINER, Examiner
from vlmrl.data.parallel_parts import write_lines
from vlmrl.data.row_images import look_at_cell
from vlmrl.data.table_pieces import RowFiles, TablePiece, read_piece
from vlmrl.errors import DataError, RewardError
from vlmrl.tasks.prompt_template import IMAGE
from vlmrl.tasks.taxonrl.domain import Domain, truth_distance
from vlmrl.tasks.taxonrl.domains import DOMAINS
from vlmrl.tasks.taxonrl.layouts import LAYOUTS

IMAGES_IN_A_ROW = 2


@dataclass(frozen=True)
class RowColumns:
    """Columns of a table; None = the table has none.

    Args:
        composite: TaxonRL's `answer_im`: a `;`-separated text with the answer and the names.
    """

    images: str
    problem: str | None
    answer: str | None
    composite: str | None

    @property
    def names(self) -> list[str]:
        return [name for name in (self.images, self.problem, self.answer, self.composite) if name]


def find_columns(table: RowFiles, classes: Sequence[str]) -> RowColumns:
    """Return the columns of a table, TaxonRL's names first.

    Args:
        classes: columns that a table of labelled images would have, for the error message.
    Raises: DataError when images or answers are missing.
    """
    columns = table.columns
    roles = match_columns(PAIRS, columns)
    if "images" not in roles or not {"composite", "answer"} & roles.keys():
        missing = "`answer` or `answer_im`" if "images" in roles else "`images`"
        raise DataError(
            f"no column {missing}; the table has: {', '.join(columns)}",
            where=table.label,
            hint="rows in TaxonRL's format have problem, images, answer and, with intermediate truth, answer_im; a"
            f" table of labelled images has image_path, {', '.join(classes)}; --levels reads a folder's images by their"
            " folders",
        )
    return RowColumns(roles["images"], *(roles.get(role) for role in ("problem", "answer", "composite")))


def read_truth(domain: Domain, answer: Any, composite: Any) -> dict[str, Any]:
    """Return the typed truth of a row: `same`, `distance`, each field as two names, and `ground_truth`.

    `ground_truth` is the published text if writing the typed truth would give another text, else None.

    Raises: RewardError with the error in the text, or when `answer` and `answer_im` contradict each other.
    """
    text = composite if composite not in (None, "") else answer
    layout = LAYOUTS[domain.layout if isinstance(text, str) and ";" in text else "answer"]
    truth = layout.read(text)
    if text is composite and answer not in (None, ""):
        same = LAYOUTS["answer"].read(answer)["same"]
        if same != truth["same"]:
            raise RewardError(f"`answer` says {'same' if same else 'different'}, `answer_im` says the opposite")
    if layout.name == domain.layout and layout.name != "answer" and layout.write(truth) != text:
        truth["ground_truth"] = text
    return complete_truth(domain, truth)


def complete_truth(domain: Domain, truth: Mapping[str, Any]) -> dict[str, Any]:
    """Return a truth with every key of the domain's schema, in the schema's order; unknown values are None."""
    whole: dict[str, Any] = {"same": truth["same"], "distance": truth.get("distance")}
    for name in domain.field_names:
        pair = truth.get(name) or (None, None)
        whole[name] = list(pair)
    if whole["distance"] is None:
        whole["distance"] = truth_distance(domain, whole)
    return whole | {"ground_truth": truth.get("ground_truth")}


@dataclass(frozen=True)
class ScanRows:
    """Function that checks a piece of a table and writes a file with one JSON line per row, for `checked_rows`.

    It is the `Make` of data/parallel_parts.py.
    """

    table: RowFiles
    columns: RowColumns
    domain: str

    def __call__(self, piece: TablePiece, part: Path) -> None:
        lines = []
        for number, row in enumerate(read_piece(piece, self.columns.names)):
            line, faults = self._line(row, EXAMINER)
            if faults:
                line = {"wrong": faults}
            lines.append({**line, "where": self.table.where(piece, number)})
        write_lines(part, lines)

    def _line(self, row: Mapping[str, Any], examiner: Examiner) -> tuple[dict[str, Any], list[str]]:
        faults: list[str] = []
        columns, domain = self.columns, DOMAINS[self.domain]
        problem = row.get(columns.problem) if columns.problem else None
        if columns.problem and (not isinstance(problem, str) or not problem.strip()):
            faults.append(f"`{columns.problem}` is {show(problem, 60)}, not a text")
        truth: dict[str, Any] = {}
        try:
            answer = row.get(columns.answer) if columns.answer else None
            composite = row.get(columns.composite) if columns.composite else None
            truth = read_truth(domain, answer, composite)
        except RewardError as error:
            faults.append(f"{error.message} ({error.hint})" if error.hint else error.message)
        values = split_images(row.get(columns.images))
        marks = problem.count(IMAGE) if isinstance(problem, str) else len(values)
        if len(values) != IMAGES_IN_A_ROW:
            faults.append(f"{len(values)} image{'s' * (len(values) != 1)}, not {IMAGES_IN_A_ROW}")
        elif marks not in (0, len(values)):
            faults.append(f"{len(values)} images, but {marks} {IMAGE} mark{'s' * (marks != 1)} in `{columns.problem}`")
        images = [look_at_cell(value, self.table.root, examiner) for value in values]
        for number, image in enumerate(images, start=1):
            if "reason" in image:
                faults.append(f"image {number}: {image['reason']}")
        return {"truth": truth, "problem": problem, "images": images}, faults


def checked_rows(parts: Sequence[Path], table: RowFiles) -> Iterator[tuple[int, int, str, dict[str, Any]]]:
    """Yield (number of the piece, row in the piece, split, JSON values) of the rows that `ScanRows` wrote, in order."""
    for index, part in enumerate(parts):
        with part.open(encoding="ascii") as lines:
            for number, line in enumerate(lines):
                yield index, number, table.pieces[index].split, json.loads(line)
