"""What a checkpoint is on disk. Nothing in it is ever unpickled.

checkpoints/step-000010/
  meta.json           schema, step, base model, dtype, what is trained, sampling policy, every file with size and sha256
  model/              weights: torch.distributed.checkpoint in safetensors form, names as in the transformers model;
                      absent under LoRA
  adapter/            under LoRA: adapter_config.json and adapter_model.safetensors as PEFT reads them; frozen weights
                      stay in the base model, which meta.json names with a checksum
  value_head.safetensors
                      weight and bias of the critic's value head, where there is a critic; for a resume, never merged
  optimizer/          moments, the same form; float32 masters too when the weights are bfloat16
  hf/                 config, generation config, processor and chat template, as `save_pretrained` writes them
  data.json           position in the data, training state (step, best validation, ...)
  rng/torch.safetensors
  proof.safetensors   token log-probs of a few rollouts under exactly these weights, to prove a reload or a merge
  COMPLETE            sha256 of meta.json, written last; without it the folder does not exist for resume, eval and merge
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from vlmrl.errors import CheckpointError
from vlmrl.store.layout import COMPLETE, META

SCHEMA = 1
MODEL, ADAPTER, OPTIMIZER, HF = "model", "adapter", "optimizer", "hf"
DATA = "data.json"
RNG = "rng/torch.safetensors"
VALUE_HEAD = "value_head.safetensors"
PROOF = "proof.safetensors"


def read_meta(folder: Path) -> dict[str, Any]:
    """meta.json of a complete checkpoint.

    Raises: CheckpointError when COMPLETE is missing, the file is damaged, or another schema wrote it.
    """
    if not (folder / COMPLETE).is_file():
        raise CheckpointError("this checkpoint is not complete: a save was interrupted", where=str(folder),
                              hint="use an older one; `vlmrl runs show RUN` lists those that are complete")  # fmt: skip
    try:
        text, said = (folder / META).read_bytes(), (folder / COMPLETE).read_text("utf-8").strip()
        if said and said != hashlib.sha256(text).hexdigest():
            raise ValueError("it was changed since it was saved")
        meta = json.loads(text)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{META} cannot be read: {error}", where=str(folder)) from error
    if not isinstance(meta, dict) or meta.get("schema") != SCHEMA:
        found = meta.get("schema") if isinstance(meta, dict) else None
        raise CheckpointError(
            f"this checkpoint has schema {found}; this vlmrl reads schema {SCHEMA}", where=str(folder)
        )
    return meta
