"""The task figures: prompt, truth, reward, measures.

There is one prompt, for supervised training, reinforcement learning, generation and evaluation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from vlmrl.data.dataset_visit import RowLabels
from vlmrl.tasks.accumulated import AccumulatedMetrics
from vlmrl.tasks.base import Task, require_prepared
from vlmrl.tasks.pooled import Verdict
from vlmrl.tasks.truth_kinds import Drawn, RowKind
from vlmrl.tasks.vfig.attacks import attacks_on, play_figures
from vlmrl.tasks.vfig.measures import METRICS, measures
from vlmrl.tasks.vfig.pictures import LEGEND, RENDER, draw_pairs
from vlmrl.tasks.vfig.reward import NAME as REWARD
from vlmrl.tasks.vfig.svg_file import SVG_FILE
from vlmrl.tasks.vfig.truth import CODE, SOURCE, code_of, truth_problems
from vlmrl.types import Row

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NAME = "figures"
SUMMARY = "the SVG code of a figure that an image shows (made by `vlmrl prep figures`)"
MOST_SOURCES = 20
"""Largest number of sources for which metrics of each are given."""
Values = tuple[str, Mapping[str, float]]
"""Source of a response, and its reward and the parts of it by the names of their metrics."""


def figures_task(info: Mapping[str, Any]) -> Task:
    """Return the task bound to a dataset that `vlmrl prep` made; `info` is its dataset.json.

    Raises: DataError when the dataset is a table that was not prepared.
    """
    require_prepared(NAME, info)
    return Task(
        name=NAME,
        summary=SUMMARY,
        template=files("vlmrl.tasks.vfig").joinpath("prompt.jinja").read_text(encoding="utf-8"),
        template_file="tasks/vfig/prompt.jinja",
        validate=truth_problems,
        profiles={"default": (REWARD, {"key": CODE})},
        by=(SOURCE,),
        metrics=METRICS,
        measures=measures(),
        set_metrics=AccumulatedMetrics(values_of, mean_per_source),
        trace=write_trace,
        attacks=attacks_on,
        kind=FIGURES,
        file=SVG_FILE,
    )


def is_figure(truth: Mapping[str, Any]) -> bool:
    """Return whether a truth is the code of a figure."""
    return isinstance(truth.get(CODE), str)


def no_labels(row: Row) -> RowLabels:
    """Return no label: a figure belongs to no class."""
    return RowLabels(None)


FIGURES = RowKind(is_figure, play=play_figures, labels=no_labels, drawn=Drawn("SVG", 0, RENDER, draw_pairs, LEGEND))


def write_trace(row: Row, rng: random.Random) -> str:
    """Return the code of the row's figure, unchanged."""
    return code_of(row.truth)


def values_of(verdict: Verdict) -> Values | None:
    """Return the source of a response with its reward and parts; None if it has no score or no source."""
    x, score, _ = verdict
    source = x.truth.get(SOURCE)
    if not isinstance(source, str) or score.error is not None:
        return None
    parts = {f"part/{name}": float(value) for name, value in score.parts.items() if value is not None}
    return source, {"reward": float(score.value), **parts}


def mean_per_source(results: Sequence[Values | None]) -> Callable[[NDArray[np.int64]], Mapping[str, float | None]]:
    """Return a function: times that each response is taken -> mean reward and parts of each source.

    Returns: `reward/<source>` and `part/<name>/<source>`; none of them for less than 2 or more than 20 sources.
    """
    import numpy as np

    sources = sorted({result[0] for result in results if result is not None})
    if not 2 <= len(sources) <= MOST_SOURCES:
        return lambda count_N: {}
    table: dict[str, tuple[list[int], list[float]]] = {}
    for index, result in enumerate(results):
        for name, value in result[1].items() if result is not None else ():
            indices, values = table.setdefault(f"{name}/{result[0]}", ([], [])) if result is not None else ([], [])
            indices.append(index)
            values.append(value)
    columns = {name: (np.array(places), np.array(values)) for name, (places, values) in sorted(table.items())}

    def means(count_N: NDArray[np.int64]) -> Mapping[str, float | None]:
        taken = {name: count_N[places] for name, (places, _) in columns.items()}
        return {
            name: float(taken[name] @ values / taken[name].sum()) if taken[name].sum() else None
            for name, (_, values) in columns.items()
        }

    return means
