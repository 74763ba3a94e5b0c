"""The counted operations of an update against formulas, and their times by hand."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts" / "bench"))

import flops
import update_roofline as roofline
from gpu_world import Case, make_items, make_model, shape_of
from update_roofline import Counted, Operation, Rates, count, kernels, predict

from vlmrl.model.policy import Policy

RATES = Rates(products=100.0, attention=10.0, memory=4.0)


def counted(recompute: bool, rank: int = 0, device: str = "cpu", groups: int = 1) -> Counted:
    case = Case("update", "taxon", "Qwen2.5-VL-7B", "shared", "split", recompute=recompute, rank=rank)
    model = make_model(case, torch.device(device), torch.float32, smoke=True)
    policy = Policy(model, backend="split" if device == "cpu" else "varlen")
    policy.device = torch.device(device)
    group = make_items(shape_of(case, True), model.config, torch.float32)
    return count(model, policy, [x for n in range(groups) for x in roofline._numbered(group, n)], 10_000)


def flops_by_phase(result: Counted, part: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in result.operations:
        total[each.phase] += each.flops if each.part == part else 0.0
    return total


def operation(reads: dict[int, int], writes: dict[int, int], **more: object) -> Operation:
    plain = Operation("text", "forward", "memory", 0.0, reads, writes)
    return dataclasses.replace(plain, **more)


def work_of(operations: list[Operation], needed: set[int]) -> Counted:
    return Counted(operations, needed, flops.Flops({"attention": 40.0, "vision attention": 20.0}, {}), 0)


NORM = [
    operation({1: 8}, {2: 16}),  # to float32
    operation({2: 16}, {3: 4}),  # its mean
    operation({2: 16, 3: 4}, {4: 8}),
    operation({4: 8, 5: 40}, {6: 8}, kind="products", flops=2000.0),
    operation({6: 8}, {7: 8}),
]


def test_between_two_products_compiled_operations_read_and_write_what_others_need():
    fused = kernels(work_of(NORM, set()), compiled=True)
    assert [(k.reads, k.writes) for k in fused] == [({1: 8}, {4: 8}), ({4: 8, 5: 40}, {6: 8}), ({6: 8}, {7: 8})]
    kept = kernels(work_of(NORM, {3}), compiled=True)  # alive at the end: a gradient, say
    assert kept[0].writes == {3: 4, 4: 8}
    assert kernels(work_of(NORM, set()), compiled=False) == NORM


def test_the_head_is_not_compiled_and_another_phase_begins_another_kernel():
    head = [dataclasses.replace(o, part="head") for o in NORM]
    assert len(kernels(work_of(head, set()), compiled=True)) == len(NORM)
    mixed = [NORM[0], dataclasses.replace(NORM[1], phase="backward")]
    assert len(kernels(work_of(mixed, set()), compiled=True)) == 2


def test_seconds_by_hand():
    """A product of 2,000 FLOPs takes 20 s, longer than its 56 bytes; one of 100 takes as long as its bytes, 14 s."""
    attends = [operation({1: 8}, {2: 8}, kind="attention", phase=p) for p in ("forward", "again", "backward")]
    seconds = predict(work_of([*NORM, *attends], set()), RATES, compiled=False)
    assert seconds["text", "forward", "products"] == 20.0
    assert seconds["text", "forward", "memory"] == (24 + 20 + 28 + 16) / 4
    names = ("forward", "again", "backward")
    assert [seconds["text", phase, "attention"] for phase in names] == [4.0, 4.0, 10.0]
    small = dataclasses.replace(NORM[3], flops=100.0)
    assert predict(work_of([small], set()), RATES, True)["text", "forward", "products"] == 56 / 4


@pytest.mark.parametrize("rank", [0, 4])
def test_counted_products_are_those_of_the_formula(rank):
    """The head asks for the number of its logits with one row more."""
    result = counted(recompute=False, rank=rank)
    products = sum(o.flops for o in result.operations if o.kind == "products")
    dense = result.flops.total - sum(
        way[part] for way in (result.flops.forward, result.flops.backward) for part in ("attention", "vision attention")
    )
    assert products == dense + 2 * 64 * 320
    assert {o.phase for o in result.operations} == {"forward", "backward"}
    parts = {(o.part, o.phase) for o in result.operations}
    assert (("vision", "backward") in parts) == (rank == 0), "an adapter does not reach the vision tower"


def test_without_storage_the_products_are_the_same_ones():
    attention = roofline.attention
    kernel = attention._takes_kernel
    attention._takes_kernel = lambda query: query.is_meta
    try:
        meta = counted(recompute=False, device="meta")
    finally:
        attention._takes_kernel = kernel
    own = counted(recompute=False)
    for part in ("vision", "text", "head"):
        assert flops_by_phase(own, part) == flops_by_phase(meta, part) != {}


def test_recomputation_counts_the_layers_again_and_keeps_less():
    kept, again = counted(recompute=False), counted(recompute=True)
    assert again.kept < kept.kept / 2
    text, vision = (flops_by_phase(again, part) for part in ("text", "vision"))
    tokens = 2 * 27 + 12 + 4 * 6  # two images of 25 tokens between two more each, words, and 4 responses
    last = 4 * 2 * 64 * 96 * tokens
    assert text["again"] == text["forward"] - last, "all but each layer's last product, whose result nothing needs"
    assert 0 < vision["again"] < vision["forward"], "patch embedding and merger are not"
    seconds = predict(again, RATES, compiled=False)
    assert seconds["text", "again", "attention"] == seconds["text", "forward", "attention"]
    assert counted(recompute=False, groups=2).flops.total == pytest.approx(2 * kept.flops.total)
