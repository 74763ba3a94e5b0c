"""Run by `processes.run_ranks`: each rank shards a model by FSDP2 and saves its part, as a run on several GPUs does.

save_sharded.py MODEL_FOLDER OUT [SCALE OUT ...]

SCALE: the weights of the next save are those of the model times this: another step of the same run.
"""

from __future__ import annotations

import sys

import torch
from torch import distributed as dist
from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForImageTextToText

from vlmrl.process import leave


def main(folder: str, *jobs: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    for layer in [*model.model.language_model.layers, *model.model.visual.blocks]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for scale, out in zip(("1", *jobs[1::2]), jobs[::2], strict=True):
        tied = model.all_tied_weights_keys
        tensors = {n: t * float(scale) for n, t in model.state_dict().items() if n not in tied}
        save(tensors, storage_writer=HuggingFaceStorageWriter(out, save_distributed=True))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)
