"""Between rollouts and update: truncation, failed rewards, dead groups, dealing groups into updates, error counts."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vlmrl.algo.family import ALGORITHMS, Algorithm
from vlmrl.data.batch import PromptTokens, TrainItem
from vlmrl.errors import RewardError
from vlmrl.rollout.sample import add_advantages, is_dead_group, mark_masked
from vlmrl.train import rl
from vlmrl.train.collect import Before, Collected, _by_sample, _critic_metrics
from vlmrl.train.state import Progress
from vlmrl.train.update import StepBatch
from vlmrl.types import Group, Row, Score, ScoredSample, Segment, Trajectory


def sample(k: int, score: float, finish: str = "stop", error: str | None = None) -> ScoredSample:
    trajectory = Trajectory("t", "p", 0, k, 0, k, (1, 2), (Segment("a", (5, 6, 7), True),), (), finish)  # type: ignore[arg-type]
    return ScoredSample(trajectory, "text", Score(score, {"reward": score}, error=error))


def group(*samples: ScoredSample, name: str = "p") -> Group:
    return Group(Row(name, "digits", "t", {}), "prompt", samples)


CUT = group(sample(0, 1.0), sample(1, 0.0), sample(2, 0.5, "length"), sample(3, 0.5))


def row(estimator: str = "group_mean", truncated: str = "keep", **cells) -> Algorithm:
    return Algorithm(name="test", summary="", advantage=estimator, truncated=truncated, **cells)


def advantages(groups, algorithm: Algorithm | None = None, **more) -> list[Group]:
    return add_advantages(groups, algorithm or row(), max_tokens=8, **more)


def advantages_and_masks(made: Group) -> tuple[list[float], list[bool]]:
    return [s.advantage for s in made.samples], [s.masked for s in made.samples]


def test_truncated_keep_treats_a_cut_response_like_any_other():
    # mean of 1, 0, 0.5, 0.5 = 0.5
    (made,) = advantages([CUT])
    assert advantages_and_masks(made) == ([0.5, -0.5, 0.0, 0.0], [False] * 4)


def test_truncated_mask_counts_it_for_the_baseline_and_does_not_train_on_it():
    made = advantages([group(*CUT.samples[:2], sample(2, 1.0, "length"), sample(3, 0.0))], row("group_mean", "mask"))[0]
    # mean of 1, 0, 1, 0 = 0.5, the cut one included
    assert advantages_and_masks(made) == ([0.5, -0.5, 0.5, -0.5], [False, False, True, False])


def test_truncated_drop_leaves_it_out_of_both():
    made = advantages([group(*CUT.samples[:2], sample(2, 9.0, "length"), sample(3, 0.5))], row("group_mean", "drop"))[0]
    # mean of 1, 0, 0.5 = 0.5
    assert advantages_and_masks(made) == ([0.5, -0.5, 0.0, 0.0], [False, False, True, False])


@pytest.mark.parametrize("truncated", ["keep", "mask", "drop"])
def test_a_failed_reward_is_masked_and_leaves_the_baseline_of_the_others_alone(truncated):
    failed = sample(2, math.nan, error="it raised")
    made = advantages([group(sample(0, 1.0), sample(1, 0.0), failed)], row("group_mean", truncated))[0]
    assert advantages_and_masks(made) == ([0.5, -0.5, 0.0], [False, False, True])


@pytest.mark.parametrize("name", [name for name, row in ALGORITHMS.items() if not row.needs_critic])
def test_a_group_is_dead_when_what_counts_is_equal(name):
    made = replace(ALGORITHMS[name], kl_coef=0.0)
    lone = group(sample(0, 3.0))
    dead = [
        group(*(sample(k, 0.1) for k in range(7))),
        group(sample(0, 0.1), sample(1, math.nan, error="x"), sample(2, 0.1)),
        group(*(sample(k, math.nan, error="x") for k in range(3))),
    ]
    live = group(sample(0, 0.1), sample(1, 0.9))
    found = advantages([*dead, live], made, greedy=[0.2] * 4)
    assert [is_dead_group(g) for g in found] == [True, True, True, False]
    assert is_dead_group(advantages([lone], made, greedy=[0.5])[0]) == (name not in ("reinforce", "remax"))
    cut = group(sample(0, 0.1), sample(1, 0.9, "length"))
    if made.needs_group:
        assert is_dead_group(advantages([cut], replace(made, truncated="drop"))[0])


def step(*groups: Group):
    prompt = SimpleNamespace(
        encoded=SimpleNamespace(prompt_ids=(1, 2), kinds=(0, 0), images={}, num_images=0, image_sizes=())
    )
    return [SimpleNamespace(prompt=prompt) for _ in groups], advantages(groups, row("group_mean", "mask"))


def test_a_step_batch_holds_every_live_sample_that_is_not_masked_under_its_own_name():
    live = group(sample(0, 1.0), sample(1, 0.0, "length"), sample(2, math.nan, error="x"), sample(3, 0.5), name="live")
    dead = group(sample(0, 0.1), sample(1, 0.1), name="dead")
    rollouts, groups = step(dead, live, dead)
    batch = rl.step_batch(rollouts, groups, keep_dead=False)
    assert [batch.names_S[i.trajectory] for i in batch.items] == [
        "digits row live sample 0", "digits row live sample 3",
    ]  # fmt: skip
    assert [batch.advantage_S[i.trajectory] for i in batch.items] == [0.5, 0.0]  # 1 - (1 + 0 + 0.5) / 3 = 0.5
    assert {i.group for i in batch.items} == {1}
    assert len(batch.names_S) == 8 and batch.dead_tokens == {}
    counted = rl.step_batch(rollouts, groups, keep_dead=False, count_dead=True)
    assert counted.dead_tokens == {0: [3, 3], 2: [3, 3]} and counted.items == batch.items
    kept = rl.step_batch(rollouts, groups, keep_dead=True)
    assert [i.group for i in kept.items] == [0, 0, 1, 1, 2, 2]


CRITIC = Algorithm(name="test", summary="", advantage="gae", gae_lambda=0.5)
JUDGED = [
    group(sample(0, 1.0), sample(1, math.nan, error="x"), name="first"),
    group(sample(0, 2.0, "length"), sample(1, 2.0), name="second"),
]
# lambda 0.5, three tokens, the score at the last: values 0: 0.25, 0.5, 1 times the score. Values 1 and the score 2:
# deltas 0, 0, 1 -> 0.25, 0.5, 1, and 1 more for the targets
VALUES = {0: torch.zeros(3), 2: torch.ones(3), 3: torch.ones(3)}


def test_what_will_not_be_trained_on_is_masked_before_there_are_advantages():
    for truncated, expected in (("keep", [False, True, False, False]), ("mask", [False, True, True, False])):
        made = mark_masked(JUDGED, replace(CRITIC, truncated=truncated))
        assert [s.masked for g in made for s in g.samples] == expected
        told = advantages(made, replace(CRITIC, truncated=truncated), values=_by_sample(made, VALUES))
        assert [s.masked for g in told for s in g.samples] == expected


def test_a_critic_gives_every_trained_sample_its_token_advantages_and_targets():
    made = advantages(JUDGED, CRITIC, values=_by_sample(JUDGED, VALUES))
    samples = [s for g in made for s in g.samples]
    up = (0.25, 0.5, 1.0)
    assert [s.token_advantages for s in samples] == [up, None, up, up]
    assert [s.value_targets for s in samples] == [up, None, (1.25, 1.5, 2.0), (1.25, 1.5, 2.0)]
    prompt = SimpleNamespace(
        encoded=SimpleNamespace(prompt_ids=(1, 2), kinds=(0, 0), images={}, num_images=0, image_sizes=())
    )
    batch = rl.step_batch([SimpleNamespace(prompt=prompt)] * 2, made, keep_dead=True)  # type: ignore[list-item]
    assert {i: t.tolist() for i, t in batch.value_target.items()} == {
        0: [0.25, 0.5, 1.0], 2: [1.25, 1.5, 2.0], 3: [1.25, 1.5, 2.0],
    }  # fmt: skip
    assert {i: t.tolist() for i, t in batch.token_advantages.items()} == {i: list(up) for i in (0, 2, 3)}
    # values 0 0 0, 1 1 1, 1 1 1; residuals up, up, up: variance 0.0972 of 0.3218 (by hand: 7/72 and 0.32176)
    metrics = _critic_metrics(Collected([], made, before=Before(value=VALUES)))
    assert metrics["value/mean"] == pytest.approx(2 / 3)
    targets = [0.25, 0.5, 1.0] + [1.25, 1.5, 2.0] * 2
    spread = sum(t * t for t in targets) / 9 - (sum(targets) / 9) ** 2
    assert metrics["value/explained_variance"] == pytest.approx(1 - (7 / 72) / spread)
    assert [t.tolist() for g in _by_sample(JUDGED, VALUES, 0.5) for t in g] == [[0] * 3, [0] * 3, [0.5] * 3, [0.5] * 3]


def test_a_step_in_which_nothing_is_trained_on_says_nothing_of_its_critic():
    nothing = mark_masked([group(sample(0, 1.0, "length"))], replace(CRITIC, truncated="drop"))
    made = advantages(nothing, replace(CRITIC, truncated="drop"), values=_by_sample(nothing, {}))
    assert _critic_metrics(Collected([], made)) == {}


def test_groups_are_dealt_whole_and_evenly_into_updates():
    prompt = PromptTokens((1,), (0,), {}, 0)
    items = [TrainItem(prompt, g, (Segment("a", (5,), True),), 10 * g + k) for g in (3, 1, 4, 5, 9) for k in range(2)]
    batch = StepBatch(items, [], [])
    parts = rl.split_groups(batch, 2)
    assert [[i.trajectory for i in p.items] for p in parts] == [[30, 31, 40, 41, 90, 91], [10, 11, 50, 51]]
    assert all(p.old_logp is batch.old_logp and p.ref_logp is batch.ref_logp for p in parts)
    assert rl.split_groups(batch, 1) == [batch]
    assert [len(p.items) for p in rl.split_groups(batch, 9)] == [2] * 5  # never an empty update
    assert sorted(i.trajectory for p in rl.split_groups(batch, 3) for i in p.items) == sorted(
        i.trajectory for i in items
    )


class Ears:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def message(self, text: str) -> None:
        self.heard.append(text)


@pytest.fixture
def session(monkeypatch, tmp_path):
    saved: list[int] = []
    monkeypatch.setattr(rl, "save", lambda s: saved.append(s.progress.step))
    run = SimpleNamespace(dir=tmp_path, id="20260101-000000-x-abcd")
    return SimpleNamespace(progress=Progress(), counted_before=(0, 0), watcher=Ears(), run=run, saved=saved)


def groups_with(failures: int, of: int) -> list[Group]:
    return [group(*(sample(k, 0.0, error="ValueError: boom" if k < failures else None) for k in range(of)))]


def test_a_few_failed_rewards_are_counted_shown_and_survived(session):
    rl.count_errors(session, groups_with(1, 1000))
    assert (session.progress.reward_errors, session.progress.samples) == (1, 1000)
    assert "boom" in session.watcher.heard[0]
    rl.count_errors(session, groups_with(10, 1000))  # 11 of 2,000
    assert session.saved == []


def test_more_than_one_per_cent_of_failed_rewards_saves_and_then_stops(session):
    session.progress.step = 7
    with pytest.raises(RewardError, match="11 of 1000") as caught:
        rl.count_errors(session, groups_with(11, 1000))
    assert session.saved == [7]
    assert "--resume" in (caught.value.hint or "")


def test_one_failure_does_not_end_a_young_run(session):
    rl.count_errors(session, groups_with(2, 8))
    with pytest.raises(RewardError):
        rl.count_errors(session, groups_with(1, 8))  # 3 of at least 200


def test_failures_of_an_attempt_before_do_not_stop_this_one(session):
    session.progress.samples, session.progress.reward_errors = 1000, 500
    session.counted_before = (1000, 500)
    rl.count_errors(session, groups_with(0, 8))
    assert session.saved == [] and session.progress.reward_errors == 500


def test_nothing_failed_nothing_said(session):
    rl.count_errors(session, groups_with(0, 8))
    assert session.watcher.heard == [] and session.progress.samples == 8


def test_group_metrics_by_hand():
    scored = [
        group(sample(0, 1.0), sample(1, 0.0, "length")),
        group(sample(0, 0.5), sample(1, 0.5)),
        group(sample(0, math.nan, error="x"), sample(1, 0.2)),
    ]
    metrics = rl.group_metrics(advantages(scored, row("group_mean", "keep")))
    assert metrics["reward/mean"] == pytest.approx((1 + 0 + 0.5 + 0.5 + 0.2) / 5)
    assert metrics["reward/part/reward"] == pytest.approx(2.2 / 5)
    assert metrics["reward/errors"] == 1
    assert metrics["rollout/dead_group_share"] == pytest.approx(2 / 3)
    assert metrics["rollout/truncated_share"] == pytest.approx(1 / 6)
    assert metrics["rollout/response_tokens_mean"] == 3
    assert metrics["reward/low"] <= metrics["reward/mean"] <= metrics["reward/high"]


def test_the_reward_of_one_group_has_no_interval():
    metrics = rl.group_metrics(advantages([group(sample(0, 0.5), sample(1, 0.2))]))
    assert metrics["reward/mean"] == pytest.approx(0.35) and not {"reward/low", "reward/high"} & set(metrics)


def test_metrics_of_a_step_in_which_every_reward_failed_have_no_reward():
    metrics = rl.group_metrics([replace(g) for g in groups_with(4, 4)])
    assert "reward/mean" not in metrics and metrics["reward/errors"] == 4
