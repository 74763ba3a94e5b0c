"""`vlmrl prep` of the mathematics tasks: read, check and write rows, or make problems with exact answers.

A published problem is checked: its text and image marks, its images, its boxed answer. A survey of the checked rows
gives facts for the dataset, rows that are wrong or there twice, and the validation split.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from vlmrl.data.dataset_writer import building, refuse_other
from vlmrl.data.doctor import RowFacts, Verdict
from vlmrl.data.image_scan import (
    EXAMINER,
    Examined,
    FileReader,
    MemoryFiles,
    RowPlace,
    RowReader,
    examine,
    examined,
    look_at_cell,
)
from vlmrl.data.open_dataset import RowUnits, cut_rows
from vlmrl.data.parallel_parts import make_parts, write_lines
from vlmrl.data.table_files import LINED
from vlmrl.data.table_pieces import RowFiles, TablePiece, locate_rows, open_row_files, read_piece
from vlmrl.data.table_values import IMAGES as IMAGE_COLUMNS
from vlmrl.data.table_values import NO_FILE, show, split_images, text_of
from vlmrl.errors import DataError, unknown
from vlmrl.rewards.math.latex import BOX, MOST_ANSWER_CHARS, last_box
from vlmrl.rewards.math.rules import Policy
from vlmrl.rewards.text_parsing import tagged_text
from vlmrl.tasks import table_rows
from vlmrl.tasks.dataset_assembly import (
    Assembly,
    Limits,
    PlannedRow,
    Prepared,
    PromptLengths,
    assemble,
    is_few,
    leave_out,
)
from vlmrl.tasks.geometry.drawn import collection as drawn_problems
from vlmrl.tasks.geometry.drawn import collection as written
from vlmrl.tasks.geometry.drawn.collection import DrawnProblem, WrittenProblem
from vlmrl.tasks.geometry.task import Collection, geometry_task
from vlmrl.tasks.prep_options import TableRequest
from vlmrl.tasks.prompt import IMAGE
from vlmrl.tasks.table_rows import IMAGES, TEST
from vlmrl.types import Media, hash64
from vlmrl.untrusted import plural


def row_schema() -> Any:
    """Return the Arrow schema of the rows."""
    import pyarrow as pa

    truth = [(name, pa.string()) for name in ("answer", "solution", "topic", "kind")]
    image = pa.struct([("sha256", pa.string()), ("width", pa.int64()), ("height", pa.int64()), ("kind", pa.string())])
    return pa.schema(
        [
            ("prompt_id", pa.string()),
            ("truth", pa.struct(truth)),
            ("images", pa.list_(image)),
            ("problem", pa.string()),
            ("origins", pa.list_(pa.string())),
        ]
    )


def row_fields(
    name: str, parts: Sequence[Path], rows: Sequence[PlannedRow], media: Sequence[Media]
) -> Iterator[dict[str, Any]]:
    """Yield the columns of published problems, their texts read again from the parts. See `Assembly.fields`."""
    facts_by_key = {row.key: row.facts for row in rows}
    for index in sorted({index for index, _ in facts_by_key}):
        for number, text in enumerate(parts[index].read_text(encoding="ascii").splitlines()):
            if (facts := facts_by_key.get((index, number))) is not None:
                line = json.loads(text)
                truth = {"answer": line["text"], "solution": line["solution"], "topic": None, "kind": None}
                yield _fields(name, line["problem"], truth, [media[i] for i in facts.images], facts.name)


def drawn_rows(
    collection: Collection, problems: Mapping[str, Sequence[DrawnProblem]]
) -> tuple[dict[str, list[PlannedRow]], list[Examined], dict[str, bytes]]:
    """Return the rows of drawn problems, and each image with its file by content hash, in the same order.

    Args:
        problems: split -> problems, each with an image of its own.
    """
    lengths = PromptLengths(geometry_task(collection, {}))
    files: dict[str, bytes] = {}
    images: list[Examined] = []
    planned: dict[str, list[PlannedRow]] = {}
    for split, members in problems.items():
        planned[split] = []
        for number, drawn in enumerate(members):
            images.append(examine(drawn.image))
            files[images[-1].media.sha256] = drawn.image
            tokens = lengths.of({"problem": f"{IMAGE}{drawn.text}"}, [images[-1].media])
            facts = RowFacts((len(images) - 1,), None, None, tokens, (), f"drawn {split} {number}")
            planned[split].append(PlannedRow(drawn, facts))
    return planned, images, files


def drawn_fields(name: str, rows: Sequence[PlannedRow], media: Sequence[Media]) -> Iterator[dict[str, Any]]:
    """Yield the columns of drawn problems. See `Assembly.fields`."""
    for row in rows:
        drawn: DrawnProblem = row.key
        problem = drawn.problem
        truth = {
            "answer": problem.answer,
            "solution": f"{problem.steps} The answer is $\\boxed{{{problem.answer}}}$.".lstrip(),
            "topic": drawn.topic,
            "kind": problem.kind,
        }
        yield _fields(name, f"{IMAGE}{drawn.text}", truth, [media[i] for i in row.facts.images], row.facts.name)


def written_rows(
    collection: Collection, problems: Mapping[str, Sequence[WrittenProblem]]
) -> dict[str, list[PlannedRow]]:
    """Return the rows of problems in text alone: split -> rows."""
    lengths = PromptLengths(geometry_task(collection, {}))
    return {
        split: [
            PlannedRow(one, RowFacts((), None, None, lengths.of({"problem": one.text}, []), (), f"{split} {number}"))
            for number, one in enumerate(members)
        ]
        for split, members in problems.items()
    }


def written_fields(name: str, rows: Sequence[PlannedRow], media: Sequence[Media]) -> Iterator[dict[str, Any]]:
    """Yield the columns of problems in text alone. See `Assembly.fields`."""
    for row in rows:
        problem: WrittenProblem = row.key
        solution = f"{problem.steps} The answer is $\\boxed{{{problem.answer}}}$."
        truth = {"answer": problem.answer, "solution": solution, "topic": problem.topic, "kind": problem.kind}
        yield _fields(name, problem.text, truth, [], f"written {row.facts.name}")


def _fields(
    name: str, problem: str, truth: Mapping[str, str | None], images: Sequence[Media], origin: str
) -> dict[str, Any]:
    content = hash64(name, problem, truth["answer"], *(image.sha256 for image in images))
    return {
        "prompt_id": f"{name}-{content:016x}",
        "truth": dict(truth),
        "images": images,
        "problem": problem,
        "origins": [origin],
    }


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


def prepare_collection(
    collection: Collection,
    request: TableRequest,
    limits: Limits,
    *,
    topics: Sequence[str] = (),
    width: int,
    force: bool = False,
) -> Prepared:
    """Make the dataset of a collection.

    Args:
        topics: of problems that are made here; () = the usual ones.
        width: of drawn figures in pixels.
    Raises: DataError for a source, name, topic or row that cannot be used; nothing is written.
    """
    if request.synthetic is not None:
        return _prepare_drawn(collection, request, topics, width, limits, force)
    if request.table is None:
        raise DataError(
            f"`vlmrl prep {collection.name}` needs a source: there is no published table of its rows",
            hint="name MAYE's folder of JSONL files and images, or a table; --synthetic N makes problems",
        )
    return _prepare_rows(collection, request, limits, force)


def _prepare_rows(collection: Collection, request: TableRequest, limits: Limits, force: bool) -> Prepared:
    name, out = request.place(collection.name)
    args = {**request.args(), **limits.args}
    refuse_other(out, args, force=force)
    located = [locate_rows(*one) for one in request.sources()]
    key = [collection.name, name, [str(one.root) for one in located], args, [one.state for one in located]]
    with building(out, key=key) as build:
        tables = []
        for number, one in enumerate(located):
            folder = build.work / f"table-{number}"
            folder.mkdir(exist_ok=True)
            tables.append(open_row_files(one, folder))
        columns = [find_columns(table, figures=collection.figures) for table in tables]
        pieces = choose_pieces(tables)
        parts = [build.work / f"problems-{i:05d}.jsonl" for i in range(len(pieces))]
        scan = ScanProblems(tables, columns)
        make_parts(scan, pieces, parts, workers=limits.workers, progress=limits.progress, what="reading rows")
        survey = survey_rows(collection, pieces, parts)
        refuse_bad(survey, request.max_bad, collection.images_at)
        assembly = Assembly(
            images=survey.images,
            places=survey.places,
            reader=TablesReader([RowReader(t, c.get(IMAGES, "")) for t, c in zip(tables, columns, strict=True)]),
            rows=dict(survey.rows),
            fields=partial(row_fields, name, parts),
            schema=row_schema(),
            dropped=[*survey.bad, *survey.repeated],
            notes=notes_on(survey),
        )
        cut_validation(assembly, request.validation_rows, request.seed)
        info = {
            "name": name,
            "task": collection.name,
            "seed": request.seed,
            "source": {"name": args["source"], "test": args["test"], "rows": dict(survey.read)},
            "args": args,
            "counts": {"images": len(survey.images), "rows": survey.read.total()},
        }
        return assemble(build, assembly, info, limits, force=force)


def _prepare_drawn(
    collection: Collection, request: TableRequest, topics: Sequence[str], width: int, limits: Limits, force: bool
) -> Prepared:
    name, out = request.place(collection.name)
    counts, figures = request.drawn(), collection.figures
    known = drawn_problems.TOPICS if figures else written.WRITTEN_TOPICS
    topics = tuple(topics) or (drawn_problems.USUAL_TOPICS if figures else written.USUAL_WRITTEN_TOPICS)
    for topic in topics:
        if topic not in known:
            raise unknown("topic", topic, known, error=DataError)
    args = {**request.args(), "topics": list(topics), **({"width": width} if figures else {}), **limits.args}
    refuse_other(out, args, force=force)
    if figures:
        problems = drawn_problems.draw_problems(
            counts, seed=request.seed, values=collection.values, topics=topics, width=width, progress=limits.progress
        )
        planned, images, files = drawn_rows(collection, problems)
        fields = partial(drawn_fields, name)
    else:
        planned = written_rows(collection, written.write_problems(counts, seed=request.seed, topics=topics))
        images, files, fields = [], {}, partial(written_fields, name)
    assembly = Assembly(images, list(files), FileReader(MemoryFiles(files)), planned, fields, row_schema())
    with building(out) as build:
        info = {
            "name": name,
            "task": collection.name,
            "seed": request.seed,
            "source": {"name": "drawn geometry" if figures else "written mathematics", "rows": counts},
            "args": args,
            "counts": {"images": len(assembly.images), "rows": sum(counts.values())},
        }
        return assemble(build, assembly, info, limits, force=force)
