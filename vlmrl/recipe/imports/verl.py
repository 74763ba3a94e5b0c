"""verl's configuration (Hydra YAML, overrides, launch scripts of `verl.trainer.main_ppo`) as a recipe.

Source: verl at 1dda039 (github.com/verl-project/verl: trainer/config/_generated_ppo_trainer.yaml, the dataclasses
behind it, trainer/ppo/core_algos.py) and at b178a3c, half a year older, for settings whose names have changed.
"""

from __future__ import annotations

import json
from typing import Any

from vlmrl.recipe.imports.draft import Draft, file_name, number, of_engine
from vlmrl.recipe.imports.read import beside, read_table

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
DEFAULTS: dict[str, Any] = {
    "data.prompt_key": "prompt",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 1024,
    "data.filter_overlong_prompts": False,
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 1e-3,
    "algorithm.norm_adv_by_std_in_grpo": True,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.tau_pos": 1.0,
    f"{ACTOR}.tau_neg": 1.05,
    f"{ACTOR}.policy_loss.clip_cov_ratio": 2e-4,
    f"{ACTOR}.policy_loss.clip_cov_lb": 1.0,
    f"{ACTOR}.policy_loss.clip_cov_ub": 5.0,
    f"{ACTOR}.policy_loss.kl_cov_ratio": 2e-4,
    f"{ACTOR}.policy_loss.ppo_kl_coef": 0.1,
    f"{ACTOR}.optim.optimizer": "AdamW",
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.entropy_coeff": 0.0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 1e-3,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.grad_clip": 1.0,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.weight_decay": 1e-2,
    f"{MODEL}.enable_gradient_checkpointing": True,
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.temperature": 1.0,
    f"{MODEL}.lora_alpha": 16,
    "trainer.total_epochs": 30,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
}
"""Defaults of verl for the settings that are taken over, used if a configuration does not write them."""
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
    f"{ACTOR}.optim.clip_grad": "optim.max_grad_norm",
    f"{ACTOR}.clip_ratio_low": "algo.clip_low",
    f"{ACTOR}.clip_ratio_high": "algo.clip_high",
    f"{ACTOR}.optim.lr": "optim.lr",
    f"{ACTOR}.optim.weight_decay": "optim.weight_decay",
    f"{ACTOR}.entropy_coeff": "algo.entropy_coef",
}
REWARDS = ("custom_reward_function", "reward.custom_reward_function")
"""Tables with the reward function, in older and in newer configurations."""
BUFFERS = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)
"""Tables of DAPO's penalty for long responses, oldest first."""
ADVANTAGES = {
    "grpo": {},
    "gae": {"algo.advantage": "gae", "algo.scale": "tokens"},
    "rloo": {"algo.advantage": "leave_one_out"},
    "remax": {"algo.advantage": "greedy"},
    "opo": {"algo.advantage": "length_weighted"},
    "reinforce_plus_plus": {"algo.advantage": "none", "algo.scale": "tokens"},
    "reinforce_plus_plus_baseline": {"algo.advantage": "group_mean", "algo.scale": "tokens"},
    "grpo_passk": {"algo.advantage": "best_of_group", "algo.scale": "group"},
    "gpg": {"algo.advantage": "group_mean", "algo.scale": "alive"},
    "gdpo": {"algo.advantage": "part_by_part", "algo.scale": "tokens"},
    "grpo_vectorized": {},
    "rloo_vectorized": {"algo.advantage": "leave_one_out"},
    "optimal_token_baseline": {"algo.advantage": "optimal_token"},
}
_BY_RESPONSE = {"algo.aggregation": "sequence_mean"}
LOSSES = {
    "vanilla": {},
    "gspo": {"algo.ratio": "sequence_token"} | _BY_RESPONSE,
    "gpg": {"algo.surrogate": "reinforce"},
    "clip_cov": {"algo.surrogate": "clip_cov"},
    "kl_cov": {"algo.surrogate": "kl_cov"},
    "geo_mean": {"algo.surrogate": "gmpo"} | _BY_RESPONSE,
    "sapo": {"algo.surrogate": "sapo"} | _BY_RESPONSE,
    "cispo": {"algo.surrogate": "cispo"},
}
"""verl's name of a loss -> cells of `[algo]`. If the cells include the aggregation, `loss_agg_mode` is ignored."""
NUMBERS = {
    "sapo": {"tau_pos": "tau_positive", "tau_neg": "tau_negative"},
    "clip_cov": {
        "policy_loss.clip_cov_ratio": "cov_share",
        "policy_loss.clip_cov_lb": "cov_low",
        "policy_loss.clip_cov_ub": "cov_high",
    },
    "kl_cov": {"policy_loss.kl_cov_ratio": "cov_share", "policy_loss.ppo_kl_coef": "cov_kl_coef"},
}
"""verl's name of a loss -> its settings: name in verl's table `actor` -> name in the recipe's table `algo`."""
AGGREGATIONS = {
    "token-mean": ("token_mean", ""),
    "seq-mean-token-mean": ("sequence_mean", ""),
    "seq-mean-token-sum-norm": ("constant", "sums divided by rollout.max_new_tokens, as in Dr. GRPO"),
    "seq-mean-token-sum": ("sequence_sum", ""),
}
MULTI_TURN = f"{ROLLOUT}.multi_turn"
CALLS = {"hermes": "hermes", "qwen3_coder": "qwen_xml"}
"""verl's name of a parser of calls -> `environment.calls`."""
LEFT = {
    "data.val_batch_size": "validation is batched by rollout.batch_tokens",
    "data.gen_batch_size": "with a filter, as many prompts as are missing are drawn again",
    "data.shuffle": "rows are always shuffled, by train.seed",
    "data.truncation": "no prompt is ever cut",
    "data.return_raw_chat": "prompts are rendered by the model's chat template",
    "data.reward_fn_key": "the reward gets every column",
    "data.custom_cls.": "a recipe loads no code except the reward",
    "data.": "tables are read as they are",
    "algorithm.gamma": "taken over only with gae and reinforce_plus_plus",
    "algorithm.lam": "taken over only with gae",
    "algorithm.filter_groups.": "the filter keeps prompts whose scores differ (algo.min_spread)",
    "algorithm.rollout_correction.": "see algo.importance",
    "algorithm.norm_adv_by_std_in_grpo": "only for the estimator grpo",
    "algorithm.": "no counterpart is known",
    f"{ACTOR}.ppo_epochs": "each batch of rollouts is used once, in train.updates_per_step updates",
    f"{ACTOR}.ppo_micro_batch_size": "rows are packed up to train.tokens_per_row; results do not depend on it",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": "rows are packed up to train.tokens_per_row; results do not depend on it",
    f"{ACTOR}.ppo_max_token_len_per_gpu": "see train.tokens_per_row; a packed row has a prompt once for all responses",
    f"{ACTOR}.use_dynamic_bsz": "rows are always packed up to train.tokens_per_row",
    f"{ACTOR}.shuffle": "updates take the groups in the order in which they were drawn",
    f"{ACTOR}.fsdp_config.": "sharding follows from --gpus; parallel.offload and parallel.shard_size change it",
    f"{ACTOR}.use_torch_compile": "model.compile does this, off by default",
    f"{ACTOR}.entropy_from_logits_with_chunking": "log-probs and entropy are always computed in pieces",
    f"{ACTOR}.entropy_checkpointing": "log-probs and entropy are always computed in pieces",
    f"{ACTOR}.ulysses_sequence_parallel_size": "there is no sequence parallelism",
    f"{ACTOR}.veomni.": "FSDP2 shards the weights",
    f"{ACTOR}.profiler.": "nothing is profiled",
    f"{ACTOR}.clip_ratio": "not used there either: clip_ratio_low and clip_ratio_high (0.2 by default) are",
    f"{ACTOR}.tau_pos": "only for the loss sapo",
    f"{ACTOR}.tau_neg": "only for the loss sapo",
    f"{ACTOR}.policy_loss.": "a number of a loss that is not chosen",
    f"{ACTOR}.checkpoint.": "see checkpoint.asynchronous; a checkpoint always has weights, moments and state",
    f"{ACTOR}.strategy": "FSDP2 shards the weights",
    f"{ACTOR}.megatron.": "sharding follows from --gpus; parallel.shard_size changes it",
    f"{ACTOR}.": "no counterpart is known",
    "actor_rollout_ref.ref.": "the reference is loaded if algo.kl_coef is above 0, in the same way as the policy",
    f"{ROLLOUT}.val_kwargs.": "validation is greedy: sampling makes the best checkpoint a matter of luck",
    f"{MULTI_TURN}.max_user_turns": "what tools return belongs to the model's turn: see environment.turns",
    f"{MULTI_TURN}.max_parallel_calls": "the calls of a turn run one after the other, at most eight",
    f"{MULTI_TURN}.tool_response_truncate_side": "a long observation is cut in the middle",
    f"{MULTI_TURN}.interaction_config_path": "there is no simulated user: write an environment whose tools answer",
    f"{MULTI_TURN}.tokenization_sanity_check_mode": "sampled tokens are never decoded and encoded again",
    f"{MULTI_TURN}.use_inference_chat_template": "sampled tokens are never decoded and encoded again",
    f"{MULTI_TURN}.": "no counterpart is known",
    f"{ROLLOUT}.agent.": "environment.workers limits the tools that run at the same time",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": "the update computes the old log-probs itself",
    **of_engine(ROLLOUT),
    f"{MODEL}.mtp.": "heads that predict several tokens are not trained",
    f"{MODEL}.use_remove_padding": "rows are always packed without padding",
    f"{MODEL}.use_fused_kernels": "log-probs are always computed without the logits of a whole row",
    f"{MODEL}.": "no counterpart is known",
    "actor_rollout_ref.hybrid_engine": "all ranks train and generate; rollout.engine_gpus reserves GPUs for generating",
    "critic.": "the critic is a head on the policy (algo.advantage = gae)",
    "reward_model.": "see [reward]",
    "reward.": "see [reward]",
    "custom_reward_function.": "see [reward]",
    "trainer.nnodes": "see `vlmrl launch slurm`",
    "trainer.balance_batch": "rows are always packed by their number of tokens",
    "trainer.critic_warmup": "the critic is trained from the first step on",
    "trainer.log_val_generations": "every response of a validation is kept",
    "trainer.val_only": "use `vlmrl eval`",
    "trainer.resume_mode": "a run is continued with --resume RUN, never by itself",
    "trainer.default_local_dir": "checkpoints are in the run's folder (--runs)",
    "trainer.resume_from_path": "a run is continued with --resume RUN",
    "trainer.device": "see model.device",
    "trainer.use_v1": "it chooses one of verl's own trainers",
    "trainer.v1.": "it chooses one of verl's own trainers",
    "trainer.": "no counterpart is known",
    "model_engine": "FSDP2 shards the weights",
    "config_path": "the configuration it names is not read: verl's defaults are taken",
    "config_name": "the configuration it names is not read: verl's defaults are taken",
    "async_training.": "rollout.overlap samples the next rollouts during the update",
    "rollout.": "rollout.engine_gpus reserves GPUs for generating",
    "distillation.": "there is no teacher",
    "transfer_queue.": "no such service is used",
    "skip.": "rollouts are always sampled again",
    "ray_kwargs.": "Ray is not used",
    "ray_init.": "Ray is not used",
    "global_profiler.": "nothing is profiled",
    "hydra.": "settings of Hydra itself",
}


def from_verl(draft: Draft) -> None:
    """Fill a draft from verl's settings."""
    draft.get("__config__")
    draft.put("algo.name", "grpo", "algorithm.adv_estimator")
    draft.same(SAME)
    draft.data_source("data.train_files", "data.val_files")
    if draft.given.get("data.train_batch_size") == 0:
        draft.taken.pop("rollout.prompts_per_step", None)
        why = "0: rollouts are asynchronous there; a step here has a fixed number of prompts"
        draft.leave("data.train_batch_size", why)
        draft.todo.append("set rollout.prompts_per_step: the configuration has no number of prompts per step")
    _data(draft)
    draft.longest_prompt()
    draft.kl_of(f"{ACTOR}.use_kl_loss", (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"))
    _algorithm(draft)
    draft.engine_of(f"{ROLLOUT}.name", f"{ROLLOUT}.tensor_model_parallel_size")
    draft.filtered_sampling(f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k")
    draft.updates_of("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")
    fsdp = f"{ACTOR}.fsdp_config"
    draft.sharding(f"{fsdp}.fsdp_size", f"{fsdp}.offload_policy", f"{fsdp}.dtype")
    _episodes(draft)
    _optimizer(draft)
    _reward(draft)
    draft.trainer_of("trainer.test_freq", "trainer.max_actor_ckpt_to_keep")
    for key in [key for key in draft.given if key.endswith("_target_")]:
        draft.leave(key, "a class of verl that Hydra creates")
    draft.leave_all(LEFT)


def _data(draft: Draft) -> None:
    usual = {"data.prompt_key": ("prompt", "messages"), "data.image_key": ("images", "image")}
    role = {"data.prompt_key": "prompt", "data.image_key": "images"}
    own = [key for key, names in usual.items() if draft.written(key) and draft.get(key) not in names]
    if own:
        draft.put("data.columns", {role[key]: draft.get(key) for key in own}, *own)
    for source, key in (("data.train_max_samples", "data.max_rows"), ("data.val_max_samples", "eval.max_rows")):
        draft.put_number(key, int, source, 1, why="the first rows; there, with data.shuffle, rows drawn at random")
    draft.thinking("data.apply_chat_template_kwargs.enable_thinking")


def _algorithm(draft: Draft) -> None:
    estimator, loss = draft.get("algorithm.adv_estimator"), draft.get(f"{ACTOR}.policy_loss.loss_mode") or "vanilla"
    if str(estimator).startswith("AdvantageEstimator."):
        estimator = str(estimator).partition(".")[2].lower()
    draft.chosen("algorithm.adv_estimator", estimator, ADVANTAGES)
    draft.chosen(f"{ACTOR}.policy_loss.loss_mode", loss, LOSSES)
    if estimator in ("grpo", "grpo_vectorized") and not draft.get("algorithm.norm_adv_by_std_in_grpo"):
        draft.put("algo.advantage", "group_mean", "algorithm.norm_adv_by_std_in_grpo")
    draft.discounts(estimator)
    numbers_of_loss(draft, loss, ACTOR)
    if names := draft.get("algorithm.gdpo_reward_keys"):
        weights = draft.get("algorithm.gdpo_reward_weights") or [1.0] * len(names)
        sources = [key for key in ("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights") if draft.written(key)]
        draft.put("reward.weights", {n: float(w) for n, w in zip(names, weights, strict=True)}, *sources)
    if loss == "vanilla":
        draft.same({f"{ACTOR}.clip_ratio_c": "algo.dual_clip"})
    else:
        draft.leave(f"{ACTOR}.clip_ratio_c", f"the loss {loss} has no dual clip, as there")
    _importance(draft)
    draft.spread_filter(
        "algorithm.filter_groups.enable",
        "algorithm.filter_groups.max_num_gen_batches",
        ", whatever metric is named there",
    )
    if buffer := next((b for b in BUFFERS if draft.get(f"{b}.enable")), None):
        draft.put("algo.overlong_tokens", int(draft.get(f"{buffer}.len") or 0), f"{buffer}.len")
        penalty = float(draft.get(f"{buffer}.penalty_factor") or 1.0)
        draft.put("algo.overlong_penalty", penalty, f"{buffer}.penalty_factor")


def numbers_of_loss(draft: Draft, loss: Any, actor: str, difference: str = "") -> None:
    """Set the numbers of a loss, its clip and its aggregation, from the table `actor`.

    Args:
        difference: what is different here for every aggregation.
    """
    for name, cell in NUMBERS.get(str(loss), {}).items():
        draft.put(f"algo.{cell}", float(draft.get(f"{actor}.{name}")), f"{actor}.{name}")
    draft.clip_of_one(loss, f"{actor}.policy_loss.loss_mode")
    key = f"{actor}.loss_agg_mode"
    mode = draft.get(key)
    if "algo.aggregation" in LOSSES.get(str(loss), {}):
        draft.leave(key, f"the loss {loss} takes the mean of each response first, as there")
    elif mode in AGGREGATIONS:
        name, why = AGGREGATIONS[mode]
        draft.put("algo.aggregation", name, key, why="; ".join(filter(None, (why, difference))))
    else:
        draft.leave(key, f"`{mode}` has no counterpart: choose token_mean, sequence_mean or constant")


def _importance(draft: Draft) -> None:
    """Set the correction for the engine's log-probs if it is on. Its value is a limit, or two bounds ("0.5_2.0")."""
    table = "algorithm.rollout_correction"
    level = draft.get(f"{table}.rollout_is")
    if draft.get(f"{table}.bypass_mode") and draft.get(f"{table}.loss_type") in (None, "ppo_clip"):
        draft.put("algo.importance", "ratio", f"{table}.bypass_mode")
        draft.leave(f"{table}.rollout_is", "the loss of bypass_mode uses no weights, as there")
        return
    if level not in ("token", "sequence"):
        return
    bounds = str(draft.get(f"{table}.rollout_is_threshold")).split("_")
    how, why = "truncate", ""
    if len(bounds) == 2:
        how, why = "mask", f"outside [1 / cap, cap]; there outside [{bounds[0]}, {bounds[1]}]"
    draft.put("algo.importance", how, f"{table}.rollout_is")
    draft.put("algo.importance_level", level, f"{table}.rollout_is")
    draft.put("algo.importance_cap", float(bounds[-1]), f"{table}.rollout_is_threshold", why=why)


def _episodes(draft: Draft) -> None:
    """Set the environment of an episode: the class or the functions of its tools, its turns and its form of calls."""
    switches = (f"{MULTI_TURN}.enable", MULTI_TURN, f"{ROLLOUT}.agent.default_agent_loop")
    if not any(draft.get(key) in (True, "tool_agent") for key in switches):
        draft.leave_all({f"{MULTI_TURN}.": "a response has one turn: multi_turn.enable is off"})
        return
    source = f"{MULTI_TURN}.tool_config_path"
    if path := draft.get(f"{MULTI_TURN}.function_tool_path"):
        source = f"{MULTI_TURN}.function_tool_path"
        name, args = f"{path}:TOOLS", {}
        draft.todo.append(f"write `TOOLS = [...]` with the functions of `@function_tool` into {path}")
    else:
        name, args = _tool_class(draft, str(draft.get(source) or ""))
    turns = number(int, draft.get(f"{MULTI_TURN}.max_assistant_turns"), 1), f"{MULTI_TURN}.max_assistant_turns"
    draft.episodes([name], source, turns, "data.max_response_length")
    if args:
        draft.put("environment.args", args, source)
    if (form := draft.get(f"{MULTI_TURN}.format")) in CALLS:
        draft.put("environment.calls", CALLS[form], f"{MULTI_TURN}.format")
    elif form is not None:
        draft.leave(f"{MULTI_TURN}.format", f"`{form}`: calls are read in the form of the chat template")
    characters, key = f"{MULTI_TURN}.max_tool_response_length", "environment.observation_tokens"
    if length := number(int, draft.get(characters), 1):
        draft.put(key, -(-length // 4), characters, why=f"{length} characters there, at about four to a token")


def _tool_class(draft: Draft, path: str) -> tuple[str, dict[str, Any]]:
    """Return the first tool of verl's file of tools: its class as file.py:name, and its arguments as JSON texts."""
    table = read_table(file) if (file := beside(path, draft.base)) else None
    tools = table.get("tools") if isinstance(table, dict) else None
    tools = [t for t in tools if isinstance(t, dict) and t.get("class_name")] if isinstance(tools, list) else []
    if not tools:
        draft.todo.append(
            "name the tools: [environment] name; there it is the file of tool_config_path, not found here"
        )
        return "tools.py:TOOLS", {}
    names = [str(tool["class_name"]) for tool in tools]
    if names[1:]:
        draft.todo.append(f"an environment is one class: write one with the tools of {', '.join(names[1:])}, too")
    draft.todo.append(f"set environment.name to the file of {names[0]}, seen from the recipe")
    args = {key: json.dumps(tools[0][key], default=str) for key in ("config", "tool_schema") if key in tools[0]}
    return file_name(names[0]), args


def _optimizer(draft: Draft) -> None:
    draft.betas_of(f"{ACTOR}.optim.betas")
    if "8bit" in (name := str(draft.get(f"{ACTOR}.optim.optimizer")).lower()):
        draft.put("optim.name", "adamw_8bit", f"{ACTOR}.optim.optimizer")
    elif name != "adamw":
        draft.leave(f"{ACTOR}.optim.optimizer", "the optimizer is AdamW (optim.name)")
    draft.steps_of("trainer.total_training_steps")
    older = draft.written(f"{ACTOR}.optim.warmup_style") and not draft.written(f"{ACTOR}.optim.lr_scheduler_type")
    shape = "warmup_style" if older else "lr_scheduler_type"
    names = (shape, "lr_warmup_steps", "lr_warmup_steps_ratio", "min_lr_ratio")
    draft.schedule_keys(*(f"{ACTOR}.optim.{name}" for name in names))
    draft.adapter(f"{MODEL}.lora_rank", f"{MODEL}.lora_alpha", f"{MODEL}.target_modules", f"{MODEL}.exclude_modules")
    draft.frozen_tower(f"{ACTOR}.freeze_vision_tower")


def _reward(draft: Draft) -> None:
    table = next((t for t in REWARDS if draft.get(f"{t}.path")), None)
    if table is None:
        draft.todo.append("name a reward: [reward] name (verl chooses one by the row's data_source)")
        return
    function = f"{draft.get(f'{table}.path')}:{draft.get(f'{table}.name') or 'compute_score'}"
    draft.put("reward.name", function, f"{table}.path")
    draft.put("reward.style", "verl", f"{table}.path")
    draft.put_table("reward.args", f"{table}.reward_kwargs")
