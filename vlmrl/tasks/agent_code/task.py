"""The task agent_code: its prompts, demonstrations, measures and tricks."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vlmrl.rewards.text_parsing import OPTIONAL, REQUIRED
from vlmrl.tasks.agent_code.rewards import NAME, PUBLISHED, PUBLISHED_EPISODES
from vlmrl.tasks.agent_code.rows import (
    ANSWER,
    CODE,
    INPUT_NAME,
    LABELS,
    OUTPUT_NAME,
    PROBLEM,
    STEPS,
    written,
)
from vlmrl.tasks.attack import Attack, says
from vlmrl.tasks.base import Task, require_prepared
from vlmrl.types import Call, RewardInput, Row

SUMMARY = "a picture that code must repair, turn or cut before its question is answered (by `vlmrl prep agent_code`)"
FOLDER = Path(__file__).parent
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
    """Return the task bound to a dataset that `vlmrl prep` made; `info` is its dataset.json.

    Raises: DataError when the dataset is a table that was not prepared.
    """
    rewards = NAME, PUBLISHED, PUBLISHED_EPISODES
    return step_task(SUMMARY, FOLDER, rewards, info, variant, write_trace, validate=truth_problems, attacks=attacks)


def step_task(
    summary: str,
    folder: Path,
    rewards: tuple[str, str, str],
    info: Mapping[str, Any],
    variant: str | None,
    trace: Callable[..., Any],
    **facts: Any,
) -> Task:
    """Return a task of steps and episodes, which is called as its folder. `trace` is told first if a thought is needed.

    Args:
        rewards: its own, and those that RLLaVA published for steps and for episodes.
    """
    require_prepared(folder.name, info)
    name = variant or VARIANTS[0]
    thought = OPTIONAL if name == "direct" else REQUIRED
    own, of_steps, of_episodes = rewards
    return Task(
        folder.name,
        summary,
        (folder / f"{name}.jinja").read_text(encoding="utf-8"),
        template_file=f"tasks/{folder.name}/{name}.jinja",
        profiles={
            "default": (own, {"thought": thought}),
            "rllava": (of_steps, {}),
            "rllava_episodes": (of_episodes, {}),
        },
        by=("step", "level"),
        trace=partial(trace, thought),
        environments=str(folder / "environment.py"),
        variant=name,
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
    unchanged = f"from PIL import Image\nImage.open('{INPUT_NAME}').save('{OUTPUT_NAME}')"
    every = "{" + ", ".join(map(repr, LABELS)) + "}"
    think = "<think>I look at the picture.</think>"

    def step(tag: str, text: str) -> str:
        return f"{think}<{tag}>{text}</{tag}>"

    def of_step(x: RewardInput, tag: str, text: str) -> str | None:
        return step(tag, text) if x.truth.get("step", ANSWER) == tag else None

    return [
        Attack("all labels", "every damage at once", "guess", lambda x: of_step(x, PROBLEM, every)),
        Attack("no change", "code that copies the picture", "guess", lambda x: of_step(x, CODE, unchanged)),
        Attack("no code", "an empty <code>", "void", lambda x: of_step(x, CODE, " ")),
        Attack("another step", "code where something else is asked for", "void",
               lambda x: step(CODE if x.truth.get("step", ANSWER) != CODE else PROBLEM, "pass")),
        Attack("nothing", "an empty response", "void", says("")),
    ]  # fmt: skip
