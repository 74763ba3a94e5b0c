"""RLLaVA's configuration as a recipe, with the reason for each key that has no place in one.

It is OmegaConf YAML, or a launch script of `rllava.train.pipeline.*`.

Source: RLLaVA at 4753d4a (github.com/TinyLoopX/RLLaVA: rllava/ppo/config.py, rllava/data/config.py,
rllava/model/config.py, rllava/utils/config.py, rllava/ppo/plugins). It is derived from verl and EasyR1: advantages,
losses and the KL are those of verl, rewards and templates those of EasyR1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmrl.errors import RecipeError
from vlmrl.recipe.imports.draft import Draft, file_name, number, of_engine
from vlmrl.recipe.imports.read import beside, read_table
from vlmrl.recipe.imports.verl import ADVANTAGES, LOSSES, numbers_of_loss

EXAMPLE: dict[str, Any] = {
    "data.prompt_key": "problem",
    "data.train_batch_size": 16,
    "actor.ppo_mini_batch_size": 4,
    "actor.fsdp.offload_params": True,
    "rollout.n": 5,
    "trainer.val_freq": 5,
    "trainer.save_freq": 20,
    "trainer.save_limit": 2,
}
GROUNDING: dict[str, Any] = {
    "data.prompt_key": "problem",
    "data.train_batch_size": 8,
    "data.min_pixels": 262_144,
    "data.filter_overlong_prompts": False,
    "actor.ppo_mini_batch_size": 8,
    "actor.fsdp.offload_params": True,
    "rollout.n": 3,
    "trainer.total_epochs": 1,
    "trainer.save_freq": 100,
    "trainer.save_limit": 3,
}
EXAMPLES = {
    "config.yaml": EXAMPLE,
    "config_grounding.yaml": GROUNDING,
    "config_lora.yaml": GROUNDING
    | {"actor.model.use_peft": True, "actor.model.lora_r": 8, "actor.model.lora_alpha": 32},
}
"""Values of RLLaVA's example files that differ from `DEFAULTS`. Launch scripts start from one of these files."""
SAME = {
    "actor.model.model_path": "model.path",
    "actor.model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    "data.min_pixels": "model.min_pixels",
    "data.max_pixels": "model.max_pixels",
    "data.train_image_dir": "data.images_root",
    "data.train_batch_size": "rollout.prompts_per_step",
    "rollout.n": "rollout.samples_per_prompt",
    "rollout.temperature": "rollout.temperature",
    "data.max_response_length": "rollout.max_new_tokens",
    "data.seed": "train.seed",
    "actor.max_grad_norm": "optim.max_grad_norm",
    "actor.optim.lr": "optim.lr",
    "actor.optim.weight_decay": "optim.weight_decay",
    "actor.clip_ratio_low": "algo.clip_low",
    "actor.clip_ratio_high": "algo.clip_high",
    "actor.clip_ratio_c": "algo.dual_clip",
    "actor.entropy_coeff": "algo.entropy_coef",
}
FUSED_LOSSES: Mapping[str, Mapping[str, str]] = {
    "luffy": {},
    "srft": {},
    "uft": {
        "algorithm.max_prefix_ratio": "algo.hint_most",
        "algorithm.hint_steps": "algo.hint_steps",
        "actor.sft_loss_coef": "algo.demonstration_coef",
    },
    "hpt": {"algorithm.switch_gate": "algo.most_solved"},
}
"""Losses that learn from demonstrations and from samples at the same time -> their numbers, and the keys for them."""
TOOLS = {"AgentSearchEnv": "vlmrl.search.tool.Search", "AgentCodeEnv": "vlmrl.environments.python_tool.Python"}
"""End of an environment's name -> the tool that takes its place."""
PACKED = "rows are packed up to train.tokens_per_row; results do not depend on it"
DEMONSTRATIONS = "for demonstrations; see `vlmrl recipe list --algos` for what the algorithm does with them"
NOT_READ = "not read there either"
LEFT = {
    key: why
    for keys, why in {
        "data.val_batch_size": "validation is batched by rollout.batch_tokens",
        "data.val_image_dir": "validation rows have the images_root of their entry",
        "data.video_key data.video_fps": "videos are not read",
        "data.shuffle": "rows are always shuffled, by train.seed",
        "data.num_workers data.filter_overlong_prompts_workers": "rows are read from memory-mapped files",
        "data.override_chat_template": "the chat template is chat_template.jinja in the model folder",
        "data.dataset_class": "a recipe loads no code except the reward: write the rows to a table",
        "data.dataset_kwargs.": "for the class that reads the rows there",
        "data.image_dir": NOT_READ,
        "algorithm.gamma": "taken over only with gae and reinforce_plus_plus",
        "algorithm.lam": "taken over only with gae",
        "algorithm.filter_key": "the filter uses the whole score",
        "algorithm.filter_low algorithm.filter_high": "the filter keeps prompts whose scores differ (algo.min_spread)",
        "algorithm.norm_adv_by_std_in_grpo": "only for the estimator grpo",
        (
            "algorithm.unify_strategy algorithm.switch_gate algorithm.success_reward_threshold "
            "algorithm.prefix_strategy algorithm.min_prefix_ratio algorithm.max_prefix_ratio "
            "algorithm.n_prefix algorithm.prefix_share_across_samples algorithm.hint_steps"
        ): DEMONSTRATIONS,
        "algorithm.hint_min_ratio algorithm.hint_max_ratio": NOT_READ,
        "algorithm.strategy": "RLLaVA does not have its mixture of supervised and reinforcement learning either",
        (
            "algorithm.expert_data_ratio algorithm.mu_warmup_steps algorithm.mu_decay_steps "
            "algorithm.mu_peak algorithm.mu_valley algorithm.enable_phi_function algorithm.clip_range "
            "algorithm.use_token_level_loss_in_sft mix_sampler."
        ): NOT_READ,
        "actor.ppo_micro_batch_size": PACKED,
        "actor.log_prob_micro_batch_size": "the update computes the old log-probs itself",
        "actor.ppo_epochs": "each batch of rollouts is used once, in train.updates_per_step updates",
        "actor.skip_grad_norm": "a gradient is clipped, whatever its norm; one that is not finite stops the run",
        "actor.clip_ratio": "not used there either: clip_ratio_low and clip_ratio_high are",
        "actor.clip_upper_bound": NOT_READ,
        "actor.tis_imp_ratio_cap": "see algo.importance and algo.importance_cap; there no engine gives log-probs",
        "actor.use_torch_compile": "model.compile does this, off by default",
        "actor.strategy": "FSDP2 shards the weights",
        "actor.ulysses_size": "there is no sequence parallelism",
        "actor.loss_remove_clip": "with one update per step every ratio is 1, and nothing is clipped",
        "actor.off_policy_ actor.on_policy_ actor.srft_type actor.sft_loss_coef": DEMONSTRATIONS,
        "actor.hpt_hint_loss_coef": NOT_READ,
        "actor.all_max_clip": DEMONSTRATIONS,
        "actor.policy_loss.": "a number of a loss that is not chosen",
        "actor.checkpoint.": "see checkpoint.asynchronous; a checkpoint always has weights, moments and state",
        "actor.fsdp.enable_cpu_offload": "not read there either: offload_params is",
        "actor.fsdp.offload_optimizer": "parallel.offload moves parameters, gradients and moments together",
        "actor.fsdp.": "sharding follows from --gpus; parallel.offload and parallel.shard_size change it",
        "actor.deepspeed.": "FSDP2 shards the weights",
        "actor.model.tokenizer_path": "the tokenizer is that of the model folder",
        "actor.model.trust_remote_code": "the families known here need no code of a repository: set "
        "model.trust_remote_code for one that does",
        "actor.model.freeze_vision_tower": "not read there either: nothing is frozen there; see model.freeze",
        "actor.model.attn_implementation": "the best kernel for shared prompts is chosen",
        "actor.model.padding_free": "rows are always packed without padding",
        "actor.model.dynamic_batching": "rows are always packed up to train.tokens_per_row",
        "actor.model.ulysses_size": "there is no sequence parallelism",
        "actor.model.enable_activation_offload": "no counterpart: see model.gradient_checkpointing",
        "actor.model.override_config.": "the model's configuration is that of its folder",
        "actor.model.tie_word_embeddings": "the model's configuration is that of its folder",
        "actor.model.lora_task_type": "an adapter of the language model, as here",
        "actor.model.lora_bias": "an adapter has no biases",
        "actor.model.lora_modules_to_save": "see model.freeze: with an adapter, nothing else is trained",
        "actor.model.lora_weight_path": "not read there either: model.path = RUN continues a run's adapter",
        "actor.model.lora_target_modules": "not used there either: every linear layer of the language model, as here",
        "actor.model.lora_dropout": "no dropout in RL: sampling and training must be the same function",
        "actor.model.": "no counterpart is known",
        "critic.": "the critic is a head on the policy (algo.advantage = gae)",
        "ref.": "the reference is loaded if algo.kl_coef is above 0, in the same way as the policy",
        "rollout.seed": "each sample has a seed of its own, from train.seed, step and prompt",
        "rollout.val_override_config.": "validation is greedy: sampling makes the best checkpoint a matter of luck",
        "rollout.env_config_path": "a response has one turn",
        "rollout.limit_images": "a prompt has the images of its row",
        "rollout.discount rollout.tool_config_path rollout.partial_rollout": NOT_READ,
        **of_engine("rollout"),
        "reward.reward_type": "recognised by the function's parameters (reward.style)",
        "reward.skip_special_tokens": "a reward gets the response without special tokens",
        "reward.model.": "see [reward]",
        "reward.num_cpus": "rewards run in worker processes (reward.workers)",
        "trainer.nnodes": "see `vlmrl launch slurm`",
        "trainer.max_try_make_batch": "no filter is on, so nothing is drawn again",
        "trainer.val_only": "use `vlmrl eval`",
        "trainer.val_generations_to_log": "every response of a validation is kept",
        "trainer.save_model_only": "a checkpoint always has weights, moments and state",
        "trainer.outputs_dir": "a run has a folder of its own below ./runs (--runs)",
        "trainer.save_checkpoint_path": "checkpoints are in the run's folder (--runs)",
        "trainer.load_checkpoint_path": "to continue a run: vlmrl train --resume RUN",
        "trainer.find_last_checkpoint": "a run is continued with --resume RUN, never by itself",
        "trainer.critic_warmup": "the critic is trained from the first step on",
        "trainer.async_training": NOT_READ,
        "CUDA_VISIBLE_DEVICES": "on the command line: --gpus 0,2 chooses GPUs",
        "master_port": "the launcher picks a port",
        "master_addr": "see --rdzv-endpoint",
        "node_rank": "see --node-rank",
    }.items()
    for key in keys.split()
}


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


def from_rllava(draft: Draft) -> None:
    """Fill a draft from RLLaVA's settings."""
    program = str(draft.given.pop("__program__", "")).rpartition(".")[2]
    if program == "py":
        raise RecipeError("scripts of TinyLLaVA's training are not imported", hint="write a recipe for `vlmrl sft`")
    config = Path(str(draft.given.pop("__config__", ""))).name
    if config:
        draft.defaults = DEFAULTS | EXAMPLES.get(config, {})
        taken = "the values of RLLaVA's own example of that name" if config in EXAMPLES else "RLLaVA's defaults"
        draft.todo.append(f"compare with {config}, which was not found: {taken} were taken")
    _pipeline(draft, program)
    draft.same(SAME)
    _data(draft)
    draft.kl_of("algorithm.use_kl_loss", ("actor.kl_loss_coef", "actor.kl_loss_type"))
    _algorithm(draft)
    _engine(draft)
    _optimizer(draft)
    if draft.get("reward.reward_type") == "env":
        draft.leave("reward.reward_type", "here a reward is a function of the response, not of an environment")
        draft.todo.append("name a reward: [reward] name (the configuration takes it from an environment)")
    else:
        draft.reward_of("reward")
    draft.trainer_of("trainer.val_freq", "trainer.save_limit")
    if count := draft.get("nproc_per_node"):  # of torchrun; RLLaVA does not read `trainer.n_gpus_per_node`
        draft.left["nproc_per_node"] = f"on the command line: vlmrl train RECIPE --gpus {count}"
        if draft.written("trainer.n_gpus_per_node"):
            draft.left["trainer.n_gpus_per_node"] = "not read there either: nproc_per_node is"
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
        _episodes(draft)
    if draft.written("mix_sampler.sft_dataset.path"):
        draft.todo.append("the configuration mixes in supervised rows; the recipe does not: run `vlmrl sft` first")


def _episodes(draft: Draft) -> None:
    """Set the environment: the class that RLLaVA's file of the environment names, to be rewritten, and its turns."""
    source = "rollout.env_config_path"
    file = beside(str(draft.get(source) or ""), draft.base)
    table = read_table(file) if file else None
    own = table.get("env") if isinstance(table, dict) else None
    name = file_name(str(own.get("class_name") or "")) if isinstance(own, dict) else ""
    turns = number(int, draft.get("rollout.max_turns"), 1), "rollout.max_turns"
    draft.episodes([name or "tools.py:TOOLS"], source, turns, "data.max_response_length", of_turn=True)
    config = own.get("config") if isinstance(own, dict) else None
    args = {k: v for k, v in config.items() if isinstance(v, (str, int, float))} if isinstance(config, dict) else {}
    if args:
        draft.put("environment.args", args, source)
    draft.todo.append(
        f"rewrite {name or 'the environment'}: its `extract_action` and `step` become typed methods, as tools "
        "(docs/environments.md); a turn without a call is the answer here"
        + "".join(f"; or name {tool} in a file of one line" for word, tool in TOOLS.items() if name.endswith(word))
    )


def _data(draft: Draft) -> None:
    for key in ("data.train_files", "data.val_files"):
        files = draft.get(key)
        if isinstance(files, str) and "," in files:
            draft.given[key] = [part.strip() for part in files.split(",") if part.strip()]
    draft.data_source("data.train_files", "data.val_files")
    if draft.get("data.answer_key") == "reward_model":
        del draft.given["data.answer_key"]
        draft.left["data.answer_key"] = "`reward_model` is verl's spelling, which is recognised"
    draft.columns_and_prompt()
    if target := draft.get("data.dataset_kwargs.target_key"):
        columns = draft.taken["data.columns"].value if "data.columns" in draft.taken else {}
        draft.put("data.columns", {**columns, "response": target}, "data.dataset_kwargs.target_key")
    draft.longest_prompt()


def _algorithm(draft: Draft) -> None:
    estimator, loss = draft.get("algorithm.adv_estimator"), draft.get("actor.policy_loss.loss_mode")
    draft.chosen("algorithm.adv_estimator", estimator, ADVANTAGES)
    if loss in FUSED_LOSSES:
        draft.put("algo.name", loss, "actor.policy_loss.loss_mode", why="it learns from demonstrations, too")
        for key, own in FUSED_LOSSES[loss].items():
            if draft.written(key):
                draft.put_number(own, int if own in ("algo.hint_steps", "algo.most_solved") else float, key)
        if draft.get("actor.loss_remove_clip") is True:
            for cell in ("algo.clip_low", "algo.clip_high", "algo.dual_clip"):
                draft.taken.pop(cell, None)
        if loss in ("luffy", "srft") and (samples := draft.taken.get("rollout.samples_per_prompt")):
            why = "one of them is the demonstration there; here it is counted apart"
            draft.put("rollout.samples_per_prompt", max(1, int(samples.value) - 1), "rollout.n", why=why)
    else:
        draft.chosen("actor.policy_loss.loss_mode", loss, LOSSES)
    if estimator == "grpo" and not draft.get("algorithm.norm_adv_by_std_in_grpo"):
        draft.put("algo.advantage", "group_mean", "algorithm.norm_adv_by_std_in_grpo")
    draft.discounts(estimator)
    numbers_of_loss(draft, loss, "actor", "one denominator for a whole update; there, one for each microbatch")
    draft.spread_filter(
        "algorithm.online_filtering",
        "trainer.max_try_make_batch",
        "; there, prompts whose mean is beyond filter_low or filter_high",
    )


def _engine(draft: Draft) -> None:
    draft.engine_of("rollout.name", "rollout.tensor_parallel_size")
    draft.filtered_sampling("rollout.top_p", "rollout.top_k")
    draft.updates_of("data.train_batch_size", "actor.ppo_mini_batch_size")
    is_fused = draft.get("actor.policy_loss.loss_mode") in FUSED_LOSSES
    if not is_fused and draft.get("actor.loss_remove_clip") is True and draft.taken["train.updates_per_step"].value > 1:
        why = "there the ratio of later updates is not clipped; here it is, by algo.clip_low and algo.clip_high"
        draft.left["actor.loss_remove_clip"] = why
    draft.sharding("actor.fsdp.fsdp_size", "actor.fsdp.offload_params", "actor.model.torch_dtype")


def _optimizer(draft: Draft) -> None:
    draft.betas_of("actor.optim.betas")
    if draft.get("actor.optim.strategy") == "adamw_bf16":
        draft.put("optim.name", "adamw_bf16_kahan", "actor.optim.strategy")
    draft.steps_of("trainer.max_steps")
    names = ("warmup_style", "lr_warmup_steps", "lr_warmup_ratio", "min_lr_ratio")
    draft.schedule_keys(*(f"actor.optim.{name}" for name in names))
    draft.leave("actor.optim.lr_scheduler_type", "not used there either: warmup_style is")
    draft.leave("actor.optim.num_cycles", "a cosine falls once, over the whole run")
    if draft.get("actor.model.use_peft"):
        draft.put("lora.rank", int(draft.get("actor.model.lora_r")), "actor.model.lora_r")
        draft.put("lora.alpha", int(draft.get("actor.model.lora_alpha")), "actor.model.lora_alpha")
        if any(draft.get(f"actor.model.{name}") for name in ("use_rslora", "lora_use_rslora")):
            draft.put("lora.rslora", True, "actor.model.use_rslora")


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
