"""Files of a checkpoint. None of them is ever unpickled.

checkpoints/step-000010/
  meta.json           schema, step, base model, dtype, what is trained, sampling policy, every file with size and sha256
  model/              weights: torch.distributed.checkpoint in safetensors form, names as in the transformers model;
                      absent under LoRA
  adapter/            under LoRA: adapter_config.json and adapter_model.safetensors as PEFT reads them; frozen weights
                      stay in the base model, which meta.json names with a checksum
  value_head.safetensors
                      weight and bias of the critic's value head, where there is a critic; for a resume, never merged
  optimizer/          moments, in the same form; float32 masters too when the weights are bfloat16
  hf/                 config, generation config, processor and chat template, as `save_pretrained` writes them
  data.json           position in the data, training state (step, best validation, ...)
  rng/torch.safetensors
  proof.safetensors   token log-probs of a few rollouts under exactly these weights, to prove a reload or a merge
  COMPLETE            sha256 of meta.json, written last; without it, resume, eval and merge ignore the folder

Only `vlmrl/store/checkpoints.py` checks that a folder holds what its meta.json says.
"""

from __future__ import annotations

MODEL, ADAPTER, OPTIMIZER, HF = "model", "adapter", "optimizer", "hf"
DATA = "data.json"
RNG = "rng/torch.safetensors"
VALUE_HEAD = "value_head.safetensors"
PROOF = "proof.safetensors"
