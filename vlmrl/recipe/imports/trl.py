"""TRL's GRPOConfig with its script and model arguments (YAML, JSON, a launch command, a Python script) as a recipe.

Source: TRL 1.16 (trl/trainer/grpo_config.py, trl/trainer/model_config.py, trl/scripts/utils.py).
"""

from __future__ import annotations

import re
from typing import Any

from vlmrl.recipe.imports.draft import COUNTED_LATER, Draft, located, number

DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-6,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "num_iterations": 1,
    "max_completion_length": 512,
    "temperature": 1.0,
    "beta": 0.0,
    "epsilon": 0.2,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "importance_sampling_level": "token",
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "seed": 42,
    "gradient_checkpointing": True,
    "save_steps": 500,
    "eval_strategy": "no",
    "dataset_train_split": "train",
    "bf16": True,
    "dtype": "float32",
    "use_bias_correction_kl": True,
    "use_vllm": False,
    "lora_r": 16,
    "lora_alpha": 32,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
}
"""Defaults of TRL for the arguments that are taken over, used if a configuration does not write them."""
SAME = {
    "model_name_or_path": "model.path",
    "model_revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "num_generations": "rollout.samples_per_prompt",
    "max_completion_length": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "learning_rate": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "adam_epsilon": "optim.epsilon",
    "max_grad_norm": "optim.max_grad_norm",
    "seed": "train.seed",
    "entropy_coef": "algo.entropy_coef",
    "delta": "algo.dual_clip",
}
SUPERVISED = (
    "packing",
    "max_length",
    "max_seq_length",
    "assistant_only_loss",
    "completion_only_loss",
    "dataset_text_field",
)
"""Arguments that only SFTConfig has."""
LEFT_SUPERVISED = {
    "max_length": "no row is cut: see rollout.max_prompt_tokens",
    "max_seq_length": "no row is cut: see rollout.max_prompt_tokens",
    "packing": "rows are always packed up to train.tokens_per_row",
}
SAMPLED = ("num_generations", "max_completion_length", "reward_funcs", "beta", "epsilon", "loss_type", "scale_rewards")
"""Arguments that only GRPOConfig has."""
LOSSES = {
    "grpo": ({"algo.aggregation": "sequence_mean"}, ""),
    "dapo": ({"algo.aggregation": "token_mean"}, ""),
    "bnpo": ({"algo.aggregation": "token_mean"}, "one denominator for all processes; there, one for each"),
    "dr_grpo": ({"algo.aggregation": "constant"}, ""),
    "cispo": ({"algo.surrogate": "cispo", "algo.aggregation": "token_mean"}, ""),
    "sapo": ({"algo.surrogate": "sapo", "algo.aggregation": "sequence_mean"}, ""),
    "luspo": ({"algo.aggregation": "sequence_sum"}, ""),
    "vespo": (
        {"algo.surrogate": "vespo", "algo.aggregation": "token_mean"},
        "importance weights multiply the loss; there the ratio",
    ),
}
VESPO = {
    "vespo_k_pos": "power_positive",
    "vespo_lambda_pos": "decay_positive",
    "vespo_k_neg": "power_negative",
    "vespo_lambda_neg": "decay_negative",
}
"""Argument of TRL's loss "vespo" -> cell of `[algo]`."""
IMPORTANCE = {
    "token_truncate": ("truncate", "token"),
    "token_mask": ("mask", "token"),
    "sequence_truncate": ("truncate", "sequence"),
    "sequence_mask": ("mask", "sequence"),
}
SERVICES = {"project": "project", "wandb_project": "project", "wandb_entity": "entity", "wandb_run_group": "group"}
"""Setting of a logging service -> key of `[log]`. Some are TRL's, others belong to scripts that use TRL."""
PEFT_TARGETS = ["q_proj", "v_proj"]
"""Layers that PEFT takes where none are named. For some models, such as qwen2_5_vl, it has none and wants names."""
OPTIMIZERS = {"adamw_8bit": "adamw_8bit", "adamw_bnb_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit"}
ONE_PROCESS = "{} is for one process: multiply it by their number, or import with --processes N"
_BATCH = "rows are packed up to train.tokens_per_row; see rollout.prompts_per_step"
LEFT = {
    "output_dir": "a run has a folder of its own below ./runs (--runs)",
    "run_name": "on the command line: vlmrl train RECIPE --name NAME",
    "logging_steps": "every step is logged",
    "logging_dir": "see log.sinks",
    "trackio_space_id": "TRACKIO_SPACE_ID in the environment names the Space",
    "log_completions": "every rollout is kept (`vlmrl report`)",
    "num_completions_to_print": "see log.sample_every_steps",
    "logging_first_step": "every step is logged",
    "logging_strategy": "every step is logged",
    "log_level": "see --quiet",
    "hub_model_id": "see `vlmrl merge`",
    "hub_model_revision": "see `vlmrl merge`",
    "hub_strategy": "see `vlmrl merge`",
    "hub_always_push": "see `vlmrl merge`",
    "chat_template": "the chat template is chat_template.jinja in the model folder",
    "gradient_checkpointing_kwargs.": "the layers are chosen by model.gradient_checkpointing",
    "use_liger_kernel": "log-probs are always computed without the logits of a whole row",
    "overwrite_output_dir": "every run has a folder of its own",
    "do_eval": "see eval.every_steps",
    "dataset_num_proc": "rows are read from memory-mapped files",
    "bf16": "model.dtype is bfloat16 on a GPU by default",
    "top_entropy_quantile": "no counterpart: see algo.surrogate for losses that pick tokens",
    "num_generations_eval": "validation is greedy, one response per prompt",
    "attn_implementation": "the best kernel for shared prompts is chosen",
    "per_device_eval_batch_size": "validation is batched by rollout.batch_tokens",
    "eval_accumulation_steps": "validation is batched by rollout.batch_tokens",
    "generation_batch_size": _BATCH,
    "max_prompt_length": "see rollout.max_prompt_tokens",
    "shuffle_dataset": "rows are always shuffled, by train.seed",
    "remove_unused_columns": "the reward gets every column",
    "dataloader_num_workers": "rows are read from memory-mapped files",
    "task_type": "the model says it",
    "push_to_hub": "see `vlmrl merge`",
    "save_strategy": "see checkpoint.every_steps",
    "save_only_model": "a checkpoint always has weights, moments and state",
    "load_best_model_at_end": "the best checkpoint is kept, and `vlmrl merge RUN` takes it",
    "metric_for_best_model": "see eval.metric",
    "greater_is_better": "see eval.goal",
    "resume_from_checkpoint": "a run is continued with --resume RUN",
    "vllm_mode": "rollout.engine_gpus = 0 is colocate; above 0, the engine has GPUs of its own",
    "vllm_gpu_memory_utilization": "see rollout.kv_cache_gib",
    "sync_ref_model": "the reference never changes during a run",
    "deepspeed": "sharding follows from --gpus",
    "fsdp": "sharding follows from --gpus",
    "ddp_timeout": "see parallel.timeout_seconds",
    "min_p": "no counterpart",
    "repetition_penalty": "no counterpart: sampling and training would have different distributions",
}


def from_trl(draft: Draft) -> None:
    """Fill a draft from TRL's arguments."""
    draft.get("__config__")
    script = str(draft.given.pop("__script__", ""))
    draft.todo += [f"`{name}` is computed by the script: set it here" for name in draft.given.pop("__computed__", ())]
    if (sign := next((key for key in SUPERVISED if draft.written(key)), None)) and not any(map(draft.written, SAMPLED)):
        _supervised(draft, sign)
        return
    for key in [k for k in draft.given if k.startswith("vllm_") and not draft.get("use_vllm")]:
        draft.leave(key, "vLLM is off (use_vllm)")
    draft.put("algo.name", "grpo", "loss_type")
    draft.same(SAME)
    _model(draft)
    _data(draft)
    updates = _batches(draft)
    _algorithm(draft)
    _engine(draft)
    _episodes(draft, script)
    _steps(draft, updates)
    _reward(draft)
    _left(draft)


def _supervised(draft: Draft, sign: str) -> None:
    """Fill a draft from SFTConfig's arguments, with rows instead of prompts and samples and without sampling keys."""
    draft.defaults = {**draft.defaults, "learning_rate": 2e-5}
    draft.put("kind", "sft", sign, why="an argument of SFTConfig, not of GRPOConfig: use `vlmrl sft`")
    draft.same({source: key for source, key in SAME.items() if not key.startswith(("rollout.", "algo."))})
    _model(draft)
    _data(draft)
    batch = ("per_device_train_batch_size", "gradient_accumulation_steps")
    for key in batch:
        if int(draft.get(key)) < 1:
            raise ValueError("it must be at least 1")
    each = int(draft.get(batch[0])) * int(draft.get(batch[1])) * (draft.processes or 1)
    draft.put("train.rows_per_step", each, *batch)
    if draft.processes is None:
        draft.todo.append(ONE_PROCESS.format("train.rows_per_step"))
    draft.put("rollout.prompts_per_step", each, *batch)  # `_steps` reads this key
    _steps(draft, 1)
    del draft.taken["rollout.prompts_per_step"]
    draft.leave_all(LEFT_SUPERVISED)
    _left(draft)


def _left(draft: Draft) -> None:
    for key in ("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora", "use_dora"):
        draft.leave(key, "no adapter: use_peft is off") if not draft.get("use_peft") else None
    draft.loggers_of("report_to", SERVICES)
    draft.leave_all(LEFT)


def _model(draft: Draft) -> None:
    dtype_key = next((key for key in ("dtype", "torch_dtype") if draft.written(key)), "dtype")
    if draft.get("fp16"):
        draft.left["fp16"] = "arithmetic is in bfloat16 or float32 (model.dtype)"
    elif draft.get("bf16") and draft.get(dtype_key) == "float32":  # float32 weights under bfloat16 autocast
        draft.leave(dtype_key, "the type of the stored weights, which is always float32 here")
    else:
        draft.arithmetic(dtype_key)
    draft.thinking("chat_template_kwargs.enable_thinking")
    if draft.get("load_in_4bit"):
        draft.put("model.quantize", "4bit", "load_in_4bit")
    if not draft.get("use_peft"):
        return
    draft.put("lora.rank", int(draft.get("lora_r")), "lora_r")
    draft.put("lora.alpha", int(draft.get("lora_alpha")), "lora_alpha")
    if targets := draft.get("lora_target_modules"):
        is_whole = isinstance(targets, list) or targets == "all-linear"
        draft.put("lora.targets", targets if is_whole else [targets], "lora_target_modules")
    else:
        draft.put("lora.targets", PEFT_TARGETS, "lora_target_modules", why="PEFT's own choice; here it is all-linear")
    for source, key in (("use_rslora", "lora.rslora"), ("use_dora", "lora.dora")):
        if draft.get(source):
            draft.put(key, True, source)
    if draft.get("lora_dropout"):
        draft.left["lora_dropout"] = "no dropout in RL: sampling and training must be the same function"


def _data(draft: Draft) -> None:
    if name := draft.get("dataset_name"):
        path, config = located(str(name)), draft.get("dataset_config")
        draft.put("data.path", f"{path}#{config}" if config and path.startswith("hub:") else path, "dataset_name")
        draft.put("data.split", str(draft.get("dataset_train_split")), "dataset_train_split")
    if isinstance(text := draft.get("system_prompt"), str):
        draft.put("data.system", text, "system_prompt")
    if isinstance(column := draft.get("dataset_prompt_column"), str):
        draft.put("data.columns", {"prompt": column}, "dataset_prompt_column")
    test_split = draft.get("dataset_test_split")
    if test_split and draft.get("eval_strategy") != "no":
        if test_split == "test":
            draft.left["dataset_test_split"] = "a checkpoint chosen on the test split spoils the test: hold a split out"
            draft.todo.append("set [[data]] validation to held-out rows")
        else:
            draft.put("data.validation", str(test_split), "dataset_test_split")
    elif test_split:
        draft.leave("dataset_test_split", "nothing is validated (eval_strategy is no)")


def _batches(draft: Draft) -> int:
    """Set prompts per step and updates per step from the completions per device. Return updates per generation."""
    count = draft.processes or 1
    per_device = int(draft.get("per_device_train_batch_size"))
    accumulate = int(draft.get("gradient_accumulation_steps"))
    generations = int(draft.get("num_generations"))
    steps = int(draft.get("steps_per_generation") or accumulate)
    completions = int(draft.get("generation_batch_size") or per_device * count * steps)
    prompts = max(1, completions // max(1, generations))
    why = f"{completions} completions per generation, {generations} per prompt (batch sizes count completions there)"
    is_whole = draft.written("generation_batch_size")
    sources = ("generation_batch_size",) if is_whole else ("per_device_train_batch_size", "gradient_accumulation_steps")
    draft.put("rollout.prompts_per_step", prompts, *sources, why=why)
    if draft.processes is None and not is_whole:
        draft.todo.append(ONE_PROCESS.format("rollout.prompts_per_step"))
    splits = max(1, completions // max(1, per_device * count * accumulate))
    iterations = int(draft.get("num_iterations"))
    if iterations > 1:
        draft.left["num_iterations"] = "each batch of rollouts is used once, in train.updates_per_step updates"
    why = "optimizer updates from one generation"
    draft.put("train.updates_per_step", min(splits, prompts), "gradient_accumulation_steps", why=why)
    return splits * iterations


def _algorithm(draft: Draft) -> None:
    loss = draft.get("loss_type")
    cells, why = LOSSES.get(loss, ({}, ""))
    if loss not in LOSSES:
        draft.left["loss_type"] = f"`{loss}` has no counterpart: choose an algorithm of `vlmrl recipe list --algos`"
    for key, value in cells.items():
        draft.put(key, value, "loss_type", why=why)
    low = float(draft.get("epsilon"))
    high = draft.get("epsilon_high")
    if loss == "sapo":
        draft.put("algo.tau_positive", float(draft.get("sapo_temperature_pos")), "sapo_temperature_pos")
        draft.put("algo.tau_negative", float(draft.get("sapo_temperature_neg")), "sapo_temperature_neg")
    if loss == "vespo":
        for key, name in VESPO.items():
            draft.put(f"algo.{name}", float(draft.get(key)), key)
    draft.put("algo.clip_low", low, "epsilon")
    bound = low if high is None else float(high)
    if loss == "cispo" and high is not None:  # in TRL this is the bound of the ratio itself, not of ratio - 1
        why = "counted from a ratio of 1; there from 0"
        draft.put("algo.clip_high", max(bound - 1.0, 1e-6), "epsilon_high", why=why)
    else:
        draft.put("algo.clip_high", bound, "epsilon_high" if high is not None else "epsilon")
    draft.put("algo.kl_coef", float(draft.get("beta")), "beta")
    if float(draft.get("beta")) > 0:
        why = "unweighted; there times the probability ratio (use_bias_correction_kl), whose value is 1 on policy"
        draft.put("algo.kl", "k3", "beta", why=why if draft.get("use_bias_correction_kl") else "")
    scale = str(draft.get("scale_rewards")).lower()
    if scale in ("none", "false", "batch"):
        draft.put("algo.advantage", "group_mean", "scale_rewards")
    if scale == "batch":
        draft.put("algo.scale", "batch", "scale_rewards")
    if draft.get("importance_sampling_level") == "sequence":
        draft.put("algo.ratio", "sequence", "importance_sampling_level")
    if draft.get("multi_objective_aggregation") == "normalize_then_sum":
        draft.put("algo.advantage", "part_by_part", "multi_objective_aggregation")
    if draft.get("mask_truncated_completions"):
        draft.put("algo.truncated", "mask", "mask_truncated_completions")


def _engine(draft: Draft) -> None:
    if draft.get("use_vllm"):
        draft.put("rollout.engine", "vllm", "use_vllm")
        parts = number(int, draft.get("vllm_tensor_parallel_size"), 2)
        if draft.given.get("vllm_mode") == "server":
            draft.leave("vllm_tensor_parallel_size", "not used there with a server; here rollout.tensor_parallel")
        elif parts:
            draft.put("rollout.tensor_parallel", parts, "vllm_tensor_parallel_size")
        mode = IMPORTANCE.get(str(draft.get("vllm_importance_sampling_mode")))
        if not draft.get("vllm_importance_sampling_correction"):
            draft.put("algo.importance", "none", "vllm_importance_sampling_correction")
        elif mode:
            draft.put("algo.importance", mode[0], "vllm_importance_sampling_mode")
            draft.put("algo.importance_level", mode[1], "vllm_importance_sampling_mode")
            cap = draft.get("vllm_importance_sampling_cap") or draft.get("vllm_importance_sampling_clip_max")
            why = "masked outside [1 / cap, cap]; there only above the limit" if mode[0] == "mask" else ""
            draft.put("algo.importance_cap", float(cap), "vllm_importance_sampling_clip_max", why=why)
    draft.filtered_sampling("top_p", "top_k")


def _episodes(draft: Draft, script: str) -> None:
    """Set the environment: the tools or the class that the trainer gets in its script, and the number of turns."""
    rounds, factory, tools = (draft.get(k) for k in ("max_tool_calling_iterations", "environment_factory", "tools"))
    names = [factory] if factory else tools if isinstance(tools, list) else [tools] if tools else []
    if not names and rounds is None:
        return
    if not names:
        names = ["tools.py:TOOLS"]
        draft.todo.append("name the tools: [environment] name (`tools` or `environment_factory` of the trainer)")
    elif factory and tools:
        draft.leave("tools", "the tools of a class are its methods: write them there")
        draft.todo.append("write the functions of `tools` as methods of the environment's class")
    if script in {str(name).partition(":")[0] for name in names}:
        draft.todo.append("move the tools into a file of their own: their process imports it, and must not train")
    turns = None if rounds is None else int(rounds) + 1, "max_tool_calling_iterations"
    draft.episodes(
        [str(n) for n in names], "environment_factory" if factory else "tools", turns, "max_completion_length"
    )


def _steps(draft: Draft, updates: int) -> None:
    limit, prompts = number(int, draft.get("max_steps"), 1), draft.taken["rollout.prompts_per_step"].value
    epochs, size = float(draft.get("num_train_epochs")), "rows" if "train.rows_per_step" in draft.taken else "prompts"
    if limit:
        why = f"{limit} optimizer updates at {updates} per generation: a step here is a generation"
        draft.put("train.steps", max(1, limit // updates), "max_steps", why=why if updates > 1 else "")
        draft.leave("num_train_epochs", "max_steps sets the number of steps")
    elif draft.rows:
        why = f"{epochs:g} passes over {draft.rows} rows at {prompts} {size} per step"
        draft.put("train.steps", max(1, int(draft.rows * epochs // prompts)), "num_train_epochs", why=why)
    else:
        draft.put("train.epochs", epochs, "num_train_epochs", why=COUNTED_LATER)
    draft.schedule_keys("lr_scheduler_type", "warmup_steps", "warmup_ratio", "lr_scheduler_kwargs.min_lr_rate")
    every = draft.get("eval_steps")
    if draft.get("eval_strategy") == "steps" and isinstance(every, int):
        draft.put("eval.every_steps", max(1, every // updates), "eval_steps")
    elif draft.get("eval_strategy") == "no":
        if draft.written("eval_strategy"):
            draft.put("eval.enabled", False, "eval_strategy")
        else:
            draft.put("eval.every_steps", 0, "eval_strategy", why="off there; here at the start and the end")
    saves = number(int, draft.get("save_steps"), 1)
    if saves:
        draft.put("checkpoint.every_steps", max(1, saves // updates), "save_steps")
    draft.put_number("checkpoint.keep_last", int, "save_total_limit", 1, why="the best checkpoint is kept, too")
    if (name := draft.get("optim")) in OPTIMIZERS:
        draft.put("optim.name", OPTIMIZERS[name], "optim")
    elif name is not None and "adamw" not in str(name):
        draft.left["optim"] = f"`{name}`: the optimizer is AdamW (optim.name)"


def _reward(draft: Draft) -> None:
    functions = draft.get("reward_funcs")
    listed = functions if isinstance(functions, list) else [functions] if functions else []
    paths = [(str(name), re.fullmatch(r"(?!trl\.)([A-Za-z_][\w.]*)\.(?!py$)(\w+)", str(name))) for name in listed]
    functions = [f"{path[1].replace('.', '/')}.py:{path[2]}" if path else name for name, path in paths]
    weights = draft.get("reward_weights")
    if weights and len(weights) != len(functions):
        raise ValueError(f"{len(functions)} functions need as many weights")
    if not functions:
        draft.todo.append('name a reward: [reward] name = "file.py:function", style = "trl"')
    elif not all(".py:" in function for function in functions):
        draft.left["reward_funcs"] = f"{', '.join(functions)}: a reward is named as file.py:function here"
        draft.leave("reward_weights", "`weight` in the table of each reward: [[rewards]]")
        draft.todo.append('name each function in a table: [[rewards]] name = "file.py:function", style = "trl"')
    elif len(functions) == 1 and not weights:
        draft.put("reward.name", functions[0], "reward_funcs")
        draft.put("reward.style", "trl", "reward_funcs")
    else:
        each = zip(functions, weights or [1.0] * len(functions), strict=True)
        rewards = [{"name": name, "style": "trl", "weight": float(weight)} for name, weight in each]
        draft.put("rewards", rewards, "reward_funcs", *(["reward_weights"] if weights else []))
