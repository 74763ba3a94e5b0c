"""When a checkpoint is written, and what becomes of it: at once, or beside the training."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from vlmrl.dist import fsdp
from vlmrl.dist.fsdp import HostCopies
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import CheckpointError
from vlmrl.train import checkpointing
from vlmrl.train.checkpointing import finish_failed, finish_save, look_after_save
from vlmrl.train.journal import Progress
from vlmrl.train.session import Saver, Written, keep_newest

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Writing:
    """A write that ends when it may, in the way it should."""

    def __init__(self, step: int, error: BaseException | None = None) -> None:
        self.made, self.error, self.may_end = Written(step, Path(f"step-{step:06d}"), [4]), error, Event()

    def __call__(self) -> Written:
        assert self.may_end.wait(10.0)
        if self.error is not None:
            raise self.error
        return self.made


class Folder:
    """A run's folder; `done` is what was done with it."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def prune_checkpoints(self, last: int, keep: list[int]) -> None:
        self.done.append(f"prune {last} {keep}")

    def event(self, step: int, what: str, folder: str) -> None:
        self.done.append(f"{step} {what} {folder}")

    def write_log(self, text: str) -> None:
        self.done.append(text)


def saving(copies: HostCopies | None = None) -> tuple[Saver, Folder]:
    """(the saver of a run that keeps three checkpoints, the run's folder)."""
    folder = Folder()
    return Saver(ALONE, copies, partial(keep_newest, folder, 3)), folder  # type: ignore[arg-type]


def two(others_written: bool) -> World:
    """Two processes as one of them sees them."""
    return SimpleNamespace(gather=lambda mine: [mine, others_written])  # type: ignore[return-value]


def test_a_gpu_saves_beside_the_training_and_a_cpu_does_not_unless_told(monkeypatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *a, **k: pytest.fail("nothing is copied yet"))
    kinds = {(a, d.type): Saver.of(a, d, ALONE).copies for a in (None, True, False) for d in (CPU, GPU)}
    assert {k for k, copies in kinds.items() if copies is not None} == {(None, "cuda"), (True, "cpu"), (True, "cuda")}
    assert [copies.pinned for k, copies in kinds.items() if copies is not None] == [True, False, True]


def test_without_copies_it_is_written_before_anything_else_happens() -> None:
    write, saver = Writing(7), Saver()
    write.may_end.set()
    saver.begin(write)
    assert saver.written and saver.under_way and saver.result() == write.made and not saver.under_way


def test_with_copies_training_goes_on_and_the_rest_is_done_when_all_have_written() -> None:
    write, (saver, folder) = Writing(7), saving(HostCopies())
    saver.begin(write)
    look_after_save(saver, two(others_written=True))
    assert folder.done == [] and saver.under_way  # still writing
    write.may_end.set()
    while not saver.written:
        pass
    look_after_save(saver, two(others_written=False))
    assert folder.done == [] and saver.under_way
    look_after_save(saver, two(others_written=True))
    # What was best when it was begun is kept: a newer best may not be on the disk yet.
    assert folder.done == ["prune 3 [4]", "7 checkpoint saved step-000007"] and not saver.under_way
    finish_save(saver)
    assert len(folder.done) == 2  # once


def test_a_failed_write_ends_the_run_where_it_is_noticed_and_removes_nothing() -> None:
    write, (saver, folder) = Writing(7, CheckpointError("disk full")), saving(HostCopies())
    saver.begin(write)
    write.may_end.set()
    with pytest.raises(CheckpointError, match="disk full"):
        finish_save(saver)
    assert folder.done == [] and not saver.under_way


def test_a_run_that_fails_waits_for_its_checkpoint_and_fails_with_its_own_error() -> None:
    said = "the checkpoint that was being written failed too: full"
    whole = ["prune 3 [4]", "7 checkpoint saved step-000007"]
    for error, told in ((None, whole), (CheckpointError("full"), [said])):
        write, (saver, folder) = Writing(7, error), saving(HostCopies())
        saver.begin(write)
        write.may_end.set()
        finish_failed(saver, folder)  # type: ignore[arg-type]
        assert folder.done == told


def test_the_next_checkpoint_waits_for_the_one_before(monkeypatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(checkpointing, "finish_save", lambda s: order.append("before is whole"))
    monkeypatch.setattr(checkpointing, "_proof", lambda learner, items: order.append("begun") or pytest.fail("enough"))
    policy = SimpleNamespace(
        model=SimpleNamespace(config=SimpleNamespace(model_type="x")), temperature=1.0, banned_ids=(), value_head=None
    )
    recipe = SimpleNamespace(
        kind="rl", lora=None, model=SimpleNamespace(dtype="float32", min_pixels=1, max_pixels=2, thinking=False)
    )
    rollouts = SimpleNamespace(finish=lambda: order.append("rollouts are there"))
    here = SimpleNamespace(
        recipe=recipe,
        base={},
        saver=Saver(),
        feed=SimpleNamespace(position={}),
        learner=SimpleNamespace(policy=policy, optimizer=SimpleNamespace(updates=0)),
        journal=SimpleNamespace(progress=Progress(), seconds=0.0, rollouts=rollouts),
    )
    with pytest.raises(pytest.fail.Exception):
        checkpointing.save(here)
    assert order == ["rollouts are there", "before is whole", "begun"]


def test_copies_are_made_anew_in_the_same_place() -> None:
    copies, x = HostCopies(), torch.arange(4.0)
    first = copies.take("weights", {"x": x})["x"]
    x += 1
    assert first.tolist() == [0.0, 1.0, 2.0, 3.0]
    again = copies.take("weights", {"x": x})["x"]
    assert again.tolist() == [1.0, 2.0, 3.0, 4.0] and again.data_ptr() == first.data_ptr()
    other = copies.take("optimizer", {"x": x})["x"]
    assert other.data_ptr() != first.data_ptr()
    assert copies.take("weights", {"x": x.bfloat16()})["x"].dtype == torch.bfloat16


def test_copies_of_one_dtype_share_a_few_buffers(monkeypatch) -> None:
    """Buffers of 40 bytes: float32 tensors of 16, 24, 0, 4 and 60 bytes in 3 of them, bfloat16 in one of its own."""
    monkeypatch.setattr(fsdp, "SLAB_BYTES", 40)
    tensors = {
        "a": torch.arange(4.0),
        "b": torch.arange(6.0).view(2, 3),
        "empty": torch.zeros(0, 3),
        "half": torch.arange(3.0).bfloat16(),
        "scalar": torch.tensor(7.0),
        "large": torch.arange(15.0),
    }
    copies = HostCopies()
    found = copies.take("weights", tensors)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype and found[name].is_contiguous()
    storages = {name: t.untyped_storage().data_ptr() for name, t in found.items()}
    assert storages["a"] == storages["b"] == storages["empty"]  # 16 + 24 + 0 bytes fill it
    assert len({storages[n] for n in ("a", "scalar", "large", "half")}) == 4
    assert {t.untyped_storage().nbytes() for t in found.values()} == {40, 6, 4, 60}
    again = copies.take("weights", {n: t + 1 for n, t in tensors.items()})
    assert {n: t.data_ptr() for n, t in again.items()} == {n: t.data_ptr() for n, t in found.items()}
    assert again["b"].tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert list(copies.take("weights", {"a": tensors["a"]})) == ["a"]
