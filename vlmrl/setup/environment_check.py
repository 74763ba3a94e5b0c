"""Checks of a source's environment: it begins an episode of a row, and runs the calls of some traces, without a model.

So an environment that fails in every episode is found before a run. `vlmrl check --deep` runs it with the model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from vlmrl.environments.base import ERROR, EnvironmentLimits
from vlmrl.environments.calls import turn_text
from vlmrl.environments.processes import Beginning, EnvironmentPool, Stopped
from vlmrl.environments.row_fields import count_repeats, sampled
from vlmrl.errors import Problem, VlmrlError
from vlmrl.redaction.redact import excerpt
from vlmrl.setup.prompts import prompt_text
from vlmrl.types import Message, Row

if TYPE_CHECKING:
    from vlmrl.tasks.source import Source

TRACES = 4
"""Number of rows whose traces are followed."""
MOST_ERROR_CHARS = 300


def environment_plan(source: Source) -> dict[str, Any]:
    """Return facts about a source's environment for the plan: its tools, and what it gets of a row.

    `repeated`: column that is kept back -> why.
    """
    if source.environment is None:
        return {}
    try:
        facts = source.environment.facts(source.rows[0], source.repeats)
    except VlmrlError:  # the scan of the rows reports it
        return {}
    counts = count_repeats(sampled(source.rows))
    repeated = {
        column: "; ".join(f"repeats `{name}` in {one.rows:,} of {one.both:,} rows" for name, one in fields.items())
        for column, fields in counts.items()
        if column in facts["kept_back"]
    }
    return {"environment": {**facts, "repeated": repeated}}


def check_environment(source: Source, where: str, rows: Sequence[Row], *, learns: bool) -> list[Problem]:
    """Begin an episode of the first row of each class of the source's environment, in its processes.

    Args:
        learns: whether the traces are learned: those of the first rows are followed, too.
    """
    environment = source.environment
    if environment is None:
        return []
    firsts: dict[int, Row] = {}
    for row in rows:
        with suppress(VlmrlError):  # the scan of the rows reports it
            firsts.setdefault(id(environment.of(row)), row)
    follows = learns and source.task.trace is not None
    chosen = list(firsts.values())
    chosen += [row for row in rows[:TRACES] if row not in chosen] if follows else []
    problems: list[Problem] = []
    try:
        with closing(
            EnvironmentPool(environment, "hermes", EnvironmentLimits.of(source.environment_settings, 1))
        ) as pool:
            for row in chosen:
                problem = _episode(pool, source, row, follows)
                pool.drop(0)
                if problem is not None and not any(problem.message == one.message for one in problems):
                    problems.append(problem)
    except VlmrlError as error:  # its process, which starts with the first episode, cannot load it
        problems.append(Problem(error.message, error.where or where, error.hint))
    return problems


def _episode(pool: EnvironmentPool, source: Source, row: Row, follows: bool) -> Problem | None:
    """Return the first problem of an episode: of its begin and, if it follows the trace, of the calls there.

    The last turn of a trace may hold a call that fails.
    """
    try:
        images, prompt = [source.dataset.image(media) for media in row.media], prompt_text(source, row)
    except VlmrlError:  # other checks report it
        return None
    sizes = [image.size for image in images]
    pool.begin(0, Beginning(row.columns, row.truth, images, sizes, 0, prompt, source.repeats))
    problem = _problem_of(pool, row, "it cannot begin an episode")
    if problem is not None or not follows:
        return problem
    try:
        turns = source.task.correct_turns(row, random.Random(0))
        texts = [turn_text(turn, "hermes") for turn in turns]
    except (VlmrlError, ValueError):  # the check of the traces reports it
        return None
    if any(isinstance(turn, Message) for turn in turns):  # nothing is run: the observations are there
        return None
    for number, text in enumerate(texts[:-1], 1):
        pool.turn(0, text)
        if (problem := _problem_of(pool, row, f"a call in turn {number} of the trace fails")) is not None:
            return problem
    return None


def _problem_of(pool: EnvironmentPool, row: Row, what: str) -> Problem | None:
    """Return the problem of the answer to what an episode was asked last; `what`: in words."""
    ((_, answer),) = pool.advance()
    if isinstance(answer, Stopped):
        level = "warning" if answer.is_outage else "error"
        return Problem(f"the environment fails: {what}: {answer.why}", row.place, None, level)
    if answer.errors:
        texts = [part for part in answer.parts if isinstance(part, str) and part.startswith(ERROR)]
        words = excerpt(texts[0].removeprefix(ERROR), MOST_ERROR_CHARS) if texts else "see the tool"
        return Problem(f"{what}: {words}", row.place)
    return None
