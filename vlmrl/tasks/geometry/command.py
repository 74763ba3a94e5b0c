"""Commands `vlmrl prep geometry3k`, `mm_math`, `geoqa` and `text_math`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.geometry import prepare, written
from vlmrl.tasks.geometry.drawn.collection import TOPICS
from vlmrl.tasks.geometry.task import Collection
from vlmrl.tasks.options import Option, PrepCommand

CUT_HELP = "Rows cut off train where the source has no validation split (0: none); default: 300, mm_math 100."
TOPICS_HELP = (
    f"Problems made here: topics, separated by commas: {', '.join(TOPICS)} (default: all but squares); of text_math:"
    f" {', '.join(written.TOPICS)} (default: all but sums)."
)
WIDTH_HELP = "Drawn figures: width in pixels; they are 3/4 as high. Below 224 there is room for simple kinds only."


def prep(
    collection: Collection,
    source: Annotated[str | None, Option("Rows, as described above.", positional=True)] = None,
    test: Annotated[str | None, Option("Other source whose rows become the test split, such as MathVerse.")] = None,
    synthetic: Annotated[int | None, Option("Make this many training problems instead of reading.", min=20)] = None,
    out: Annotated[Path | None, Option("Dataset folder to make; default: data/NAME.")] = None,
    name: Annotated[str | None, Option("Name of the dataset; default: the task's.")] = None,
    seed: Annotated[int, Option("Seed of problems made here, and of rows cut off train.")] = 0,
    validation_rows: Annotated[int | None, Option(CUT_HELP, min=0)] = None,
    topics: Annotated[str | None, Option(TOPICS_HELP)] = None,
    width: Annotated[int, Option(WIDTH_HELP, min=112, max=1344)] = 448,
    max_bad: Annotated[float, Option("Largest share of wrong rows that are left out.", min=0, max=1)] = 0.0,
    images_root: Annotated[
        Path | None, Option("Folder that image paths are relative to; default: the table's.")
    ] = None,
    *,
    limits: Limits,
    force: bool = False,
) -> Prepared:
    """Make the dataset of a collection; see `prepare.prepare_collection`."""
    request = prepare.GeometryRequest(
        collection=collection,
        source=source,
        test=test,
        synthetic=synthetic,
        out=out,
        name=name,
        seed=seed,
        validation_rows=collection.validation_rows if validation_rows is None else validation_rows,
        topics=tuple(topic.strip() for topic in topics.split(",")) if topics else (),
        width=width,
        max_bad=max_bad,
        images_root=images_root,
    )
    return prepare.prepare_collection(request, limits, force=force)


def prep_command(collection: Collection) -> PrepCommand:
    """Return the command of a collection."""
    default = f" Default: {collection.published}." if collection.published else ""
    if collection.figures:
        rows = (
            "MAYE's folder of JSONL files and images (question, answer, solution, image), or rows with problem, answer"
            " and images in Parquet, JSONL, CSV or a folder of the `datasets` library, or `hub:org/name`; each with"
            " `@split` if one split is wanted."
        )
        instead = "draws figures with labels and exact answers instead."
    else:
        rows = (
            "rows with problem (or prompt: a text, or a chat with one question) and answer (or ground_truth, or verl's"
            " reward_model) in Parquet, JSONL, CSV or a folder of the `datasets` library, or `hub:org/name`; each with"
            " `@split` if one split is wanted."
        )
        instead = "writes problems with exact answers instead."
    source = collection.published or f"maye/datasets/{collection.name}"
    return PrepCommand(
        partial(prep, collection),
        f"{collection.about}\n\n"
        f"SOURCE: {rows}{default} The answer is the last \\boxed{{...}} of the solution, else the answer column."
        f" --synthetic N {instead}\n\n"
        f"Example: vlmrl prep {collection.name} --synthetic 600 --out data/{collection.name}\n\n"
        f"Example: vlmrl prep {collection.name} {source}",
        keeps=lambda options: options["synthetic"] is None,
    )
