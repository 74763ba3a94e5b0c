"""Entries of the tasks grounding, detection and counting, the kinds of their rows, and their `vlmrl prep` commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

from vlmrl.tasks.base import Task
from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.perception.answer import Settings
from vlmrl.tasks.perception.probe_responses import box_kind
from vlmrl.tasks.perception.reward import GroundingSettings
from vlmrl.tasks.perception.rows import (
    CATEGORY_KINDS,
    EXPRESSION_KINDS,
    QUESTION_KINDS,
    SINGLE,
    USUAL,
    BoxOrder,
    Drawing,
    counting_form,
    declared,
    detection_form,
    drawn_rows,
    grounding_form,
    space_help,
)
from vlmrl.tasks.perception.task import (
    COUNTING,
    COUNTING_VARIANTS,
    DETECTION,
    GROUNDING,
    SUMMARIES,
    counting_task,
    detection_task,
    grounding_task,
)
from vlmrl.tasks.perception.truth import BOX, BOXES, MAIN, VARIANTS
from vlmrl.tasks.prep_options import SOURCES, Option, PrepCommand, TableRequest, chosen_names, table_options
from vlmrl.tasks.table_rows import RowForm, prepare_table

MAKERS: Mapping[str, Callable[..., Task]] = {
    COUNTING: counting_task,
    DETECTION: detection_task,
    GROUNDING: grounding_task,
}
PUBLISHED: Mapping[str, str] = {
    COUNTING: "hub:BUAADreamer/clevr_count_70k",
    DETECTION: "hub:laolao77/ViRFT_COCO_base65",
    GROUNDING: "hub:Kangheng/PR1-Datasets-Grounding",
}
GROUNDING_SPACE_HELP = space_help(" and for a column normalized_solution")
DETECTION_SPACE_HELP = space_help()
ALL = "default: all of them."
OBJECTS_HELP = "The question column names objects (`people`), as PixMo-count's does: ask how many there are."
BoxSide = Annotated[int, Option("Drawn images: width and height in pixels.", min=84, max=1344)]


def _asks_help(kinds: str, known: Mapping[str, Any] | tuple[str, ...], default: str = ALL) -> str:
    return f"Drawn images: kinds of {kinds}, separated by commas: {', '.join(known)}; {default}"


EXPRESSIONS_HELP = _asks_help(
    "expressions",
    EXPRESSION_KINDS,
    f"default: all except {SINGLE}, which draws one large shape alone in a frame, for tiny models.",
)
CATEGORIES_HELP = _asks_help("categories", CATEGORY_KINDS)
QUESTIONS_HELP = _asks_help("questions", QUESTION_KINDS)


def _prepare(
    task: str,
    request: TableRequest,
    form: RowForm,
    settings: Mapping[str, Any],
    drawing: Drawing,
    drawn: tuple[str, ...],
    limits: Limits,
) -> Prepared:
    """Make the dataset of a task from a table whose rows have this form, or draw it.

    Args:
        settings: options for tables, as dataset.json has them.
        drawn: options for drawings, by the names of their fields, in the order of dataset.json.
    Raises: DataError for an option, source or row that cannot be used; nothing is written.
    """
    chosen = {name: getattr(drawing, name) for name in drawn}
    return prepare_table(
        MAKERS[task]({}),
        request,
        limits,
        form=form,
        settings=settings,
        draw=partial(drawn_rows, task, drawing, request.seed),
        drawn_settings={**chosen, "asks": list(drawing.asks)},
    )


@table_options(
    PUBLISHED[GROUNDING], validation_rows=500, test="Other source whose rows become the test split, such as RefCOCO's."
)
def prep_grounding(
    request: TableRequest,
    truth_space: Annotated[str | None, Option(GROUNDING_SPACE_HELP)] = None,
    box_order: BoxOrder = "xyxy",
    asks: Annotated[str | None, Option(EXPRESSIONS_HELP)] = None,
    side: BoxSide = 336,
    others: Annotated[int, Option("Drawn images: largest number of shapes beside those needed.", min=0, max=10)] = 3,
    *,
    limits: Limits,
) -> Prepared:
    """Make the dataset of grounding; see `_prepare`."""
    space, order = declared(request, truth_space, box_order)
    settings = {"truth_space": space, "box_order": order}
    drawing = Drawing(side, others, chosen_names("--asks", asks, EXPRESSION_KINDS, "kinds of expressions") or USUAL)
    form = grounding_form(space, order)
    return _prepare(GROUNDING, request, form, settings, drawing, ("side", "others"), limits)


@table_options(PUBLISHED[DETECTION], validation_rows=500)
def prep_detection(
    request: TableRequest,
    truth_space: Annotated[str | None, Option(DETECTION_SPACE_HELP)] = None,
    box_order: BoxOrder = "xyxy",
    asks: Annotated[str | None, Option(CATEGORIES_HELP)] = None,
    absent: Annotated[float, Option("Drawn images: share of rows whose category no shape has.", min=0, max=1)] = 0.2,
    side: BoxSide = 336,
    others: Annotated[int, Option("Drawn images: largest number of shapes beside the first.", min=0, max=10)] = 4,
    *,
    limits: Limits,
) -> Prepared:
    """Make the dataset of detection; see `_prepare`."""
    space, order = declared(request, truth_space, box_order)
    settings = {"truth_space": space, "box_order": order}
    kinds = chosen_names("--asks", asks, CATEGORY_KINDS, "kinds of categories") or tuple(CATEGORY_KINDS)
    drawing, form = Drawing(side, others, kinds, absent), detection_form(space, order)
    return _prepare(DETECTION, request, form, settings, drawing, ("side", "others", "absent"), limits)


@table_options(
    PUBLISHED[COUNTING], validation_rows=500, test="Other source whose rows become the test split, such as SuperCLEVR."
)
def prep_counting(
    request: TableRequest,
    objects: Annotated[bool, Option(OBJECTS_HELP)] = False,
    asks: Annotated[str | None, Option(QUESTIONS_HELP)] = None,
    side: Annotated[int, Option("Drawn images: width and height in pixels.", min=56, max=1344)] = 224,
    most: Annotated[int, Option("Drawn images: largest count.", min=1, max=30)] = 9,
    others: Annotated[int, Option("Drawn images: largest number of shapes that do not count.", min=0, max=30)] = 6,
    *,
    limits: Limits,
) -> Prepared:
    """Make the dataset of counting; see `_prepare`."""
    kinds = chosen_names("--asks", asks, QUESTION_KINDS, "kinds of questions") or QUESTION_KINDS
    drawing, form = Drawing(side, others, kinds, most=most), counting_form(objects)
    return _prepare(COUNTING, request, form, {"objects": objects}, drawing, ("side", "most", "others"), limits)


def _command(prep: Callable[..., Prepared], task: str, about: str, rows: str, exact: str, example: str) -> PrepCommand:
    """Return the command of a task.

    Args:
        about, rows: first sentence of its help, and the columns of a source.
        exact: what drawings have exactly.
        example: options of an example with rows of one's own.
    """
    return PrepCommand(
        prep,
        f"{about}\n\nSOURCE: rows with an image, {rows}Default: {PUBLISHED[task]}. --synthetic N draws coloured shapes "
        f"with exact {exact} instead.\n\nExample: vlmrl prep {task} --synthetic 600 --out data/{task}\n\n"
        f"Example: vlmrl prep {task} {example}",
    )


COMMANDS: Mapping[str, PrepCommand] = {
    COUNTING: _command(
        prep_counting,
        COUNTING,
        "Questions for the number of objects in an image.",
        f"a question (problem, question) and a whole number (answer, ground_truth, count) {SOURCES} ",
        "counts",
        "--test superclevr_test200_counting_problems.jsonl --images-root superclevr",
    ),
    DETECTION: _command(
        prep_detection,
        DETECTION,
        "Images with the boxes of all objects of a category.",
        "a category (or a problem that names it: category 'dog') and a list of boxes (solution, boxes, objects) "
        f"{SOURCES} A list without boxes, or the words No Objects, is a row without objects. ",
        "boxes",
        "rows.jsonl --truth-space thousand --images-root coco",
    ),
    GROUNDING: _command(
        prep_grounding,
        GROUNDING,
        "Texts that describe one region of an image, with its box.",
        f"a text (problem, expression, question) and a box (solution, bbox, normalized_solution) {SOURCES} ",
        "boxes",
        "refcoco_val.json --truth-space pixels --images-root coco",
    ),
}
TASKS = {
    name: TaskEntry(
        make,
        SUMMARIES[name],
        variants=tuple(COUNTING_VARIANTS) if name == COUNTING else VARIANTS,
        profiles=("default", "rllava"),
        prep=COMMANDS[name],
    )
    for name, make in MAKERS.items()
}
KINDS = (box_kind(BOXES, Settings(MAIN)), box_kind(BOX, GroundingSettings(MAIN)))
