"""What the imports from EasyR1, verl and TRL have in common: a function for each thing that two or all of them set."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmrl.recipe.import_draft import Draft, number

SCHEDULES = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}  # fmt: skip
DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"}


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


def filtered_sampling(draft: Draft, top_p: str, top_k: str) -> None:
    """rollout.top_p and rollout.top_k where they are on, with the permission that they need here."""
    p, k = number(float, draft.get(top_p)), number(int, draft.get(top_k), 1)
    sources = []
    if p is not None and p < 1:
        draft.put("rollout.top_p", p, top_p)
        sources.append(top_p)
    if k is not None:
        draft.put("rollout.top_k", k, top_k)
        sources.append(top_k)
    if sources:
        why = "what is sampled is then not the policy that is trained: no importance correction holds"
        draft.put("rollout.allow_filtered_sampling", True, *sources, why=why)


def step_size(draft: Draft, key: str, why: str) -> None:
    """rollout.prompts_per_step as it is written; 0 stands for "as they come" and is left, with `why`."""
    if draft.given.get(key) == 0:
        draft.taken.pop("rollout.prompts_per_step", None)
        draft.leave(key, why)
        draft.todo.append("set rollout.prompts_per_step: the configuration has no size of a step")


def updates_of(draft: Draft, prompts: str, batch: str) -> None:
    """train.updates_per_step of a system whose two batch sizes count prompts."""
    drawn, each = draft.get(prompts), draft.get(batch)
    if isinstance(drawn, int) and isinstance(each, int) and each > 0:
        name = batch.rpartition(".")[2]
        why = f"{drawn} prompts a step in updates of {each} prompts each ({name} counts prompts there)"
        draft.put("train.updates_per_step", max(1, drawn // each), batch, why=why)


def chosen(draft: Draft, key: str, found: Any, table: Mapping[str, Mapping[str, Any]]) -> None:
    """The cells of `[algo]` that `found`, the value of `key`, stands for in a table; without a row there it is left."""
    if found not in table:
        draft.left[key] = f"`{found}` has no counterpart: choose a row of `vlmrl recipe list --algos`"
    for cell, value in table.get(found, {}).items():
        draft.put(cell, value, key)


def discounts(draft: Draft, estimator: Any) -> None:
    """algo.gamma and algo.gae_lambda, of the estimators that have returns token by token."""
    if estimator in ("gae", "reinforce_plus_plus") and draft.written("algorithm.gamma"):
        draft.put("algo.gamma", float(draft.get("algorithm.gamma")), "algorithm.gamma")
    if estimator == "gae" and draft.written("algorithm.lam"):
        draft.put("algo.gae_lambda", float(draft.get("algorithm.lam")), "algorithm.lam")


def spread_filter(draft: Draft, on: str, tries: str, why: str) -> None:
    """algo.filter and the most draws under it. `why`: what it goes by there."""
    if draft.get(on):
        draft.put("algo.filter", "spread", on, why=f"prompts whose scores are all equal are drawn anew{why}")
        if (most := number(int, draft.get(tries), 1)) is not None:
            draft.put("algo.filter_tries", most, tries)


def betas_of(draft: Draft, key: str) -> None:
    found = draft.get(key)
    if isinstance(found, list) and len(found) == 2:
        for name, value in zip(("beta1", "beta2"), found, strict=True):
            draft.put(f"optim.{name}", float(value), key)


def adapter(draft: Draft, rank: str, alpha: str, targets: str, exclude: str) -> None:
    """The `[lora]` table, where the rank is above 0. Targets: a list, names with commas, or all-linear."""
    if (size := number(int, draft.get(rank), 1)) is None:
        for key in (alpha, targets, exclude):
            draft.leave(key, "no adapter: its rank is 0")
        return
    draft.put("lora.rank", size, rank)
    draft.put("lora.alpha", int(draft.get(alpha)), alpha)
    found = draft.get(targets)
    if isinstance(found, str) and found != "all-linear" and re.fullmatch(r"[\w.]+(?: *, *[\w.]+)*", found):
        found = [name.strip() for name in found.split(",")]
    if isinstance(found, list) or found == "all-linear":
        draft.put("lora.targets", found, targets)
    else:
        draft.leave(targets, "layers are named by the last parts of their names (lora.targets)")
    draft.leave(exclude, "the vision tower has no adapter unless lora.vision = true; see lora.exclude")


def frozen_tower(draft: Draft, key: str) -> None:
    if draft.get(key):
        draft.put("model.freeze", ["vision", "connector"], key, why="the tower with its merger, as there")


def sharding(draft: Draft, size: str, offload: str, dtype: str) -> None:
    """Processes that hold one model, weights in main memory between their uses, and the type of the arithmetic."""
    if (processes := number(int, draft.get(size), 1)) is not None:
        draft.put("parallel.shard_size", processes, size)
    if draft.get(offload) is True:
        draft.put("parallel.offload", True, offload)
    arithmetic(draft, dtype)


def arithmetic(draft: Draft, key: str) -> None:
    """model.dtype, where the type is written."""
    found = draft.get(key)
    if isinstance(found, str) and found.removeprefix("torch.") in DTYPES:
        draft.put("model.dtype", DTYPES[found.removeprefix("torch.")], key)
    else:
        draft.leave(key, "arithmetic is in bfloat16 or float32 (model.dtype)")


def thinking(draft: Draft, key: str) -> None:
    """model.thinking, where the chat template is given its switch."""
    if isinstance(on := draft.get(key), bool):
        draft.put("model.thinking", "on" if on else "off", key)


def trainer_of(draft: Draft, validation: str, keep: str) -> None:
    """The `trainer` table of EasyR1 and verl: cadence, checkpoints, names. `validation`, `keep`: what differs."""
    for source, key in ((validation, "eval.every_steps"), ("trainer.save_freq", "checkpoint.every_steps")):
        every = number(int, draft.get(source), 1)
        why = "" if every else "off there; here 0: at the end, and validation at step 0"
        draft.put(key, every or 0, source, why=why)
    if (newest := number(int, draft.get(keep), 1)) is not None:
        draft.put("checkpoint.keep_last", newest, keep, why="the best one is kept besides")
    for key, flag in (("trainer.n_gpus_per_node", "--gpus"), ("trainer.experiment_name", "--name")):
        if value := draft.get(key):
            draft.left[key] = f"on the command line: vlmrl train RECIPE {flag} {value}"
    loggers = draft.get("trainer.logger")
    if isinstance(loggers, list) and "tensorboard" in loggers:
        draft.put("log.sinks", ["tensorboard"], "trainer.logger")
    else:
        draft.leave("trainer.logger", "metrics.jsonl is always written; tensorboard is the one sink (log.sinks)")


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
    elif rows and prompts and prompts.value and isinstance(passes, (int, float)):
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
    steps, share = draft.get(warmup), draft.get(ratio)
    if isinstance(steps, float) and 0 < steps < 1:  # transformers 5 has one setting for both
        share, ratio = steps, warmup
    steps = number(int, steps, 1)
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
