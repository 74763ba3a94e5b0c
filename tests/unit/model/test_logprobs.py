"""Token log-probs from hidden states."""

from __future__ import annotations

import math

import pytest
import torch

from vlmrl.model.logprobs import banned_mask, policy_logits, token_logprobs


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


def test_a_banned_target_has_log_prob_minus_infinity():
    logp, _ = token_logprobs(torch.zeros(1, 3), torch.tensor([0]), lambda h: h, temperature=1.0, banned_ids=[0])
    assert logp.item() == -math.inf


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_gradients_are_finite_although_banned_logits_are_not(entropy_gradient):
    hidden = torch.tensor([[0.3, -0.2, 60.0, 1.0]] * 5, requires_grad=True)
    logp, entropy = token_logprobs(
        hidden, torch.tensor([0, 1, 3, 0, 1]), lambda h: h * 5, temperature=0.5, banned_ids=[2],
        entropy_gradient=entropy_gradient,
    )  # fmt: skip
    (logp.sum() + (entropy.sum() if entropy_gradient else 0)).backward()
    assert torch.isfinite(hidden.grad).all() and (hidden.grad[:, 2] == 0).all()
    assert entropy.requires_grad == entropy_gradient


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_chunks_give_the_same_values_and_gradients(monkeypatch, entropy_gradient):
    from vlmrl.model import logprobs

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
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 7 * 3)
    chunked_values, chunked_gradient = run()
    assert torch.allclose(chunked_values, values, rtol=1e-6, atol=0)
    assert torch.allclose(chunked_gradient, gradient, rtol=1e-6, atol=1e-7)


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
