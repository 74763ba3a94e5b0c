"""The task gui: its prompts, demonstrations and tricks; its tools stand in environment.py."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from vlmrl.environments.calls import write_call
from vlmrl.errors import DataError
from vlmrl.rewards.boxes.planes import Box, Plane, check_space, convert, plane_of
from vlmrl.rewards.boxes.writing import FORMS
from vlmrl.tasks.attack import Attack, says
from vlmrl.tasks.base import NewRow, Task, prepared_task
from vlmrl.tasks.dataset_assembly import drawn_counts
from vlmrl.tasks.gui.kinds import KINDS, LAYOUT, UNSEEN
from vlmrl.tasks.perception.truth import DIRECT, BoxSettings, variant_of
from vlmrl.tasks.prep_options import Option, chosen_names
from vlmrl.types import Call, RewardInput, Row, Size, Turn
from vlmrl.untrusted import parse_json

SUMMARY = "small web pages to act in by screenshots, with tools to click, type and scroll (made by `vlmrl prep gui`)"
DONE = "done"
SPACES = ("thousand", "seen", "pixels", "unit")
VARIANTS = tuple(f"{space}{end}" for end in ("", DIRECT) for space in SPACES)
"""Coordinate space of the tools; `_direct`: a last turn without a thought."""


def gui_task(info: Mapping[str, Any], variant: str | None = None) -> Task:
    """Return the task of a dataset; see `prepared_task`."""
    chosen = variant_of(variant)
    settings = BoxSettings(chosen.space, thought=chosen.thought)
    return prepared_task(
        "gui",
        SUMMARY,
        info,
        f"gui/{chosen.template}",
        validate=truth_problems,
        variables={"form": FORMS[chosen.space].partition("] ")[2]},
        profiles={"default": ("environment_reward", {})},
        by=("kind", "group"),
        prep=prep,
        trace=partial(write_trace, settings),
        trace_sees=True,
        attacks=partial(attacks, settings),
        environments="gui/environment.py",
        environment_args={"space": chosen.space},
        variant=chosen.name,
        variants=VARIANTS,
    )


def prep(
    synthetic: Annotated[int, Option("Number of training pages.", min=20)] = 2000,
    side: Annotated[int, Option("Width and height of a page in pixels.", min=112, max=1344)] = LAYOUT,
    kinds: Annotated[str, Option("Kinds of pages, separated by commas.")] = ",".join(KINDS),
    unseen: Annotated[str, Option("Those that only the test split has, separated by commas.")] = ",".join(UNSEEN),
    seed: Annotated[int, Option("Seed of the drawings.")] = 0,
) -> dict[str, list[NewRow]]:
    """Draw small web pages, what is to be done in them, and the actions that do it. It needs a Chromium."""
    from vlmrl.tasks.gui.environment import draw_splits

    every = chosen_names("--kinds", kinds or ",", KINDS, "kinds")
    kept_back = chosen_names("--unseen", unseen, KINDS, "kinds")
    known = [kind for kind in every if kind not in kept_back]
    if not known:
        raise DataError("--kinds and --unseen leave no kind for training", hint='--unseen ""')
    counts = drawn_counts(synthetic)
    return draw_splits(counts, {**dict.fromkeys(counts, known), "test": every}, side, seed)


def truth_problems(truth: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a truth, in words."""
    missing = [name for name in ("page", "goal", "actions", "side") if not truth.get(name)]
    return [f"there is no {', '.join(missing)}"] if missing else []


def write_trace(form: BoxSettings, row: Row, rng: random.Random, seen_sizes: tuple[Size, ...]) -> list[Call | str]:
    """Return the turns of a demonstration: one action in each, and the last one, which says that all is done."""
    side, space = int(row.truth["side"]), check_space(form.space)
    plane = plane_of(space, (side, side), seen_sizes[0] if seen_sizes else (side, side))

    def written(x: float, y: float) -> list[float]:
        point = convert(Box(x, y, x, y), Plane("pixels", side, side), plane)[:2]
        return [round(number, 3 if space == "unit" else None) for number in point]

    turns: list[Call | str] = []
    for name, value in parse_json(row.truth["actions"]):
        if name == "click":
            turns.append(Call(name, dict(zip("xy", written(*value), strict=True))))
        elif name == "scroll":
            turns.append(Call(name, {"dy": written(0, value)[1]}))
        else:
            turns.append(Call(name, {"text" if name == "type" else "key": value}))
    return [*turns, form.form(DONE, "It is done.")]


def attacks(form: BoxSettings, rows: Sequence[RewardInput]) -> list[Attack]:
    """Return tricks: an answer alone, texts in the place of actions, and clicks without a look."""

    def played(calls: Sequence[Call]) -> tuple[Turn, ...]:
        pairs = ((Turn("assistant", write_call(call, "hermes"), calls=(call,)), Turn("tool", "")) for call in calls)
        return (*(turn for pair in pairs for turn in pair), Turn("assistant", form.form(DONE)))

    grid = [Call("click", {"x": x, "y": y}) for y in range(50, 1000, 100) for x in range(50, 1000, 100)]
    return [
        Attack("answer alone", "the last turn without an action", "void", says(form.form(DONE))),
        Attack("goal in words", "the goal as an answer", "void", lambda x: form.form(str(x.truth.get("goal")))),
        Attack("hundred clicks", "clicks in a grid", "void", says(""), episode=lambda x: played(grid)),
        Attack("typed", "a text", "void", says(""), episode=lambda x: played([Call("type", {"text": "x"})])),
    ]
