"""Losses behind masked images, beside ten lines of autograd and numbers worked by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vlmrl.algo.algorithms import ALGORITHMS, resolve
from vlmrl.algo.losses import masked_perception_loss, most_dependent, perception_loss, response_weights
from vlmrl.dist.world import World
from vlmrl.model.packing import PackedRow, PromptTokens, TokenStats
from vlmrl.train.collect import Before
from vlmrl.train.perception import token_weights, with_dependency
from vlmrl.train.step_batch import StepBatch, split_updates, step_batch
from vlmrl.train.update import PolicyGradient, add_gradients
from vlmrl.types import Group, Row, Score, ScoredSample, Segment, Trajectory

SEEN, HIDDEN = PromptTokens((1, 2, 3), (0, 0, 0), {}, 0), PromptTokens((1, 2, 4), (0, 0, 0), {}, 0)
ROWS = ("papo", "papo_published", "vppo")


class Table(torch.nn.Module):
    """A policy with log-probs and entropies per token id; behind the prompt that ends with 4, with others."""

    device = torch.device("cpu")
    sharing = "packed"

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.rand(2, 2, 200, generator=torch.Generator().manual_seed(3))
        self.logp, self.entropy = torch.nn.Parameter(-0.05 - 2 * numbers[0]), torch.nn.Parameter(numbers[1])

    def forward(self, row: PackedRow, reference: object = None, teacher: object = None) -> TokenStats:
        ends = {s.group: int(row.input_ids_N[s.end - 1]) for s in row.layout if s.response < 0}
        hidden = torch.tensor([int(ends[row.layout[s].group] == 4) for s in row.span_K.tolist()])
        return TokenStats(self.logp[hidden, row.target_K], self.entropy[hidden, row.target_K])


def group(scores: Sequence[float], lengths: Sequence[int], first_id: int) -> Group:
    samples = []
    for k, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        ids = tuple(first_id + 10 * k + t for t in range(length))
        part = Segment("a", ids, True, (-0.5,) * length)
        trajectory = Trajectory("t", "p", 0, k, 0, 0, (1, 2, 3), (part,), (), "stop")
        samples.append(ScoredSample(trajectory, "", Score(score, {}), score))
    return Group(Row("p", "s", "t", {}), "", tuple(samples))


def masked(index: int) -> PromptTokens:
    return HIDDEN


def batch_of(groups: Sequence[Group], name: str = "papo", **cells: Any) -> tuple[StepBatch, PolicyGradient]:
    """A batch as a step prepares it, with the statistics of the policy before the updates."""
    row, policy = resolve(name, **cells), Table()
    objective = PolicyGradient(row)
    batch = step_batch(groups, lambda index: SEEN, keep_dead=objective.keeps_dead, count_dead=row.counts_dead)
    of = lambda k: {  # noqa: E731
        i.trajectory: policy.logp[k, list(i.segments[0].ids)].detach() for i in batch.items
    }
    before = Before(logp=of(0), masked=of(1))
    batch.masked_logp |= before.masked
    batch.masked_prompt = masked if row.masks_both else None
    if row.perception == "select":
        batch.token_weight |= token_weights(row, batch, before)
    return batch, objective


def gradient(
    batch: StepBatch, objective: PolicyGradient, tokens_per_row: int = 1000
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The gradients of log-probs and entropies, [2, 200] each, and the metrics."""
    policy = Table()
    optimizer: Any = SimpleNamespace(clear=lambda: None)
    rest: Any = {"tokens_per_row": tokens_per_row, "max_tokens": 10}
    numbers = add_gradients(policy, optimizer, batch, objective, **rest)  # type: ignore[arg-type]
    zeros = torch.zeros(2, 200)
    return *(zeros if p.grad is None else p.grad for p in (policy.logp, policy.entropy)), numbers  # type: ignore[return-value]


def half_and_quarter() -> tuple[Tensor, Tensor]:
    logp, hidden = (torch.tensor([p], dtype=torch.float64).log().requires_grad_() for p in (0.5, 0.25))
    return logp, hidden


def test_the_terms_of_papo_and_both_gradients_by_hand():
    row, entropy = resolve("papo", perception_entropy=0.0), torch.zeros(1, dtype=torch.float64)
    logp, hidden = half_and_quarter()
    loss, kl = perception_loss(row, logp, hidden, entropy)
    # k3 = 0.25 / 0.5 - 1 - ln(0.25 / 0.5) = 0.1931; times -0.01
    assert kl.item() == pytest.approx(0.193147, abs=1e-6) and loss.item() == pytest.approx(-0.00193147, abs=1e-8)
    loss.sum().backward()
    # d k3 / d log p = 1 - 0.25 / 0.5 = 0.5, and nothing through the other pass
    assert logp.grad is not None and logp.grad.item() == pytest.approx(-0.005, abs=1e-12) and hidden.grad is None
    logp, hidden = half_and_quarter()
    loss = masked_perception_loss(row, logp, hidden, entropy)
    assert loss.item() == 0.0
    loss.sum().backward()
    assert hidden.grad is not None and hidden.grad.item() == pytest.approx(0.005, abs=1e-12) and logp.grad is None


def test_the_entropies_of_papo_are_exact_and_those_of_its_code_are_not():
    logp, hidden = half_and_quarter()
    entropies = [torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (0.7, 0.9)]
    row = resolve("papo", perception_coef=0.0)
    loss, _ = perception_loss(row, logp, hidden, entropies[0])
    other = masked_perception_loss(row, logp, hidden, entropies[1])
    assert [loss.item(), other.item()] == pytest.approx([0.03 * 0.7, 0.03 * 0.9])
    (loss + other).sum().backward()
    assert [e.grad.item() for e in entropies if e.grad is not None] == pytest.approx([0.03, 0.03])
    # The published code: -ln 0.5 - ln 0.25 = 3 ln 2, of which the second is a constant.
    loss, _ = perception_loss(resolve("papo_published", perception_coef=0.0), logp, hidden, entropies[0])
    assert loss.item() == pytest.approx(0.03 * 3 * math.log(2))
    logp.grad = hidden.grad = None
    loss.sum().backward()
    assert logp.grad is not None and logp.grad.item() == pytest.approx(-0.03) and hidden.grad is None  # type: ignore[unreachable]


def test_a_kl_above_ten_has_no_gradient():
    logp, hidden = torch.tensor([-14.0], requires_grad=True), torch.tensor([0.0])
    loss, kl = perception_loss(resolve("papo", perception_entropy=0.0), logp, hidden, torch.zeros(1))
    loss.sum().backward()
    assert kl.item() == 10 and logp.grad is not None and logp.grad.item() == 0


@pytest.mark.parametrize(
    ("tokens", "share", "count"), [(5, 0.2, 1), (6, 0.2, 2), (1, 0.2, 1), (15, 0.2, 3), (100, 0.07, 7), (3, 1.0, 3)]
)
def test_the_share_of_a_response_is_rounded_up(tokens, share, count):
    dependency = torch.rand(tokens, generator=torch.Generator().manual_seed(tokens))
    chosen = most_dependent(dependency, share)
    assert int(chosen.sum()) == count
    if count < tokens:
        assert dependency[chosen].min() > dependency[~chosen].max()


def test_of_equal_tokens_the_first_are_chosen():
    assert most_dependent(torch.tensor([0.0, 1.0, 1.0, 1.0]), 0.5).tolist() == [False, True, True, False]


def test_responses_are_weighed_between_the_least_and_the_most_with_the_mean_one():
    assert response_weights([0.1, 0.5, 0.3], 0.9) == pytest.approx([0.9, 1.1, 1.0])
    assert response_weights([0.0, 0.0, 0.0, 1.0], 0.5) == pytest.approx([0.5, 0.5, 0.5, 2.5])
    assert response_weights([0.2], 0.9) == response_weights([0.2 + 5e-7], 0.9) == [1.0]
    assert response_weights([0.2, 0.2 + 5e-7], 0.9) == [1.0, 1.0]


def test_five_tokens_train_one_of_vppo():
    batch, objective = batch_of([group([1.0, -1.0], [5, 5], 20)], "vppo", perception_entropy=0.0, perception_share=0.2)
    found, _, numbers = gradient(batch, objective)
    dependency = [kl_of(batch, k) for k in (0, 1)]
    assert [int((found[0, 20 + 10 * k : 25 + 10 * k] != 0).sum()) for k in (0, 1)] == [1, 1]
    weights = response_weights([float(d.mean()) for d in dependency], 0.9)
    for k, (sign, weight) in enumerate(zip((-1, 1), weights, strict=True)):
        assert found[0, 20 + 10 * k + int(dependency[k].argmax())].item() == pytest.approx(sign * weight / 10, rel=1e-5)
    assert numbers["perception/selected_share"] == pytest.approx(0.2) and not found[1].any()


def kl_of(batch: StepBatch, trajectory: int) -> Tensor:
    ids = next(list(i.segments[0].ids) for i in batch.items if i.trajectory == trajectory)
    d = (Table().logp[1, ids] - Table().logp[0, ids]).double().detach()
    return (d.exp() - d - 1).clamp(max=10)


def reference(groups: Sequence[Group], objective: PolicyGradient) -> tuple[Tensor, Tensor]:
    """The gradients by autograd, response by response, in float64, in one backward through both passes."""
    a, policy = objective.algorithm, Table()
    logp, entropy = (p.detach().double().requires_grad_() for p in (policy.logp, policy.entropy))
    live = [s for g in groups for s in g.samples if objective.keeps_dead or not g.is_dead]
    ids = [list(s.trajectory.response_ids) for s in live]
    counted = sum(len(s.trajectory.response_ids) for g in groups for s in g.samples if a.counts_dead or s in live)
    kl = [(x := logp[1, i] - logp[0, i]).exp() - x - 1 for i in ids]
    weights = (
        response_weights([float(x.detach().mean()) for x in kl], a.perception_floor) if a.perception == "select" else []
    )
    total = torch.zeros((), dtype=torch.float64)
    for k, (sample, own) in enumerate(zip(live, ids, strict=True)):
        policy_loss = -sample.advantage * (logp[0, own] - logp[0, own].detach()).exp()
        if a.perception == "select":
            smallest = kl[k].sort(descending=True).values[math.ceil(a.perception_share * len(own) - 1e-9) - 1]
            policy_loss = policy_loss * weights[k] * (kl[k] >= smallest)
            terms = -a.perception_entropy * logp[0, own]
        elif a.masks_both:
            terms = -a.perception_coef * kl[k] + a.perception_entropy * (entropy[0, own] + entropy[1, own])
        else:
            d = logp[1, own].detach() - logp[0, own]
            terms = -a.perception_coef * (d.exp() - d - 1) - a.perception_entropy * logp[0, own]
        total = total + (policy_loss + terms).sum() / counted
    total.backward()
    zeros = torch.zeros(2, 200, dtype=torch.float64)
    return logp.grad, zeros if entropy.grad is None else entropy.grad  # type: ignore[return-value]


GROUPS = st.lists(
    st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.5]), st.integers(1, 8)), min_size=2, max_size=3),
    min_size=1,
    max_size=3,
)


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(ROWS),
    shapes=GROUPS,
    budget=st.sampled_from([12, 19, 1000]),
    has_filter=st.booleans(),
    coef=st.sampled_from([0.0, 0.3]),
)
def test_the_gradient_is_that_of_ten_lines_whatever_the_packing(name, shapes, budget, has_filter, coef):
    groups = [group([s for s, _ in g], [n for _, n in g], 20 + 50 * k) for k, g in enumerate(shapes)]
    cells = {"filter": "spread" if has_filter else "none", "perception_coef": coef, "perception_share": 0.3}
    batch, objective = batch_of(groups, name, **cells)
    if not batch.items:
        return
    found = gradient(batch, objective, budget)
    for own, expected in zip(found[:2], reference(groups, objective), strict=True):
        torch.testing.assert_close(own.double(), expected, rtol=1e-5, atol=1e-7)
    assert gradient(batch, objective)[2]["loss/total"] == pytest.approx(found[2]["loss/total"], rel=1e-5, abs=1e-7)


def test_dead_groups_are_trained_where_a_term_acts_on_them():
    def keeps(name: str, **cells: Any) -> bool:
        return PolicyGradient(resolve(name, **cells)).keeps_dead

    assert keeps("papo") and keeps("papo", perception_entropy=0.0) and keeps("papo", perception_coef=0.0)
    assert not keeps("papo", perception_coef=0.0, perception_entropy=0.0) and not keeps("papo", filter="spread")
    assert keeps("vppo", filter="none") and not keeps("vppo", filter="none", perception_entropy=0.0)
    assert not keeps("vppo") and not keeps("grpo")


def test_masks_that_hide_nothing_have_no_loss_and_no_gradient():
    batch, objective = batch_of([group([0.0, 0.0], [3, 2], 20)], perception_entropy=0.0)
    batch.masked_prompt = lambda index: SEEN
    policy = Table()
    batch.masked_logp |= {i.trajectory: policy.logp[0, list(i.segments[0].ids)].detach() for i in batch.items}
    found, entropies, numbers = gradient(batch, objective)
    assert not found.any() and not entropies.any() and numbers["loss/total"] == 0 == numbers["perception/kl"]


def test_dependencies_go_to_the_samples_of_their_groups():
    groups = [group([1, 0], [2, 1], 20), group([1, 0], [1, 1], 50)]
    groups[0] = replace(groups[0], demonstrations=(groups[0].samples[0],))
    made = with_dependency(groups, {0: (0.5, 0.25), 3: (1.0,), 4: (2.0,)})
    assert [[s.dependency for s in g.samples] for g in made] == [[(0.5, 0.25), None], [(1.0,), (2.0,)]]


def test_weights_come_from_the_responses_of_all_ranks():
    """Each of two ranks has one group; alone, each would have the range of its own responses."""
    groups = [group([1.0, -1.0], [4, 6], 20), group([1.0, -1.0], [5, 3], 70)]
    whole, objective = batch_of(groups, "vppo")
    row = objective.algorithm

    class Two(World):
        def gather(self, value: Any) -> list[Any]:
            return [value, theirs]

    policy, weights = Table(), {}
    means = {i: float(kl_of(whole, i).mean()) for i in whole.token_weight}
    own = [{i.trajectory: means[i.trajectory] for i in whole.items if i.group == k} for k in (0, 1)]
    for k in (0, 1):
        theirs = own[1 - k]
        part = replace(whole, items=[i for i in whole.items if i.group == k], world=Two())
        of = lambda side, part=part: {  # noqa: E731
            i.trajectory: policy.logp[side, list(i.segments[0].ids)].detach() for i in part.items
        }
        weights |= token_weights(row, part, Before(logp=of(0), masked=of(1)))
    assert weights.keys() == whole.token_weight.keys()
    for i, weight in weights.items():
        torch.testing.assert_close(weight, whole.token_weight[i])


def test_each_update_has_its_own_range():
    groups = [group([1.0, -1.0], [4, 6], 20), group([1.0, -1.0], [5, 3], 70)]
    whole, objective = batch_of(groups, "vppo")
    policy = Table()
    of = lambda side: {i.trajectory: policy.logp[side, list(i.segments[0].ids)].detach() for i in whole.items}  # noqa: E731
    for part in split_updates(replace(whole, updates=[[0], [1]])):
        weights = token_weights(objective.algorithm, part, Before(logp=of(0), masked=of(1)))
        assert min(float(w.max()) for w in weights.values()) == pytest.approx(0.9)


def test_the_rows_are_in_the_table():
    assert [n for n, row in ALGORITHMS.items() if row.perception != "none"] == list(ROWS)
