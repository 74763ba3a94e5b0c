"""Entry of the task agent_search, and its `vlmrl prep` command."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from vlmrl.tasks.agent_code.task import VARIANTS
from vlmrl.tasks.agent_search.rows import ABOUT, MOST_TOWNS, PASSAGES_FILE, Drawing, draw_splits, passages_of, row_form
from vlmrl.tasks.agent_search.task import SUMMARY, agent_search_task
from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.prep_options import SOURCES, Option, PrepCommand, TableRequest, listed_names, table_options
from vlmrl.tasks.table_rows import prepare_table

PUBLISHED = "hub:laolao77/MAT"
STEPWISE_HELP = "A row asks for one step of a chain (a query or the answer), as published; else for a whole episode."


@table_options(
    PUBLISHED, validation_rows=100, test="Other source whose rows become the test split, such as MAT-Search's."
)
def prep_agent_search(
    request: TableRequest,
    stepwise: Annotated[bool, Option(STEPWISE_HELP)] = False,
    side: Annotated[int, Option("Drawn pictures: width and height in pixels.", min=56, max=1344)] = 224,
    towns: Annotated[int, Option("Drawn worlds: number of towns with an emblem.", min=20, max=MOST_TOWNS)] = 60,
    about: Annotated[str, Option("Drawn questions, separated by commas.")] = ",".join(ABOUT),
    *,
    limits: Limits,
) -> Prepared:
    """Make the dataset of agent_search from a table, or draw it; see `prepare_table`.

    Raises: DataError for an option, source or row that cannot be used; nothing is written.
    """
    drawing = Drawing(side, towns, listed_names(about, ABOUT, "--about"), request.seed, stepwise)
    files = {} if request.synthetic is None else {PASSAGES_FILE: passages_of(drawing)}
    drawn = {"draw": partial(draw_splits, drawing), "drawn_settings": vars(drawing), "files": files}
    chosen = {"form": row_form(stepwise), "settings": {"stepwise": stepwise}, **drawn}
    return prepare_table(agent_search_task({}), request, limits, **chosen)


COMMAND = PrepCommand(
    prep_agent_search,
    f"Questions about what a picture shows, whose answers must be looked up.\n\nSOURCE: {row_form(False).help}. "
    f"{SOURCES} Default: {PUBLISHED}. --synthetic N draws emblems of towns in a world without a place on earth, and "
    f"writes {PASSAGES_FILE}, the corpus to search, into the dataset.\n\n"
    "Example: vlmrl prep agent_search --synthetic 2000 --out data/agent_search",
)
TASKS = {
    "agent_search": TaskEntry(
        agent_search_task, SUMMARY, variants=VARIANTS, profiles=("default", "rllava", "rllava_episodes"), prep=COMMAND
    )
}
