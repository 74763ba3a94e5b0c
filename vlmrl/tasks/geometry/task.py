r"""The mathematics tasks geometry3k, mm_math, geoqa and text_math: a problem, with a figure or without, and an answer.

The truth of a row is its `answer`, the published `solution` (which ends with the box, or is one), and for drawn figures
`topic` and `kind`. Published rows have None there.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from vlmrl.redaction.redact import quoted
from vlmrl.rewards.math.latex import BOX
from vlmrl.tasks.base import Task, prepared_task
from vlmrl.tasks.reflection import FACTS, REFLECTION
from vlmrl.types import Row

GRADING: tuple[str, Mapping[str, Any]] = ("math", {})
"""Reward of these tasks, with its arguments: the one place that names it."""
PROFILES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "default": GRADING,
    "maye": ("maye", {"key": "solution"}),
    "rllava": ("rllava_math", {"key": "answer"}),
}
"""Profile -> reward with its arguments. `maye` grades against the solution, the others against the answer."""
CHAT, ZERO, THINK = "chat", "zero", "think"
"""Prompts. "chat": the problem, and a request for a solution with a box. "zero": for models that were not tuned to
follow instructions; it describes a conversation about a figure and asks for a thought between tags. "think": the
problem, and a request for a thought between tags, then a box."""


@dataclass(frozen=True)
class Collection:
    """Published collection of problems.

    Args:
        summary: one line for `vlmrl recipe list --tasks`.
        about: first paragraph of `vlmrl prep NAME --help`.
        published: its rows on the hub; None = a source must be named.
        validation_rows: rows that are cut off train where the source has no validation split.
        values: whether drawn figures show the values of the problem; else the text states them.
        figures: whether its problems have figures; else they are text alone.
        variants, profiles: names of its prompts, and of its rewards.
        images_at: where figures are that its published tables name by paths; "" = they are in the tables.
    """

    name: str
    summary: str
    about: str
    published: str | None
    validation_rows: int
    values: bool = False
    figures: bool = True
    variants: tuple[str, ...] = (CHAT, ZERO, THINK)
    profiles: tuple[str, ...] = ("default", "rllava")
    images_at: str = ""


GEOMETRY3K = Collection(
    "geometry3k",
    "geometry problems whose figure shows the values; the answer in a box (made by `vlmrl prep geometry3k`)",
    "Geometry problems whose figure shows the values (Geometry3K).",
    "hub:hiyouga/geometry3k",
    300,
    values=True,
    profiles=("default", "maye", "rllava"),
)
MM_MATH = Collection(
    "mm_math",
    "school mathematics whose text states the values; the answer in a box (made by `vlmrl prep mm_math`)",
    "School mathematics with a figure, whose text states the values (MM_Math; its test set is MathVerse).",
    None,
    100,
    profiles=("default", "maye", "rllava"),
)
GEOQA = Collection(
    "geoqa",
    "geometry problems with a figure; the answer, mostly an angle or a length, in a box (made by `vlmrl prep geoqa`)",
    "Geometry problems with a figure (GeoQA): angles, lengths and areas.",
    "hub:leonardPKU/GEOQA_R1V_Train_8K",
    300,
    images_at="the collection Geo170K (hub:Luckyjhg/Geo170K, images.zip) has the figures of GeoQA's published tables",
)
TEXT_MATH = Collection(
    "text_math",
    "mathematics problems without a figure; the answer in a box (made by `vlmrl prep text_math`)",
    "Mathematics problems in text alone, without images (MATH, OpenR1-Math, AIME).",
    "hub:hiyouga/math12k",
    300,
    figures=False,
    variants=(CHAT, THINK),
)
COLLECTIONS = (GEOMETRY3K, MM_MATH, GEOQA, TEXT_MATH)


def geometry_task(collection: Collection, info: Mapping[str, Any], variant: str | None = None) -> Task:
    """Return the task of a dataset; see `prepared_task`."""
    chosen = variant or CHAT
    return prepared_task(
        collection.name,
        collection.summary,
        info,
        f"geometry/{chosen}.jinja",
        validate=truth_problems,
        profiles={profile: PROFILES[profile] for profile in collection.profiles},
        by=("topic",),
        set_metrics=REFLECTION,
        metrics=FACTS,
        trace=partial(write_trace, chosen),
        variant=chosen,
        variants=collection.variants,
    )


def truth_problems(truth: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a truth, in words."""
    problems = []
    answer, solution = truth.get("answer"), truth.get("solution")
    if not isinstance(answer, str) or not answer.strip():
        problems.append(f"`answer` is {quoted(answer)}, not a text")
    if solution is not None and not (isinstance(solution, str) and BOX.search(solution)):
        problems.append(f"`solution` is {quoted(solution)}, not a text with a box")
    return problems


def write_trace(variant: str, row: Row, rng: random.Random) -> str:
    """Return the published solution, in the form that the variant asks for; without one, the answer in a box."""
    box = f"\\boxed{{{row.truth['answer']}}}"
    solution = str(row.truth.get("solution") or box)
    return solution if variant == CHAT or "</think>" in solution else f"<think>{solution}</think>\n{box}"
