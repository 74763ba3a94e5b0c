"""Entries of the tasks geometry3k, mm_math, geoqa and text_math, and their `vlmrl prep` commands."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.geometry.drawn import collection
from vlmrl.tasks.geometry.drawn.collection import TOPICS
from vlmrl.tasks.geometry.prepare import prepare_collection
from vlmrl.tasks.geometry.task import COLLECTIONS, Collection, geometry_task
from vlmrl.tasks.prep_options import SOURCES, Option, PrepCommand, TableRequest, table_options

TOPICS_HELP = (
    f"Problems made here: topics, separated by commas: {', '.join(TOPICS)} (default: all but squares); of text_math:"
    f" {', '.join(collection.WRITTEN_TOPICS)} (default: all but sums)."
)
WIDTH_HELP = "Drawn figures: width in pixels; they are 3/4 as high. Below 224 there is room for simple kinds only."


def prep(
    collection: Collection,
    request: TableRequest,
    topics: Annotated[str | None, Option(TOPICS_HELP)] = None,
    width: Annotated[int, Option(WIDTH_HELP, min=112, max=1344)] = 448,
    *,
    limits: Limits,
) -> Prepared:
    """Make the dataset of a collection; see `prepare_collection`."""
    names = tuple(topic.strip() for topic in topics.split(",")) if topics else ()
    return prepare_collection(collection, request, limits, topics=names, width=width)


def prep_command(collection: Collection) -> PrepCommand:
    """Return the command of a collection."""
    default = f" Default: {collection.published}." if collection.published else ""
    if collection.figures:
        rows = (
            "MAYE's folder of JSONL files and images (question, answer, solution, image), or rows with problem, answer"
            f" and images {SOURCES}"
        )
        instead = "draws figures with labels and exact answers instead."
    else:
        rows = (
            "rows with problem (or prompt: a text, or a chat with one question) and answer (or ground_truth, or verl's"
            f" reward_model) {SOURCES}"
        )
        instead = "writes problems with exact answers instead."
    source = collection.published or f"maye/datasets/{collection.name}"
    options = table_options(
        collection.published,
        validation_rows=collection.validation_rows,
        test="Other source whose rows become the test split, such as MathVerse.",
        synthetic="Make this many training problems instead of reading.",
        seed="Seed of problems made here, and of rows cut off train.",
    )
    return PrepCommand(
        options(partial(prep, collection)),
        f"{collection.about}\n\n"
        f"SOURCE: {rows}{default} The answer is the last \\boxed{{...}} of the solution, else the answer column."
        f" --synthetic N {instead}\n\n"
        f"Example: vlmrl prep {collection.name} --synthetic 600 --out data/{collection.name}\n\n"
        f"Example: vlmrl prep {collection.name} {source}",
        keeps=lambda options: options["synthetic"] is None,
    )


def _entry(collection: Collection) -> TaskEntry:
    return TaskEntry(
        partial(geometry_task, collection),
        collection.summary,
        variants=collection.variants,
        profiles=collection.profiles,
        prep=prep_command(collection),
    )


TASKS = {collection.name: _entry(collection) for collection in COLLECTIONS}
