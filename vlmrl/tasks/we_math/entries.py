"""Entry of the task we_math in the table of tasks, and the command `vlmrl prep we_math`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

from vlmrl.errors import DataError
from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.prep_options import SOURCES, Option, PrepCommand, TableRequest, table_options
from vlmrl.tasks.table_rows import TEST, TRAIN, prepare_table
from vlmrl.tasks.we_math.rows import Drawing, drawn_rows, table_form
from vlmrl.tasks.we_math.task import NAME, SUMMARY, VARIANTS, we_math_task

PUBLISHED, PUBLISHED_TEST = "hub:We-Math/We-Math2.0-SFT@sft", "hub:We-Math/We-Math@testmini"
SPLITS = {"sft": TRAIN, "testmini": TEST}
"""Name of a published split -> its name in the dataset."""
STEPS_HELP = "Drawn sets: numbers of steps, separated by commas; 2, 3 or both."


@table_options(
    PUBLISHED,
    validation_rows=300,
    test="Other source whose rows become the test split, such as We-Math's sets.",
    synthetic="Draw this many training sets instead of reading.",
)
def prep(
    request: TableRequest,
    side: Annotated[int, Option("Drawn sets: width and height of the images in pixels.", min=56, max=1344)] = 224,
    most: Annotated[int, Option("Drawn sets: largest number of shapes of a kind.", min=1, max=9)] = 5,
    steps: Annotated[str, Option(STEPS_HELP)] = "2,3",
    *,
    limits: Limits,
) -> Prepared:
    """Make the dataset. Raises: DataError for an option, source or row that cannot be used; nothing is written."""
    numbers = tuple(number.strip() for number in steps.split(","))
    if not set(numbers) <= {"2", "3"}:
        raise DataError(f"--steps is {steps!r}", hint="2, 3 or 2,3")
    drawing = Drawing(side, most, tuple(int(number) for number in numbers))
    if request.source is None and request.test is None and request.synthetic is None:
        request = replace(request, test=PUBLISHED_TEST)
    return prepare_table(
        we_math_task({}),
        request,
        limits,
        form=table_form(),
        settings={},
        draw=partial(drawn_rows, drawing=drawing, seed=request.seed),
        drawn_settings={"side": side, "most": most, "steps": list(drawing.steps)},
        split_names=SPLITS,
    )


PREP = PrepCommand(
    prep,
    "Composite problems with a figure, and their sub-problems, one for each step.\n\n"
    "SOURCE: rows with an image, a question and an answer "
    f"{SOURCES} Rows of sets also have option, ID and key"
    f" (2steps_1, 3steps_multi). Default: {PUBLISHED}, with {PUBLISHED_TEST} as the test split. --synthetic N draws"
    " sets of coloured shapes with exact answers instead: 2 or 3 numbers to count, and a composite problem.\n\n"
    "Example: vlmrl prep we_math --synthetic 200 --out data/we_math\n\n"
    "Example: vlmrl prep we_math rows.parquet --test testmini.json --images-root data",
)


TASKS = {NAME: TaskEntry(we_math_task, SUMMARY, variants=tuple(VARIANTS), profiles=("default", "rllava"), prep=PREP)}
