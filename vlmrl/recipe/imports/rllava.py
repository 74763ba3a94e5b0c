"""RLLaVA's configuration as a recipe.

It is OmegaConf YAML, or a launch script of `rllava.train.pipeline.*`.

Source: RLLaVA at 4753d4a (github.com/TinyLoopX/RLLaVA: rllava/ppo/config.py, rllava/data/config.py,
rllava/model/config.py, rllava/utils/config.py, rllava/ppo/plugins). It is derived from verl and EasyR1: advantages,
losses and the KL are those of verl, rewards and templates those of EasyR1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmrl.errors import RecipeError
from vlmrl.recipe.imports.draft import Draft, number
from vlmrl.recipe.imports.rllava_keys import EXAMPLES, LEFT, MIXED_LOSSES, SAME
from vlmrl.recipe.imports.shared import (
    betas_of,
    chosen,
    clip_of_one,
    columns_and_prompt,
    data_source,
    discounts,
    dropped_rows,
    engine_of,
    filtered_sampling,
    kl_of,
    reward_of,
    sharding,
    spread_filter,
    trainer_of,
    updates_of,
)
from vlmrl.recipe.imports.steps import schedule_keys, steps_of
from vlmrl.recipe.imports.verl import ADVANTAGES, AGGREGATIONS, LOSSES, NUMBERS

DEFAULTS: dict[str, Any] = {
    "data.prompt_key": "prompt",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 512,
    "data.seed": 1,
    "data.min_pixels": 3136,
    "data.max_pixels": 4_194_304,
    "data.filter_overlong_prompts": True,
    "algorithm.adv_estimator": "grpo",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_loss": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 1e-3,
    "algorithm.online_filtering": False,
    "actor.ppo_mini_batch_size": 256,
    "actor.max_grad_norm": 1.0,
    "actor.clip_ratio_low": 0.2,
    "actor.clip_ratio_high": 0.2,
    "actor.clip_ratio_c": 3.0,
    "actor.loss_agg_mode": "token-mean",
    "actor.entropy_coeff": 0.0,
    "actor.kl_loss_coef": 0.01,
    "actor.kl_loss_type": "low_var_kl",
    "actor.policy_loss.loss_mode": "vanilla",
    "actor.policy_loss.clip_cov_ratio": 2e-4,
    "actor.policy_loss.clip_cov_lb": 1.0,
    "actor.policy_loss.clip_cov_ub": 5.0,
    "actor.policy_loss.kl_cov_ratio": 2e-4,
    "actor.policy_loss.ppo_kl_coef": 0.1,
    "actor.model.enable_gradient_checkpointing": True,
    "actor.model.lora_r": 128,
    "actor.model.lora_alpha": 256,
    "actor.optim.lr": 1e-6,
    "actor.optim.weight_decay": 1e-2,
    "actor.optim.strategy": "adamw",
    "rollout.name": "vllm",
    "rollout.n": 1,
    "rollout.temperature": 1.0,
    "trainer.total_epochs": 15,
    "trainer.val_freq": -1,
    "trainer.save_freq": -1,
    "trainer.save_limit": -1,
    "trainer.max_try_make_batch": 20,
}
"""Defaults of RLLaVA for the settings that are taken over, used if a configuration does not write them."""


def from_rllava(draft: Draft, base: Path, rows: int | None, processes: int | None) -> None:
    """Fill a draft from RLLaVA's settings. `base`: folder of the imported file. Others: see `run.import_recipe`."""
    program = str(draft.given.pop("__program__", "")).rpartition(".")[2]
    if program == "py":
        raise RecipeError("scripts of TinyLLaVA's training are not imported", hint="write a recipe for `vlmrl sft`")
    config = Path(str(draft.given.pop("__config__", ""))).name
    if config in EXAMPLES:
        draft.defaults = DEFAULTS | EXAMPLES[config]
        draft.todo.append(
            f"compare with {config}, which was not found: the values of RLLaVA's own example of that name were taken"
        )
    elif config:
        draft.todo.append(f"compare with {config}, which was not found: RLLaVA's defaults were taken")
    _pipeline(draft, program)
    draft.same(SAME)
    _data(draft)
    kl_of(draft, "algorithm.use_kl_loss", ("actor.kl_loss_coef", "actor.kl_loss_type"), "algorithm.use_kl_in_reward")
    _algorithm(draft)
    _engine(draft)
    _optimizer(draft, rows)
    _reward(draft)
    trainer_of(draft, "trainer.val_freq", "trainer.save_limit")
    _processes(draft)
    if program == "sft":
        _only_supervised(draft)
    _leave_rest(draft)


def _pipeline(draft: Draft, program: str) -> None:
    """Set the kind of training according to the program: supervised for `sft`, else reinforcement learning."""
    if program == "sft":
        draft.put("kind", "sft", "data.train_files", why="the program is rllava.train.pipeline.sft: use `vlmrl sft`")
        return
    draft.put("algo.name", "grpo", "algorithm.adv_estimator")
    if program == "agentic" or (
        number(int, draft.get("rollout.max_turns"), 2) and draft.get("rollout.env_config_path")
    ):
        for key in ("rollout.env_config_path", "rollout.max_turns"):
            draft.leave(key, "an episode has one turn here")
        draft.todo.append("the configuration is for several turns with tools; the recipe is for one turn")
    if draft.written("mix_sampler.sft_dataset.path"):
        draft.todo.append("the configuration mixes in supervised rows; the recipe does not: run `vlmrl sft` first")


def _data(draft: Draft) -> None:
    for key in ("data.train_files", "data.val_files"):
        files = draft.get(key)
        if isinstance(files, str) and "," in files:
            draft.given[key] = [part.strip() for part in files.split(",") if part.strip()]
    data_source(draft, "data.train_files", "data.val_files")
    if draft.get("data.answer_key") == "reward_model":
        del draft.given["data.answer_key"]
        draft.left["data.answer_key"] = "`reward_model` is verl's spelling, which is recognised"
    columns_and_prompt(draft)
    if target := draft.get("data.dataset_kwargs.target_key"):
        draft.left["data.dataset_kwargs.target_key"] = (
            f"the demonstrations in the column `{target}` are for `vlmrl sft`"
        )
    dropped_rows(draft, "data.max_prompt_length", "data.filter_overlong_prompts")


def _algorithm(draft: Draft) -> None:
    estimator, loss = draft.get("algorithm.adv_estimator"), draft.get("actor.policy_loss.loss_mode")
    chosen(draft, "algorithm.adv_estimator", estimator, ADVANTAGES)
    if loss in MIXED_LOSSES:
        draft.left["actor.policy_loss.loss_mode"] = f"`{loss}` mixes demonstrations into the samples: no counterpart"
        draft.todo.append(f"the loss {loss} also learns from demonstrations; the recipe learns only from samples")
    else:
        chosen(draft, "actor.policy_loss.loss_mode", loss, LOSSES)
    if estimator == "grpo" and not draft.get("algorithm.norm_adv_by_std_in_grpo"):
        draft.put("algo.advantage", "group_mean", "algorithm.norm_adv_by_std_in_grpo")
    discounts(draft, estimator)
    for name, cell in NUMBERS.get(str(loss), {}).items():
        draft.put(f"algo.{cell}", float(draft.get(f"actor.{name}")), f"actor.{name}")
    clip_of_one(draft, loss, "actor.policy_loss.loss_mode")
    mode = draft.get("actor.loss_agg_mode")
    if "algo.aggregation" in LOSSES.get(str(loss), {}):
        draft.leave("actor.loss_agg_mode", f"the loss {loss} takes the mean of each response first, as there")
    elif mode in AGGREGATIONS:
        name, why = AGGREGATIONS[mode]
        uneven = "one denominator for a whole update; there, one for each microbatch"
        draft.put("algo.aggregation", name, "actor.loss_agg_mode", why="; ".join(filter(None, (why, uneven))))
    else:
        draft.leave("actor.loss_agg_mode", f"`{mode}` has no counterpart: choose token_mean, sequence_mean or constant")
    spread_filter(
        draft,
        "algorithm.online_filtering",
        "trainer.max_try_make_batch",
        "; there, prompts whose mean is beyond filter_low or filter_high",
    )


def _engine(draft: Draft) -> None:
    engine_of(draft, "rollout.name", "rollout.tensor_parallel_size")
    filtered_sampling(draft, "rollout.top_p", "rollout.top_k")
    updates_of(draft, "data.train_batch_size", "actor.ppo_mini_batch_size")
    if draft.get("actor.loss_remove_clip") is True and draft.taken["train.updates_per_step"].value > 1:
        why = "there the ratio of later updates is not clipped; here it is, by algo.clip_low and algo.clip_high"
        draft.left["actor.loss_remove_clip"] = why
    sharding(draft, "actor.fsdp.fsdp_size", "actor.fsdp.offload_params", "actor.model.torch_dtype")


def _optimizer(draft: Draft, rows: int | None) -> None:
    betas_of(draft, "actor.optim.betas")
    if draft.get("actor.optim.strategy") == "adamw_bf16":
        draft.put("optim.name", "adamw_bf16_kahan", "actor.optim.strategy")
    steps_of(draft, rows, "trainer.max_steps", "trainer.total_epochs")
    schedule_keys(
        draft,
        "actor.optim.warmup_style",
        "actor.optim.lr_warmup_steps",
        "actor.optim.lr_warmup_ratio",
        "actor.optim.min_lr_ratio",
    )
    draft.leave("actor.optim.lr_scheduler_type", "not used there either: warmup_style is")
    draft.leave("actor.optim.num_cycles", "a cosine falls once, over the whole run")
    if draft.get("actor.model.use_peft"):
        draft.put("lora.rank", int(draft.get("actor.model.lora_r")), "actor.model.lora_r")
        draft.put("lora.alpha", int(draft.get("actor.model.lora_alpha")), "actor.model.lora_alpha")
        if any(draft.get(f"actor.model.{name}") for name in ("use_rslora", "lora_use_rslora")):
            draft.put("lora.rslora", True, "actor.model.use_rslora")


def _reward(draft: Draft) -> None:
    if draft.get("reward.reward_type") == "env":
        draft.leave("reward.reward_type", "here a reward is a function of the response, not of an environment")
        draft.todo.append("name a reward: [reward] name (the configuration takes it from an environment)")
    else:
        reward_of(draft, "reward")


def _processes(draft: Draft) -> None:
    """Record the number of processes, torchrun's `nproc_per_node`. RLLaVA does not read `trainer.n_gpus_per_node`."""
    if count := draft.get("nproc_per_node"):
        draft.left["nproc_per_node"] = f"on the command line: vlmrl train RECIPE --gpus {count}"
        if draft.written("trainer.n_gpus_per_node"):
            draft.left["trainer.n_gpus_per_node"] = "not read there either: nproc_per_node is"


def _only_supervised(draft: Draft) -> None:
    """Replace prompts per step by rows per step, and remove the keys of sampling and rewards."""
    rows = draft.taken.pop("rollout.prompts_per_step", None)
    if rows is not None:
        draft.put("train.rows_per_step", rows.value, "data.train_batch_size")
    for key in [k for k in draft.taken if k.startswith(("algo.", "reward.")) or k in _SAMPLING]:
        del draft.taken[key]
    column = draft.get("data.dataset_kwargs.target_key") or draft.get("data.answer_key") or "answer"
    columns = draft.taken.get("data.columns")
    draft.put("data.columns", {**(columns.value if columns else {}), "response": str(column)}, "data.answer_key")


_SAMPLING = (
    "rollout.samples_per_prompt",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.top_k",
    "rollout.engine",
    "rollout.allow_filtered_sampling",
    "rollout.tensor_parallel",
    "train.updates_per_step",
)


def _leave_rest(draft: Draft) -> None:
    """Leave out all remaining settings. A name that ends with `_` means all names that begin with it."""
    prefixes = {key: why for key, why in LEFT.items() if key.endswith("_")}
    for start, why in prefixes.items():
        for key in [k for k in draft.given if k.startswith(start) and k not in draft.used]:
            draft.leave(key, why)
    if not draft.get("actor.model.use_peft"):
        names = ("actor.model.lora_", "actor.model.use_rslora")
        for key in [k for k in draft.given if k.startswith(names)]:
            draft.leave(key, "no adapter: use_peft is off")
    draft.leave_all({key: why for key, why in LEFT.items() if key not in prefixes})
