"""Mismatch between engine and trainer: worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from vlmrl.train.update import Mismatch, Tally, tally_mismatch


def mismatch_of(*rows: tuple[torch.Tensor, torch.Tensor]) -> Mismatch:
    """Of rows of (the trainer's, the engine's) log-probs."""
    tally = Tally()
    for ours, theirs in rows:
        tally_mismatch(tally, ours, theirs)
    return Mismatch.of(tally.read())


def test_two_tokens_by_hand():
    # d = 0 and ln 2; w = 1 and 2; k3 = (0 + 2 - 1 - 0.6931) / 2; effective (1 + 2)^2 / (2 * (1 + 4)) = 0.9.
    found = mismatch_of((torch.tensor([-1.0, math.log(0.5)]), torch.tensor([-1.0, math.log(0.25)])))
    assert found.metrics() == pytest.approx(
        {
            "policy/sampler_gap_mean": math.log(2) / 2,
            "policy/sampler_gap_max": math.log(2),
            "policy/sampler_k3": (1 - math.log(2)) / 2,
            "policy/sampler_ess": 0.9,
        },
        abs=1e-7,
    )


def test_the_sign_of_the_difference_counts_in_k3():
    # The trainer half as likely as the engine: w = 1/2, k3 = 1/2 - 1 + ln 2.
    found = mismatch_of((torch.tensor([math.log(0.25)]), torch.tensor([math.log(0.5)])))
    assert found.metrics()["policy/sampler_k3"] == pytest.approx(math.log(2) - 0.5, abs=1e-7)


def test_rows_add_up_and_unsampled_tokens_do_not_count():
    rng = torch.Generator().manual_seed(1)
    ours, theirs = torch.randn(7, generator=rng), torch.randn(7, generator=rng)
    theirs[3] = float("nan")
    whole = mismatch_of((ours, theirs))
    parts = mismatch_of(*((ours[cut], theirs[cut]) for cut in (slice(0, 3), slice(3, 4), slice(4, 7), slice(7, 7))))
    gaps = [abs(a - b) for a, b in zip(ours.tolist(), theirs.tolist(), strict=True) if not math.isnan(b)]
    assert whole.gap_max == parts.gap_max == max(gaps)
    assert whole.tokens == 6 and parts.metrics() == pytest.approx(whole.metrics(), rel=1e-12)


def test_nothing_sampled_is_no_mismatch():
    assert mismatch_of() == mismatch_of((torch.ones(2), torch.full((2,), math.nan))) == Mismatch()
    assert Mismatch().metrics() == {
        "policy/sampler_gap_mean": 0.0,
        "policy/sampler_gap_max": 0.0,
        "policy/sampler_k3": 0.0,
        "policy/sampler_ess": 1.0,
    }
