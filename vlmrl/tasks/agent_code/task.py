"""The task agent_code: its prompts, demonstrations, measures and tricks."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from vlmrl.rewards.text_parsing import OPTIONAL, REQUIRED
from vlmrl.tasks.agent_code.rewards import NAME, PUBLISHED, PUBLISHED_EPISODES
from vlmrl.tasks.agent_code.rows import (
    ANSWER,
    CODE,
    COPY,
    INPUT_NAME,
    LABELS,
    OUTPUT_NAME,
    PROBLEM,
    STEPS,
    written,
)
from vlmrl.tasks.attack import Attack, says
from vlmrl.tasks.base import Task, prepared_task
from vlmrl.types import Call, RewardInput, Row

SUMMARY = "a picture that code must repair, turn or cut before its question is answered (by `vlmrl prep agent_code`)"
VARIANTS = ("think", "direct")
"""With a thought before the step, or without one."""
DAMAGE_WORDS: Mapping[str, str] = {
    "rotation90": "turned by 90 degrees",
    "rotation180": "upside down",
    "dark": "too dark",
    "overexposure": "too bright",
    "blur": "blurred",
    "noise": "noisy",
    "crop": "a small part of a page",
}


def agent_code_task(info: Mapping[str, Any], variant: str | None = None) -> Task:
    """Return the task of a dataset; see `prepared_task`."""
    rewards = NAME, PUBLISHED, PUBLISHED_EPISODES
    return step_task(SUMMARY, rewards, info, variant, write_trace, validate=truth_problems, attacks=attacks)


def step_task(
    summary: str,
    rewards: tuple[str, str, str],
    info: Mapping[str, Any],
    variant: str | None,
    trace: Callable[..., Any],
    **facts: Any,
) -> Task:
    """Return a task of steps and episodes. `trace` is told first if a thought is needed.

    Args:
        rewards: its own, which is called as the task, and those that RLLaVA published for steps and for episodes.
    """
    chosen = variant or VARIANTS[0]
    thought = OPTIONAL if chosen == "direct" else REQUIRED
    own, of_steps, of_episodes = rewards
    return prepared_task(
        own,
        summary,
        info,
        f"{own}/{chosen}.jinja",
        profiles={
            "default": (own, {"thought": thought}),
            "rllava": (of_steps, {}),
            "rllava_episodes": (of_episodes, {}),
        },
        by=("step", "level"),
        trace=partial(trace, thought),
        environments=f"{own}/environment.py",
        variant=chosen,
        variants=VARIANTS,
        **facts,
    )


def truth_problems(truth: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a truth, in words."""
    step = truth.get("step", ANSWER)
    if step not in STEPS.values():
        return [f"the step is {step!r}, not one of {', '.join(STEPS.values())}"]
    field = {PROBLEM: "damage", CODE: "code", ANSWER: "answer"}[step]
    return [] if truth.get(field) else [f"there is no `{field}`"]


def write_trace(thought: str, row: Row, rng: random.Random) -> str | list[str | list[str | Call]]:
    """Return a right step; of a drawn row that asks for the answer alone, an episode that repairs the picture first."""
    truth = row.truth
    damage = next((DAMAGE_WORDS[label] for label in truth.get("damage") or () if label in DAMAGE_WORDS), "")
    think = "" if thought == OPTIONAL else f"<think>The picture is {damage or 'fine'}.</think>"
    if "step" in truth:
        return think + written(truth["step"], truth)
    answer = think + written(ANSWER, truth)
    if not truth.get("code"):
        return answer
    code = truth["code"].replace(INPUT_NAME, "image_0.png").replace(f"image.save('{OUTPUT_NAME}')", "show(image)")
    return [[*([think] if think else []), Call("python", {"code": code})], answer]


def attacks(rows: Sequence[RewardInput]) -> list[Attack]:
    """Return tricks with steps."""
    every = "{" + ", ".join(map(repr, LABELS)) + "}"
    think = "<think>I look at the picture.</think>"

    def step(tag: str, text: str) -> str:
        return f"{think}<{tag}>{text}</{tag}>"

    def of_step(x: RewardInput, tag: str, text: str) -> str | None:
        return step(tag, text) if x.truth.get("step", ANSWER) == tag else None

    return [
        Attack("all labels", "every damage at once", "guess", lambda x: of_step(x, PROBLEM, every)),
        Attack("no change", "code that copies the picture", "guess", lambda x: of_step(x, CODE, COPY)),
        Attack("no code", "an empty <code>", "void", lambda x: of_step(x, CODE, " ")),
        Attack("another step", "code where something else is asked for", "void",
               lambda x: step(CODE if x.truth.get("step", ANSWER) != CODE else PROBLEM, "pass")),
        Attack("nothing", "an empty response", "void", says("")),
    ]  # fmt: skip
