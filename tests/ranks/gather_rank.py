"""One process of a gathering: `python gather_rank.py`, with torchrun's environment. Compares with what was sharded."""

from __future__ import annotations

import itertools

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from vlmrl.dist.world import join_world
from vlmrl.rollout import weight_sync
from vlmrl.rollout.weight_sync import whole_tensors

SHAPES = [(1,), (7,), (2, 5), (3, 4), (1, 9), (8, 3, 2), (6,), (64, 8), (5, 1)]


def main() -> None:
    asked: list[int] = []
    gather = weight_sync._gather

    def counted(shards: list[DTensor]):
        asked.append(sum(t.numel() * t.element_size() for t in shards))
        return gather(shards)

    weight_sync._gather = counted  # type: ignore[assignment]
    with join_world("cpu", timeout_seconds=60) as world:
        mesh = init_device_mesh("cpu", (world.size,))
        torch.manual_seed(0)
        kinds = itertools.product((torch.float32, torch.bfloat16), SHAPES)
        full = {str(i): torch.randn(shape).to(kind) for i, (kind, shape) in enumerate(kinds)}
        full["ids"] = torch.arange(5)
        plain = {"3", "8", "ids"}
        named = {n: t if n in plain else distribute_tensor(t, mesh, [Shard(0)]) for n, t in full.items()}
        for bucket_bytes, dtype in itertools.product((1, 100, 1 << 20), (None, torch.bfloat16)):
            asked.clear()
            found = list(whole_tensors(named.items(), bucket_bytes, dtype))
            assert [n for n, _ in found] == list(full)
            for name, tensor in found:
                want = full[name].to(dtype) if dtype and name not in plain else full[name]
                assert type(tensor) is torch.Tensor and tensor.dtype == want.dtype and torch.equal(tensor, want), name
            largest = max(t.numel() * t.element_size() for t in full.values())
            assert max(asked) <= max(bucket_bytes, largest) and (bucket_bytes == 1 or len(asked) < len(full))
        # Values of any size go from the first rank to each.
        assert world.hand_out([bytes(10**rank) for rank in range(world.size)]) == bytes(10**world.rank)
        assert world.hand_out([{"x": rank} for rank in range(world.size)] if world.is_main else []) == {"x": world.rank}


if __name__ == "__main__":
    main()
