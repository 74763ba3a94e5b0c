"""The KL over the whole vocabulary: by hand, against torch's own in one piece, and however it is cut into chunks."""

from __future__ import annotations

import math

import pytest
import torch
from tinyworld import assert_close

from vlmrl.algo.divergence import Divergence
from vlmrl.model import policy as logprobs
from vlmrl.model.memory import HeadChunks
from vlmrl.model.policy import divergence

REVERSE = Divergence()


def as_hidden(*rows: list[float]) -> torch.Tensor:
    """Hidden states that are the logits: the head is the identity."""
    return torch.tensor(rows, dtype=torch.float32)


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def test_the_sum_over_the_vocabulary_by_hand():
    # (0.5, 0.5) against (0.25, 0.75): 0.5 ln 2 + 0.5 ln (2 / 3) = 0.346574 - 0.202733 = 0.143841; equal ones: 0
    ours, theirs = as_hidden([0.5, 0.5], [0.3, 0.7]).log(), as_hidden([0.25, 0.75], [0.3, 0.7]).log()
    found = divergence(ours, theirs, same, same, REVERSE, temperature=1.0)
    assert found.tolist() == pytest.approx([0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0.0], abs=1e-6)
    # the other way round: 0.25 ln (1 / 2) + 0.75 ln 1.5 = 0.130812
    back = divergence(theirs, ours, same, same, REVERSE, temperature=1.0)
    assert back[0].item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), abs=1e-6)


def test_temperature_and_banned_ids_are_those_of_the_policy():
    # logits ln 4, 0 at temperature 2: 2, 1 -> (2/3, 1/3); third id banned. Reference 0, 0 -> (1/2, 1/2)
    ours, theirs = as_hidden([math.log(4), 0.0, 50.0]), as_hidden([0.0, 0.0, -50.0])
    found = divergence(ours, theirs, same, same, REVERSE, temperature=2.0, banned_ids=[2])
    assert found.item() == pytest.approx(2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3), abs=1e-6)


def test_chunks_change_neither_value_nor_gradient(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(7, 5, generator=generator).requires_grad_() for _ in range(2)]
    head, ref_head = torch.nn.Linear(5, 11), torch.nn.Linear(5, 11)
    weights = torch.randn(7, generator=generator)
    found = []
    for elements in (2**25, 3 * 11, 1):
        sizes = HeadChunks(2 * elements, elements)
        monkeypatch.setattr(logprobs, "chunks_for", lambda device, sizes=sizes: sizes)
        for x in (*made, *head.parameters(), *ref_head.parameters()):
            x.grad = None
        kl = divergence(made[0], made[1], head, ref_head, REVERSE, temperature=0.7, banned_ids=[3])
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
    assert divergence(made[0][:0], made[1][:0], head, ref_head, REVERSE, temperature=1.0).shape == (0,)


def by_autograd(logits, theirs, kind, weight, top_k):
    """Ten lines of the definition, in float64, for autograd."""
    p, q = logits.double().softmax(-1), theirs.double().softmax(-1)
    if top_k:
        ids = q.topk(top_k).indices
        p, q = (torch.cat([x.gather(-1, ids), 1.0 - x.gather(-1, ids).sum(-1, keepdim=True)], -1) for x in (p, q))
    m = weight * q + (1.0 - weight) * p
    reverse, forward = (p * (p / q).log()).sum(-1), (q * (q / p).log()).sum(-1)
    jsd = weight * (q * (q / m).log()).sum(-1) + (1.0 - weight) * (p * (p / m).log()).sum(-1)
    return {"reverse": reverse, "forward": forward, "jsd": jsd}[kind]


@pytest.mark.parametrize("top_k", [0, 1, 3])
@pytest.mark.parametrize(("kind", "weight"), [("reverse", 0.5), ("forward", 0.5), ("jsd", 0.5), ("jsd", 0.1)])
def test_each_divergence_and_its_gradient_equal_autograds(kind, weight, top_k):
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(5, 9, generator=generator)).requires_grad_()
    theirs, factor = 3 * torch.randn(5, 9, generator=generator), torch.randn(5, generator=generator)
    settings = Divergence(kind, weight, top_k)
    value = divergence(logits, theirs, same, same, settings, temperature=1.0)
    (gradient,) = torch.autograd.grad((value * factor).sum(), logits)
    expected = by_autograd(logits, theirs, kind, weight, top_k)
    assert_close(value, expected.float())
    assert_close(gradient, torch.autograd.grad((expected * factor).sum(), logits)[0])


def test_divergences_by_hand():
    ours, theirs = as_hidden([0.5, 0.5]).log(), as_hidden([0.25, 0.75]).log()

    def value(**settings) -> float:
        return divergence(ours, theirs, same, same, Divergence(**settings), temperature=1.0).item()

    # forward: 0.25 ln 0.5 + 0.75 ln 1.5
    assert value(kind="forward") == pytest.approx(0.130812, abs=1e-6)
    # m = (0.375, 0.625): (0.25 ln (2/3) + 0.75 ln 1.2 + 0.5 ln (4/3) + 0.5 ln 0.8) / 2
    assert value(kind="jsd") == pytest.approx(0.033822, abs=1e-6)
    # weight 0.25: m = 0.25 q + 0.75 p = (0.4375, 0.5625)
    by_hand = 0.25 * (0.25 * math.log(0.25 / 0.4375) + 0.75 * math.log(0.75 / 0.5625))
    by_hand += 0.75 * (0.5 * math.log(0.5 / 0.4375) + 0.5 * math.log(0.5 / 0.5625))
    assert value(kind="jsd", weight=0.25) == pytest.approx(by_hand, abs=1e-6)
    # the teacher at temperature 2: (0.25, 0.75)^0.5 = (1, 1.7321) / 2.7321
    q = 1 / (1 + math.sqrt(3))
    assert value(temperature=2.0) == pytest.approx(0.5 * math.log(0.5 / q) + 0.5 * math.log(0.5 / (1 - q)), abs=1e-6)


def test_the_rest_of_the_top_k_is_one_outcome():
    # q (0.6, 0.3, 0.1), k = 1: outcomes (0.6, 0.4); p (0.2, 0.5, 0.3): (0.2, 0.8)
    ours, theirs = as_hidden([0.2, 0.5, 0.3]).log(), as_hidden([0.6, 0.3, 0.1]).log()
    value = divergence(ours, theirs, same, same, Divergence(top_k=1), temperature=1.0)
    assert value.item() == pytest.approx(0.2 * math.log(0.2 / 0.6) + 0.8 * math.log(0.8 / 0.4), abs=1e-6)
    # A k that leaves nothing, or nothing but banned ids, is the whole vocabulary.
    whole = divergence(ours, theirs, same, same, REVERSE, temperature=1.0)
    for k in (2, 3, 7):
        banned = [3] if k == 3 else []
        more = [torch.nn.functional.pad(x, (0, len(banned))) for x in (ours, theirs)]
        value = divergence(*more, same, same, Divergence(top_k=k), temperature=1.0, banned_ids=banned)
        assert_close(value, whole)


@pytest.mark.parametrize(
    "settings", [Divergence(k, w, n) for k, w in (("reverse", 0.5), ("forward", 0.5), ("jsd", 0.3)) for n in (0, 4)]
)
def test_equal_models_have_the_divergence_and_the_gradient_zero_exactly(settings):
    generator = torch.Generator().manual_seed(2)
    logits = (5 * torch.randn(6, 50, generator=generator)).requires_grad_()
    value = divergence(logits, logits.detach(), same, same, settings, temperature=0.7, banned_ids=[1, 2])
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert value.tolist() == [0.0] * 6 and not gradient.any()


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
@pytest.mark.parametrize("top_k", [0, 2])
def test_distributions_far_apart_stay_finite(kind, top_k):
    logits, theirs = as_hidden([0.0, 200.0, 0.0, 0.0]).requires_grad_(), as_hidden([200.0, 0.0, -1.0, -1.0])
    value = divergence(logits, theirs, same, same, Divergence(kind, top_k=top_k), temperature=1.0)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert value.isfinite().all() and gradient.isfinite().all()
    assert value.item() == pytest.approx(math.log(2) if kind == "jsd" else 200.0, rel=1e-5)
    assert gradient[0, 1] > 0.0 or kind != "forward"


def test_heads_of_other_sizes_are_compared_over_the_ids_of_both():
    generator = torch.Generator().manual_seed(3)
    ours, theirs = torch.randn(4, 12, generator=generator), torch.randn(4, 10, generator=generator)
    banned = [10, 11]  # rows that pad the policy's embedding
    value = divergence(ours, theirs, same, same, REVERSE, temperature=1.0, banned_ids=banned)
    assert_close(value, by_autograd(ours[:, :10], theirs, "reverse", 0.5, 0).float())
    back = divergence(theirs, ours, same, same, REVERSE, temperature=1.0)
    assert_close(back, by_autograd(theirs, ours[:, :10], "reverse", 0.5, 0).float())
