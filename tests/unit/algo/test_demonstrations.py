"""Losses, credit and denominators of demonstrations, beside ten lines of autograd and numbers worked by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vlmrl.algo.algorithms import ALGORITHMS, resolve
from vlmrl.algo.credit import add_credit, solved
from vlmrl.algo.losses import own_demonstration_loss, shaped_demonstration, unsure_weight
from vlmrl.dist.world import World
from vlmrl.model.packing import PackedRow, PromptTokens, TokenStats, TrainItem
from vlmrl.train.step_batch import StepBatch, split_updates, step_batch
from vlmrl.train.update import PolicyGradient, add_gradients
from vlmrl.types import Group, Row, Score, ScoredSample, Segment, Trajectory

PROMPT = PromptTokens((1, 2, 3), (0, 0, 0), {}, 0)
MIXED = sorted(name for name, row in ALGORITHMS.items() if row.demonstrations == "mixed")
FUSED = sorted(name for name, row in ALGORITHMS.items() if row.demonstrations != "none")


class Table(torch.nn.Module):
    """A policy with one log-prob per token id, and an entropy of its own per id."""

    device = torch.device("cpu")
    sharing = "packed"

    def __init__(self) -> None:
        super().__init__()
        self.logp = torch.nn.Parameter(-0.05 - torch.rand(200, generator=torch.Generator().manual_seed(3)))

    def forward(self, row: PackedRow, reference: object = None, teacher: object = None) -> TokenStats:
        return TokenStats(self.logp[row.target_K], self.entropies(row.target_K))

    @staticmethod
    def entropies(ids: Tensor) -> Tensor:
        return 0.2 + ids.float() / 100


def policy_part(*ids: int) -> Segment:
    return Segment("assistant", ids, True, (-0.5,) * len(ids))


def shown_part(*ids: int) -> Segment:
    return Segment("assistant", ids, True, author="demonstration")


def scored(k: int, score: float, *segments: Segment, error: str | None = None) -> ScoredSample:
    trajectory = Trajectory("t", "p", 0, k, 0, 0, (1, 2, 3), segments, (), "stop")
    return ScoredSample(trajectory, "", Score(score, {"a": score}, error=error), masked=error is not None)


def group(scores: Sequence[float], demonstration: float | None, first_id: int = 20) -> Group:
    samples = tuple(scored(k, s, policy_part(first_id + 2 * k, first_id + 2 * k + 1)) for k, s in enumerate(scores))
    shown = () if demonstration is None else (scored(len(scores), demonstration, shown_part(first_id + 90)),)
    return Group(Row("p", "s", "t", {}), "", samples, shown)


def gradient(
    batch: StepBatch, objective: PolicyGradient, tokens_per_row: int = 1000
) -> tuple[Tensor, dict[str, float]]:
    policy = Table()
    told = add_gradients(
        policy,  # type: ignore[arg-type]
        SimpleNamespace(clear=lambda: None),  # type: ignore[arg-type]
        batch,
        objective,
        tokens_per_row=tokens_per_row,
        max_tokens=10,
    )
    assert policy.logp.grad is not None
    return policy.logp.grad, told


def test_the_shaped_loss_and_its_gradient_by_hand():
    logp = torch.tensor([0.4, 0.4], dtype=torch.float64).log().requires_grad_()
    loss = shaped_demonstration(logp, torch.tensor([1.0, -2.0], dtype=torch.float64), 0.1)
    # -1 x 0.4 / 0.5 = -0.8; 2 x 0.8 = 1.6; d/dlogp = -A x 0.1 x 0.4 / 0.25 = -0.16 A
    assert loss.tolist() == pytest.approx([-0.8, 1.6], abs=1e-12)
    loss.sum().backward()
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx([-0.16, 0.32], abs=1e-12)


def test_the_losses_with_a_mean_of_their_own_by_hand():
    logp = torch.tensor([0.4], dtype=torch.float64).log().requires_grad_()
    assert unsure_weight(logp).item() == pytest.approx(0.24, abs=1e-12) and not unsure_weight(logp).requires_grad
    losses = {name: own_demonstration_loss(ALGORITHMS[name], logp, 0.5) for name in ("uft", "chord", "srft")}
    # -ln 0.4 = 0.916291; x 0.24 = 0.219910; x e^-0.5 = 0.555759
    found = {name: loss.item() for name, loss in losses.items() if loss is not None}
    assert found == pytest.approx({"uft": 0.9162907, "chord": 0.2199098, "srft": 0.5557585}, abs=1e-6)
    assert own_demonstration_loss(ALGORITHMS["luffy"], logp, 0.5) is None
    chord = losses["chord"]
    assert chord is not None
    chord.sum().backward()
    assert logp.grad is not None and logp.grad.item() == pytest.approx(-0.24, abs=1e-12)


def test_mu_and_the_share_of_hints_go_their_way():
    row = resolve("chord", mu_peak=0.5, mu_valley=0.1, mu_warmup=2, mu_decay=2)
    assert [row.mu_at(step) for step in range(6)] == pytest.approx([0, 0.25, 0.5, 0.3, 0.1, 0.1])
    assert resolve("chord", mu_peak=0.5, mu_warmup=0, mu_decay=0).mu_at(0) == pytest.approx(0.02)
    row = resolve("uft", hint_most=0.8)
    assert [row.hint_share_at(step) for step in (0, 50, 100, 500)] == pytest.approx([0.8, 0.4, 0, 0])


def test_luffys_demonstration_is_one_of_the_group():
    # scores 0, 0 and the demonstration's 1: the mean is 1/3
    (made,) = add_credit([group([0, 0], 1.0)], ALGORITHMS["luffy"], [[False, False]], max_tokens=10)
    assert [s.advantage for s in made.samples] == pytest.approx([-1 / 3, -1 / 3])
    assert [s.advantage for s in made.demonstrations] == pytest.approx([2 / 3]) and not made.demonstrations[0].masked
    # all scores are equal: nothing is learned, from the demonstration neither
    (made,) = add_credit([group([1, 1], 1.0)], ALGORITHMS["luffy"], [[True, True]], max_tokens=10)
    assert made.is_dead and made.demonstrations[0].masked


def test_srfts_samples_are_right_or_wrong_and_its_demonstration_is_compared():
    (made,) = add_credit([group([0.5, 1], 1.0)], ALGORITHMS["srft"], [[False, True]], max_tokens=10)
    assert [s.advantage for s in made.samples] == [-1.0, 1.0]
    assert made.demonstrations[0].advantage == pytest.approx(1 - 2.5 / 3) and not made.demonstrations[0].masked


def test_hpts_demonstration_takes_the_place_of_the_samples():
    groups = [group([0, 0.4], 0.7), group([0, 1], None)]
    first, second = add_credit(groups, ALGORITHMS["hpt"], [[False, False], [False, True]], max_tokens=10)
    assert first.is_dead and all(s.masked for s in first.samples) and not first.demonstrations[0].masked
    assert [s.advantage for s in second.samples] == [-0.5, 0.5]


def test_a_demonstration_whose_reward_failed_is_learned_unless_it_is_compared():
    broken = replace(group([0, 1], None), demonstrations=(scored(2, math.nan, shown_part(99), error="x"),))
    for name, masked in (("luffy", True), ("srft", False), ("chord", False)):
        (made,) = add_credit([broken], ALGORITHMS[name], [[False, True]], max_tokens=10)
        assert [made.demonstrations[0].masked, made.demonstrations[0].advantage] == [masked, 0.0], name


def test_solved_is_the_accuracy_or_else_the_score():
    assert solved([group([1.0, 0.2, 0.9], None)], [[0.0, 1.0, None]]) == [[False, True, False]]


def reference(groups: Sequence[Group], objective: PolicyGradient) -> Tensor:
    """The gradient by autograd, response by response, in float64."""
    a, policy = objective.algorithm, Table()
    logp = policy.logp.detach().double().requires_grad_()
    live = [s for g in groups for s in (() if g.is_dead else g.samples)] + [
        s for g in groups for s in g.demonstrations if not s.masked
    ]
    dead = [s for g in groups if g.is_dead for s in g.samples if not s.masked] if a.counts_dead else []
    count = lambda samples, author: sum(  # noqa: E731
        len(seg.ids) for s in samples for seg in s.trajectory.segments if seg.author == author
    )
    own, shown = count(live, "policy") + count(dead, "policy"), count(live, "demonstration")
    responses = len([s for s in [*live, *dead] if a.one_mean or count([s], "policy")])
    denominator = {"token_mean": own + shown * a.one_mean, "constant": responses * 10}[a.aggregation]
    ids = [i for s in live for seg in s.trajectory.segments if seg.author == "policy" for i in seg.ids]
    entropy = float(Table.entropies(torch.tensor(ids)).double().mean()) if ids else 0.0
    total, coef = torch.zeros((), dtype=torch.float64), a.demonstration_coef if objective.mu is None else objective.mu
    for sample in live:
        for segment in sample.trajectory.segments:
            x, p = logp[list(segment.ids)], logp[list(segment.ids)].exp()
            if segment.author == "policy":
                gain = a.entropy_gain * math.exp(entropy) if a.weighs_by_entropy and sample.advantage > 0 else 1.0
                share = 1.0 if objective.mu is None else 1 - objective.mu
                total = total - share * gain * sample.advantage * x.sum() / denominator
                continue
            if a.one_mean:
                total = total - (sample.advantage * p / (p + a.shaping)).sum() / denominator
            weight = {"unsure": (p * (1 - p)).detach(), "both": math.exp(-entropy), "shaped": 0.0}
            total = total - coef * (weight.get(a.demonstration_loss, 1.0) * x).sum() / max(1, shown)
    total.backward()
    assert logp.grad is not None
    return logp.grad


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(FUSED),
    scores=st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=3), min_size=1, max_size=3),
    shown=st.lists(st.sampled_from([None, 0.5, 1.0]), min_size=3, max_size=3),
    budget=st.sampled_from([6, 11, 1000]),
    mu=st.sampled_from([None, 0.25]),
)
def test_the_gradient_is_that_of_ten_lines_whatever_the_packing(name, scores, shown, budget, mu):
    row = ALGORITHMS[name]
    groups = [group(s, shown[k], 20 + 10 * k) for k, s in enumerate(scores)]
    if row.demonstrations == "hint":
        groups = [hinted(g, 150 + 10 * k) if shown[k] else group(scores[k], None, 20 + 10 * k)
                  for k, g in enumerate(groups)]  # fmt: skip
    right = [[x >= 1 for x in s] for s in scores]
    made = add_credit(groups, row, right, max_tokens=10)
    keep = row.demonstrations == "hint"
    batch = step_batch(made, lambda index: PROMPT, keep_dead=keep, count_dead=row.counts_dead)
    objective = PolicyGradient(row, mu=mu if row.mu_peak else None)
    if not batch.items:
        return
    found, _ = gradient(batch, objective, budget)
    if keep:
        made = [replace(g, samples=tuple(replace(s, advantage=s.advantage or 1e-300) for s in g.samples)) for g in made]
    torch.testing.assert_close(found.double(), reference(made, objective), rtol=1e-5, atol=1e-7)


def hinted(one: Group, first_id: int) -> Group:
    """The group, with a hint of two tokens in front of each sample."""
    samples = []
    for k, s in enumerate(one.samples):
        segments = (shown_part(first_id + 2 * k, first_id + 2 * k + 1), *s.trajectory.segments)
        samples.append(replace(s, trajectory=replace(s.trajectory, segments=segments)))
    return replace(one, samples=tuple(samples), demonstrations=())


def test_metrics_of_the_policy_count_its_own_tokens_alone():
    made = add_credit([group([0, 1], 1.0)], ALGORITHMS["chord"], [[False, True]], max_tokens=10)
    _, told = gradient(step_batch(made, lambda index: PROMPT, keep_dead=False), PolicyGradient(ALGORITHMS["chord"]))
    assert told["policy/entropy"] == pytest.approx(0.2 + (20 + 21 + 22 + 23) / 4 / 100)
    assert told["demonstration/logp"] == pytest.approx(float(Table().logp[110].detach()))
    # a step in which only demonstrations are trained has no metric of the policy
    made = add_credit([group([0, 0], 1.0)], ALGORITHMS["hpt"], [[False, False]], max_tokens=10)
    _, told = gradient(step_batch(made, lambda index: PROMPT, keep_dead=False), PolicyGradient(ALGORITHMS["hpt"]))
    assert "policy/entropy" not in told and told["loss/demonstrations"] > 0


@pytest.mark.parametrize("name", [name for name in FUSED if name != "hpt"])  # which leaves its samples out
def test_trajectories_are_numbered_through_samples_and_demonstrations(name):
    groups = [group([0, 1], 1.0, 20), group([0, 1], None, 40), group([1, 0], 0.5, 60)]
    made = add_credit(groups, ALGORITHMS[name], [[False, True]] * 3, max_tokens=10)
    batch = step_batch(made, lambda index: PROMPT, keep_dead=True, updates=3)
    names = {i.trajectory: i.segments[0].ids[0] for i in batch.items}
    assert [names.get(k) for k in (3, 5)] == [40, 60] and len(batch.advantage_S) == 8
    assert sorted(len(part.items) for part in split_updates(batch)) == [2, 3, 3]


def test_a_demonstration_goes_with_its_group_to_one_rank():
    made = add_credit([group([0, 1], 1.0, 20), group([0, 1], 1.0, 40)], ALGORITHMS["luffy"], [], max_tokens=10)
    world = World(0, 2, 0, 2)
    batch = step_batch(made, lambda index: PROMPT, keep_dead=False, owners=[0, 1], world=world)
    assert [i.group for i in batch.items] == [0, 0, 0] and [i.trajectory for i in batch.items] == [0, 1, 2]


def test_an_item_of_supervised_training_has_no_demonstration():
    batch = StepBatch([TrainItem(PROMPT, 0, (policy_part(5, 6),), 0)], [1.0], ["row"])
    assert batch.counts_of(batch.items[0]) == (2, 0) and not any(batch.demonstrated_of(batch.items[0]))
