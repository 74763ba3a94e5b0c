"""verl's configuration (Hydra YAML, overrides, launch scripts of `verl.trainer.main_ppo`) as a recipe.

Source: verl's trainer/config/ppo_trainer.yaml and the dataclasses behind it (github.com/verl-project/verl).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmrl.recipe.import_draft import Draft, number
from vlmrl.recipe.import_shared import data_source, dropped_rows, engine_of, schedule_keys, steps_of

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
DEFAULTS: dict[str, Any] = {
    "data.prompt_key": "prompt", "data.max_prompt_length": 512, "data.max_response_length": 512,
    "data.train_batch_size": 1024, "data.filter_overlong_prompts": False,
    "algorithm.adv_estimator": "gae", "algorithm.use_kl_in_reward": False, "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed", "algorithm.kl_ctrl.kl_coef": 1e-3, "algorithm.norm_adv_by_std_in_grpo": True,
    f"{ACTOR}.ppo_mini_batch_size": 256, f"{ACTOR}.clip_ratio": 0.2, f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.loss_agg_mode": "token-mean", f"{ACTOR}.entropy_coeff": 0.0, f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 1e-3, f"{ACTOR}.kl_loss_type": "low_var_kl", f"{ACTOR}.grad_clip": 1.0,
    f"{ACTOR}.optim.lr": 1e-6, f"{ACTOR}.optim.weight_decay": 1e-2, f"{MODEL}.enable_gradient_checkpointing": True,
    f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.n": 1, f"{ROLLOUT}.temperature": 1.0,
    "trainer.total_epochs": 30, "trainer.test_freq": -1, "trainer.save_freq": -1,
}  # fmt: skip
"""What verl does where nothing is written, of the keys that are taken over."""
SAME = {
    f"{MODEL}.path": "model.path",
    f"{MODEL}.enable_gradient_checkpointing": "model.gradient_checkpointing",
    f"{MODEL}.trust_remote_code": "model.trust_remote_code",
    "data.train_batch_size": "rollout.prompts_per_step",
    f"{ROLLOUT}.n": "rollout.samples_per_prompt",
    f"{ROLLOUT}.temperature": "rollout.temperature",
    "data.max_response_length": "rollout.max_new_tokens",
    "data.seed": "train.seed",
    f"{ACTOR}.grad_clip": "optim.max_grad_norm",
    f"{ACTOR}.optim.lr": "optim.lr",
    f"{ACTOR}.optim.weight_decay": "optim.weight_decay",
    f"{ACTOR}.clip_ratio_c": "algo.dual_clip",
    f"{ACTOR}.entropy_coeff": "algo.entropy_coef",
    "custom_reward_function.reward_kwargs": "reward.args",
}
ADVANTAGES = {
    "grpo": {}, "gae": {"algo.advantage": "gae", "algo.scale": "tokens"}, "rloo": {"algo.advantage": "leave_one_out"},
    "remax": {"algo.advantage": "greedy"}, "opo": {"algo.advantage": "length_weighted"},
    "reinforce_plus_plus": {"algo.advantage": "none", "algo.scale": "tokens"},
    "reinforce_plus_plus_baseline": {"algo.advantage": "group_mean", "algo.scale": "tokens"},
    "grpo_passk": {"algo.advantage": "best_of_group", "algo.scale": "group"},
    "gpg": {"algo.advantage": "group_mean", "algo.scale": "alive"},
}  # fmt: skip
LOSSES = {
    "vanilla": {}, "gspo": {"algo.ratio": "sequence_token"}, "gpg": {"algo.surrogate": "reinforce"},
    "clip_cov": {"algo.surrogate": "clip_cov"}, "kl_cov": {"algo.surrogate": "kl_cov"},
    "geo_mean": {"algo.surrogate": "gmpo"}, "sapo": {"algo.surrogate": "sapo"}, "cispo": {"algo.surrogate": "cispo"},
}  # fmt: skip
AGGREGATIONS = {
    "token-mean": ("token_mean", ""),
    "seq-mean-token-mean": ("sequence_mean", ""),
    "seq-mean-token-sum-norm": ("constant", "sums over rollout.max_new_tokens, as Dr. GRPO"),
    "seq-mean-token-sum": (
        "constant",
        "sums over a constant, rollout.max_new_tokens: the same up to a factor of lr",
    ),
}
KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "low_var_kl", "k3": "low_var_kl",
      "full": "full"}  # fmt: skip
_NO_GRADIENT = {f"{kind}+": value for kind, value in KL.items()}
LEFT = {
    "data.val_batch_size": "validation is batched by rollout.batch_tokens",
    "data.gen_batch_size": "with a filter, what is missing is drawn anew, in the number that is missing",
    "data.shuffle": "rows are always shuffled, by train.seed",
    "data.truncation": "no prompt is ever cut",
    "data.return_raw_chat": "prompts are rendered by the model's chat template",
    "data.reward_fn_key": "the reward gets every column",
    "data.custom_cls.": "no code is loaded from a recipe but the reward",
    "data.": "tables are read as they are",
    "algorithm.gamma": "taken over with gae and reinforce_plus_plus alone",
    "algorithm.lam": "taken over with gae alone",
    "algorithm.filter_groups.": "the filter keeps prompts whose scores differ (algo.min_spread)",
    "algorithm.rollout_correction.": "see algo.importance",
    "algorithm.": "no counterpart is known",
    f"{ACTOR}.ppo_epochs": "each batch of rollouts is gone through once, in train.updates_per_step updates",
    f"{ACTOR}.ppo_micro_batch_size": "rows are packed up to train.tokens_per_row; results do not depend on it",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": "rows are packed up to train.tokens_per_row; results do not depend on it",
    f"{ACTOR}.ppo_max_token_len_per_gpu": "see train.tokens_per_row; a row holds a prompt once for all responses",
    f"{ACTOR}.use_dynamic_bsz": "rows are always packed up to train.tokens_per_row",
    f"{ACTOR}.shuffle": "updates take the groups in the order in which they were drawn",
    f"{ACTOR}.fsdp_config.": "sharding follows from --gpus; parallel.offload and parallel.shard_size change it",
    f"{ACTOR}.policy_loss.": "numbers of the loss: see algo.clip_* and algo.cov_*",
    f"{ACTOR}.": "no counterpart is known",
    "actor_rollout_ref.ref.": "the reference is loaded where algo.kl_coef is above 0, as the policy is",
    f"{ROLLOUT}.val_kwargs.": "validation is greedy: a sampled one makes the best checkpoint a matter of luck",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": "old log-probs are the update's own",
    f"{ROLLOUT}.": "the engine's own business: rollout.kv_cache_gib is what one may set",
    f"{MODEL}.": "no counterpart is known",
    "actor_rollout_ref.": "all processes do both: rollout.engine_gpus sets cards apart for generating",
    "critic.": "the critic is a head on the policy (algo.advantage = gae)",
    "reward_model.": "see [reward]",
    "reward.": "see [reward]",
    "custom_reward_function.": "see [reward]",
    "trainer.project_name": "no such service is written to",
    "trainer.nnodes": "see `vlmrl launch slurm`",
    "trainer.critic_warmup": "the critic learns from the first step on",
    "trainer.val_before_train": "validation at step 0 is always made",
    "trainer.resume_mode": "a run goes on with --resume RUN, never by itself",
    "trainer.default_local_dir": "checkpoints are in the run's folder (--runs)",
    "trainer.": "no counterpart is known",
    "ray_kwargs.": "there is no Ray here",
    "ray_init.": "there is no Ray here",
    "global_profiler.": "no counterpart is known",
    "hydra.": "settings of Hydra itself",
}  # fmt: skip


def from_verl(draft: Draft, base: Path, rows: int | None, processes: int | None) -> None:
    """Fill a draft from verl's settings. Args as `import_recipe.import_recipe`."""
    draft.get("__config__")
    draft.put("algo.name", "grpo", "algorithm.adv_estimator")
    draft.same(SAME)
    data_source(draft, "data.train_files", "data.val_files")
    if draft.written("data.prompt_key") and draft.get("data.prompt_key") not in ("prompt", "messages"):
        draft.put("data.columns", {"prompt": draft.get("data.prompt_key")}, "data.prompt_key")
    draft.leave("data.image_key", "the columns images and image are recognised; others: [[data]] columns")
    dropped_rows(draft, "data.max_prompt_length", "data.filter_overlong_prompts")
    _clips(draft)
    _kl(draft)
    _algorithm(draft)
    _engine(draft)
    _optimizer(draft, rows)
    _reward(draft)
    _trainer(draft)
    draft.leave_all(LEFT)


def _clips(draft: Draft) -> None:
    both = float(draft.get(f"{ACTOR}.clip_ratio"))
    for side in ("low", "high"):
        own = draft.get(f"{ACTOR}.clip_ratio_{side}")
        source = f"{ACTOR}.clip_ratio" if own is None else f"{ACTOR}.clip_ratio_{side}"
        draft.put(f"algo.clip_{side}", both if own is None else float(own), source)


def _kl(draft: Draft) -> None:
    in_loss, in_reward = draft.get(f"{ACTOR}.use_kl_loss"), draft.get("algorithm.use_kl_in_reward")
    loss_keys = (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type")
    reward_keys = ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", "algorithm.kl_ctrl.type",
                   "algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon")  # fmt: skip
    coef, kind = loss_keys if in_loss else reward_keys[:2]
    if not in_loss and not in_reward:
        draft.put("algo.kl_coef", 0.0, f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward")
        for key in (*loss_keys, *reward_keys):
            draft.leave(key, "the KL is off: use_kl_loss and use_kl_in_reward are false")
        return
    if in_loss and in_reward:
        draft.left["algorithm.use_kl_in_reward"] = (
            "the KL is in the loss or in the reward, not in both: the loss was taken"
        )
    name = draft.get(kind)
    found = KL.get(name) or _NO_GRADIENT.get(name, "low_var_kl")
    why = "" if found == name else f"the same estimator, whose name here is {found}"
    why = "its value as named; the gradient that the + stands for has no counterpart" if name in _NO_GRADIENT else why
    draft.put("algo.kl", found, kind, why=why)
    draft.put("algo.kl_in", "loss" if in_loss else "reward", f"{ACTOR}.use_kl_loss")
    draft.put("algo.kl_coef", float(draft.get(coef)), coef)
    if not in_loss and draft.get("algorithm.kl_ctrl.type") == "adaptive":
        draft.put(
            "algo.kl_target", float(draft.get("algorithm.kl_ctrl.target_kl") or 0.1), "algorithm.kl_ctrl.target_kl"
        )
        draft.put(
            "algo.kl_horizon", float(draft.get("algorithm.kl_ctrl.horizon") or 10_000), "algorithm.kl_ctrl.horizon"
        )


def _algorithm(draft: Draft) -> None:
    estimator, loss = draft.get("algorithm.adv_estimator"), draft.get(f"{ACTOR}.policy_loss.loss_mode") or "vanilla"
    if str(estimator).startswith("AdvantageEstimator."):
        estimator = str(estimator).partition(".")[2].lower()
    for found, table, key in (
        (estimator, ADVANTAGES, "algorithm.adv_estimator"), (loss, LOSSES, f"{ACTOR}.policy_loss.loss_mode"),
    ):  # fmt: skip
        if found not in table:
            draft.left[key] = f"`{found}` has no counterpart: choose a row of `vlmrl recipe list --algos`"
        for name, value in table.get(found, {}).items():
            draft.put(name, value, key)
    if estimator == "grpo" and not draft.get("algorithm.norm_adv_by_std_in_grpo"):
        draft.put("algo.advantage", "group_mean", "algorithm.norm_adv_by_std_in_grpo")
    if estimator in ("gae", "reinforce_plus_plus") and draft.written("algorithm.gamma"):
        draft.put("algo.gamma", float(draft.get("algorithm.gamma")), "algorithm.gamma")
    if estimator == "gae" and draft.written("algorithm.lam"):
        draft.put("algo.gae_lambda", float(draft.get("algorithm.lam")), "algorithm.lam")
    mode = draft.get(f"{ACTOR}.loss_agg_mode")
    if mode in AGGREGATIONS:
        name, why = AGGREGATIONS[mode]
        draft.put("algo.aggregation", name, f"{ACTOR}.loss_agg_mode", why=why)
    if draft.get("algorithm.filter_groups.enable"):
        why = "prompts whose scores are all equal are drawn anew, whatever metric was named"
        draft.put("algo.filter", "spread", "algorithm.filter_groups.enable", why=why)
        tries = number(int, draft.get("algorithm.filter_groups.max_num_gen_batches"), 1)
        if tries:
            draft.put("algo.filter_tries", tries, "algorithm.filter_groups.max_num_gen_batches")
    buffer = "reward_model.overlong_buffer"
    if draft.get(f"{buffer}.enable"):
        draft.put("algo.overlong_tokens", int(draft.get(f"{buffer}.len") or 0), f"{buffer}.len")
        draft.put(
            "algo.overlong_penalty", float(draft.get(f"{buffer}.penalty_factor") or 1.0), f"{buffer}.penalty_factor"
        )


def _engine(draft: Draft) -> None:
    engine_of(draft, f"{ROLLOUT}.name", f"{ROLLOUT}.tensor_model_parallel_size")
    top_p, top_k = draft.get(f"{ROLLOUT}.top_p"), draft.get(f"{ROLLOUT}.top_k")
    why = "what is sampled is then not the policy that is trained: no importance correction holds"
    if isinstance(top_p, (int, float)) and top_p < 1:
        draft.put("rollout.top_p", float(top_p), f"{ROLLOUT}.top_p")
        draft.put("rollout.allow_filtered_sampling", True, f"{ROLLOUT}.top_p", why=why)
    if isinstance(top_k, int) and top_k > 0:
        draft.put("rollout.top_k", top_k, f"{ROLLOUT}.top_k")
        draft.put("rollout.allow_filtered_sampling", True, f"{ROLLOUT}.top_k", why=why)
    prompts, batch = draft.get("data.train_batch_size"), draft.get(f"{ACTOR}.ppo_mini_batch_size")
    if isinstance(prompts, int) and isinstance(batch, int) and batch > 0:
        why = f"{prompts} prompts a step in updates of {batch} prompts each (ppo_mini_batch_size counts prompts there)"
        draft.put("train.updates_per_step", max(1, prompts // batch), f"{ACTOR}.ppo_mini_batch_size", why=why)


def _optimizer(draft: Draft, rows: int | None) -> None:
    betas = draft.get(f"{ACTOR}.optim.betas")
    if isinstance(betas, list) and len(betas) == 2:
        draft.put("optim.beta1", float(betas[0]), f"{ACTOR}.optim.betas")
        draft.put("optim.beta2", float(betas[1]), f"{ACTOR}.optim.betas")
    steps_of(draft, rows, "trainer.total_training_steps", "trainer.total_epochs")
    older = draft.written(f"{ACTOR}.optim.warmup_style") and not draft.written(f"{ACTOR}.optim.lr_scheduler_type")
    shape = f"{ACTOR}.optim.{'warmup_style' if older else 'lr_scheduler_type'}"
    schedule_keys(draft, shape, f"{ACTOR}.optim.lr_warmup_steps", f"{ACTOR}.optim.lr_warmup_steps_ratio",
                  f"{ACTOR}.optim.min_lr_ratio")  # fmt: skip
    rank = number(int, draft.get(f"{MODEL}.lora_rank"), 1)
    if rank:
        draft.put("lora.rank", rank, f"{MODEL}.lora_rank")
        draft.put("lora.alpha", int(draft.get(f"{MODEL}.lora_alpha") or 16), f"{MODEL}.lora_alpha")
        targets = draft.get(f"{MODEL}.target_modules")
        if isinstance(targets, list) or targets == "all-linear":
            draft.put("lora.targets", targets, f"{MODEL}.target_modules")
        draft.leave(f"{MODEL}.exclude_modules", "the vision tower has no adapter unless lora.vision = true")
    if draft.get(f"{ACTOR}.freeze_vision_tower"):
        why = "the tower with its merger, as there"
        draft.put("model.freeze", ["vision", "connector"], f"{ACTOR}.freeze_vision_tower", why=why)


def _reward(draft: Draft) -> None:
    path = draft.get("custom_reward_function.path") or draft.get("reward.custom_reward_function.path")
    name = draft.get("custom_reward_function.name") or draft.get("reward.custom_reward_function.name")
    if path:
        draft.put("reward.name", f"{path}:{name or 'compute_score'}", "custom_reward_function.path")
        draft.put("reward.style", "verl", "custom_reward_function.path")
    else:
        draft.todo.append("name a reward: [reward] name (verl chooses one by the row's data_source)")


def _trainer(draft: Draft) -> None:
    for source, key in (("trainer.test_freq", "eval.every_steps"), ("trainer.save_freq", "checkpoint.every_steps")):
        every = number(int, draft.get(source), 1)
        draft.put(
            key, every or 0, source, why="" if every else "off there; here 0: at the end, and validation at step 0"
        )
    if (keep := number(int, draft.get("trainer.max_actor_ckpt_to_keep"), 1)) is not None:
        draft.put("checkpoint.keep_last", keep, "trainer.max_actor_ckpt_to_keep", why="the best one is kept besides")
    if gpus := draft.get("trainer.n_gpus_per_node"):
        draft.left["trainer.n_gpus_per_node"] = f"on the command line: vlmrl train RECIPE --gpus {gpus}"
    if name := draft.get("trainer.experiment_name"):
        draft.left["trainer.experiment_name"] = f"on the command line: vlmrl train RECIPE --name {name}"
    loggers = draft.get("trainer.logger")
    if isinstance(loggers, list) and "tensorboard" in loggers:
        draft.put("log.sinks", ["tensorboard"], "trainer.logger")
    else:
        draft.leave("trainer.logger", "metrics.jsonl is always written; tensorboard is the one sink (log.sinks)")
