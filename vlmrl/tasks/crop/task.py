"""The task crop: its prompts, demonstrations and tricks; its tools stand in environment.py."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from vlmrl.environments.calls import write_call
from vlmrl.rewards.boxes.planes import Box, check_space, convert, plane_of
from vlmrl.rewards.boxes.writing import FORMS
from vlmrl.rewards.text_parsing import OPTIONAL, REQUIRED
from vlmrl.tasks.attack import Attack, Kind, says
from vlmrl.tasks.base import Task, prepared_task
from vlmrl.tasks.crop.rewards import CROP, RLLAVA_CROP, true_answer
from vlmrl.tasks.perception.truth import BoxSettings, size_of
from vlmrl.tasks.truth_kinds import problems_of
from vlmrl.types import Call, RewardInput, Row, Size, Turn

SUMMARY = "a question whose answer stands in a small place, with a tool to zoom (made by `vlmrl prep crop`)"
SPACES, ALONE, CODE, DIRECT = ("thousand", "seen", "pixels", "unit"), "alone", "code", "_direct"
VARIANTS = tuple(f"{name}{end}" for end in ("", DIRECT) for name in (*SPACES, CODE, ALONE))
"""Coordinate space of the boxes of the tool `zoom`; `code`: traces cut a part with the tool `python`, by pixels;
`alone`: the prompt names no tool. `_direct`: an answer without a thought."""


def crop_task(info: Mapping[str, Any], variant: str | None = None) -> Task:
    """Return the task of a dataset; see `prepared_task`."""
    name = variant or VARIANTS[0]
    thought, means = OPTIONAL if name.endswith(DIRECT) else REQUIRED, name.removesuffix(DIRECT)
    chosen = BoxSettings("pixels" if means == CODE else means, thought=thought)
    return prepared_task(
        "crop",
        SUMMARY,
        info,
        "crop/direct.jinja" if thought == OPTIONAL else "crop/think.jinja",
        validate=partial(problems_of, true_answer),
        variables={"form": "" if means == ALONE else FORMS[check_space(chosen.space)]},
        profiles={"default": (CROP, {"thought": thought}), "rllava": (RLLAVA_CROP, {})},
        by=("category",),
        trace=partial(write_trace, chosen, means == CODE),
        trace_sees=True,
        attacks=partial(attacks, chosen),
        environments="crop/environment.py",
        environment_args={"space": means} if means in SPACES else {},
        variant=name,
        variants=VARIANTS,
    )


def write_trace(
    form: BoxSettings, by_code: bool, row: Row, rng: random.Random, seen_sizes: tuple[Size, ...]
) -> str | list[str | Call]:
    """Return the turns of a demonstration: a look at the box `look` of a drawn row, and what it shows.

    It is right where it looks at the right place. Without a tool or without that box, it is the right answer alone.
    """
    if form.space == ALONE or row.truth.get("look") is None:
        return form.form(row.truth["answer"])
    box = convert(Box(*row.truth["look"]), plane_of("pixels", size_of(row.truth)), form.plane_of_trace(row, seen_sizes))
    numbers = [round(number, 3 if form.space == "unit" else None) for number in box]
    code = f"show(images[0].crop(({', '.join(map(str, numbers))})))"
    look = Call("python", {"code": code}) if by_code else Call("zoom", {"box": numbers})
    return [look, form.form(row.truth["look_answer"])]


def attacks(form: BoxSettings, rows: Sequence[RewardInput]) -> list[Attack]:
    """Return tricks with calls, and with all answers at once."""
    every = form.form(" ".join(dict.fromkeys(str(x.truth.get("answer")) for x in rows)))

    def trick(
        name: str, idea: str, kind: Kind, last: str, times: int = 4, *, before: str = "", label: str = ""
    ) -> Attack:
        """Return a trick of calls and a last turn; `{}` in the texts is the right answer in its tags."""

        def turns(x: RewardInput) -> tuple[Turn, ...]:
            right = f"<answer>{x.truth.get('answer')}</answer>"
            call = Call("zoom", {"box": [0, 0, 500, 500], "label": label.format(right)})
            text = before.format(right) + write_call(call, "hermes")
            return (*(Turn("assistant", text, calls=(call,)), Turn("tool", "image 1")) * times, Turn("assistant", last))

        return Attack(name, idea, kind, says(""), episode=turns)

    return [
        Attack("every answer", "all answers of the rows in one tag", "void", says(every)),
        trick("calls alone", "four calls and no answer", "void", ""),
        trick("the tool's words", "what the tool wrote as the answer", "void", "<answer>image 1</answer>"),
        trick("answer in a call", "the right answer only in an argument", "broken", "I see.", label="{}"),
        trick(
            "taken back", "a right turn with a call, and a last turn without an answer", "broken", "No.", before="{}"
        ),
        trick("wrong after four calls", "a wrong answer beside calls", "miss", form.form("none")),
    ]
