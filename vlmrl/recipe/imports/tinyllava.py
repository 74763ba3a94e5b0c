"""TinyLLaVA's supervised training as a recipe: launch scripts of `rllava/train/train.py`, a part of RLLaVA.

Source: RLLaVA at 4753d4a (github.com/TinyLoopX/RLLaVA: rllava/train/train.py, rllava/model/config.py,
examples/tinyllava/train).
"""

from __future__ import annotations

from typing import Any

from vlmrl.recipe.imports.draft import Draft, number
from vlmrl.recipe.imports.shared import loggers_of
from vlmrl.recipe.imports.steps import COUNTED_LATER, schedule_keys

DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "seed": 42,
    "save_steps": 500,
    "tune_type_llm": "frozen",
    "tune_type_vision_tower": "frozen",
    "tune_type_connector": "full",
    "gradient_checkpointing": False,
    "lora_r": 128,
    "lora_alpha": 256,
}
"""Defaults of the trainer for the arguments that are taken over, used if a script does not write them."""
SAME = {
    "image_folder": "data.images_root",
    "learning_rate": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "max_grad_norm": "optim.max_grad_norm",
    "seed": "train.seed",
    "gradient_checkpointing": "model.gradient_checkpointing",
}
_PUT_TOGETHER = "there a model is made of a language model, a vision tower and a connector; here it is one whole"
LEFT = {
    "model_name_or_path": _PUT_TOGETHER,
    "vision_tower": _PUT_TOGETHER,
    "vision_tower2": _PUT_TOGETHER,
    "connector_type": _PUT_TOGETHER,
    "resampler_hidden_size": _PUT_TOGETHER,
    "num_queries": _PUT_TOGETHER,
    "num_resampler_layers": _PUT_TOGETHER,
    "mm_vision_select_layer": _PUT_TOGETHER,
    "mm_vision_select_feature": _PUT_TOGETHER,
    "mm_patch_merge_type": _PUT_TOGETHER,
    "tune_vision_tower_from_layer": "a part is trained completely or not at all (model.freeze)",
    "tune_embed_tokens": "see model.freeze",
    "training_recipe": "see [lora], model.quantize and model.freeze",
    "conv_version": "prompts are rendered by the model's chat template",
    "is_multimodal": "each row has images or none",
    "image_aspect_ratio": "see model.min_pixels and model.max_pixels",
    "model_max_length": "no row is cut: see rollout.max_prompt_tokens",
    "group_by_modality_length": "rows are always packed up to train.tokens_per_row",
    "lazy_preprocess": "rows are read from memory-mapped files",
    "dataloader_num_workers": "rows are read from memory-mapped files",
    "tokenizer_use_fast": "the tokenizer is that of the model folder",
    "tokenizer_padding_side": "rows are always packed without padding",
    "attn_implementation": "the best kernel for shared prompts is chosen",
    "deepspeed": "sharding follows from --gpus",
    "include": "see --gpus",
    "CUDA_VISIBLE_DEVICES": "on the command line: --gpus 0,2 chooses GPUs",
    "tokenizer_name_or_path": _PUT_TOGETHER,
    "master_port": "the launcher picks a port",
    "bf16": "model.dtype is bfloat16 on a GPU by default",
    "fp16": "arithmetic is in bfloat16 or float32 (model.dtype)",
    "tf32": "arithmetic is in bfloat16 or float32 (model.dtype)",
    "per_device_eval_batch_size": "validation is batched by rollout.batch_tokens",
    "evaluation_strategy": "see eval.every_steps",
    "eval_strategy": "see eval.every_steps",
    "save_strategy": "see checkpoint.every_steps",
    "logging_steps": "every step is logged",
    "output_dir": "a run has a folder of its own below ./runs (--runs)",
    "run_name": "on the command line: vlmrl sft RECIPE --name NAME",
    "pretrained_model_path": "the result of the first of two stages there; model.path is one whole model",
    "lora_dropout": "no dropout in an adapter that RL continues",
    "lora_bias": "an adapter has no biases",
    "lora_r": "no adapter: tune_type_llm is not lora",
    "lora_alpha": "no adapter: tune_type_llm is not lora",
    "optim": "the optimizer is AdamW (optim.name)",
    "bits": "see model.quantize",
    "quant_type": "with 4 bits, weights are NF4",
    "double_quant": "see model.quantize",
    "mm_projector_lr": "all trained weights have one learning rate",
    "vision_tower_lr": "all trained weights have one learning rate",
}


def from_tinyllava(draft: Draft, rows: int | None, processes: int | None) -> None:
    """Fill a draft from the trainer's arguments. `rows`, `processes`: see `run.import_recipe`."""
    draft.defaults = DEFAULTS
    draft.put("kind", "sft", "data_path", why="supervised training: use `vlmrl sft`")
    draft.same(SAME)
    _data(draft)
    _trained(draft)
    each, accumulated = (int(draft.get(k)) for k in ("per_device_train_batch_size", "gradient_accumulation_steps"))
    draft.put(
        "train.rows_per_step",
        max(1, each * accumulated) * (processes or 1),
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
    )
    if processes is None:
        draft.todo.append(
            "train.rows_per_step is for one process: multiply it by their number, or import with --processes N"
        )
    _length(draft, rows)
    loggers_of(draft, "report_to", {})
    draft.leave_all(LEFT)


def _data(draft: Draft) -> None:
    path = draft.get("data_path")
    if isinstance(path, str) and "$" not in path:
        draft.put("data.path", path, "data_path")
    else:
        draft.leave("data_path", "given to the script on its command line")
    if "$" in str(draft.get("image_folder") or ""):
        draft.taken.pop("data.images_root", None)
        draft.leave("image_folder", "given to the script on its command line")
    draft.todo.append(
        "rows are conversations (`conversations`: from, value): convert them to messages of role and content"
    )


def _trained(draft: Draft) -> None:
    """Set the frozen parts, or the adapter, from `tune_type_*`."""
    language = str(draft.get("tune_type_llm"))
    frozen = ["language"] if language == "frozen" else []
    frozen += ["vision"] if draft.get("tune_type_vision_tower") == "frozen" else []
    frozen += ["connector"] if draft.get("tune_type_connector") == "frozen" else []
    if language.startswith(("lora", "qlora")):
        draft.put("lora.rank", int(draft.get("lora_r")), "lora_r", "tune_type_llm")
        draft.put("lora.alpha", int(draft.get("lora_alpha")), "lora_alpha")
        for key in ("tune_type_vision_tower", "tune_type_connector"):
            draft.leave(key, "with an adapter, nothing else is trained")
        if language.startswith("qlora"):
            why = "4 bits, whatever the number there"
            draft.put("model.quantize", "4bit", "tune_type_llm", why=why)
    elif frozen:
        draft.put("model.freeze", frozen, "tune_type_llm", "tune_type_vision_tower", "tune_type_connector")


def _length(draft: Draft, rows: int | None) -> None:
    steps, size = number(int, draft.get("max_steps"), 1), draft.taken["train.rows_per_step"].value
    epochs = float(draft.get("num_train_epochs"))
    if steps:
        draft.put("train.steps", steps, "max_steps")
    elif rows:
        why = f"{epochs:g} passes over {rows} rows at {size} rows per step"
        draft.put("train.steps", max(1, int(rows * epochs // size)), "num_train_epochs", why=why)
    else:
        draft.put("train.epochs", epochs, "num_train_epochs", why=COUNTED_LATER)
    schedule_keys(draft, "lr_scheduler_type", "warmup_steps", "warmup_ratio", "")
    if saves := number(int, draft.get("save_steps"), 1):
        draft.put("checkpoint.every_steps", saves, "save_steps")
    if keep := number(int, draft.get("save_total_limit"), 1):
        draft.put("checkpoint.keep_last", keep, "save_total_limit", why="the best checkpoint is kept, too")
