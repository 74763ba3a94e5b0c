"""Entry of the task agent_code, and its `vlmrl prep` command."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from vlmrl.tasks.agent_code.rows import LABELS, Drawing, draw_row, row_form
from vlmrl.tasks.agent_code.task import SUMMARY, VARIANTS, agent_code_task
from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.drawing import draw_rows
from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.prep_options import SOURCES, Option, PrepCommand, TableRequest, listed_names, table_options
from vlmrl.tasks.table_rows import prepare_table

PUBLISHED = "hub:laolao77/MAT"
STEPWISE_HELP = "A row asks for one step of a chain (damage, code or answer), as published; else for a whole episode."


@table_options(
    PUBLISHED, validation_rows=100, test="Other source whose rows become the test split, such as MAT-Coding."
)
def prep_agent_code(
    request: TableRequest,
    stepwise: Annotated[bool, Option(STEPWISE_HELP)] = False,
    side: Annotated[int, Option("Drawn pictures: width and height in pixels.", min=56, max=1344)] = 336,
    damages: Annotated[str, Option("Drawn pictures: damages, separated by commas.")] = ",".join(LABELS),
    *,
    limits: Limits,
) -> Prepared:
    """Make the dataset of agent_code from a table, or draw it; see `prepare_table`.

    Raises: DataError for an option, source or row that cannot be used; nothing is written.
    """
    drawing = Drawing(side, listed_names(damages, LABELS, "--damages"), stepwise)
    draw = partial(draw_rows, "agent_code", seed=request.seed, draw=partial(draw_row, drawing), hint="a larger --side")
    chosen = {"form": row_form(stepwise), "settings": {"stepwise": stepwise}, "draw": draw}
    return prepare_table(agent_code_task({}), request, limits, **chosen, drawn_settings=vars(drawing))


COMMAND = PrepCommand(
    prep_agent_code,
    f"Questions about pictures that code must repair first.\n\nSOURCE: {row_form(False).help}. {SOURCES} Default: "
    f"{PUBLISHED}. --synthetic N draws shapes and damages the pictures in seven ways instead.\n\n"
    "Example: vlmrl prep agent_code --synthetic 2000 --out data/agent_code",
)
TASKS = {
    "agent_code": TaskEntry(
        agent_code_task, SUMMARY, variants=VARIANTS, profiles=("default", "rllava", "rllava_episodes"), prep=COMMAND
    )
}
