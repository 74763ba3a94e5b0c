"""Entries of the tasks grounding, detection and counting, the kinds of their rows, and their `vlmrl prep` commands."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from vlmrl.rewards.boxes.planes import Space
from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.perception.answer import Settings
from vlmrl.tasks.perception.probe_responses import boxes_kind, grounding_kind
from vlmrl.tasks.perception.reward import GroundingSettings
from vlmrl.tasks.perception.rows import (
    CATEGORY_KINDS,
    EXPRESSION_KINDS,
    QUESTION_KINDS,
    SINGLE,
    USUAL,
    BoxOrder,
    CountingDrawing,
    DetectionDrawing,
    GroundingDrawing,
    counting_table_form,
    declared,
    detection_table_form,
    drawn_counting_rows,
    drawn_detection_rows,
    drawn_grounding_rows,
    grounding_table_form,
    space_help,
)
from vlmrl.tasks.perception.task import (
    COUNTING,
    COUNTING_SUMMARY,
    COUNTING_VARIANTS,
    DETECTION,
    DETECTION_SUMMARY,
    GROUNDING,
    GROUNDING_SUMMARY,
    counting_task,
    detection_task,
    grounding_task,
)
from vlmrl.tasks.perception.truth import MAIN, VARIANTS
from vlmrl.tasks.prep_options import SOURCES, Option, PrepCommand, TableRequest, chosen_names, table_options
from vlmrl.tasks.table_rows import prepare_table

PUBLISHED_GROUNDING = "hub:Kangheng/PR1-Datasets-Grounding"
PUBLISHED_SPACE: Space = "thousand"
"""Coordinate space of the boxes of `PUBLISHED`."""
GROUNDING_SPACE_HELP = space_help(PUBLISHED_SPACE, " and for a column normalized_solution")
EXPRESSION_KINDS_HELP = (
    f"Drawn images: kinds of expressions, separated by commas: {', '.join(EXPRESSION_KINDS)}; default: all except "
    f"{SINGLE}, which draws one large shape alone in a frame, for tiny models."
)


@table_options(
    PUBLISHED_GROUNDING, validation_rows=500, test="Other source whose rows become the test split, such as RefCOCO's."
)
def prep_grounding(
    request: TableRequest,
    truth_space: Annotated[str | None, Option(GROUNDING_SPACE_HELP)] = None,
    box_order: BoxOrder = "xyxy",
    asks: Annotated[str | None, Option(EXPRESSION_KINDS_HELP)] = None,
    side: Annotated[int, Option("Drawn images: width and height in pixels.", min=84, max=1344)] = 336,
    others: Annotated[int, Option("Drawn images: largest number of shapes beside those needed.", min=0, max=10)] = 3,
    *,
    limits: Limits,
    force: bool = False,
) -> Prepared:
    """Make the dataset. Raises: DataError for an option, source or row that cannot be used; nothing is written."""
    space, order = declared(request, truth_space, box_order, PUBLISHED_SPACE)
    kinds = chosen_names("--asks", asks, EXPRESSION_KINDS, "kinds of expressions") or USUAL
    return prepare_table(
        grounding_task({}),
        request,
        limits,
        form=grounding_table_form(space, order),
        settings={"truth_space": space, "box_order": order},
        draw=partial(drawn_grounding_rows, drawing=GroundingDrawing(side, others, kinds), seed=request.seed),
        drawn_settings={"side": side, "others": others, "asks": list(kinds)},
        force=force,
    )


GROUNDING_PREP = PrepCommand(
    prep_grounding,
    "Texts that describe one region of an image, with its box.\n\n"
    "SOURCE: rows with an image, a text (problem, expression, question) and a box (solution, bbox, "
    f"normalized_solution) {SOURCES} Default: {PUBLISHED_GROUNDING}. --synthetic N draws coloured shapes with exact "
    "boxes instead.\n\n"
    "Example: vlmrl prep grounding --synthetic 600 --out data/grounding\n\n"
    "Example: vlmrl prep grounding refcoco_val.json --truth-space pixels --images-root coco",
    keeps=lambda options: False,
)


GROUNDING_TASKS = {
    GROUNDING: TaskEntry(
        grounding_task, GROUNDING_SUMMARY, variants=VARIANTS, profiles=("default", "rllava"), prep=GROUNDING_PREP
    ),
}
GROUNDING_KINDS = (grounding_kind(GroundingSettings(MAIN)),)


PUBLISHED_DETECTION = "hub:laolao77/ViRFT_COCO_base65"
DETECTION_SPACE_HELP = space_help(PUBLISHED_SPACE)
CATEGORY_KINDS_HELP = (
    f"Drawn images: kinds of categories, separated by commas: {', '.join(CATEGORY_KINDS)}; default: all of them."
)


@table_options(PUBLISHED_DETECTION, validation_rows=500)
def prep_detection(
    request: TableRequest,
    truth_space: Annotated[str | None, Option(DETECTION_SPACE_HELP)] = None,
    box_order: BoxOrder = "xyxy",
    asks: Annotated[str | None, Option(CATEGORY_KINDS_HELP)] = None,
    absent: Annotated[
        float, Option("Drawn images: share of rows whose category no shape has.", min=0, max=1)
    ] = DetectionDrawing.absent,
    side: Annotated[int, Option("Drawn images: width and height in pixels.", min=84, max=1344)] = DetectionDrawing.side,
    others: Annotated[
        int, Option("Drawn images: largest number of shapes beside the first.", min=0, max=10)
    ] = DetectionDrawing.others,
    *,
    limits: Limits,
    force: bool = False,
) -> Prepared:
    """Make the dataset. Raises: DataError for an option, source or row that cannot be used; nothing is written."""
    space, order = declared(request, truth_space, box_order, PUBLISHED_SPACE)
    kinds = chosen_names("--asks", asks, CATEGORY_KINDS, "kinds of categories") or tuple(CATEGORY_KINDS)
    return prepare_table(
        detection_task({}),
        request,
        limits,
        form=detection_table_form(space, order),
        settings={"truth_space": space, "box_order": order},
        draw=partial(drawn_detection_rows, drawing=DetectionDrawing(side, others, absent, kinds), seed=request.seed),
        drawn_settings={"side": side, "others": others, "absent": absent, "asks": list(kinds)},
        force=force,
    )


DETECTION_PREP = PrepCommand(
    prep_detection,
    "Images with the boxes of all objects of a category.\n\n"
    "SOURCE: rows with an image, a category (or a problem that names it: category 'dog') and a list of boxes "
    f"(solution, boxes, objects) {SOURCES} A list without boxes, or the words No Objects, is a row without "
    "objects. "
    f"Default: {PUBLISHED_DETECTION}. --synthetic N draws coloured shapes with exact boxes instead.\n\n"
    "Example: vlmrl prep detection --synthetic 600 --out data/detection\n\n"
    "Example: vlmrl prep detection rows.jsonl --truth-space thousand --images-root coco",
    keeps=lambda options: False,
)


DETECTION_TASKS = {
    DETECTION: TaskEntry(
        detection_task, DETECTION_SUMMARY, variants=VARIANTS, profiles=("default", "rllava"), prep=DETECTION_PREP
    ),
}
DETECTION_KINDS = (boxes_kind(Settings(MAIN)),)


PUBLISHED_COUNTING = "hub:BUAADreamer/clevr_count_70k"
OBJECTS_HELP = "The question column names objects (`people`), as PixMo-count's does: ask how many there are."
QUESTION_KINDS_HELP = (
    f"Drawn images: kinds of questions, separated by commas: {', '.join(QUESTION_KINDS)}; default: all of them."
)


@table_options(
    PUBLISHED_COUNTING, validation_rows=500, test="Other source whose rows become the test split, such as SuperCLEVR."
)
def prep_counting(
    request: TableRequest,
    objects: Annotated[bool, Option(OBJECTS_HELP)] = False,
    asks: Annotated[str | None, Option(QUESTION_KINDS_HELP)] = None,
    side: Annotated[int, Option("Drawn images: width and height in pixels.", min=56, max=1344)] = 224,
    most: Annotated[int, Option("Drawn images: largest count.", min=1, max=30)] = 9,
    others: Annotated[int, Option("Drawn images: largest number of shapes that do not count.", min=0, max=30)] = 6,
    *,
    limits: Limits,
    force: bool = False,
) -> Prepared:
    """Make the dataset. Raises: DataError for an option, source or row that cannot be used; nothing is written."""
    kinds = chosen_names("--asks", asks, QUESTION_KINDS, "kinds of questions") or QUESTION_KINDS
    drawing = CountingDrawing(side, most, others, asks=kinds)
    return prepare_table(
        counting_task({}),
        request,
        limits,
        form=counting_table_form(objects),
        settings={"objects": objects},
        draw=partial(drawn_counting_rows, drawing=drawing, seed=request.seed),
        drawn_settings={"side": side, "most": most, "others": others, "asks": list(kinds)},
        force=force,
    )


COUNTING_PREP = PrepCommand(
    prep_counting,
    "Questions for the number of objects in an image.\n\n"
    "SOURCE: rows with an image, a question (problem, question) and a whole number (answer, ground_truth, count) "
    f"{SOURCES} Default: {PUBLISHED_COUNTING}. --synthetic N draws coloured shapes with exact counts instead.\n\n"
    "Example: vlmrl prep counting --synthetic 600 --out data/counting\n\n"
    "Example: vlmrl prep counting --test superclevr_test200_counting_problems.jsonl --images-root superclevr",
    keeps=lambda options: False,
)


COUNTING_TASKS = {
    COUNTING: TaskEntry(
        counting_task,
        COUNTING_SUMMARY,
        variants=tuple(COUNTING_VARIANTS),
        profiles=("default", "rllava"),
        prep=COUNTING_PREP,
    ),
}


TASKS = {**COUNTING_TASKS, **DETECTION_TASKS, **GROUNDING_TASKS}
KINDS = (*DETECTION_KINDS, *GROUNDING_KINDS)
