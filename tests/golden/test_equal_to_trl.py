"""The losses and advantages of the table equal those of TRL (1.16), where TRL has the same.

TRL's own functions run here, unbound, on a stand-in for its trainer that returns given log-probs: `_compute_loss` and
`_generate_and_score_completions` of GRPOTrainer and RLOOTrainer, and `_compute_loss` of the experimental GMPOTrainer.
Values and gradients are compared, on ragged masks with holes, in float64, to 1e-7 (TRL's counts are float32).

Equal: the surrogates "clip" (with either or no bound, dual clip, at level "token" and "sequence"), "cispo", "sapo",
"vespo" and "gmpo"; all four aggregations; k3 (and low_var_kl below its limit) in the loss; the four importance
corrections; the entropy bonus of a token mean; the share of clipped tokens; the baselines "group_mean" (scales "none",
"group", "batch") and "leave_one_out" (with k1 in the reward too), and "part_by_part".

Different, and tested as the relation that is named:
- TRL's epsilon_high of CISPO is the bound itself (5), `clip_high` what it adds to 1 (4).
- A response without trained tokens counts in the denominators of TRL's "grpo", "sapo", "luspo", "dr_grpo" and GMPO, not
  here; in GMPO it also adds a constant to the value.
- TRL's "bnpo" is the mean of the microbatches' token means; here only the step counts. Its "dapo" and "cispo" divide by
  the mean token count of all steps that one generation feeds; here by the step's own.
- TRL multiplies the KL with the ratio unless use_bias_correction_kl = False; here it never is.
- TRL's bonus is the mean entropy of all tokens in every loss type; here it is aggregated as the loss.
- TRL masks by default only what lies above the cap; here [1 / cap, cap], which is TRL's with clip_min = 1 / cap.
- The loss that TRL's delta limits is at least (1 + epsilon_high) * |advantage|; the dual clip may lie below.
- Log-ratios are limited to +-20 here, not in TRL.
- TRL adds 1e-4 to a standard deviation, here 1e-6.
- Importance weights multiply the loss of "vespo"; in TRL their product over a response is in its ratio, as here with
  importance "ratio", where no weight is limited.
- TRL has no ratio level "sequence_token"; with one advantage a response its value and gradient are those of "sequence".
- TRL's RLOO has one ratio a response, the product of its tokens'; here a ratio a token: the same gradient on policy.

No counterpart in TRL: "clip_cov", "kl_cov", "reinforce" (off policy), k1, k2, "abs" and "full" in the loss; baselines
"length_weighted", "best_of_group", "greedy", "none", "gae" (TRL 1.16 has no PPO: of the row "ppo" the policy's loss is
compared); scales "alive" and "tokens"; a part of the reward that is None (its weight goes to the others here, in TRL it
is lost); the baseline "optimal_token". In TRL alone: off_policy_mask_threshold, top_entropy_quantile, adaptive entropy.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loss_numbers import MAX_TOKENS, Numbers, check, gradients, ours, token_data
from torch import Tensor

from vlmrl.algo import advantages as estimators
from vlmrl.algo.advantages import ScoredGroup, batch_advantages
from vlmrl.algo.algorithms import ALGORITHMS, resolve
from vlmrl.algo.losses import Denominator, aggregate, importance_weight, k1, k3

pytest.importorskip("trl")

LENGTHS = (7, 1, 5, 3, 6, 2)
HOLES = ((0, 2), (0, 3), (4, 5), (2, 0))
"""Tokens inside a response that are not trained, (response, token): TRL's tool_mask."""
SEEDS = (0, 2, 3)
SPREADS = (0.02, 0.4, 1.5)
"""How far new and old log-probs lie apart, nats: within every clip, around the clips, and beyond them."""
EPSILONS = {
    name: {"epsilon": low, "epsilon_high": high}
    for name, low, high in (
        ("ppo", 0.2, 0.2),
        ("higher", 0.2, 0.28),
        ("gspo", 3e-4, 4e-4),
        ("luspo", 2e-3, 2.5e-3),
        ("wide", 0.1, 0.5),
        ("none", math.inf, math.inf),
    )
}
SEQUENCE = {"importance_sampling_level": "sequence"}
PLAIN_KL = {"use_bias_correction_kl": False}


def settings_of(loss_type: str, epsilons: str = "ppo", *more: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Settings of TRL."""
    return {"loss_type": loss_type, **EPSILONS[epsilons], **{k: v for m in more for k, v in m.items()}, **others}


GMPO = settings_of("gmpo", epsilon=0.4, epsilon_high=0.4)
CISPO = settings_of("cispo", epsilon_high=5.0)
ROWS: dict[str, dict[str, Any]] = {
    "grpo": settings_of("dapo", "higher"),
    "grpo_paper": settings_of("grpo"),
    "dr_grpo": settings_of("dr_grpo"),
    "dapo": settings_of("dapo", "higher"),
    "gdpo": settings_of("dapo", "higher"),
    "gspo": settings_of("grpo", "gspo", SEQUENCE),
    "gspo_token": settings_of("grpo", "gspo", SEQUENCE),
    "luspo": settings_of("luspo", "luspo", SEQUENCE),
    "gmpo": GMPO,
    "cispo": CISPO,
    "sapo": settings_of("sapo"),
    "vespo": settings_of("vespo"),
    "otb": settings_of("dapo"),
    "rloo": settings_of("dapo", "none"),
    "opo": settings_of("dapo", "none"),
    "pass_at_k": settings_of("dapo", "higher"),
    "reinforce++": settings_of("dapo"),
    "reinforce++-baseline": settings_of("dapo"),
    "ppo": settings_of("dapo"),
    "easyr1": settings_of("dapo", "ppo", PLAIN_KL, epsilon_high=0.3, delta=3.0, beta=0.01),
    "maye": settings_of("dapo", "ppo", PLAIN_KL, beta=0.001),
}
"""Row -> the TRL settings whose loss is the same."""
WITHOUT = ("clip_cov", "kl_cov", "gpg", "reinforce", "remax", "luffy", "srft", "hpt", "uft", "chord")
WITHOUT += ("opd", "opd_reward", "opsd", "va_opd", "papo", "papo_published", "vppo")
"""Rows whose surrogate, demonstrations, teacher or masked images TRL's GRPO does not have."""
WIDE = {"clip_low": 0.1, "clip_high": 0.5}
CELLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((n, {"kl_coef": 0.3}, s | PLAIN_KL | {"beta": 0.3}) for n, s in ROWS.items() if ALGORITHMS[n].kl == "k3"),
    ("grpo", {}, settings_of("bnpo", "higher")),
    ("grpo", WIDE, settings_of("dapo", "wide")),
    ("gmpo", WIDE, settings_of("gmpo", "wide")),
    ("gspo", WIDE, settings_of("grpo", "wide", SEQUENCE)),
    ("gspo", WIDE | {"aggregation": "token_mean"}, settings_of("dapo", "wide", SEQUENCE)),
    ("gspo", WIDE | {"aggregation": "constant"}, settings_of("dr_grpo", "wide", SEQUENCE)),
    ("gspo", {"clip_high": 0.1, "dual_clip": 1.2}, ROWS["gspo"] | {"epsilon_high": 0.1, "delta": 1.2}),
    ("grpo", {"dual_clip": 1.5}, ROWS["grpo"] | {"delta": 1.5}),
    ("grpo_paper", {"dual_clip": 1.2}, ROWS["grpo_paper"] | {"delta": 1.2}),
    ("dr_grpo", {"dual_clip": 4.0}, ROWS["dr_grpo"] | {"delta": 4.0}),
    ("cispo", {"clip_high": 0.1}, CISPO | {"epsilon_high": 1.1}),
    ("cispo", {"ratio": "sequence"}, CISPO | SEQUENCE),
    ("sapo", {"ratio": "sequence"}, settings_of("sapo", "ppo", SEQUENCE)),
    (
        "sapo",
        {"tau_positive": 0.5, "tau_negative": 3.0},
        settings_of("sapo", sapo_temperature_pos=0.5, sapo_temperature_neg=3.0),
    ),
    (
        "vespo",
        {"power_positive": 0.5, "decay_positive": 1.5, "power_negative": 1.0, "decay_negative": 0.25},
        settings_of("vespo", vespo_k_pos=0.5, vespo_lambda_pos=1.5, vespo_k_neg=1.0, vespo_lambda_neg=0.25),
    ),
    ("luspo", WIDE, settings_of("luspo", "wide", SEQUENCE)),
    ("grpo", WIDE | {"aggregation": "sequence_sum"}, settings_of("luspo", "wide")),
]
"""(row, its overrides, the TRL settings whose loss is the same)."""


@pytest.fixture(scope="module")
def trl() -> SimpleNamespace:
    """TRL's trainers and the defaults of their settings. The import takes seconds."""
    from trl import GRPOConfig, RLOOConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "experimental: may change"
        from trl.experimental.gmpo import GMPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    defaults = lambda config: {f.name: f.default for f in dataclasses.fields(config)}  # noqa: E731
    return SimpleNamespace(
        grpo=GRPOTrainer,
        gmpo=GMPOTrainer,
        rloo=RLOOTrainer,
        grpo_defaults=defaults(GRPOConfig),
        rloo_defaults=defaults(RLOOConfig),
    )


def numbers(seed: int, spread: float = 0.4, empty: tuple[int, ...] = ()) -> Numbers:
    """Random ones. Untrained places hold numbers as well, which must not matter. `empty`: responses without tokens."""
    g = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    normal = lambda *size: torch.randn(*size, generator=g, dtype=torch.float64)  # noqa: E731
    logp = -2.0 + 0.7 * normal(*shape)
    mask = (torch.arange(shape[1])[None] < torch.tensor(LENGTHS)[:, None]).long()
    for response, token in HOLES:
        mask[response, token] = 0
    mask[list(empty)] = 0
    return Numbers(
        logp.clone().requires_grad_(), (1.5 + 0.3 * normal(*shape)).requires_grad_(), logp + spread * normal(*shape),
        logp + 0.5 * normal(*shape), (logp + 0.4 * normal(*shape)).float().double(),
        torch.tensor([1.3, -0.8, 0.0, -1.9, 0.6, 0.9], dtype=torch.float64)[torch.randperm(shape[0], generator=g)],
        mask,
    )  # fmt: skip


def stand_in(defaults: dict[str, Any], settings: dict[str, Any], **more: Any) -> SimpleNamespace:
    """What TRL's functions ask of `self`: one process in training, with the defaults of its settings or these."""
    assert settings.keys() <= defaults.keys()
    values = defaults | settings
    for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
        # As plain numbers TRL's `torch.where` rounds them to float32.
        values[name] = torch.tensor(values.get(name, 1.0), dtype=torch.float64)
    same = lambda x, **_: x  # noqa: E731
    place = SimpleNamespace(
        num_processes=1, process_index=0, device=torch.device("cpu"), gather=same, reduce=same, sync_gradients=True
    )
    return SimpleNamespace(
        **values
        | {
            "args": SimpleNamespace(**values),
            "accelerator": place,
            "aux_loss_enabled": False,
            "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
            "epsilon_low": values["epsilon"],
            "epsilon_high": values["epsilon_high"] if values["epsilon_high"] is not None else values["epsilon"],
            "_entropy_bonus_enabled": values.get("entropy_coef", 0.0) != 0.0,
            "_metrics": defaultdict(_lists),
        }
        | more
    )


def _lists() -> defaultdict[str, list[float]]:
    return defaultdict(list)


def theirs(
    trl: SimpleNamespace,
    x: Numbers,
    settings: dict[str, Any],
    *,
    off_policy: bool = True,
    weight: Tensor | None = None,
    parts: int = 1,
    num_items: int | None = None,
    steps: int = 1,
) -> tuple[Tensor, dict[str, list[float]]]:
    """(TRL's loss, its metrics). `parts`: of how many microbatches `x` is one; `steps`: that a generation feeds."""
    gmpo = settings["loss_type"] == "gmpo"
    settings = {k: v for k, v in settings.items() if not (gmpo and k == "loss_type")}
    trainer = stand_in(
        trl.grpo_defaults,
        settings | {"max_completion_length": MAX_TOKENS, "steps_per_generation": parts * steps},
        current_gradient_accumulation_steps=parts,
        _get_per_token_logps_and_entropies=lambda *_, **__: (x.logp, x.entropy, None),
        get_gamma_weights=trl.grpo.get_gamma_weights,
    )
    everything = torch.ones_like(x.mask)
    inputs = {
        "prompt_ids": everything[:, :1],
        "prompt_mask": everything[:, :1],
        "completion_ids": everything,
        "completion_mask": everything,
        "tool_mask": x.mask,
        "advantages": x.advantage,
        "ref_per_token_logps": x.ref,
        "num_items_in_batch": x.mask.sum() if num_items is None else torch.tensor(num_items),
    }
    if off_policy:
        inputs["old_per_token_logps"] = x.old
    if weight is not None:
        inputs["importance_sampling_ratio"] = weight
    loss = (trl.gmpo if gmpo else trl.grpo)._compute_loss(trainer, None, inputs)
    return loss, trainer._metrics["train"]


def test_every_row_is_compared_or_has_no_counterpart():
    assert {*ROWS, *WITHOUT} == set(ALGORITHMS) and not set(ROWS) & set(WITHOUT)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("name", ROWS)
def test_the_loss_of_a_row(trl, name, spread, seed):
    x = numbers(seed, spread)
    check(ours(x, ALGORITHMS[name])[0], theirs(trl, x, ROWS[name])[0], x)


@pytest.mark.parametrize("name", ROWS)
def test_the_loss_of_a_row_on_policy(trl, name):
    x = numbers(3)
    check(ours(x, ALGORITHMS[name], off_policy=False)[0], theirs(trl, x, ROWS[name], off_policy=False)[0], x)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c[0]}-{c[1]}")
def test_the_loss_of_a_row_with_other_cells(trl, cell, spread, seed):
    name, overrides, settings = cell
    x = numbers(seed, spread)
    check(ours(x, resolve(name, **overrides))[0], theirs(trl, x, settings)[0], x)


@pytest.mark.parametrize("name", ["grpo", "easyr1", "cispo", "gmpo"])
def test_the_spreads_reach_the_bounds(name):
    """Or the tests above would compare no clip."""
    row = ALGORITHMS[name]
    for x in (numbers(seed, 1.5) for seed in SEEDS):
        data, where = token_data(x)
        ratio, bad = (x.logp[where] - x.old[where]).exp(), data.advantage < 0
        assert row.clip_high is not None and (ratio > 1.0 + row.clip_high).any()
        assert row.dual_clip is None or (bad & (ratio > row.dual_clip)).any()
        assert row.surrogate == "cispo" or 0.0 < ours(x, row)[1]["policy/clip_share"].mean() < 1.0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["grpo", "grpo_paper", "dr_grpo", "maye", "gmpo"])
def test_the_share_of_clipped_tokens(trl, name, seed):
    x = numbers(seed)
    found, metrics = ours(x, ALGORITHMS[name])[1]["policy/clip_share"], theirs(trl, x, ROWS[name])[1]
    assert metrics["clip_ratio/region_mean"] == [pytest.approx(found.double().mean().item(), rel=1e-6)]


@pytest.mark.parametrize("name", ["reinforce", "gpg", "remax"])
def test_on_policy_the_plain_policy_gradient_is_cispo(trl, name):
    x = numbers(4)
    check(ours(x, ALGORITHMS[name], off_policy=False)[0], theirs(trl, x, ROWS["cispo"], off_policy=False)[0], x)


@pytest.mark.parametrize(
    "name", ["grpo", "easyr1", "cispo", "grpo_paper", "dr_grpo", "gspo", "sapo", "gmpo", "luspo", "vespo"]
)
def test_trls_microbatches_add_up_to_the_step(trl, name):
    """Those of "dr_grpo" and of the sequence means do so when all microbatches have as many responses."""
    x = numbers(5)
    num_items = int(x.mask.sum())
    cut = [theirs(trl, x.rows(i, i + 2), ROWS[name], parts=3, num_items=num_items)[0] for i in (0, 2, 4)]
    check(ours(x, ALGORITHMS[name])[0], torch.stack(cut).sum(), x)


def test_trls_bnpo_is_the_mean_of_its_microbatches(trl):
    x = numbers(6)
    settings = ROWS["grpo"] | {"loss_type": "bnpo"}
    cut = torch.stack([theirs(trl, x.rows(i, i + 2), settings, parts=3)[0] for i in (0, 2, 4)]).sum()
    each = torch.stack([ours(x.rows(i, i + 2), ALGORITHMS["grpo"])[0] for i in (0, 2, 4)])
    check(each.mean(), cut, x)
    assert not torch.isclose(ours(x, ALGORITHMS["grpo"])[0], cut, rtol=1e-3)


@pytest.mark.parametrize("name", ["grpo", "cispo"])
def test_the_denominator_of_trl_spans_the_steps_of_a_generation(trl, name):
    """TRL: tokens of all three steps / 3. Here: the step's own tokens."""
    x = numbers(7)
    num_items = int(x.mask.sum())
    for i in (0, 2, 4):
        step = x.rows(i, i + 2)
        wanted = theirs(trl, step, ROWS[name], num_items=num_items, steps=3)[0]
        check(ours(step, ALGORITHMS[name])[0] * int(step.mask.sum()) / (num_items / 3), wanted, x)


@pytest.mark.parametrize("name", [n for n in ROWS if n != "gspo_token"])
def test_a_response_without_trained_tokens_counts_in_trls_means_over_responses(trl, name):
    """4 of 6 have tokens: over 6 in TRL, over 4 here. The token mean is the same. In TRL's GMPO their ratio is 1."""
    x = numbers(8, empty=(1, 4))
    share = 1.0 if ALGORITHMS[name].aggregation == "token_mean" else 4 / 6
    constant = -x.advantage[[1, 4]].sum() / 6 if name == "gmpo" else 0.0
    check(ours(x, ALGORITHMS[name])[0] * share + constant, theirs(trl, x, ROWS[name])[0], x)


@pytest.mark.parametrize("seed", SEEDS)
def test_luspo_is_gspo_with_each_response_times_its_length(trl, seed):
    """And so "constant" times max_tokens."""
    x = numbers(seed, 0.4)
    wanted = theirs(trl, x, settings_of("luspo", "wide", SEQUENCE))[0]
    check(ours(x, resolve("gspo", **WIDE, aggregation="constant"))[0] * MAX_TOKENS, wanted, x)
    lengths = x.mask.sum(1).tolist()
    alone = [ours(x.rows(i, i + 1), resolve("gspo", **WIDE))[0] * n for i, n in enumerate(lengths)]
    check(torch.stack(alone).mean(), wanted, x)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_ratio_of_vespo_over_the_policy_that_sampled(trl, seed):
    x = numbers(seed, 0.4)
    weight = torch.where(x.mask.bool(), (x.old - x.sampler).exp(), 1.0)
    wanted = theirs(trl, x, ROWS["vespo"], weight=weight)[0]
    check(ours(x, ALGORITHMS["vespo"], importance="ratio")[0], wanted, x)
    assert not torch.isclose(ours(x, ALGORITHMS["vespo"])[0], wanted, rtol=1e-3)


@pytest.mark.parametrize("name", ["grpo", "cispo", "sapo"])
def test_trls_bias_corrected_kl_is_the_ratio_times_ours(trl, name):
    x = numbers(9)
    row = ALGORITHMS[name]
    with_kl = theirs(trl, x, ROWS[name] | {"beta": 0.3, "use_bias_correction_kl": True})[0]
    data, where = token_data(x)
    kl = (x.logp[where] - x.old[where]).exp() * k3(x.logp[where], x.ref[where])
    total = Denominator.of(row.aggregation, x.mask.sum(1).tolist(), MAX_TOKENS)
    check(ours(x, row)[0] + 0.3 * aggregate(kl, data.response_tokens, total), with_kl, x)


def test_the_entropy_bonus_of_a_token_mean(trl):
    x = numbers(10)
    settings = ROWS["maye"] | {"entropy_coef": 0.05}
    check(ours(x, ALGORITHMS["maye"], entropy_coef=0.05)[0], theirs(trl, x, settings)[0], x)


@pytest.mark.parametrize("name", ["grpo_paper", "dr_grpo", "gspo"])
def test_the_entropy_bonus_is_aggregated_as_the_loss_and_trls_is_not(trl, name):
    x = numbers(10)
    data, where = token_data(x)
    total = Denominator.of(ALGORITHMS[name].aggregation, x.mask.sum(1).tolist(), MAX_TOKENS)
    aggregated, mean = aggregate(x.entropy[where], data.response_tokens, total), x.entropy[where].mean()
    found = ours(x, ALGORITHMS[name], entropy_coef=0.05)[0] + 0.05 * (aggregated - mean)
    check(found, theirs(trl, x, ROWS[name] | {"entropy_coef": 0.05})[0], x)


def test_a_dual_clip_inside_the_upper_bound(trl):
    """Ratio 2, advantage -1, delta 1.1, upper bound 1.28: 1.1 here; the larger of 1.1 and 1.28 in TRL."""
    x = numbers(0)
    x = replace(x, old=x.logp.detach() - math.log(2.0), advantage=-torch.ones_like(x.advantage))
    assert ours(x, resolve("grpo", dual_clip=1.1))[0].item() == pytest.approx(1.1)
    assert theirs(trl, x, ROWS["grpo"] | {"delta": 1.1})[0].item() == pytest.approx(1.28)


def test_a_log_ratio_past_twenty_is_limited_here_and_not_in_trl(trl):
    x = numbers(0)
    x = replace(x, old=x.logp.detach() - 25.0, advantage=-torch.ones_like(x.advantage))
    assert theirs(trl, x, ROWS["rloo"])[0].item() == pytest.approx(math.exp(25.0))
    assert ours(x, ALGORITHMS["rloo"])[0].item() == pytest.approx(math.exp(20.0))


MODES = [("truncate", "token"), ("mask", "token"), ("truncate", "sequence"), ("mask", "sequence")]


def scored(
    trl: SimpleNamespace,
    x: Numbers,
    rewards: Tensor,
    weights: list[float],
    settings: dict[str, Any],
    kind: str = "grpo",
) -> dict[str, Any]:
    """What `_generate_and_score_completions` makes of completions with these log-probs and rewards [B, P]."""
    names = [f"part{p}" for p in range(rewards.shape[1])]
    reference = object()
    completions = [[5] * n for n in LENGTHS]
    where = [x.mask[i, :n].tolist() for i, n in enumerate(LENGTHS)]
    sampler = [[None if math.isnan(v) else v for v in x.sampler[i, :n].tolist()] for i, n in enumerate(LENGTHS)]
    if kind == "grpo":
        generated = ([[3]] * len(LENGTHS), completions, where, completions, sampler, {}, None, None)
    else:
        generated = ([[3]] * len(LENGTHS), completions, completions)
    trainer = stand_in(
        getattr(trl, f"{kind}_defaults"),
        {"pad_to_multiple_of": None, "steps_per_generation": 1, **settings},
        _generate=lambda prompts: generated,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        eos_token_ids=[1],
        tools=None,
        environments=None,
        environment_factories=None,
        ref_model=reference,
        reward_func_names=names,
        reward_funcs=names,
        reward_weights=torch.tensor(weights, dtype=torch.float64),
        _calculate_rewards=lambda *_: rewards.clone(),
        _get_per_token_logps_and_entropies=lambda model, *_, **__: (x.ref if model is reference else x.old, None, None),
        _logs=defaultdict(list, rewards=_lists(), extra=_lists()),
        _pending_extra_logs=_lists(),
        _pending_metrics=_lists(),
    )
    return getattr(trl, kind)._generate_and_score_completions(trainer, [{"prompt": "p"}] * len(LENGTHS))


def trl_weight(trl: SimpleNamespace, x: Numbers, mode: str, level: str, high: float, low: float | None) -> Tensor:
    settings = {
        "use_vllm": True,
        "vllm_importance_sampling_mode": f"{level}_{mode}",
        "vllm_importance_sampling_clip_max": high,
        "vllm_importance_sampling_clip_min": low,
        "num_generations": 3,
    }
    rewards = torch.zeros(len(LENGTHS), 1, dtype=torch.float64)
    return scored(trl, x, rewards, [1.0], settings)["importance_sampling_ratio"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["grpo", "grpo_paper", "cispo", "sapo", "gspo", "luspo", "maye"])
@pytest.mark.parametrize(("mode", "level"), MODES)
def test_the_importance_correction(trl, mode, level, name, seed):
    """The weight of each token, and the loss with it: it multiplies the policy loss and not the KL."""
    x = numbers(seed)
    x.sampler[0, 1] = x.sampler[4, 0] = math.nan
    row = resolve(name, importance_level=level, importance_cap=1.6)
    weight = trl_weight(trl, x, mode, level, 1.6, 1 / 1.6 if mode == "mask" else None)
    found, shown = ours(x, row, importance=mode)
    of_each = weight.expand_as(x.logp)[x.mask.bool()]
    torch.testing.assert_close(shown["policy/importance_weight"], of_each, rtol=1e-7, atol=1e-12)
    assert (of_each == (1.6 if mode == "truncate" else 0.0)).any() and len(of_each.unique()) > 1
    wanted = theirs(trl, x, ROWS[name] | {"use_vllm": True}, weight=weight)[0]
    check(found, wanted, x)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_trl_masks_by_default_only_above_the_cap(trl, level):
    x = numbers(0)
    data, where = token_data(x)
    assert data.old_logp is not None
    two_sided = importance_weight(data.old_logp, data.sampler_logp, data.response, mode="mask", level=level, cap=1.6)
    wanted = trl_weight(trl, x, "mask", level, 1.6, None).expand_as(x.logp)[where]
    below = (wanted > 0) & (wanted < 1 / 1.6)
    assert below.any()
    torch.testing.assert_close(two_sided, wanted.masked_fill(below, 0.0), rtol=1e-7, atol=1e-12)


def rewards_of(seed: int, parts: int) -> Tensor:
    """[6, parts]: two prompts of three samples, in quarters, so that some are equal."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 5, (len(LENGTHS), parts), generator=g).double() / 4


def our_advantages(rewards: Tensor, weights: list[float], size: int, estimator: str, **options: Any) -> Tensor:
    values = rewards.numpy() @ np.array(weights)
    penalties = options.pop("penalties", None)
    groups = [
        ScoredGroup(
            values[i : i + size].tolist(),
            [not math.isnan(v) for v in values[i : i + size]],
            LENGTHS[i : i + size],
            rewards[i : i + size].tolist(),
            weights,
            penalties=penalties[i : i + size] if penalties else (),
        )
        for i in range(0, len(values), size)
    ]
    found = batch_advantages(groups, estimator, **options)
    return torch.tensor([float(a[0]) for group in found for a in group], dtype=torch.float64)


BASELINES = [
    ("group_mean", None, {"scale_rewards": "none"}),
    ("group_mean_std", None, {"scale_rewards": "group"}),
    ("group_mean", "group", {"scale_rewards": "group"}),
    ("group_mean", "batch", {"scale_rewards": "batch"}),
    ("part_by_part", None, {"multi_objective_aggregation": "normalize_then_sum"}),
]
KINDS = ["random", "one without a score", "a dead group", "all dead"]


def rewards_of_kind(seed: int, parts: int, kind: str) -> Tensor:
    rewards = rewards_of(seed, parts)
    if kind == "one without a score":
        rewards[4] = math.nan
    if kind in ("a dead group", "all dead"):
        rewards[:3] = 0.75
    if kind == "all dead":
        rewards[3:] = 0.25
    return rewards


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("estimator", "scale", "settings"), BASELINES)
def test_the_advantages_but_for_what_is_added_to_the_deviation(
    trl, monkeypatch, estimator, scale, settings, kind, seed
):
    """With TRL's 1e-4 in the place of 1e-6 they are the same."""
    rewards = rewards_of_kind(seed, 2, kind)
    wanted = scored(trl, numbers(seed), rewards, [1.0, 0.5], dict(num_generations=3, **settings))["advantages"]
    monkeypatch.setattr(estimators, "STD_EPSILON", 1e-4)
    found = our_advantages(rewards, [1.0, 0.5], 3, estimator, scale=scale)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)
    assert (found.abs().max() > 0.1) == (kind != "all dead")


def test_what_is_added_to_the_deviation(trl):
    rewards = rewards_of(0, 1)
    wanted = scored(trl, numbers(0), rewards, [1.0], {"num_generations": 3})["advantages"]
    deviation = rewards.view(2, 3).std(dim=1).repeat_interleave(3)
    found = our_advantages(rewards, [1.0], 3, "group_mean_std")
    torch.testing.assert_close(found * (deviation + 1e-6), wanted * (deviation + 1e-4), rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_leave_one_out_baseline(trl, kind, seed):
    rewards = rewards_of_kind(seed, 2, kind)
    settings = {"num_generations": 3, "beta": 0.0}
    wanted = scored(trl, numbers(seed), rewards, [1.0, 0.5], settings, "rloo")["advantages"]
    torch.testing.assert_close(our_advantages(rewards, [1.0, 0.5], 3, "leave_one_out"), wanted, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_leave_one_out_baseline_with_the_kl_in_the_reward(trl, seed):
    """RLOOTrainer has no mask for holes: all tokens of a completion count."""
    x, rewards = numbers(seed), rewards_of(seed, 1)
    wanted = scored(trl, x, rewards, [1.0], {"num_generations": 3, "beta": 0.1}, "rloo")["advantages"]
    penalties = [0.1 * k1(x.old, x.ref)[i, :n].numpy() for i, n in enumerate(LENGTHS)]
    found = our_advantages(rewards, [1.0], 3, "leave_one_out", penalties=penalties)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-12)


def test_on_policy_the_gradient_of_trls_rloo_is_that_of_a_constant_denominator(trl):
    """A token's push is -advantage / responses in TRL; "constant" has max_tokens in the denominator as well."""
    x = numbers(11)
    x = replace(x, old=x.logp.detach())
    trainer = stand_in(
        trl.rloo_defaults, {}, _get_per_token_logps_and_entropies=lambda *_, **__: (x.logp, x.entropy, None)
    )
    one = torch.ones_like(x.mask)
    inputs = {
        "prompt_ids": one[:, :1],
        "prompt_mask": one[:, :1],
        "completion_ids": one,
        "completion_mask": x.mask,
        "advantages": x.advantage,
        "old_logps": (x.old * x.mask).sum(1),
    }
    wanted = gradients(trl.rloo._compute_loss(trainer, None, inputs), x)[0]
    found = gradients(ours(x, resolve("rloo", aggregation="constant"))[0] * MAX_TOKENS, x)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-12)
    assert found.abs().max() > 0
