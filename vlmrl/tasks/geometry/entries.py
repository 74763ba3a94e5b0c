"""Entries of the tasks geometry3k, mm_math, geoqa and text_math, and their `vlmrl prep` commands."""

from __future__ import annotations

from functools import partial

from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.geometry.prepare import prepare_collection
from vlmrl.tasks.geometry.task import COLLECTIONS, Collection, geometry_task
from vlmrl.tasks.prep_options import SOURCES, PrepCommand, table_options


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
        options(partial(prepare_collection, collection)),
        f"{collection.about}\n\n"
        f"SOURCE: {rows}{default} The answer is the last \\boxed{{...}} of the solution, else the answer column."
        f" --synthetic N {instead}\n\n"
        f"Example: vlmrl prep {collection.name} --synthetic 600 --out data/{collection.name}\n\n"
        f"Example: vlmrl prep {collection.name} {source}",
        keeps=lambda options: options["synthetic"] is None,
    )


TASKS = {
    collection.name: TaskEntry(
        partial(geometry_task, collection),
        collection.summary,
        variants=collection.variants,
        profiles=collection.profiles,
        prep=prep_command(collection),
    )
    for collection in COLLECTIONS
}
