"""The heart, against a hand-made loop: log-probs and gradients of a step, however it is packed, split and ordered."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinyworld import (
    assert_close,
    assert_same_gradients,
    gradients,
    items_of,
    mixed_prompts,
    prompt_tokens,
    response,
    saved_bytes,
)

from vlmrl.algo.algo_keys import Algorithm
from vlmrl.algo.algorithms import ALGORITHMS
from vlmrl.algo.choices import AGGREGATIONS
from vlmrl.model.load import load_model
from vlmrl.model.memory import HeadChunks
from vlmrl.model.packing import TrainItem, make_row, pack
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Model
from vlmrl.train.step_batch import StepBatch
from vlmrl.train.update import CrossEntropy, PolicyGradient, fill_logps, fill_stats, update
from vlmrl.types import Segment

MAX_TOKENS = 16
TEMPERATURE = 0.7
WHOLE = 100_000


@dataclass
class GradientTaker:
    """Stands in for the optimizer: keeps the gradient that a step would have used, and changes no weight."""

    model: torch.nn.Module
    taken: dict[str, torch.Tensor] = field(default_factory=dict)

    def clip(self) -> float:
        self.taken = gradients(self.model)
        return 1.0

    def part_norms(self) -> dict[str, float]:
        return {}

    def step(self, lr: float) -> None:
        self.clear()

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)


def step_gradient(policy: Policy, batch: StepBatch, objective, tokens_per_row: int = WHOLE):
    """(gradient, metrics) of one update."""
    taker = GradientTaker(policy.model)
    metrics = update(policy, taker, batch, objective, lr=1.0, tokens_per_row=tokens_per_row, max_tokens=MAX_TOKENS)  # type: ignore[arg-type]
    return taker.taken, metrics


def batch_of(items: Sequence[TrainItem], advantages: Sequence[float]) -> StepBatch:
    return StepBatch(list(items), list(advantages), [f"row {i}" for i in range(len(advantages))])


def reference_logps(
    model, items: Sequence[TrainItem], temperature: float, banned: Sequence[int]
) -> dict[int, torch.Tensor]:
    """trajectory -> log-probs of its trained tokens, one plain forward each, from `model(...).logits`."""
    found = {}
    for item in items:
        ids = [*item.prompt.ids, *(t for s in item.segments for t in s.ids)]
        kinds = [*item.prompt.kinds, *[0] * item.num_tokens]
        logits = (
            model(
                input_ids=torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                mm_token_type_ids=torch.tensor([kinds], dtype=torch.int),
                **item.prompt.images,
            )
            .logits[0]
            .float()
            / temperature
        )
        logits[:, list(banned)] = -math.inf
        rows = []
        at = len(item.prompt.ids)
        for segment in item.segments:
            for token in segment.ids:
                if segment.trained:
                    rows.append(logits[at - 1, token] - torch.logsumexp(logits[at - 1], 0))
                at += 1
        found[item.trajectory] = torch.stack(rows) if rows else torch.zeros(0)
    return found


def reference_loss(logps, items, advantages, algorithm: Algorithm, old, max_tokens: int) -> torch.Tensor:
    """The whole step's loss, one token after the other."""
    counted = [i for i in items if len(logps[i.trajectory])]
    tokens = sum(len(logps[i.trajectory]) for i in counted)
    picked = reference_picks(logps, counted, advantages, algorithm, old) if algorithm.selects else set()
    loss = torch.zeros(())
    for item in counted:
        logp, before = logps[item.trajectory], old[item.trajectory]
        advantage, n = advantages[item.trajectory], len(logp)
        changes = [logp[k] - before[k] for k in range(n)]
        for k in range(n):
            term = reference_term(logp, changes, k, advantage, algorithm, (item.trajectory, k) in picked)
            weight = {
                "token_mean": 1 / tokens,
                "sequence_mean": 1 / (n * len(counted)),
                "sequence_sum": 1 / len(counted),
                "constant": 1 / (len(counted) * max_tokens),
            }[algorithm.aggregation]
            loss = loss + weight * term
    return loss


def reference_term(logp, changes, k: int, advantage: float, a: Algorithm, is_picked: bool) -> torch.Tensor:
    """One token's loss, with plain ifs."""
    change = changes[k]
    if a.ratio != "token":
        mean = sum(changes) / len(changes)
        change = mean if a.ratio == "sequence" else mean.detach() + logp[k] - logp[k].detach()
    ratio = torch.exp(change)
    low = 1 - a.clip_low if a.clip_low is not None else 0.0
    high = 1 + a.clip_high if a.clip_high is not None else math.inf
    if a.surrogate == "reinforce":
        return -advantage * logp[k]
    if a.surrogate == "cispo":
        return -min(max(ratio.item(), low), high) * advantage * logp[k]
    if a.surrogate == "sapo":
        tau = a.tau_positive if advantage > 0 else a.tau_negative
        return -advantage * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
    if a.surrogate == "vespo":
        power, decay = (a.power_positive, a.decay_positive) if advantage >= 0 else (a.power_negative, a.decay_negative)
        w = math.exp(sum(c.item() for c in changes))
        return -(w**power) * math.exp(decay * (1 - w)) * advantage * logp[k]
    if a.surrogate == "gmpo":
        limited = []
        for c in changes:
            if advantage >= 0:
                limited.append(c if c.item() < a.clip_high else torch.tensor(a.clip_high))
            else:
                limited.append(c if c.item() > -a.clip_low else torch.tensor(-a.clip_low))
        return -advantage * torch.exp(sum(limited) / len(limited))
    if a.surrogate == "kl_cov":
        return -advantage * ratio + (a.cov_kl_coef * abs(change) if is_picked else 0.0)
    if is_picked:
        return torch.zeros(())
    kept = min(max(ratio.item(), low), high)
    term = -ratio * advantage if ratio.item() * advantage <= kept * advantage else torch.tensor(-kept * advantage)
    if a.dual_clip is not None and advantage < 0 and term.item() > -advantage * a.dual_clip:
        return torch.tensor(-advantage * a.dual_clip)
    return term


def reference_picks(logps, items, advantages, a: Algorithm, old) -> set[tuple[int, int]]:
    """What Clip-Cov (with a share of 1: all that it may pick) and KL-Cov pick, as (trajectory, token)."""
    every = [(i.trajectory, k) for i in items for k in range(len(logps[i.trajectory]))]
    logp = {(t, k): float(logps[t][k].detach()) for t, k in every}
    mean, centre = sum(logp.values()) / len(every), sum(advantages[t] for t, _ in every) / len(every)
    covariance = {(t, k): (logp[t, k] - mean) * (advantages[t] - centre) for t, k in every}
    if a.surrogate == "kl_cov":
        count = max(1, int(a.cov_share * len(every)))
        return set(sorted(every, key=lambda x: -covariance[x])[:count])
    assert a.cov_share == 1.0
    clipped = set()
    for t, k in every:
        ratio = math.exp(logp[t, k] - float(old[t][k]))
        over = advantages[t] > 0 and ratio > 1 + a.clip_high
        if over or (advantages[t] < 0 and ratio < 1 - a.clip_low):
            clipped.add((t, k))
    return {x for x in every if a.cov_low < covariance[x] < a.cov_high and x not in clipped}


LOSS_CELLS = ("ratio", "surrogate", "clip_low", "clip_high", "dual_clip", "aggregation")
"""What makes the loss of a row, the KL aside."""


def distinct_losses() -> dict[str, Algorithm]:
    """One row for every loss of the table; Clip-Cov and KL-Cov with shares that pick some tokens of a small step."""
    seen: dict[tuple, Algorithm] = {}
    for row in ALGORITHMS.values():
        seen.setdefault(tuple(getattr(row, cell) for cell in LOSS_CELLS), row)
    rows = {row.name: row for row in seen.values()}
    rows["clip_cov"] = replace(rows["clip_cov"], cov_share=1.0, cov_low=0.2, clip_low=0.2, clip_high=0.2)
    rows["kl_cov"] = replace(rows["kl_cov"], cov_share=0.3)
    return rows


ROWS = distinct_losses()


def spread_of(row: Algorithm) -> float:
    """Distance of new and old log-probs in nats, such that a clip acts on some tokens or responses."""
    return 0.3 if row.ratio == "token" or row.clip_low is None else 10 * row.clip_low


@pytest.fixture(scope="module")
def prompts(tiny_encoder):
    return mixed_prompts(tiny_encoder)


@pytest.fixture(scope="module")
def world(prompts):
    """A step with everything in it: ragged responses, several groups, an agent with a tool's answer between."""
    items = items_of([(prompts[0], [5, 1, 9]), (prompts[1], [3, 12]), (prompts[2], [7, 2, 4]), (prompts[3], [6])])
    tool = Segment("tool", response(77, 4).ids, False)
    late = Segment("assistant", response(78, 3).ids, True)
    items[3] = replace(items[3], segments=(items[3].segments[0], tool, late))
    items[5] = replace(items[5], segments=(tool, late, tool))  # begins and ends with what nobody trains on
    advantages = [1.0, -0.5, 0.25, -1.0, 2.0, 0.5, -0.75, 1.5, -2.0]
    assert len(items) == len(advantages)
    return items, advantages


@pytest.fixture
def policy(frozen_tiny_model, tiny_banned):
    made = Policy(frozen_tiny_model, temperature=TEMPERATURE, banned_ids=tiny_banned)
    yield made
    made.model.zero_grad(set_to_none=True)


def logps_of(policy: Policy, items: Sequence[TrainItem], tokens_per_row: int = WHOLE) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    fill_logps(policy, batch_of(items, [0.0] * (1 + max(i.trajectory for i in items))), found, tokens_per_row)
    return found


@pytest.mark.parametrize("tokens_per_row", [1, 64, 150, WHOLE])
def test_packed_log_probs_equal_a_plain_forward_of_each_response(
    policy, eager_model, world, tiny_banned, tokens_per_row
):
    items, _ = world
    with torch.no_grad():
        expected = reference_logps(eager_model, items, TEMPERATURE, tiny_banned)
    found = logps_of(policy, items, tokens_per_row)
    assert found.keys() == expected.keys()
    for index in expected:
        assert_close(found[index], expected[index], f"trajectory {index}")


def test_padded_path_equals_the_same_reference(frozen_tiny_model, eager_model, world, tiny_banned):
    items, _ = world
    padded = Policy(frozen_tiny_model, temperature=TEMPERATURE, banned_ids=tiny_banned, shared_prefix=False)
    with torch.no_grad():
        expected = reference_logps(eager_model, items, TEMPERATURE, tiny_banned)
    found = logps_of(padded, items)
    for index in expected:
        assert_close(found[index], expected[index], f"trajectory {index}")


@pytest.mark.parametrize("tokens_per_row", [64, WHOLE])
def test_packed_energies_equal_those_of_a_plain_forward_of_each_response(
    policy, eager_model, world, tiny_banned, tokens_per_row
):
    """1 - 2 pi + the sum of pi^2, from plain logits."""
    items = [i for i in world[0] if len(i.segments) == 1]
    energies: dict[int, torch.Tensor] = {}
    logps: dict[int, torch.Tensor] = {}
    batch = batch_of(items, [0.0] * len(world[0]))
    fill_stats(policy, batch, {"energy": energies, "logp": logps}, tokens_per_row)
    assert energies.keys() == logps.keys() == {i.trajectory for i in items}
    for item in items:
        ids = [*item.prompt.ids, *item.segments[0].ids]
        kinds = torch.tensor([[*item.prompt.kinds, *[0] * item.num_tokens]], dtype=torch.int)
        with torch.no_grad():
            whole = eager_model(input_ids=torch.tensor([ids]), mm_token_type_ids=kinds, **item.prompt.images)
        logits = whole.logits[0, len(item.prompt.ids) - 1 : -1].double() / TEMPERATURE
        logits[:, list(tiny_banned)] = -math.inf
        p = logits.softmax(-1)
        own = p[torch.arange(len(p)), torch.tensor(item.segments[0].ids)]
        assert_close(energies[item.trajectory], 1 - 2 * own + p.square().sum(-1), f"trajectory {item.trajectory}")


def test_entropy_is_that_of_the_policy_without_banned_ids(policy, eager_model, world, tiny_banned):
    item = world[0][0]
    stats = policy(make_row([item]))
    ids = [*item.prompt.ids, *item.segments[0].ids]
    with torch.no_grad():
        logits = eager_model(input_ids=torch.tensor([ids])).logits[0, len(item.prompt.ids) - 1 : -1] / TEMPERATURE
    logits[:, list(tiny_banned)] = -math.inf
    p = logits.double().softmax(-1)
    assert_close(stats.entropy, -torch.special.xlogy(p, p).sum(-1), "entropy")
    assert not stats.entropy.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("on_policy", [True, False])
def test_the_step_gradient_of_every_algorithm_equals_the_hand_made_loop(
    policy, eager_model, world, tiny_banned, row, on_policy
):
    items, advantages = world
    algorithm = ROWS[row]
    logps = reference_logps(eager_model, items, TEMPERATURE, tiny_banned)
    old = {k: v.detach() for k, v in logps.items()}
    if not on_policy:
        spread = 1.5 if algorithm.dual_clip else spread_of(algorithm)
        generator = torch.Generator().manual_seed(1)
        old = {k: v + spread * torch.randn(len(v), generator=generator) for k, v in old.items()}
    loss = reference_loss(logps, items, advantages, algorithm, old, MAX_TOKENS)
    eager_model.zero_grad(set_to_none=True)
    loss.backward()
    batch = batch_of(items, advantages)
    if not on_policy:
        batch.old_logp = old
    found, metrics = step_gradient(policy, batch, PolicyGradient(algorithm), 120)
    assert_same_gradients(found, gradients(eager_model))
    assert metrics["loss/total"] == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-6)
    clips = algorithm.surrogate in ("clip", "gmpo") and algorithm.clip_low is not None
    assert (metrics["policy/clip_share"] > 0) == (row == "clip_cov" or (clips and not on_policy))


def test_the_cross_entropy_gradient_equals_the_hand_made_loop(frozen_tiny_model, eager_model, world):
    items, _ = world
    plain = Policy(frozen_tiny_model)
    logps = reference_logps(eager_model, items, 1.0, [])
    loss = -torch.cat(list(logps.values())).mean()
    eager_model.zero_grad(set_to_none=True)
    loss.backward()
    found, metrics = step_gradient(plain, batch_of(items, [0.0] * len(items)), CrossEntropy(), 100)
    assert_same_gradients(found, gradients(eager_model))
    assert metrics["loss/cross_entropy"] == pytest.approx(float(loss.detach()), rel=1e-6)


def test_the_entropy_bonus_and_kl_gradients_equal_the_hand_made_loop(
    frozen_tiny_model, eager_model, world, tiny_banned
):
    items, advantages = world[0][:2], world[1]
    policy = Policy(frozen_tiny_model, temperature=TEMPERATURE, banned_ids=tiny_banned, entropy_gradient=True)
    batch = batch_of(items, advantages)
    generator = torch.Generator().manual_seed(2)
    logps = reference_logps(eager_model, items, TEMPERATURE, tiny_banned)
    batch.ref_logp = {k: v.detach() + 0.5 * torch.randn(len(v), generator=generator) for k, v in logps.items()}
    tokens = sum(len(v) for v in logps.values())
    loss = torch.zeros(())
    for item in items:
        ids = [*item.prompt.ids, *item.segments[0].ids]
        logits = eager_model(input_ids=torch.tensor([ids])).logits[0, len(item.prompt.ids) - 1 : -1] / TEMPERATURE
        kept = [i for i in range(logits.shape[-1]) if i not in tiny_banned]
        p = logits[:, kept].softmax(-1)
        entropy = -(p * p.log()).sum(-1)
        logp = logps[item.trajectory]
        d = batch.ref_logp[item.trajectory] - logp
        loss = (
            loss
            + (
                -advantages[item.trajectory] * (logp - logp.detach()).exp() + 0.3 * (d.exp() - d - 1) - 0.2 * entropy
            ).sum()
            / tokens
        )
    eager_model.zero_grad(set_to_none=True)
    loss.backward()
    found, _ = step_gradient(policy, batch, PolicyGradient(ALGORITHMS["grpo"], kl_coef=0.3, entropy_coef=0.2))
    assert_same_gradients(found, gradients(eager_model))


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(max_examples=6)
@given(data=st.data())
def test_the_gradient_does_not_depend_on_packing_splitting_or_order(policy, world, aggregation, data):
    items, advantages = world
    objective = PolicyGradient(replace(ALGORITHMS["grpo"], aggregation=aggregation))
    expected, metrics = step_gradient(policy, batch_of(items, advantages), objective)
    order = data.draw(st.permutations(items))
    budget = data.draw(st.integers(1, 300))
    found, shown = step_gradient(policy, batch_of(order, advantages), objective, budget)
    assert_same_gradients(found, expected)
    for name in ("loss/total", "policy/entropy", "loss/policy"):
        assert shown[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
@settings(max_examples=3)
@given(data=st.data())
def test_no_surrogate_depends_on_packing_splitting_or_order(policy, world, row, data):
    """Off policy, with the engine's log-probs off as well, at both levels of correction."""
    items, advantages = world
    level = data.draw(st.sampled_from(["token", "sequence"]))
    objective = PolicyGradient(replace(ROWS[row], importance_level=level), 0.1, importance="truncate")
    order = data.draw(st.permutations(items))
    budget = data.draw(st.integers(1, 300))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    spread = spread_of(ROWS[row])
    logps = logps_of(policy, items)
    old, ref, said = (
        {k: v + spread * torch.randn(len(v), generator=generator) for k, v in logps.items()} for _ in range(3)
    )
    sampled = {i.trajectory: with_sampler(i, said[i.trajectory].tolist()) for i in items}
    found = []
    for chosen, tokens_per_row in ((items, WHOLE), (order, budget)):
        batch = batch_of([sampled[i.trajectory] for i in chosen], advantages)
        batch.old_logp, batch.ref_logp, batch.seed = old, ref, 5
        found.append(step_gradient(policy, batch, objective, tokens_per_row))
    assert_same_gradients(found[1][0], found[0][0])
    for name, value in found[0][1].items():
        assert found[1][1][name] == pytest.approx(value, rel=1e-4, abs=1e-5)


def with_sampler(item: TrainItem, said: list[float]) -> TrainItem:
    """The item with these log-probs from the engine, in order over its trained segments."""
    values = iter(said)
    segments = tuple(
        replace(s, sampler_logp=tuple(next(values) for _ in s.ids)) if s.trained else s for s in item.segments
    )
    return replace(item, segments=segments)


def test_clip_covs_random_choice_is_the_same_however_rows_are_packed(policy, world):
    items, advantages = world
    objective = PolicyGradient(replace(ROWS["clip_cov"], cov_share=0.05))
    picks = []
    for order, budget in ((items, WHOLE), (items[::-1], 60)):
        batch = batch_of(order, advantages)
        batch.seed = 11
        picks.append(objective.select(policy, batch, budget))
    tokens = sum(len(x) for x in picks[0].values())
    assert sum(int(x.sum()) for x in picks[0].values()) == max(1, int(0.05 * tokens))
    assert all(picks[0][i].tolist() == picks[1][i].tolist() for i in picks[0])


def test_token_advantages_take_the_place_of_the_one_of_the_response(policy, world):
    """Every token's own advantage, in any packing; and dead groups in the denominator shrink the step."""
    items, advantages = world
    objective = PolicyGradient(ALGORITHMS["grpo"])
    same = batch_of(items, [0.0] * len(advantages))
    same.token_advantages = {i.trajectory: torch.full((same.num_trained(i),), advantages[i.trajectory]) for i in items}
    expected, _ = step_gradient(policy, batch_of(items, advantages), objective)
    assert_same_gradients(step_gradient(policy, same, objective, 60)[0], expected)
    first = items[0].trajectory
    ramp = torch.linspace(-1.0, 2.0, same.num_trained(items[0]))
    alone = batch_of(items[:1], [0.0])
    alone.token_advantages = {first: ramp}
    _, metrics = step_gradient(policy, alone, objective)
    assert metrics["loss/policy"] == pytest.approx(-float(ramp.mean()), rel=1e-5)
    tokens = sum(same.num_trained(i) for i in items)
    counted = batch_of(items, advantages)
    counted.dead_tokens = {9: [tokens // 2], 10: [tokens - tokens // 2]}
    halved, _ = step_gradient(policy, counted, objective)
    assert_same_gradients({k: 2 * v for k, v in halved.items()}, expected)


@pytest.mark.parametrize("row", ["grpo", "grpo_paper", "dr_grpo", "gmpo"])
def test_leaving_dead_groups_out_of_the_forward_pass_changes_no_gradient(policy, world, row):
    items, advantages = world
    dead = {items[0].group, items[-1].group}
    zeroed = [0.0 if any(i.trajectory == t and i.group in dead for i in items) else a for t, a in enumerate(advantages)]
    objective = PolicyGradient(ALGORITHMS[row])
    expected, all_of_them = step_gradient(policy, batch_of(items, zeroed), objective)
    live = [i for i in items if i.group not in dead]
    counted = batch_of(live, zeroed)
    counted.dead_tokens = {g: [counted.num_trained(i) for i in items if i.group == g] for g in sorted(dead)}
    found, metrics = step_gradient(policy, counted, objective)
    assert_same_gradients(found, expected)
    assert metrics["loss/total"] == pytest.approx(all_of_them["loss/total"], rel=1e-6)
    # What is shown is of the tokens that were run: as if the dead groups had never been there.
    _, without = step_gradient(policy, batch_of(live, zeroed), objective)
    assert metrics["policy/entropy"] == without["policy/entropy"] != all_of_them["policy/entropy"]


@pytest.mark.slow
@settings(max_examples=8)
@given(data=st.data())
def test_shared_prefix_equals_the_padded_reference_for_any_groups(frozen_tiny_model, tiny_banned, prompts, data):
    chosen = data.draw(st.lists(st.sampled_from(prompts), min_size=1, max_size=3))
    groups = [(p, data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))) for p in chosen]
    items = items_of(groups, seed=data.draw(st.integers(0, 99)))
    advantages = [(-1.0) ** i * (1 + i) for i in range(len(items))]
    kwargs = {"temperature": TEMPERATURE, "banned_ids": tiny_banned}
    shared, padded = Policy(frozen_tiny_model, **kwargs), Policy(frozen_tiny_model, **kwargs, shared_prefix=False)
    row = pack(items, WHOLE)
    assert len(row) == 1
    with torch.no_grad():
        assert_close(shared(make_row(row[0])).logp, padded(make_row(row[0])).logp, "log-probs")
    objective = PolicyGradient(ALGORITHMS["grpo"])
    found, _ = step_gradient(shared, batch_of(items, advantages), objective)
    expected, _ = step_gradient(padded, batch_of(items, advantages), objective)
    assert_same_gradients(found, expected)


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_gradient_checkpointing_keeps_less_and_changes_nothing(tiny_folder, policy, world, shared_prefix):
    items, advantages = world
    wanted = Model(path=str(tiny_folder), dtype="float32", device="cpu", gradient_checkpointing=True)
    recomputing = Policy(
        load_model(wanted), temperature=TEMPERATURE, banned_ids=policy.banned_ids, shared_prefix=shared_prefix
    )
    objective = PolicyGradient(ALGORITHMS["grpo"])
    expected, _ = step_gradient(policy, batch_of(items, advantages), objective)
    found, _ = step_gradient(recomputing, batch_of(items, advantages), objective)
    assert_same_gradients(found, expected)
    row = make_row(pack(items, WHOLE)[0])
    assert saved_bytes(recomputing, row) < 0.5 * saved_bytes(Policy(policy.model, shared_prefix=shared_prefix), row)
    assert not recomputing.model.training


def test_chunked_head_changes_nothing(policy, world, monkeypatch):
    from vlmrl.model import policy as logprobs

    items, advantages = world
    objective = PolicyGradient(ALGORITHMS["grpo"])
    expected, _ = step_gradient(policy, batch_of(items, advantages), objective)
    monkeypatch.setattr(logprobs, "chunks_for", lambda device: HeadChunks(3 * 300, 300))  # three positions a chunk
    found, _ = step_gradient(policy, batch_of(items, advantages), objective)
    assert_same_gradients(found, expected)


def test_a_response_neither_sees_its_sibling_nor_another_group(policy, prompts):
    alone = items_of([(prompts[1], [6])])
    others = items_of([(prompts[1], [6, 11, 2]), (prompts[2], [4, 4])])
    assert others[0].segments == alone[0].segments
    assert_close(logps_of(policy, others)[0], logps_of(policy, alone)[0])


def test_the_first_trained_token_is_predicted_from_the_last_prompt_token(policy, eager_model, prompts, tiny_banned):
    item = items_of([(prompts[2], [1])])[0]
    with torch.no_grad():
        logits = (
            eager_model(
                input_ids=torch.tensor([item.prompt.ids]),
                mm_token_type_ids=torch.tensor([item.prompt.kinds]).int(),
                **item.prompt.images,
            ).logits[0, -1]
            / TEMPERATURE
        )
    logits[list(tiny_banned)] = -math.inf
    assert_close(logps_of(policy, [item])[0], logits.log_softmax(-1)[[item.segments[0].ids[0]]])


def test_an_agents_trajectory_has_the_log_probs_of_its_plain_story(policy, prompts):
    """Three segments, the middle one not trained: what is trained must not depend on how the story is cut."""
    whole = response(5, 12)
    plain = TrainItem(prompt_tokens(prompts[1]), 0, (whole,), 0)
    parts = tuple(
        Segment("x", whole.ids[a:b], trained) for a, b, trained in ((0, 4, True), (4, 9, False), (9, 12, True))
    )
    agent = TrainItem(plain.prompt, 0, parts, 0)
    expected = logps_of(policy, [plain])[0]
    assert_close(logps_of(policy, [agent])[0], torch.cat([expected[:4], expected[9:]]))


def test_old_log_probs_from_the_same_packing_are_bitwise_the_new_ones(policy, world):
    """So that the first of several updates has ratios of exactly 1."""
    items, advantages = world
    batch = batch_of(items, advantages)
    fill_logps(policy, batch, batch.old_logp, 120)
    _, metrics = step_gradient(
        policy, batch, PolicyGradient(replace(ALGORITHMS["grpo"], clip_low=1e-9, clip_high=1e-9)), 120
    )
    assert metrics["policy/clip_share"] == 0.0
    tokens = sum(len(v) for v in batch.old_logp.values())
    expected = -sum(a * batch.num_trained(i) for i, a in zip(items, advantages, strict=True)) / tokens
    assert metrics["loss/policy"] == pytest.approx(expected, rel=1e-6)


def test_the_sampler_gap_is_the_largest_difference_over_sampled_tokens(policy, world):
    items, advantages = world
    logps = logps_of(policy, items, 120)
    said = tuple(float(x) for x in logps[0])
    first = replace(items[0].segments[0], sampler_logp=(said[0] + 0.25, *said[1:]))
    changed = [replace(items[0], segments=(first,)), *items[1:]]
    _, metrics = step_gradient(policy, batch_of(changed, advantages), PolicyGradient(ALGORITHMS["grpo"]), 120)
    assert metrics["policy/sampler_gap_max"] == pytest.approx(0.25, abs=1e-5)


def test_bfloat16_rows_run_and_stay_near_float32(tiny_model, policy, world):
    half = Policy(copy.deepcopy(tiny_model).to(torch.bfloat16), temperature=TEMPERATURE, banned_ids=policy.banned_ids)
    row = make_row(pack(world[0], WHOLE)[0])
    with torch.no_grad():
        found, expected = half(row), policy(row)
    assert found.logp.dtype == torch.float32
    assert float((found.logp - expected.logp).abs().mean()) < 0.5
