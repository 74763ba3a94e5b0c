"""The losses, advantages and estimators of the table equal those of verl, where verl has the same.

verl/numbers.json holds what verl's own functions gave in float64 for the inputs that it holds too (its `source` names
the commit). Values and gradients are compared to 1e-7: verl adds 1e-8 to some counts.

Equal: the policy losses vanilla (with and without its dual clip), gspo (our gspo_token), geo_mean (gmpo), cispo, sapo,
gpg, clip_cov and kl_cov (with the same tokens picked), each without importance weights and with weights truncated or
masked, by token or by sequence; the weights themselves; the four aggregations; the KL estimators; the clipped value
loss; vespo, of its authors' fork of verl, without weights and with weights in its ratio; the advantages grpo (with and
without the deviation), rloo, opo, grpo_passk, reinforce_plus_plus and its baseline form, remax, gae, gdpo (scale
"tokens") and optimal_token_baseline (which adds 1e-8 to a sum of weights there).

Different, and tested as the relation that is named: what algo/algorithms.py says of a row.

No counterpart here: dppo_tv, dppo_kl, dro, bypass_mode, tir_optimal_token_baseline, rejection of whole sequences
(rollout_rs), estimators whose name ends in "+".
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loss_numbers import Numbers, gradients, ours, token_data
from torch import Tensor

from vlmrl.algo.advantages import ScoredGroup, batch_advantages, value_targets
from vlmrl.algo.algorithms import ALGORITHMS, OF_ROWS, resolve
from vlmrl.algo.losses import KL_LOSSES, Denominator, aggregate, clipped_value_loss

VERL = json.loads((Path(__file__).parent / "verl/numbers.json").read_text())
TOLERANCE = {"rtol": 1e-7, "atol": 1e-10}
BY_SAME_LOSS = {"ppo", "dapo", "gdpo", "pass_at_k", "reinforce++", "reinforce++-baseline", "rloo", "opo", "otb", "maye"}
"""Rows whose loss is that of a row that is compared, with other bounds or none; their advantages are compared."""
RELATED = {"gspo", "luspo", "reinforce", "remax"}
"""Rows whose loss is compared by a relation below, or is that of gspo with another aggregation, or of gpg."""


def numbers_of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def spread_out(values: list[float], mask: Tensor) -> Tensor:
    """Numbers of the trained tokens where they belong in [B, T]; 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask.bool(), numbers_of(*values))


@pytest.fixture
def x() -> Numbers:
    given = VERL["tokens"]
    mask = torch.tensor(given["mask"])
    logp, old, sampler = (spread_out(given[name], mask) for name in ("logp", "old", "sampler"))
    return Numbers(
        logp.requires_grad_(),
        torch.ones_like(logp).requires_grad_(),
        old,
        torch.zeros_like(old),
        sampler,
        numbers_of(*given["advantage"]),
        mask,
    )


def loss_of(x: Numbers, case: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    x = replace(x, advantage=-x.advantage) if case.get("negated") else x
    row = resolve(case["row"], **case["overrides"])
    return ours(x, row, importance=case["importance"], kl_coef=0.0)


def name_of(case: dict[str, Any]) -> str:
    level = case["overrides"].get("importance_level", "")
    kind = "dual" if "dual_clip" in case["overrides"] else "negated" if case.get("negated") else ""
    return f"{case['row']}-{kind}-{case['importance']}{level}"


def cases_of(*rows: str) -> list[dict[str, Any]]:
    return [case for case in VERL["losses"] if case["row"] in rows]


def test_every_row_is_compared_by_its_own_loss_or_by_one_that_is():
    # verl's functions are of samples alone
    sampled = {
        name for name, row in ALGORITHMS.items() if row.demonstrations == row.teacher == row.perception == "none"
    }
    assert {case["row"] for case in VERL["losses"]} | BY_SAME_LOSS | RELATED == sampled
    assert set(OF_ROWS) <= set(ALGORITHMS)


@pytest.mark.parametrize("case", VERL["losses"], ids=name_of)
def test_the_loss_and_its_gradient(x, case):
    found, _ = loss_of(x, case)
    torch.testing.assert_close(found, numbers_of(case["value"])[0], **TOLERANCE)
    gradient = gradients(found, x)[0][x.mask.bool()]
    torch.testing.assert_close(gradient, numbers_of(*case["gradient"]), **TOLERANCE)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("case", [c for c in VERL["losses"] if "weight" in c], ids=name_of)
def test_the_importance_weights(x, case):
    weight = loss_of(x, case)[1]["policy/importance_weight"]
    torch.testing.assert_close(weight, numbers_of(*case["weight"]), **TOLERANCE)


SAME_SHARE = ("grpo", "easyr1", "grpo_paper", "dr_grpo", "gspo_token", "cispo", "sapo")


@pytest.mark.parametrize("case", cases_of(*SAME_SHARE), ids=name_of)
def test_the_share_of_clipped_tokens(x, case):
    """verl tells the dual clip apart; here it counts with the other bounds."""
    share = loss_of(x, case)[1]["policy/clip_share"].double().mean()
    assert share.item() == pytest.approx(sum(case["clipped"]), abs=1e-6)


@pytest.mark.parametrize("row", ["grpo", "easyr1", "dr_grpo", "gspo_token", "cispo", "gmpo", "clip_cov"])
def test_the_bounds_are_reached(x, row):
    """Or the tests above would compare no clip."""
    assert max(loss_of(x, c)[1]["policy/clip_share"].mean().item() for c in cases_of(row)) > 0.1


def test_gmpo_counts_the_tokens_that_a_bound_changes_and_verl_all_that_are_outside(x):
    case = cases_of("gmpo")[0]
    shown = loss_of(x, case)[1]["policy/clip_share"]
    data, where = token_data(x)
    change = (x.logp - x.old)[where]
    outside = (change.abs() > 0.4) & (data.advantage != 0)
    assert outside.double().mean().item() == pytest.approx(sum(case["clipped"]), abs=1e-6)
    towards = torch.sign(change) == torch.sign(data.advantage)
    assert torch.equal(shown.bool(), outside & towards) and not torch.equal(outside & towards, outside)


def test_an_importance_weight_of_a_token_acts_on_the_whole_response_in_gspo(x):
    """The same value as verl's; the gradient of each response is that of its mean weight."""
    plain, *weighted = [c for c in cases_of("gspo_token") if "clip_low" not in c["overrides"]]
    case = next(c for c in weighted if name_of(c) == "gspo_token--truncatetoken")
    found, shown = loss_of(x, case | {"row": "gspo"})
    assert found.item() == pytest.approx(case["value"], rel=1e-7)
    mine = gradients(found, x)[0]
    unweighted = gradients(loss_of(x, plain)[0], x)[0]
    weights = spread_out(shown["policy/importance_weight"].tolist(), x.mask)
    mean = weights.sum(1, keepdim=True) / x.mask.sum(1, keepdim=True)
    torch.testing.assert_close(mine, unweighted * mean, **TOLERANCE)
    assert (mine[x.mask.bool()] - numbers_of(*case["gradient"])).abs().max() > 1e-3


def groups() -> list[ScoredGroup]:
    given = VERL["groups"]
    size, starts = given["size"], np.cumsum([0, *given["lengths"]])
    tokens = lambda name: [np.array(given[name][a:b]) for a, b in pairwise(starts)]  # noqa: E731
    penalties, values = tokens("penalties"), tokens("values")
    energies = [1.0 - 2.0 * np.exp(p) + s for p, s in zip(tokens("logp"), tokens("squares"), strict=True)]
    return [
        ScoredGroup(
            given["scores"][i : i + size],
            [True] * size,
            given["lengths"][i : i + size],
            given["parts"][i : i + size],
            given["weights"],
            given["greedy"][i // size],
            penalties[i : i + size],
            values[i : i + size],
            energies=energies[i : i + size],
        )
        for i in range(0, len(given["scores"]), size)
    ]


def flat(advantages: list[list[np.ndarray]], lengths: list[int]) -> Tensor:
    """One number a token."""
    samples = [a for group in advantages for a in group]
    return numbers_of(*(v for a, n in zip(samples, lengths, strict=True) for v in np.broadcast_to(a, (n,)).tolist()))


WHITENED = ("none", "group_mean", "part_by_part")


@pytest.mark.parametrize("case", VERL["advantages"], ids=lambda c: f"{c['verl']} {c['settings']}")
def test_the_advantages(case):
    """Of a group of equal scores they are 0; in verl, whitening over the batch leaves it the mean's place."""
    settings, lengths = dict(case["settings"]), VERL["groups"]["lengths"]
    estimator = settings.pop("estimator")
    given = [g if case["penalties"] else replace(g, penalties=(), values=()) for g in groups()]
    found, wanted = flat(batch_advantages(given, estimator, **settings), lengths), numbers_of(*case["advantages"])
    of_dead = sum(lengths[: VERL["groups"]["size"]])
    assert len(set(VERL["groups"]["scores"][: VERL["groups"]["size"]])) == 1
    if estimator in WHITENED and settings.get("scale") == "tokens" and not case["penalties"] and case["verl"] != "gdpo":
        assert not found[:of_dead].any() and wanted[:of_dead].abs().max() > 1e-3
        found, wanted = found[of_dead:], wanted[of_dead:]
    # gdpo is float32 there; of optimal_token 1e-8 / (sum of weights, above 1) of a return is missing there
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8 if estimator == "optimal_token" else 1e-9)
    assert found.abs().max() > 0.1


def test_what_the_critic_should_have_said():
    given, lengths = groups(), VERL["groups"]["lengths"]
    found = flat([value_targets(g, gamma=0.97, lam=0.9) for g in given], lengths)
    torch.testing.assert_close(found, numbers_of(*VERL["returns"]), **TOLERANCE)


@pytest.mark.parametrize("case", VERL["kl"]["cases"], ids=lambda c: f"{c['kl']} is verl's {c['verl']}")
def test_the_kl_estimators(case):
    logp, ref = numbers_of(*VERL["kl"]["logp"]).requires_grad_(), numbers_of(*VERL["kl"]["ref"])
    found = KL_LOSSES[case["kl"]](logp, ref)
    torch.testing.assert_close(found, numbers_of(*case["value"]), **TOLERANCE)
    found.sum().backward()
    torch.testing.assert_close(logp.grad, numbers_of(*case["gradient"]), **TOLERANCE)


def test_the_value_loss():
    given = VERL["value"]
    value, old, target = (numbers_of(*given[name]) for name in ("value", "old", "target"))
    found = clipped_value_loss(value, old, target, clip_range=given["clip_range"]).mean()
    assert found.item() == pytest.approx(given["mean"], rel=1e-9)


@pytest.mark.parametrize(
    ("ours_", "verls"),
    [
        ("token_mean", "token-mean"),
        ("sequence_mean", "seq-mean-token-mean"),
        ("sequence_sum", "seq-mean-token-sum"),
        ("constant", "seq-mean-token-sum-norm"),
    ],
)
def test_the_aggregations(x, ours_, verls):
    counts = x.mask.sum(1)
    total = Denominator.of(ours_, counts.tolist(), VERL["tokens"]["max_tokens"])
    found = aggregate(x.logp[x.mask.bool()], counts.repeat_interleave(counts), total)
    assert found.item() == pytest.approx(VERL["aggregation"][verls], rel=1e-7)
