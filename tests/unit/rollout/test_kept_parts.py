"""Parts of each tensor that a worker of an engine in parts keeps: worked by hand, and seen in loaders like vLLM's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vlmrl.rollout.vllm import wire
from vlmrl.rollout.vllm.wire import WatchedLoad, cut, paste


def load_rows(parameter: Tensor, tensor: Tensor, part: int) -> None:
    """As vLLM's column-parallel layers do."""
    size = parameter.shape[0]
    parameter.data.copy_(tensor.narrow(0, part * size, size))


def test_rows_columns_and_pieces_of_both_are_found() -> None:
    sent = {name: torch.randn(4, 6) for name in ("rows", "columns", "turned", "two", "whole", "twice", "unread")}
    watched = WatchedLoad()
    with watched:
        tensors = {name: watched.watch(name, t.clone()) for name, t in sent.items()}
        load_rows(torch.empty(2, 6), tensors["rows"], 1)
        torch.empty(4, 3).copy_(tensors["columns"][:, 3:])
        torch.empty(3, 4).copy_(tensors["turned"].t()[3:])
        torch.empty(2, 6).copy_(torch.cat([tensors["two"][:1], tensors["two"][3:]]))
        torch.empty(4, 6).copy_(tensors["whole"])
        torch.empty(24).copy_(torch.cat([tensors["twice"].view(-1)[:12]] * 2))
    kept = watched.kept()
    # Row-major, 6 numbers a row: the second half of the rows begins at 12, columns 3.. of each row at 3.
    assert kept == {
        "rows": [(12, (2, 6), (6, 1))],
        "columns": [(3, (4, 3), (6, 1))],
        "turned": [(3, (3, 4), (1, 6))],
        "two": [(0, (1, 6), (6, 1)), (18, (1, 6), (6, 1))],
        "twice": [(0, (12,), (1,))],
    }
    for name, regions in kept.items():
        pieces = cut(sent[name], regions)
        got = paste(iter(pieces), regions, (4, 6), torch.float32)
        seen = ~got.isnan()
        assert torch.equal(got[seen], sent[name][seen]) and int(seen.sum()) == sum(p.numel() for p in pieces)
    assert torch.equal(
        paste(iter(cut(sent["two"], kept["two"])), kept["two"], (4, 6), torch.float32)[3], sent["two"][3]
    )


def test_what_cannot_be_told_apart_is_sent_whole() -> None:
    watched, base = WatchedLoad(), torch.randn(8)
    with watched:
        views = [watched.watch("left", base[:4]), watched.watch("right", base[4:])]  # one memory, two names
        numbers = watched.watch("ids", torch.arange(8))
        turned = watched.watch("turned", torch.randn(3, 4).t())
        spread = watched.watch("spread", torch.randn(1, 4))
        for tensor in (*views, numbers, turned):
            torch.empty(2).copy_(tensor.flatten()[:2])
        torch.empty(3, 2).copy_(spread[:, :2].expand(3, 2))
    assert watched.kept() == {}


def test_memory_that_is_used_again_belongs_to_the_old_tensor_no_more() -> None:
    watched, memory = WatchedLoad(), bytearray(64)
    with watched:
        tensor = watched.watch("a", torch.frombuffer(memory, dtype=torch.float32))
        torch.empty(4).copy_(tensor[:4])
        del tensor
        torch.empty(4).copy_(torch.frombuffer(memory, dtype=torch.float32)[8:12])
    assert watched.kept() == {"a": [(0, (4,), (1,))]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_message_carries_the_kept_numbers_alone_and_bit_for_bit(dtype) -> None:
    tensor = torch.randn(4, 6).to(dtype)
    regions = [(3, (4, 3), (6, 1))]
    header, blobs = wire.pack_tensor("w", tensor, regions)
    assert [len(b) for b in blobs] == [4 * 3 * dtype.itemsize]
    name, got = wire.unpack_tensor(header, [bytearray(b) for b in blobs])
    assert name == "w" and got.dtype == dtype and got.shape == (4, 6)
    assert torch.equal(got[:, 3:], tensor[:, 3:]) and got[:, :3].isnan().all()
    header, blobs = wire.pack_tensor("w", tensor)
    assert torch.equal(wire.unpack_tensor(header, [bytearray(b) for b in blobs])[1], tensor)
