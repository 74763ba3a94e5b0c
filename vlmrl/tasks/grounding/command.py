"""Command `vlmrl prep grounding`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from vlmrl.errors import DataError, unknown
from vlmrl.rewards.boxes.planes import check_space
from vlmrl.rewards.boxes.reading import check_order
from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.grounding.drawn import ASKS, SINGLE, USUAL, Drawing, drawn_rows
from vlmrl.tasks.grounding.rows import table_form
from vlmrl.tasks.grounding.task import grounding_task
from vlmrl.tasks.grounding.truth import TRUTH_SPACES
from vlmrl.tasks.options import Option, PrepCommand
from vlmrl.tasks.table_command import TableRequest, prepare_table

PUBLISHED = "hub:Kangheng/PR1-Datasets-Grounding"
PUBLISHED_SPACE = "thousand"
"""Coordinate space of the boxes of `PUBLISHED`."""
SPACE_HELP = (
    f"Coordinate space of the true boxes: {', '.join(TRUTH_SPACES)}. Default: {PUBLISHED_SPACE} for the published "
    "table and for a column normalized_solution; else it must be given."
)
ASKS_HELP = (
    f"Drawn images: kinds of expressions, separated by commas: {', '.join(ASKS)}; default: all except {SINGLE}, which "
    "draws one large shape alone in a frame, for tiny models."
)


def prep(
    source: Annotated[str | None, Option("Rows, as described above.", positional=True)] = None,
    test: Annotated[str | None, Option("Other source whose rows become the test split, such as RefCOCO's.")] = None,
    synthetic: Annotated[int | None, Option("Draw this many training rows instead of reading.", min=20)] = None,
    out: Annotated[Path | None, Option("Dataset folder to make; default: data/NAME.")] = None,
    name: Annotated[str | None, Option("Name of the dataset; default: grounding.")] = None,
    seed: Annotated[int, Option("Seed of drawings, and of rows cut off train.")] = 0,
    validation_rows: Annotated[
        int, Option("Rows cut off train where the source has no validation split; 0: none.", min=0)
    ] = 500,
    max_bad: Annotated[float, Option("Largest share of wrong rows that are left out.", min=0, max=1)] = 0.0,
    images_root: Annotated[
        Path | None, Option("Folder that image paths are relative to; default: the table's.")
    ] = None,
    truth_space: Annotated[str | None, Option(SPACE_HELP)] = None,
    box_order: Annotated[str, Option("Order of the numbers of a true box: xyxy, xywh or yxyx.")] = "xyxy",
    asks: Annotated[str | None, Option(ASKS_HELP)] = None,
    side: Annotated[int, Option("Drawn images: width and height in pixels.", min=84, max=1344)] = 336,
    others: Annotated[int, Option("Drawn images: largest number of shapes beside those needed.", min=0, max=10)] = 3,
    *,
    limits: Limits,
    force: bool = False,
) -> Prepared:
    """Make the dataset. Raises: DataError for an option, source or row that cannot be used; nothing is written."""
    if truth_space is not None and truth_space not in TRUTH_SPACES:
        raise unknown("--truth-space", truth_space, TRUTH_SPACES, error=DataError)
    kinds = tuple(kind.strip() for kind in asks.split(",")) if asks else USUAL
    if wrong := [kind for kind in kinds if kind not in ASKS]:
        raise DataError(f"--asks names `{wrong[0]}`", hint=f"kinds of expressions: {', '.join(ASKS)}")
    declared = truth_space or (PUBLISHED_SPACE if source is None else None)
    space = None if declared is None else check_space(declared)
    request = TableRequest(PUBLISHED, source, test, synthetic, out, name, seed, validation_rows, max_bad, images_root)
    return prepare_table(
        grounding_task({}),
        request,
        limits,
        form=table_form(space, check_order(box_order)),
        settings={"truth_space": space, "box_order": box_order},
        draw=partial(drawn_rows, drawing=Drawing(side, others, kinds), seed=seed),
        drawn_settings={"side": side, "others": others, "asks": list(kinds)},
        force=force,
    )


PREP = PrepCommand(
    prep,
    "Texts that describe one region of an image, with its box.\n\n"
    "SOURCE: rows with an image, a text (problem, expression, question) and a box (solution, bbox, "
    "normalized_solution) in Parquet, JSONL, JSON, CSV or a folder of the `datasets` library, or `hub:org/name`; each "
    f"with `@split` if one split is wanted. Default: {PUBLISHED}. --synthetic N draws coloured shapes with exact boxes "
    "instead.\n\n"
    "Example: vlmrl prep grounding --synthetic 600 --out data/grounding\n\n"
    "Example: vlmrl prep grounding refcoco_val.json --truth-space pixels --images-root coco",
    keeps=lambda options: False,
)
