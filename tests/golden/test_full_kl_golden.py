"""The KL over the whole vocabulary: by hand, against torch's own in one piece, and however it is cut into chunks."""

from __future__ import annotations

import math

import pytest
import torch
from tinyworld import assert_close

from vlmrl.model import policy
from vlmrl.model.memory import HeadChunks
from vlmrl.model.policy import full_kl


def as_hidden(*rows: list[float]) -> torch.Tensor:
    """Hidden states that are the logits: the head is the identity."""
    return torch.tensor(rows, dtype=torch.float32)


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def test_the_sum_over_the_vocabulary_by_hand():
    # (0.5, 0.5) against (0.25, 0.75): 0.5 ln 2 + 0.5 ln (2 / 3) = 0.346574 - 0.202733 = 0.143841; equal ones: 0
    ours, theirs = as_hidden([0.5, 0.5], [0.3, 0.7]).log(), as_hidden([0.25, 0.75], [0.3, 0.7]).log()
    found = full_kl(ours, theirs, same, same, temperature=1.0)
    assert found.tolist() == pytest.approx([0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0.0], abs=1e-6)
    # the other way round: 0.25 ln (1 / 2) + 0.75 ln 1.5 = 0.130812
    back = full_kl(theirs, ours, same, same, temperature=1.0)
    assert back[0].item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), abs=1e-6)


def test_temperature_and_banned_ids_are_those_of_the_policy():
    # logits ln 4, 0 at temperature 2: 2, 1 -> (2/3, 1/3); third id banned. Reference 0, 0 -> (1/2, 1/2)
    ours, theirs = as_hidden([math.log(4), 0.0, 50.0]), as_hidden([0.0, 0.0, -50.0])
    found = full_kl(ours, theirs, same, same, temperature=2.0, banned_ids=[2])
    assert found.item() == pytest.approx(2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3), abs=1e-6)


def test_chunks_change_neither_value_nor_gradient(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(7, 5, generator=generator).requires_grad_() for _ in range(2)]
    head, ref_head = torch.nn.Linear(5, 11), torch.nn.Linear(5, 11)
    weights = torch.randn(7, generator=generator)
    found = []
    for elements in (2**25, 3 * 11, 1):
        sizes = HeadChunks(2 * elements, elements)
        monkeypatch.setattr(policy, "chunks_for", lambda device, sizes=sizes: sizes)
        for x in (*made, *head.parameters(), *ref_head.parameters()):
            x.grad = None
        kl = full_kl(made[0], made[1], head, ref_head, temperature=0.7, banned_ids=[3])
        (kl * weights).sum().backward()
        assert made[1].grad is None and all(p.grad is None for p in ref_head.parameters())
        found.append((kl.detach(), made[0].grad.clone(), head.weight.grad.clone()))
    kept = [i for i in range(11) if i != 3]
    ours, theirs = (h(x)[:, kept] / 0.7 for h, x in ((head, made[0]), (ref_head, made[1])))
    expected = torch.nn.functional.kl_div(
        theirs.log_softmax(-1), ours.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    gradient = torch.autograd.grad((expected * weights).sum(), made[0])[0]
    for kl, by_hidden, by_head in found:
        assert_close(kl, expected)
        assert_close(by_hidden, gradient)
        assert_close(by_head, found[0][2])
    assert full_kl(made[0][:0], made[1][:0], head, ref_head, temperature=1.0).shape == (0,)
