"""EasyR1's configuration (`examples/config.yaml`, dotlist overrides, launch scripts) as a recipe.

Source: EasyR1 at b44b311 (github.com/hiyouga/EasyR1, verl/trainer/config.py and its modules), and the snapshot of it in
TaxonRL (github.com/max-vkl/TaxonRL at f4b80ac).
"""

from __future__ import annotations

from typing import Any

from vlmrl.recipe.imports.draft import KL_NAMES, Draft, of_engine

ACTOR = "worker.actor"
DEFAULTS: dict[str, Any] = {
    "data.prompt_key": "prompt",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.rollout_batch_size": 512,
    "data.seed": 1,
    "data.min_pixels": 262_144,
    "data.max_pixels": 4_194_304,
    "data.filter_overlong_prompts": True,
    "algorithm.adv_estimator": "grpo",
    "algorithm.disable_kl": False,
    "algorithm.use_kl_loss": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_coef": 1e-3,
    "algorithm.kl_type": "fixed",
    "worker.actor.global_batch_size": 256,
    "worker.actor.max_grad_norm": 1.0,
    "worker.actor.clip_ratio_low": 0.2,
    "worker.actor.clip_ratio_high": 0.3,
    "worker.actor.clip_ratio_dual": 3.0,
    "worker.actor.loss_avg_mode": "token",
    "worker.actor.model.enable_gradient_checkpointing": True,
    "worker.actor.optim.lr": 1e-6,
    "worker.actor.optim.weight_decay": 1e-2,
    "worker.rollout.name": "vllm",
    "worker.rollout.n": 1,
    "worker.rollout.temperature": 1.0,
    "worker.actor.model.lora.alpha": 64,
    "trainer.total_epochs": 15,
    "trainer.val_freq": -1,
    "trainer.save_freq": -1,
    "trainer.save_limit": -1,
}
"""Defaults of EasyR1 for the settings that are taken over, used if a configuration does not write them."""
EXAMPLE: dict[str, Any] = {
    "data.prompt_key": "problem",
    "data.max_prompt_length": 2048,
    "data.max_response_length": 2048,
    "algorithm.use_kl_loss": True,
    "algorithm.kl_penalty": "low_var_kl",
    "algorithm.kl_coef": 1e-2,
    "worker.actor.global_batch_size": 128,
    "worker.rollout.n": 5,
    "trainer.val_freq": 5,
    "trainer.save_freq": 30,
    "trainer.save_limit": 3,
}
"""Values of `examples/config.yaml` that differ from `DEFAULTS`."""
SAME = {
    "worker.actor.model.model_path": "model.path",
    "worker.actor.model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    "worker.actor.model.trust_remote_code": "model.trust_remote_code",
    "data.min_pixels": "model.min_pixels",
    "data.max_pixels": "model.max_pixels",
    "data.image_dir": "data.images_root",
    "data.rollout_batch_size": "rollout.prompts_per_step",
    "worker.rollout.n": "rollout.samples_per_prompt",
    "worker.rollout.temperature": "rollout.temperature",
    "data.max_response_length": "rollout.max_new_tokens",
    "data.seed": "train.seed",
    "worker.actor.max_grad_norm": "optim.max_grad_norm",
    "worker.actor.optim.lr": "optim.lr",
    "worker.actor.optim.weight_decay": "optim.weight_decay",
    "worker.actor.clip_ratio_low": "algo.clip_low",
    "worker.actor.clip_ratio_high": "algo.clip_high",
    "worker.actor.clip_ratio_dual": "algo.dual_clip",
    "algorithm.kl_target": "algo.kl_target",
    "algorithm.kl_horizon": "algo.kl_horizon",
    "worker.actor.tau_positive": "algo.tau_positive",
    "worker.actor.tau_negative": "algo.tau_negative",
}
"""Settings with the same meaning: EasyR1's key -> recipe key."""
ADVANTAGES = {
    "grpo": {},
    "rloo": {"algo.advantage": "leave_one_out"},
    "remax": {"algo.advantage": "greedy"},
    "reinforce_plus_plus": {"algo.advantage": "none", "algo.scale": "tokens"},
    "gae": {"algo.advantage": "gae", "algo.scale": "tokens"},
    "grpo_passk": {"algo.advantage": "best_of_group", "algo.scale": "group"},
}
LOSSES = {
    "default": {},
    "gspo": {"algo.ratio": "sequence"},
    "gspo_token": {"algo.ratio": "sequence_token"},
    "cispo": {"algo.surrogate": "cispo"},
    "sapo": {"algo.surrogate": "sapo"},
}
LEFT = {
    "data.format_prompt": "see data.prompt",
    "data.val_batch_size": "validation is batched by rollout.batch_tokens",
    "data.mini_rollout_batch_size": "with a filter, as many prompts as are missing are drawn again",
    "data.shuffle": "rows are always shuffled, by train.seed",
    "data.filter_overlong_prompts_workers": "`vlmrl check` looks at the rows",
    "data.video_key": "videos are not read",
    "data.video_fps": "videos are not read",
    "data.override_chat_template": "the chat template is chat_template.jinja in the model folder",
    "algorithm.filter_key": "the filter uses the whole score",
    "algorithm.filter_low": "the filter keeps prompts whose scores differ (algo.min_spread), whatever their mean",
    "algorithm.filter_high": "the filter keeps prompts whose scores differ (algo.min_spread), whatever their mean",
    "algorithm.gamma": "taken over only with gae and reinforce_plus_plus",
    "algorithm.lam": "taken over only with gae",
    "worker.actor.ppo_epochs": "each batch of rollouts is used once, in train.updates_per_step updates",
    "worker.actor.micro_batch_size_per_device_for_update": "rows are packed up to train.tokens_per_row; results do not"
    " depend on it",
    "worker.actor.micro_batch_size_per_device_for_experience": "the update computes the old log-probs itself",
    "worker.actor.padding_free": "rows are always packed without padding",
    "worker.actor.dynamic_batching": "rows are always packed up to train.tokens_per_row",
    "worker.actor.ulysses_size": "there is no sequence parallelism",
    "worker.actor.use_torch_compile": "model.compile does this, off by default",
    "worker.actor.model.tokenizer_path": "the tokenizer is that of the model folder",
    "worker.actor.model.override_config": "the model's configuration is that of its folder",
    "worker.actor.optim.lr_warmup_ratio": "see optim.warmup_steps",
    "worker.actor.fsdp.": "sharding follows from --gpus; parallel.offload and parallel.shard_size change it",
    "worker.actor.offload.": "there they are moved once per phase; parallel.offload moves them between all uses",
    "worker.critic.": "the critic is a head on the policy (algo.advantage = gae)",
    "worker.ref.": "the reference is loaded if algo.kl_coef is above 0, in the same way as the policy",
    "worker.rollout.val_override_config.": "validation is greedy: sampling makes the best checkpoint a matter of luck",
    "worker.rollout.seed": "each sample has a seed of its own, from train.seed, step and prompt",
    **of_engine("worker.rollout"),
    "worker.reward.reward_type": "recognised by the function's parameters (reward.style)",
    "trainer.nnodes": "see `vlmrl launch slurm`",
    "trainer.max_try_make_batch": "no filter is on, so nothing is drawn again",
    "trainer.val_only": "use `vlmrl eval`",
    "trainer.val_generations_to_log": "every response of a validation is kept",
    "trainer.save_model_only": "a checkpoint always has weights, moments and state",
    "trainer.save_checkpoint_path": "checkpoints are in the run's folder (--runs)",
    "trainer.find_last_checkpoint": "a run is continued with --resume RUN, never by itself",
    "trainer.critic_warmup": "the critic is trained from the first step on",
}


def from_easyr1(draft: Draft) -> None:
    """Fill a draft from EasyR1's settings."""
    if (config := draft.given.pop("__config__", None)) and str(config).endswith("config.yaml"):
        draft.defaults = DEFAULTS | EXAMPLE
        draft.todo.append(f"compare with {config}, which was not found: the values of EasyR1's own example were taken")
    draft.put("algo.name", "easyr1", "algorithm.adv_estimator")
    draft.same(SAME)
    draft.data_source("data.train_files", "data.val_files")
    draft.columns_and_prompt()
    draft.longest_prompt()
    _kl(draft)
    _algorithm(draft)
    draft.engine_of("worker.rollout.name", "worker.rollout.tensor_parallel_size")
    draft.filtered_sampling("worker.rollout.top_p", "worker.rollout.top_k")
    draft.updates_of("data.rollout_batch_size", "worker.actor.global_batch_size")
    draft.sharding(f"{ACTOR}.fsdp.fsdp_size", f"{ACTOR}.fsdp.enable_cpu_offload", f"{ACTOR}.fsdp.mp_param_dtype")
    _optimizer(draft)
    draft.reward_of("worker.reward")
    draft.trainer_of("trainer.val_freq", "trainer.save_limit")
    if draft.get("trainer.load_checkpoint_path"):
        why = "to continue a run: vlmrl train --resume RUN, which fails if there is no such run"
        draft.left["trainer.load_checkpoint_path"] = why
    lora = f"{ACTOR}.model.lora"
    draft.adapter(f"{lora}.rank", f"{lora}.alpha", f"{lora}.target_modules", f"{lora}.exclude_modules")
    draft.frozen_tower(f"{ACTOR}.model.freeze_vision_tower")
    draft.leave_all(LEFT)


def _kl(draft: Draft) -> None:
    if draft.get("algorithm.disable_kl"):
        draft.put("algo.kl_coef", 0.0, "algorithm.disable_kl")
        for key in ("algorithm.use_kl_loss", "algorithm.kl_penalty", "algorithm.kl_coef", "algorithm.kl_type"):
            draft.leave(key, "no KL: algorithm.disable_kl")
        return
    kind = draft.get("algorithm.kl_penalty")
    estimator = KL_NAMES.get(kind, "low_var_kl")
    why = "" if kind == estimator else f"the same estimator; its name here is {estimator}"
    draft.put("algo.kl", estimator, "algorithm.kl_penalty", why=why)
    draft.put("algo.kl_in", "loss" if draft.get("algorithm.use_kl_loss") else "reward", "algorithm.use_kl_loss")
    draft.put("algo.kl_coef", float(draft.get("algorithm.kl_coef")), "algorithm.kl_coef")
    if draft.get("algorithm.kl_type") != "adaptive":
        for name in ("kl_target", "kl_horizon"):
            draft.taken.pop(f"algo.{name}", None)
            draft.leave(f"algorithm.{name}", "the coefficient is fixed (algorithm.kl_type)")


def _algorithm(draft: Draft) -> None:
    estimator, loss = draft.get("algorithm.adv_estimator"), draft.get("worker.actor.loss_type") or "default"
    draft.chosen("algorithm.adv_estimator", estimator, ADVANTAGES)
    draft.chosen("worker.actor.loss_type", loss, LOSSES)
    draft.discounts(estimator)
    if loss == "cispo" and draft.taken["algo.clip_low"].value == 0:
        why = "practically 0: the ratio is at least 1, as there; the paper has no lower bound (algo.name = cispo)"
        draft.put("algo.clip_low", 1e-6, "worker.actor.clip_ratio_low", why=why)
    mode = draft.get("worker.actor.loss_avg_mode")
    if mode == "seq":
        why = "a true mean over responses; there, uneven microbatches turn it into a mean over tokens"
        draft.put("algo.aggregation", "sequence_mean", "worker.actor.loss_avg_mode", why=why)
    draft.spread_filter(
        "algorithm.online_filtering",
        "trainer.max_try_make_batch",
        "; there, prompts whose mean is beyond filter_low or filter_high",
    )


def _optimizer(draft: Draft) -> None:
    draft.betas_of("worker.actor.optim.betas")
    if draft.get("worker.actor.optim.strategy") == "adamw_bf16":
        draft.put("optim.name", "adamw_bf16_kahan", "worker.actor.optim.strategy")
    draft.steps_of("trainer.max_steps")
    names = ("lr_scheduler_type", "lr_warmup_steps", "lr_warmup_ratio", "min_lr_ratio")
    draft.schedule_keys(*(f"{ACTOR}.optim.{name}" for name in names))
    draft.leave("worker.actor.optim.warmup_style", "not used there either")
