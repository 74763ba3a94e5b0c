"""Token log-probs from hidden states."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlmrl.algo.divergence import Divergence
from vlmrl.model import policy as logprobs
from vlmrl.model.memory import HeadChunks, head_chunks
from vlmrl.model.policy import banned_mask, divergence, gradient_energy, policy_logits, token_logprobs


def test_log_prob_and_entropy_by_hand():
    # logits of 3 tokens at T = 2: ln 9, ln 4, ln 4 -> over 2: ln 3, ln 2, ln 2 -> p = 3/7, 2/7, 2/7
    hidden = torch.tensor([[math.log(9), math.log(4), math.log(4)]], dtype=torch.float64)
    logp, entropy = token_logprobs(hidden, torch.tensor([0]), lambda h: h, temperature=2.0)
    assert logp.item() == pytest.approx(math.log(3 / 7), rel=1e-6)
    assert entropy.item() == pytest.approx(-(3 / 7 * math.log(3 / 7) + 2 * 2 / 7 * math.log(2 / 7)), rel=1e-6)
    # with token 0 banned: 1/2 each, entropy ln 2
    logp, entropy = token_logprobs(hidden, torch.tensor([2]), lambda h: h, temperature=2.0, banned_ids=[0])
    assert logp.item() == pytest.approx(math.log(0.5), rel=1e-6)
    assert entropy.item() == pytest.approx(math.log(2), rel=1e-6)


def test_the_energy_of_a_token_by_hand():
    # pi = 1/2, 1/4, 1/4: of the first token 0.25 + 0.0625 + 0.0625; of the second 0.5625 + 0.25 + 0.0625
    hidden = torch.tensor([[2.0, 1.0, 1.0]] * 2).log() * 0.7
    found = gradient_energy(hidden, torch.tensor([0, 1]), lambda h: h, temperature=0.7, banned_ids=[])
    assert found.tolist() == pytest.approx([0.375, 0.875], rel=1e-6)
    # with the first banned: 1/2 and 1/2, so 0.25 + 0.25
    found = gradient_energy(hidden[:1], torch.tensor([2]), lambda h: h, temperature=0.7, banned_ids=[0])
    assert found.tolist() == pytest.approx([0.5], rel=1e-6)
    # nearly certain: (1 - pi)^2 + the other's pi^2 = 2 e^-40 (nearly), where 1 - 2 pi + the sum of squares is 0
    sure = gradient_energy(torch.tensor([[20.0, 0.0]]), torch.tensor([0]), lambda h: h, temperature=1.0, banned_ids=[])
    assert sure.item() == pytest.approx(2 * math.exp(-40), rel=1e-5)


def test_the_energy_is_the_squared_gradient_of_the_log_prob_in_chunks_too(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    weight, hidden = torch.randn(7, 4, generator=generator), torch.randn(10, 4, generator=generator)
    target = torch.randint(0, 6, (10,), generator=generator)
    logits = (hidden @ weight.T).double().requires_grad_()
    scaled = (logits / 0.7).detach().requires_grad_()
    banned = scaled.masked_fill(torch.arange(7) == 6, -math.inf)
    banned.log_softmax(-1)[torch.arange(10), target].sum().backward()
    assert scaled.grad is not None
    wanted = scaled.grad.square().sum(-1).float()
    options: Any = {"temperature": 0.7, "banned_ids": [6]}
    whole = gradient_energy(hidden, target, lambda h: h @ weight.T, **options)
    assert torch.allclose(whole, wanted, rtol=1e-5, atol=0) and not whole.requires_grad
    monkeypatch.setattr(logprobs, "chunks_for", lambda device: HeadChunks(7 * 3, 7 * 2))
    assert torch.allclose(gradient_energy(hidden, target, lambda h: h @ weight.T, **options), wanted, rtol=1e-5, atol=0)
    assert gradient_energy(hidden[:0], target[:0], lambda h: h @ weight.T, **options).shape == (0,)


def test_a_banned_target_has_log_prob_minus_infinity():
    logp, _ = token_logprobs(torch.zeros(1, 3), torch.tensor([0]), lambda h: h, temperature=1.0, banned_ids=[0])
    assert logp.item() == -math.inf


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_a_banned_target_moves_its_own_logit_nowhere(entropy_gradient):
    hidden = torch.zeros(1, 3, requires_grad=True)
    options = {"temperature": 1.0, "banned_ids": [0], "entropy_gradient": entropy_gradient}
    logp, _ = token_logprobs(hidden, torch.tensor([0]), lambda h: h * 1, **options)
    logp.sum().backward()
    assert hidden.grad.tolist() == [[0.0, -0.5, -0.5]]


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_gradients_are_finite_although_banned_logits_are_not(entropy_gradient):
    hidden = torch.tensor([[0.3, -0.2, 60.0, 1.0]] * 5, requires_grad=True)
    logp, entropy = token_logprobs(
        hidden,
        torch.tensor([0, 1, 3, 0, 1]),
        lambda h: h * 5,
        temperature=0.5,
        banned_ids=[2],
        entropy_gradient=entropy_gradient,
    )
    (logp.sum() + (entropy.sum() if entropy_gradient else 0)).backward()
    assert torch.isfinite(hidden.grad).all() and (hidden.grad[:, 2] == 0).all()
    assert entropy.requires_grad == entropy_gradient


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_chunks_give_the_same_values_and_gradients(monkeypatch, entropy_gradient):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    start = torch.randn(10, 4, generator=generator, dtype=torch.float64)
    target = torch.randint(0, 6, (10,), generator=generator)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        hidden = start.clone().requires_grad_()
        logp, entropy = token_logprobs(
            hidden, target, lambda h: h @ weight.T, temperature=0.7, banned_ids=[6], entropy_gradient=entropy_gradient
        )
        (logp.sum() + 0.1 * entropy.sum()).backward()
        return torch.stack([logp, entropy]).detach(), hidden.grad

    values, gradient = run()
    monkeypatch.setattr(logprobs, "chunks_for", lambda device: HeadChunks(7 * 3, 7 * 2))
    chunked_values, chunked_gradient = run()
    assert torch.allclose(chunked_values, values, rtol=1e-6, atol=0)
    assert torch.allclose(chunked_gradient, gradient, rtol=1e-6, atol=1e-7)


class Launches(TorchDispatchMode):
    """Counts what would be launched on a GPU: operations that make or change numbers, not views of them."""

    VIEWS = (
        "alias",
        "detach",
        "empty",
        "empty_like",
        "expand",
        "select",
        "slice",
        "split",
        "t",
        "unsqueeze",
        "view",
        "_unsafe_view",
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ not in self.VIEWS
        return func(*args, **(kwargs or {}))


def test_a_device_gets_few_launches_for_a_large_vocabulary():
    """On the device that computes nothing; 4,800 positions of 151,936 words make 3 chunks."""
    hidden = torch.zeros(4800, 8, device="meta", requires_grad=True)
    weight = torch.zeros(151_936, 8, device="meta", requires_grad=True)
    target = torch.zeros(4800, dtype=torch.long, device="meta")
    with Launches() as launched:
        logp, _ = token_logprobs(hidden, target, lambda h: h @ weight.T, temperature=0.7, banned_ids=[0, 3])
        logp.sum().backward()
    assert launched.count < 200


class Memory(TorchDispatchMode):
    """The most bytes that the tensors made inside held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage) -> None:
        if (key := storage._cdata) in self.known:
            return
        size = storage.nbytes()
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone() -> None:
            self.known.discard(key)
            self.now -= size

        weakref.finalize(storage, gone)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_of_a_chunk_is_what_the_plan_counts(monkeypatch, dtype, entropy_gradient):
    positions, vocabulary, width = 64, 4096, 2
    sizes = HeadChunks(positions * vocabulary, positions * vocabulary)
    monkeypatch.setattr(logprobs, "chunks_for", lambda device: sizes)
    hidden = torch.randn(4 * positions, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    target = torch.zeros(4 * positions, dtype=torch.long)
    with Memory() as memory:
        logp, entropy = token_logprobs(
            hidden, target, lambda h: h @ weight.T, temperature=0.7, banned_ids=[1], entropy_gradient=entropy_gradient
        )
        (logp.sum() + (entropy.sum() if entropy_gradient else 0)).backward()
    planned = sizes.peak_bytes(4 * positions, vocabulary)
    assert planned == 13 * positions * vocabulary
    assert 0.5 * planned < memory.peak < 1.05 * planned  # some numbers a position and a word besides


def test_the_full_kl_stays_within_the_same_plan(monkeypatch):
    positions, vocabulary, width = 64, 4096, 2
    sizes = HeadChunks(positions * vocabulary, positions * vocabulary)
    monkeypatch.setattr(logprobs, "chunks_for", lambda device: sizes)
    hidden, other = (torch.randn(4 * positions, width, requires_grad=i == 0) for i in (0, 1))
    weight = torch.randn(vocabulary, width, requires_grad=True)
    head = lambda h: h @ weight.T  # noqa: E731
    with Memory() as memory:
        divergence(hidden, other, head, head, Divergence(), temperature=0.7, banned_ids=[1]).sum().backward()
    assert memory.peak < 1.05 * sizes.peak_bytes(4 * positions, vocabulary)


def test_chunks_by_device_and_free_memory():
    gib = 2**30
    assert head_chunks("cpu", 8 * gib) == HeadChunks(2**24, 2**19)
    assert head_chunks("cuda") == head_chunks("cuda", 1000 * gib) == HeadChunks(2**28, 2**28)
    # a quarter of 8 GiB, 13 bytes a logit: 165,191,049
    assert head_chunks("cuda", 8 * gib).chunk == 2 * gib // 13
    assert head_chunks("cuda", 0).chunk == 2**24
    assert HeadChunks(100, 50).positions(7) == 14 and HeadChunks(100, 50).positions(1000) == 1
    assert HeadChunks(100, 50).peak_bytes(3, 7) == 13 * 21 and HeadChunks(100, 50).peak_bytes(30, 7) == 13 * 98


def test_no_positions_give_no_values_that_can_still_be_differentiated():
    hidden = torch.zeros(0, 4, requires_grad=True)
    logp, entropy = token_logprobs(hidden, torch.zeros(0, dtype=torch.long), lambda h: h, temperature=1.0)
    assert logp.shape == entropy.shape == (0,)
    logp.sum().backward()


def test_banned_ids_past_the_vocabulary_are_ignored():
    assert banned_mask([], 5, torch.device("cpu")) is None
    assert banned_mask([7], 5, torch.device("cpu")) is None
    assert banned_mask([1, 7], 3, torch.device("cpu")).tolist() == [False, True, False]


def test_policy_logits_are_float32_whatever_the_model_computes_in():
    out = policy_logits(torch.ones(2, 3, dtype=torch.bfloat16), 2.0, torch.tensor([True, False, False]))
    assert out.dtype == torch.float32
    assert out.tolist() == [[-math.inf, 0.5, 0.5]] * 2
