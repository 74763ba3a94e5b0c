"""The task figures: from the picture of a figure to its SVG code.

One prompt serves supervised training, reinforcement learning, evaluation and `vlmrl generate`. The pictures of a
dataset are drawn from its code by the renderer that draws the responses.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from vlmrl.metric import SHARE, Metric
from vlmrl.tasks.attack import Attack
from vlmrl.tasks.base import Outcome, Task, require_prepared
from vlmrl.tasks.vfig.attacks import attacks_on
from vlmrl.tasks.vfig.reward import NAME as REWARD
from vlmrl.tasks.vfig.truth import notes_on, truth_problems
from vlmrl.types import RewardInput, Row, Score

NAME = "figures"
SUMMARY = "a figure as SVG code: shapes, arrows and texts of a picture (made by `vlmrl prep figures`)"
MEASURES = ("render", "elements", "picture", "shapes", "lines", "texts")
"""Parts of the reward that are measures, too."""


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
        profiles={"default": (REWARD, {"key": "svg"})},
        outcome=measure,
        metrics={**dict.fromkeys(MEASURES, Metric("higher", SHARE)), "parse_failure": Metric("lower", SHARE)},
        by=("source",),
        trace=write_trace,
        attacks=attacks,
        notes=notes_on,
    )


def measure(x: RewardInput, score: Score) -> Outcome:
    """Return the measures of one answer, from the parts of the reward `svg`; None where another reward has scored it.

    A response is hostile text, so that nothing is drawn here.

    Returns: accuracy (elements and picture at least 0.9), parse_failure (no code that can be drawn), and `MEASURES`.
        A figure that cannot be drawn counts as 0 in all of them.
    """
    parts = {name.rpartition(".")[2]: value for name, value in score.parts.items()}
    render = parts.get("render")
    return {
        "accuracy": parts.get("accuracy"),
        "parse_failure": None if render is None else 1.0 - render,
        **{name: parts.get(name) for name in MEASURES},
    }


def write_trace(row: Row, rng: random.Random) -> str:
    """Return the right response to a row: its code."""
    return str(row.truth["svg"])


def attacks(rows: Sequence[RewardInput]) -> list[Attack]:
    """Return tricks that earn something from rewards for SVG code."""
    return attacks_on(rows)
