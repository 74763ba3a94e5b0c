"""Number of steps and learning rate schedule of an imported configuration."""

from __future__ import annotations

import math
from typing import Any

from vlmrl.recipe.imports.draft import Draft, number

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}
COUNTED_LATER = "the steps are counted when a run starts; the last rows of an epoch are trained on, too"
"""Note about `train.epochs`, used if the import cannot compute the number of steps."""


def steps_of(draft: Draft, rows: int | None, most: str, epochs: str) -> None:
    """Set train.steps, as written or computed from epochs and number of rows; if rows are unknown, set train.epochs."""
    steps, prompts = number(int, draft.get(most), 1), draft.taken.get("rollout.prompts_per_step")
    passes = draft.get(epochs)
    if steps:
        draft.put("train.steps", steps, most)
        draft.leave(epochs, f"{most} sets the number of steps")
    elif rows and prompts and prompts.value and isinstance(passes, (int, float)):
        why = f"{passes:g} passes over {rows} rows at {prompts.value} prompts per step"
        draft.put("train.steps", max(1, math.floor(rows / prompts.value) * int(passes)), epochs, why=why)
    elif isinstance(passes, (int, float)) and passes > 0:
        draft.put("train.epochs", float(passes), epochs, why=COUNTED_LATER)


def schedule_keys(draft: Draft, kind: str, warmup: str, ratio: str, lowest: str) -> None:
    """Set the schedule of the learning rate and its warm-up. A ratio becomes steps if the number of steps is known."""
    shape = draft.get(kind)
    if shape in SCHEDULES:
        draft.put("optim.schedule", SCHEDULES[shape], kind)
    elif shape is not None:
        draft.left[kind] = f"`{shape}` has no counterpart: choose constant, linear or cosine"
    steps, share = draft.get(warmup), draft.get(ratio)
    if isinstance(steps, float) and 0 < steps < 1:  # transformers 5 has one setting for number and ratio
        share, ratio = steps, warmup
    steps = number(int, steps, 1)
    total = draft.taken.get("train.steps")
    later = "the first step uses lr / warmup_steps, never 0"
    if steps:
        draft.put("optim.warmup_steps", steps, warmup, why=later)
    elif isinstance(share, (int, float)) and share > 0:
        if total is None:
            if share < 1:
                draft.put("optim.warmup_ratio", float(share), ratio, why=later)
            else:
                draft.left[ratio] = f"{share:g}: a warm-up cannot be the whole run"
        else:
            draft.put(
                "optim.warmup_steps", math.ceil(share * total.value), ratio, why=f"{share:g} of train.steps; {later}"
            )
    floor: Any = draft.get(lowest)
    if isinstance(floor, (int, float)) and floor > 0 and draft.taken.get("optim.schedule") is not None:
        draft.put("optim.min_lr_ratio", float(floor), lowest)
