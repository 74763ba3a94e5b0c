"""`vlmrl prep` of the mathematics tasks: read, check and write rows, or make problems with exact answers.

A published problem is checked: its text and image marks, its images, its boxed answer. A survey of the checked rows
gives facts for the dataset, rows that are wrong or there twice, and the validation split.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, NamedTuple

from vlmrl.data.dataset_writer import building, refuse_other
from vlmrl.data.doctor import RowFacts
from vlmrl.data.image_scan import Examined, examine
from vlmrl.data.open_dataset import RowUnits
from vlmrl.data.table_files import LINED
from vlmrl.data.table_pieces import RowFiles, locate_rows
from vlmrl.data.table_values import IMAGES as IMAGE_COLUMNS
from vlmrl.data.table_values import NO_FILE, show, text_of
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
    row_schema,
)
from vlmrl.tasks.geometry.drawn import collection as drawn
from vlmrl.tasks.geometry.drawn.collection import DrawnProblem, WrittenProblem
from vlmrl.tasks.geometry.task import Collection, geometry_task
from vlmrl.tasks.prep_options import Option, TableRequest
from vlmrl.tasks.prompt import IMAGE
from vlmrl.tasks.table_rows import IMAGES, TRAIN, CheckedTables, ChosenPiece, check_tables, checked_line, cut_validation
from vlmrl.types import LeftOut, Media, hash64
from vlmrl.untrusted import plural


def problem_schema() -> Any:
    """Return the Arrow schema of the rows."""
    import pyarrow as pa

    truth = [(name, pa.string()) for name in ("answer", "solution", "topic", "kind")]
    return row_schema(truth, ("problem", pa.string()), ("origins", pa.list_(pa.string())))


def row_fields(name: str, facts: RowFacts, line: Mapping[str, Any], images: Sequence[Media]) -> dict[str, Any]:
    """Return the columns of a published problem. See `CheckedTables.assembly`."""
    truth = {"answer": line["text"], "solution": line["solution"], "topic": None, "kind": None}
    return _fields(name, line["problem"], truth, images, facts.name)


def made_rows(
    collection: Collection, problems: Mapping[str, Sequence[DrawnProblem | WrittenProblem]]
) -> tuple[dict[str, list[PlannedRow]], list[Examined], dict[str, bytes]]:
    """Return the rows of drawn or written problems, and each image with its file by content hash, in the same order.

    Args:
        problems: split -> problems; a drawn one has an image of its own.
    """
    lengths = PromptLengths(geometry_task(collection, {}))
    files: dict[str, bytes] = {}
    images: list[Examined] = []
    planned: dict[str, list[PlannedRow]] = {}
    for split, members in problems.items():
        planned[split] = []
        for number, member in enumerate(members):
            numbers, name = (), f"{split} {number}"
            if isinstance(member, DrawnProblem):
                numbers, name = (len(images),), f"drawn {name}"
                images.append(examine(member.image))
                files[images[-1].media.sha256] = member.image
            tokens = lengths.of({"problem": _text_of(member)}, [images[i].media for i in numbers])
            answer = (member.problem if isinstance(member, DrawnProblem) else member).answer
            planned[split].append(PlannedRow(member, RowFacts(numbers, answer, None, tokens, (), name)))
    return planned, images, files


def made_fields(name: str, rows: Sequence[PlannedRow], media: Sequence[Media]) -> Iterator[dict[str, Any]]:
    """Yield the columns of drawn or written problems. See `Assembly.fields`."""
    for row in rows:
        member: DrawnProblem | WrittenProblem = row.key
        is_drawn = isinstance(member, DrawnProblem)
        problem = member.problem if is_drawn else member
        solution = f"{problem.steps} The answer is $\\boxed{{{problem.answer}}}$.".lstrip()
        truth = {"answer": problem.answer, "solution": solution, "topic": member.topic, "kind": problem.kind}
        origin = row.facts.name if is_drawn else f"written {row.facts.name}"
        yield _fields(name, _text_of(member), truth, [media[i] for i in row.facts.images], origin)


def _text_of(member: DrawnProblem | WrittenProblem) -> str:
    return f"{IMAGE}{member.text}" if isinstance(member, DrawnProblem) else member.text


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


def place_in(chosen: ChosenPiece, table: RowFiles, index: int) -> str:
    """Return the place of a row for messages; in a folder with a text file per split, the split and the line."""
    piece = replace(chosen.piece, split=chosen.split)
    if piece.numbers and not table.label.lower().endswith(LINED):
        return f"{piece.split} line {piece.numbers[index]}"
    return table.where(piece, index)


def check_row(
    cells: Mapping[str, Any], columns: Mapping[str, str], values: list[Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return problem, answer (`text`), solution and differs of a row, and its faults. See `table_rows.Check`."""
    faults: list[str] = []
    line: dict[str, Any] = {}
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
        from vlmrl.rewards.math.grader import text_alone  # it loads SymPy

        line |= shown_solution(cells.get("shown"), answer)._asdict()
        line["unread"] = text_alone(answer.text, Policy())
    except DataError as error:
        faults.append(error.message)
    return line, faults


def survey_rows(collection: Collection, checked: CheckedTables) -> tuple[list[str], list[str]]:
    """Read the checked rows once, and collect facts in `checked`.

    Of rows of a split with the same images, problem and answer, the first is kept. With different answers, all of them
    are wrong.

    Returns: places of the rows whose answer column spells another answer than the box of the solution, and of the rows
        whose answer the parser cannot read, with the answer.
    """
    differing, unread, lengths = list[str](), list[str](), PromptLengths(geometry_task(collection, {}))
    alike: dict[tuple[str, tuple[int, ...], str], list[tuple[str, PlannedRow]]] = defaultdict(list)
    for split, key, line, images in checked.sound_lines():
        differing += [line["where"]] if line["differs"] else []
        unread += [f"{line['where']} {show(line['text'], 40)}"] if line["unread"] else []
        tokens = lengths.of({"problem": line["problem"]}, [checked.images[i].media for i in images])
        row = PlannedRow(key, RowFacts(images, line["text"], None, tokens, (), line["where"]))
        alike[split, images, line["problem"]].append((line["text"], row))
    for (split, _, _), rows in alike.items():
        _keep_one(checked, split, rows)
    return differing, unread


def _keep_one(checked: CheckedTables, split: str, rows: Sequence[tuple[str, PlannedRow]]) -> None:
    """Add the first of rows with the same images and problem; none of them if their answers differ."""
    first = rows[0][1]
    if len({answer for answer, _ in rows}) > 1:
        reason = "the same figure and problem have different answers in different rows"
        checked.bad += [LeftOut(row.facts.name, reason) for _, row in rows]
        return
    checked.rows[split].append(first)
    reason = f"the same figure, problem and answer as {first.facts.name}"
    checked.repeated += [LeftOut(row.facts.name, reason) for _, row in rows[1:]]


def refuse_bad(checked: CheckedTables, max_bad: float, images_at: str = "") -> None:
    """Raise a DataError as `CheckedTables.refuse_bad`; it names absent images if most rows lack theirs.

    Args:
        images_at: where the images are that tables of this collection name by paths; "" = not known.
    """
    absent = [one for one in checked.bad if NO_FILE in one.reason]
    if 2 * len(absent) > checked.total and not checked.is_sound(max_bad):
        raise DataError(
            f"{len(absent):,} of {checked.total:,} rows name an image file that is not there; nothing was written:"
            f"\n  {absent[0].origin}: {absent[0].reason}",
            hint="the table has paths only: get its images, and give the folder that the paths start from as"
            f" --images-root{f'; {images_at}' if images_at else ''}",
        )
    hint = "are the columns problem, images, and solution or answer, and do paths of images lead from the table's"
    checked.refuse_bad(max_bad, f"{hint} folder (else --images-root)?")


TOPICS_HELP = (
    f"Problems made here: topics, separated by commas: {', '.join(drawn.TOPICS)} (default: all but squares); of "
    f"text_math: {', '.join(drawn.WRITTEN_TOPICS)} (default: all but sums)."
)
WIDTH_HELP = "Drawn figures: width in pixels; they are 3/4 as high. Below 224 there is room for simple kinds only."


def prepare_collection(
    collection: Collection,
    request: TableRequest,
    topics: Annotated[str | None, Option(TOPICS_HELP)] = None,
    width: Annotated[int, Option(WIDTH_HELP, min=112, max=1344)] = 448,
    *,
    limits: Limits,
) -> Prepared:
    """Make the dataset of a collection.

    Raises: DataError for a source, name, topic or row that cannot be used; nothing is written.
    """
    if request.synthetic is not None:
        names = tuple(topic.strip() for topic in topics.split(",")) if topics else ()
        return _prepare_drawn(collection, request, names, width, limits)
    if request.table is None:
        raise DataError(
            f"`vlmrl prep {collection.name}` needs a source: there is no published table of its rows",
            hint="name MAYE's folder of JSONL files and images, or a table; --synthetic N makes problems",
        )
    return _prepare_rows(collection, request, limits)


def _prepare_rows(collection: Collection, request: TableRequest, limits: Limits) -> Prepared:
    name, out = request.place(collection.name)
    args = {**request.args(), **limits.args}
    refuse_other(out, args, force=limits.force)
    located = [locate_rows(*one) for one in request.sources()]
    key = [collection.name, name, [str(one.root) for one in located], args, [one.state for one in located]]
    with building(out, key=key) as build:
        columns = partial(find_columns, figures=collection.figures)
        make = partial(checked_line, check_row)
        checked = check_tables(build.work, located, columns, make, limits, where=place_in)
        differing, unread = survey_rows(collection, checked)
        refuse_bad(checked, request.max_bad, collection.images_at)
        assembly = checked.assembly(partial(row_fields, name), problem_schema())
        if differing:
            finding = f"{len(differing):,} rows spell another answer than the box of their solution, such as"
            assembly.notes["answers"] = ("look", f"{finding} {', '.join(differing[:3])}; the box is graded")
        if unread:
            finding = f"{len(unread):,} rows have an answer that cannot be read, such as {', '.join(unread[:3])}"
            assembly.notes["unread answers"] = ("look", f"{finding}; only the same text is right there")
        # a row without images shares nothing with others
        train = enumerate(assembly.rows.get(TRAIN, ()))
        units = {"figure": [RowUnits(row.facts.images or (f"row {i}",), None) for i, row in train]}
        shares = "it shares a figure with the validation rows"
        cut_validation(assembly, units, request.validation_rows, request.seed, shares=shares)
        info = {
            "name": name,
            "task": collection.name,
            "seed": request.seed,
            "source": {"name": args["source"], "test": args["test"], "rows": dict(checked.read)},
            "args": args,
            "counts": {"images": len(checked.images), "rows": checked.total},
        }
        return assemble(build, assembly, info, limits)


def _prepare_drawn(
    collection: Collection, request: TableRequest, topics: Sequence[str], width: int, limits: Limits
) -> Prepared:
    name, out = request.place(collection.name)
    counts, figures = request.drawn(), collection.figures
    known = drawn.TOPICS if figures else drawn.WRITTEN_TOPICS
    topics = tuple(topics) or (drawn.USUAL_TOPICS if figures else drawn.USUAL_WRITTEN_TOPICS)
    for topic in topics:
        if topic not in known:
            raise unknown("topic", topic, known, error=DataError)
    args = {**request.args(), "topics": list(topics), **({"width": width} if figures else {}), **limits.args}
    refuse_other(out, args, force=limits.force)
    if figures:
        problems = drawn.draw_problems(
            counts, seed=request.seed, values=collection.values, topics=topics, width=width, progress=limits.progress
        )
    else:
        problems = drawn.write_problems(counts, seed=request.seed, topics=topics)
    planned, images, files = made_rows(collection, problems)
    fields, reader = partial(made_fields, name), partial(map, files.__getitem__)
    assembly = Assembly(images, list(files), reader, planned, fields, problem_schema())
    with building(out) as build:
        info = {
            "name": name,
            "task": collection.name,
            "seed": request.seed,
            "source": {"name": "drawn geometry" if figures else "written mathematics", "rows": counts},
            "args": args,
            "counts": {"images": len(assembly.images), "rows": sum(counts.values())},
        }
        return assemble(build, assembly, info, limits)
