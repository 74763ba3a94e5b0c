"""Command `vlmrl prep we_math`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from vlmrl.errors import DataError
from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.options import Option, PrepCommand
from vlmrl.tasks.table_command import TableRequest, prepare_table
from vlmrl.tasks.table_rows import TEST, TRAIN
from vlmrl.tasks.we_math.drawn import Drawing, drawn_rows
from vlmrl.tasks.we_math.rows import table_form
from vlmrl.tasks.we_math.task import we_math_task

PUBLISHED, PUBLISHED_TEST = "hub:We-Math/We-Math2.0-SFT@sft", "hub:We-Math/We-Math@testmini"
SPLITS = {"sft": TRAIN, "testmini": TEST}
"""Name of a published split -> its name in the dataset."""
STEPS_HELP = "Drawn sets: numbers of steps, separated by commas; 2, 3 or both."


def prep(
    source: Annotated[str | None, Option("Rows, as described above.", positional=True)] = None,
    test: Annotated[
        str | None, Option("Other source whose rows become the test split, such as We-Math's sets.")
    ] = None,
    synthetic: Annotated[int | None, Option("Draw this many training sets instead of reading.", min=20)] = None,
    out: Annotated[Path | None, Option("Dataset folder to make; default: data/NAME.")] = None,
    name: Annotated[str | None, Option("Name of the dataset; default: we_math.")] = None,
    seed: Annotated[int, Option("Seed of drawings, and of rows cut off train.")] = 0,
    validation_rows: Annotated[
        int, Option("Rows cut off train where the source has no validation split; 0: none.", min=0)
    ] = 300,
    max_bad: Annotated[float, Option("Largest share of wrong rows that are left out.", min=0, max=1)] = 0.0,
    images_root: Annotated[
        Path | None, Option("Folder that image paths are relative to; default: the table's.")
    ] = None,
    side: Annotated[int, Option("Drawn sets: width and height of the images in pixels.", min=56, max=1344)] = 224,
    most: Annotated[int, Option("Drawn sets: largest number of shapes of a kind.", min=1, max=9)] = 5,
    steps: Annotated[str, Option(STEPS_HELP)] = "2,3",
    *,
    limits: Limits,
    force: bool = False,
) -> Prepared:
    """Make the dataset. Raises: DataError for an option, source or row that cannot be used; nothing is written."""
    numbers = tuple(number.strip() for number in steps.split(","))
    if not set(numbers) <= {"2", "3"}:
        raise DataError(f"--steps is {steps!r}", hint="2, 3 or 2,3")
    drawing = Drawing(side, most, tuple(int(number) for number in numbers))
    if source is None and test is None and synthetic is None:
        test = PUBLISHED_TEST
    request = TableRequest(PUBLISHED, source, test, synthetic, out, name, seed, validation_rows, max_bad, images_root)
    return prepare_table(
        we_math_task({}),
        request,
        limits,
        form=table_form(),
        settings={},
        draw=partial(drawn_rows, drawing=drawing, seed=seed),
        drawn_settings={"side": side, "most": most, "steps": list(drawing.steps)},
        split_names=SPLITS,
        force=force,
    )


PREP = PrepCommand(
    prep,
    "Composite problems with a figure, and their sub-problems, one for each step.\n\n"
    "SOURCE: rows with an image, a question and an answer in Parquet, JSON, JSONL, CSV or a folder of the `datasets`"
    " library, or `hub:org/name`; each with `@split` if one split is wanted. Rows of sets also have option, ID and key"
    f" (2steps_1, 3steps_multi). Default: {PUBLISHED}, with {PUBLISHED_TEST} as the test split. --synthetic N draws"
    " sets of coloured shapes with exact answers instead: 2 or 3 numbers to count, and a composite problem.\n\n"
    "Example: vlmrl prep we_math --synthetic 200 --out data/we_math\n\n"
    "Example: vlmrl prep we_math rows.parquet --test testmini.json --images-root data",
    keeps=lambda options: False,
)
