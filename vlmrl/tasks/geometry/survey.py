"""Survey of checked rows: facts for the dataset, rows that are wrong or there twice, the validation split."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmrl.data.cells import NO_FILE
from vlmrl.data.doctor import RowFacts, Verdict
from vlmrl.data.image_scan import examined
from vlmrl.data.image_shards import Examined
from vlmrl.data.row_images import RowPlace
from vlmrl.data.validation_cut import RowUnits, cut_rows
from vlmrl.errors import DataError
from vlmrl.tasks.dataset_assembly import Assembly, PlannedRow, PromptLengths, is_few, leave_out
from vlmrl.tasks.geometry.problem_rows import ChosenPiece, TablePlace
from vlmrl.tasks.geometry.task import Collection, geometry_task

MAX_CUT = 0.1
"""Largest share of the training rows that is cut off for validation."""
SHOWN_BAD = 5


@dataclass
class Survey:
    """Result of reading the tables: facts of sound rows, every image once, and what is wrong with the other rows.

    Args:
        bad: rows that are left out, each {"origin", "reason"}.
        repeated: the same of rows that repeat another row of their split.
        differing: places of rows whose answer column spells another answer than the box of the solution.
        read: split -> rows that were read.
    """

    images: list[Examined] = field(default_factory=list)
    places: list[TablePlace] = field(default_factory=list)
    rows: dict[str, list[PlannedRow]] = field(default_factory=lambda: defaultdict(list))
    bad: list[dict[str, Any]] = field(default_factory=list)
    repeated: list[dict[str, Any]] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    read: Counter[str] = field(default_factory=Counter)
    numbers: dict[str, int] = field(default_factory=dict)

    def image_number(self, fields: dict[str, Any], place: TablePlace) -> int:
        """Return the number of an image; an image that was not there before is added."""
        sha256 = str(fields["sha256"])
        if sha256 not in self.numbers:
            self.numbers[sha256] = len(self.images)
            self.images.append(examined(fields))
            self.places.append(place)
        return self.numbers[sha256]


def survey_rows(collection: Collection, pieces: Sequence[ChosenPiece], parts: Sequence[Path]) -> Survey:
    """Read the checked rows once, and collect facts.

    Of rows of a split with the same images, problem and answer, the first is kept. With different answers, all of them
    are wrong.
    """
    survey, lengths = Survey(), PromptLengths(geometry_task(collection, {}))
    alike: dict[tuple[str, tuple[int, ...], str], list[tuple[str, PlannedRow]]] = defaultdict(list)
    for index, (chosen, part) in enumerate(zip(pieces, parts, strict=True)):
        split = chosen.piece.split
        for number, text in enumerate(part.read_text(encoding="ascii").splitlines()):
            line = json.loads(text)
            survey.read[split] += 1
            if "wrong" in line:
                survey.bad.append({"origin": line["where"], "reason": "; ".join(line["wrong"])})
                continue
            images = tuple(
                survey.image_number(fields, TablePlace(chosen.table, RowPlace(chosen.number, number, position)))
                for position, fields in enumerate(line["images"])
            )
            if line["differs"]:
                survey.differing.append(line["where"])
            tokens = lengths.of({"problem": line["problem"]}, [survey.images[i].media for i in images])
            row = PlannedRow((index, number), RowFacts(images, None, None, tokens, (), line["where"]))
            alike[split, images, line["problem"]].append((line["text"], row))
    for (split, _, _), rows in alike.items():
        _keep_one(survey, split, rows)
    return survey


def _keep_one(survey: Survey, split: str, rows: Sequence[tuple[str, PlannedRow]]) -> None:
    """Add the first of rows with the same images and problem; none of them if their answers differ."""
    first = rows[0][1]
    if len({answer for answer, _ in rows}) > 1:
        reason = "the same figure and problem have different answers in different rows"
        survey.bad += [{"origin": row.facts.name, "reason": reason} for _, row in rows]
        return
    survey.rows[split].append(first)
    reason = f"the same figure, problem and answer as {first.facts.name}"
    survey.repeated += [{"origin": row.facts.name, "reason": reason} for _, row in rows[1:]]


def refuse_bad(survey: Survey, max_bad: float, images_at: str = "") -> None:
    """Raise a DataError with the first bad rows when their share is above `max_bad`, or no row is sound.

    Args:
        images_at: where the images are that tables of this collection name by paths; "" = not known.
    """
    bad, total = survey.bad, survey.read.total()
    if survey.rows and is_few(len(bad), total, max_bad):
        return
    absent = [one for one in bad if NO_FILE in one["reason"]]
    if 2 * len(absent) > total:
        raise DataError(
            f"{len(absent):,} of {total:,} rows name an image file that is not there; nothing was written:"
            f"\n  {absent[0]['origin']}: {absent[0]['reason']}",
            hint="the table has paths only: get its images, and give the folder that the paths start from as"
            f" --images-root{f'; {images_at}' if images_at else ''}",
        )
    lines = [f"\n  {one['origin']}: {one['reason']}" for one in bad[:SHOWN_BAD]]
    more = f"\n  ... and {len(bad) - SHOWN_BAD:,} more" if len(bad) > SHOWN_BAD else ""
    message = f"{len(bad):,} of {total:,} rows are wrong, more than --max-bad {max_bad:g}"
    hint = f"mend the rows, or {leave_out(len(bad), total)}"
    if 2 * len(bad) > total:
        hint = (
            "are the columns problem, images, and solution or answer, and do paths of images lead from the table's"
            " folder (else --images-root)?"
        )
    raise DataError(
        f"{message if survey.rows else f'all {total:,} rows are wrong'}; nothing was written:{''.join(lines)}{more}",
        hint=hint,
    )


def notes_on(survey: Survey) -> dict[str, tuple[Verdict, str]]:
    """Return the doctor's notes on rows that were left out, and on answers that differ from their box."""
    notes: dict[str, tuple[Verdict, str]] = {}
    total = survey.read.total()
    if survey.bad:
        share = f"{len(survey.bad):,} of {total:,} rows ({len(survey.bad) / total:.2%})"
        notes["rows that are wrong"] = ("look", f"{share} left out: dropped.jsonl")
    if survey.differing:
        places = ", ".join(survey.differing[:3])
        finding = (
            f"{len(survey.differing):,} rows spell another answer than the box of their solution, such as {places}"
        )
        notes["answers"] = ("look", f"{finding}; the box is graded")
    return notes


def cut_validation(assembly: Assembly, num_rows: int, seed: int) -> None:
    """Move rows of `train` to a new split `validation` if there is none, and report it; no figure is in both."""
    check, rows = "validation split", assembly.rows
    if "validation" in rows or "train" not in rows:
        own = "validation" in rows
        finding = "the source's own" if own else f"none: the source has {' and '.join(rows)} alone"
        assembly.notes = {**assembly.notes, check: ("ok" if own else "look", finding)}
        return
    train = rows["train"]
    cut = cut_rows(
        # a row without images shares nothing with others
        [RowUnits(row.facts.images or (f"row {i}",), None) for i, row in enumerate(train)],
        min(num_rows, int(MAX_CUT * len(train))),
        seed=seed,
    )
    if not cut.taken:
        why = "none was asked for" if not num_rows else "no row can be kept out of training"
        finding = f"none: {why}; do not choose checkpoints on the test split"
        assembly.notes = {**assembly.notes, check: ("look", finding)}
        return
    taken, lost = set(cut.taken), set(cut.lost)
    assembly.rows = {
        "train": [row for i, row in enumerate(train) if i not in taken and i not in lost],
        "validation": [train[i] for i in cut.taken],
        **{split: members for split, members in rows.items() if split != "train"},
    }
    reason = "it shares a figure with the validation rows"
    assembly.dropped += [{"origin": train[i].facts.name, "reason": reason} for i in cut.lost]
    finding = f"the source has none: {len(taken):,} rows cut off train, which share no figure with it"
    lost_words = f"; {len(lost):,} rows with a figure of both left out" if lost else ""
    assembly.notes = {**assembly.notes, check: ("look", finding + lost_words)}
