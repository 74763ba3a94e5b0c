"""What the imports from EasyR1, verl and TRL have in common: data, steps, schedules."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from vlmrl.recipe.import_draft import Draft, number

SCHEDULES = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}  # fmt: skip


def data_source(draft: Draft, train: str, validation: str) -> None:
    """`name@split` of training and validation as one `[[data]]` entry; what would spoil a validation is left out."""
    files = draft.get(train)
    if isinstance(files, list):
        for other in files[1:]:
            draft.todo.append(f"add a [[data]] entry for {other}")
        files = files[0] if files else None
    if not files:
        return
    path, _, split = str(files).partition("@")
    named = located(path)
    why = "" if named == path else "a hub name; `vlmrl prep` makes a dataset folder of it, with splits and checks"
    draft.put("data.path", named, train, why=why)
    if split:
        draft.put("data.split", split, train)
    held = draft.get(validation)
    held = held[0] if isinstance(held, list) and held else held
    if not held:
        return
    other, _, other_split = str(held).partition("@")
    if other == path and other_split == split:
        draft.left[validation] = "validation on the rows that are trained on measures memory: hold a split out"
        draft.todo.append("set [[data]] validation to held-out rows")
    elif other_split == "test" or "test" in Path(other).stem.split("_"):
        draft.left[validation] = "a checkpoint chosen on the test split spoils the test: hold a split out, or set"
        draft.left[validation] += " [[data]] validation and eval.allow_test_split = true"
        draft.todo.append("set [[data]] validation to held-out rows that are not the test split")
    elif other == path and other_split:
        draft.put("data.validation", other_split, validation)
    elif Path(other).suffix in (".parquet", ".jsonl", ".json", ".csv"):
        draft.put("data.validation", other, validation)
    else:
        draft.left[validation] = "validation rows are a split of the same dataset, or a table file"
        draft.todo.append("set [[data]] validation to a split of the same dataset, or to a table file")


def located(path: str) -> str:
    """A file or folder as it is; `org/name` that is none here as a hub name."""
    looks_like_hub = path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).suffix
    return f"hub:{path}" if looks_like_hub and not Path(path).exists() else path


def engine_of(draft: Draft, engine: str, parts: str) -> None:
    """rollout.engine, and how many cards hold one engine: a matter of the machine, taken over where it is written."""
    found, count = draft.get(engine), number(int, draft.get(parts), 2)
    if found == "vllm":
        draft.put("rollout.engine", "vllm", engine)
        if count:
            draft.put("rollout.tensor_parallel", count, parts)
        return
    draft.leave(engine, f"`{found}`: the engines here are torch and vllm")
    if count:
        draft.leave(parts, "the engine vllm alone is cut into parts (rollout.tensor_parallel)")


def dropped_rows(draft: Draft, longest: str, dropped: str) -> None:
    """The prompt limit; what happens to rows beyond it differs."""
    value = number(int, draft.get(longest), 1)
    if value is None:
        return
    quietly = draft.get(dropped)
    why = "longer rows are an error of `vlmrl check`, with their number; "
    draft.put("rollout.max_prompt_tokens", value, longest,
              why=why + ("there they are dropped without a word" if quietly else "there they are cut"))  # fmt: skip


def steps_of(draft: Draft, rows: int | None, most: str, epochs: str) -> None:
    """train.steps: as written, or from epochs where the number of rows is known."""
    steps, prompts = number(int, draft.get(most), 1), draft.taken.get("rollout.prompts_per_step")
    passes = draft.get(epochs)
    if steps:
        draft.put("train.steps", steps, most)
        draft.leave(epochs, f"{most} decides")
    elif rows and prompts and isinstance(passes, (int, float)):
        why = f"{passes:g} passes over {rows} rows at {prompts.value} prompts a step"
        draft.put("train.steps", max(1, math.floor(rows / prompts.value) * int(passes)), epochs, why=why)
    elif passes:
        draft.left[epochs] = "a run is as long as train.steps says"
        draft.todo.append(
            f"set train.steps: {passes:g} passes are {passes:g} x rows / prompts_per_step (--rows N works it out)"
        )


def schedule_keys(draft: Draft, kind: str, warmup: str, ratio: str, lowest: str) -> None:
    """The learning rate's shape and warm-up. A ratio becomes steps where the number of steps is known."""
    shape = draft.get(kind)
    if shape in SCHEDULES:
        draft.put("optim.schedule", SCHEDULES[shape], kind)
    elif shape is not None:
        draft.left[kind] = f"`{shape}` has no counterpart: constant, linear or cosine"
    steps, share = number(int, draft.get(warmup), 0), draft.get(ratio)
    total = draft.taken.get("train.steps")
    later = "the first step has lr / warmup_steps, never 0"
    if steps:
        draft.put("optim.warmup_steps", steps, warmup, why=later)
    elif isinstance(share, (int, float)) and share > 0:
        if total is None:
            draft.left[ratio] = "a warm-up is given in steps (optim.warmup_steps)"
            draft.todo.append(f"set optim.warmup_steps to {share:g} of train.steps")
        else:
            draft.put(
                "optim.warmup_steps", math.ceil(share * total.value), ratio, why=f"{share:g} of train.steps; {later}"
            )
    floor: Any = draft.get(lowest)
    if isinstance(floor, (int, float)) and floor > 0 and draft.taken.get("optim.schedule") is not None:
        draft.put("optim.min_lr_ratio", float(floor), lowest)
