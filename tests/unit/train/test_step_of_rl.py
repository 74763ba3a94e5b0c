"""Between rollouts and update: truncation, failed rewards, dead groups, dealing groups into updates, error counts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import Ears

from vlmrl.algo.algorithms import ALGORITHMS, Algorithm
from vlmrl.algo.credit import add_advantages, mark_masked
from vlmrl.dist.world import World
from vlmrl.errors import RecipeError, RewardError
from vlmrl.model.packing import PromptTokens
from vlmrl.rewards.base import ABSENT, RewardSpec
from vlmrl.store.metrics import encode
from vlmrl.tasks import make_task
from vlmrl.tasks.base import PooledMetrics, Task
from vlmrl.tasks.reflection import RATIOS
from vlmrl.tasks.source import pooled_metrics
from vlmrl.train.collect import Before, by_sample, critic_metrics
from vlmrl.train.journal import Progress, group_metrics
from vlmrl.train.rl import count_failures
from vlmrl.train.step_batch import StepBatch, balance, split_updates, step_batch
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


@pytest.mark.parametrize("name", [n for n, r in ALGORITHMS.items() if not r.needs_critic and r.advantage != "zero"])
def test_a_group_is_dead_when_what_counts_is_equal(name):
    made = replace(ALGORITHMS[name], kl_coef=0.0)
    lone = group(sample(0, 3.0))
    dead = [
        group(*(sample(k, 0.1) for k in range(7))),
        group(sample(0, 0.1), sample(1, math.nan, error="x"), sample(2, 0.1)),
        group(*(sample(k, math.nan, error="x") for k in range(3))),
    ]
    live = group(sample(0, 0.1), sample(1, 0.9))
    energies = [[[1.0] * 3] * len(g.samples) for g in (*dead, live)] if made.needs_energy else None
    found = advantages([*dead, live], made, greedy=[0.2] * 4, energies=energies)
    assert [g.is_dead for g in found] == [True, True, True, False]
    assert advantages([lone], made, greedy=[0.5])[0].is_dead == (name not in ("reinforce", "remax"))
    cut = group(sample(0, 0.1), sample(1, 0.9, "length"))
    if made.needs_group:
        assert advantages([cut], replace(made, truncated="drop"))[0].is_dead


PROMPT = PromptTokens((1, 2), (0, 0), {}, 0)


def batch_of(groups: Sequence[Group], **settings) -> StepBatch:
    return step_batch(groups, lambda index: PROMPT, **settings)


def test_a_step_batch_holds_every_live_sample_that_is_not_masked_under_its_own_name():
    live = group(sample(0, 1.0), sample(1, 0.0, "length"), sample(2, math.nan, error="x"), sample(3, 0.5), name="live")
    dead = group(sample(0, 0.1), sample(1, 0.1), name="dead")
    groups = advantages([dead, live, dead], row("group_mean", "mask"))
    batch = batch_of(groups, keep_dead=False)
    assert [batch.names_S[i.trajectory] for i in batch.items] == [
        "row live of digits, sample 0",
        "row live of digits, sample 3",
    ]
    assert [batch.advantage_S[i.trajectory] for i in batch.items] == [0.5, 0.0]  # 1 - (1 + 0 + 0.5) / 3 = 0.5
    assert {i.group for i in batch.items} == {1}
    assert len(batch.names_S) == 8 and batch.dead_tokens == {}
    counted = batch_of(groups, keep_dead=False, count_dead=True)
    assert counted.dead_tokens == {0: [3, 3], 2: [3, 3]} and counted.items == batch.items
    kept = batch_of(groups, keep_dead=True)
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
        told = advantages(made, replace(CRITIC, truncated=truncated), values=by_sample(made, VALUES))
        assert [s.masked for g in told for s in g.samples] == expected


def test_a_critic_gives_every_trained_sample_its_token_advantages_and_targets():
    made = advantages(JUDGED, CRITIC, values=by_sample(JUDGED, VALUES))
    samples = [s for g in made for s in g.samples]
    up = (0.25, 0.5, 1.0)
    assert [s.token_advantages for s in samples] == [up, None, up, up]
    assert [s.value_targets for s in samples] == [up, None, (1.25, 1.5, 2.0), (1.25, 1.5, 2.0)]
    batch = batch_of(made, keep_dead=True)
    assert {i: t.tolist() for i, t in batch.value_target.items()} == {
        0: [0.25, 0.5, 1.0], 2: [1.25, 1.5, 2.0], 3: [1.25, 1.5, 2.0],
    }  # fmt: skip
    assert {i: t.tolist() for i, t in batch.token_advantages.items()} == {i: list(up) for i in (0, 2, 3)}
    # values 0 0 0, 1 1 1, 1 1 1; residuals up, up, up: variance 0.0972 of 0.3218 (by hand: 7/72 and 0.32176)
    metrics = critic_metrics(made, VALUES)
    assert metrics["value/mean"] == pytest.approx(2 / 3)
    targets = [0.25, 0.5, 1.0] + [1.25, 1.5, 2.0] * 2
    spread = sum(t * t for t in targets) / 9 - (sum(targets) / 9) ** 2
    assert metrics["value/explained_variance"] == pytest.approx(1 - (7 / 72) / spread)
    assert [t.tolist() for g in by_sample(JUDGED, VALUES, 0.5) for t in g] == [[0] * 3, [0] * 3, [0.5] * 3, [0.5] * 3]


def test_a_step_in_which_nothing_is_trained_on_says_nothing_of_its_critic():
    nothing = mark_masked([group(sample(0, 1.0, "length"))], replace(CRITIC, truncated="drop"))
    made = advantages(nothing, replace(CRITIC, truncated="drop"), values=by_sample(nothing, {}))
    assert critic_metrics(made, {}) == {}


def test_the_statistics_of_all_ranks_are_joined_each_with_its_own_kind():
    def of(trajectory: int) -> Before:
        return Before(*({trajectory: torch.tensor([kind + trajectory])} for kind in (0.1, 0.2, 0.3, 0.4, 0.5)))

    def gather(own):
        return [own, [{5: torch.tensor([kind + 5])} for kind in (0.1, 0.2, 0.3, 0.4, 0.5)]]

    joined = of(2).joined(SimpleNamespace(size=2, gather=gather))  # type: ignore[arg-type]
    for name, kind in (("logp", 0.1), ("value", 0.2), ("kl", 0.3), ("teacher", 0.4), ("energy", 0.5)):
        found = {i: x.item() for i, x in getattr(joined, name).items()}
        assert found == pytest.approx({2: kind + 2, 5: kind + 5}), name


def test_groups_are_dealt_whole_and_evenly_into_updates():
    groups = [group(sample(0, 0.0), sample(1, 1.0), name=f"row {k}") for k in range(5)]
    groups = advantages(groups, row("group_mean", "mask"))
    batch = batch_of(groups, keep_dead=False, updates=2)
    parts = split_updates(batch)
    assert [[i.trajectory for i in p.items] for p in parts] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]]
    assert all(p.old_logp is batch.old_logp and p.ref_logp is batch.ref_logp for p in parts)
    alone = batch_of(groups, keep_dead=False)
    assert split_updates(alone) == [alone]
    assert [len(p.items) for p in split_updates(batch_of(groups, keep_dead=False, updates=9))] == [2] * 5  # none empty
    three = split_updates(batch_of(groups, keep_dead=False, updates=3))
    assert sorted(i.trajectory for p in three for i in p.items) == sorted(i.trajectory for i in alone.items)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3)), max_size=12), st.integers(1, 4))
def test_groups_are_balanced_over_processes_and_stay_where_they_were_sampled_when_they_can(given_, size):
    costs, owners = [c for c, _ in given_], [o % size for _, o in given_]
    found = balance(costs, owners, size)
    load = [sum(c for c, r in zip(costs, found, strict=True) if r == rank) for rank in range(size)]
    fair = max(-(-sum(costs) // size), max(costs, default=0))
    assert len(found) == len(costs) and max(load) <= fair + max(costs, default=0)
    even = all(sum(c for c, o in zip(costs, owners, strict=True) if o == rank) <= fair for rank in range(size))
    assert not even or found == owners


@given(st.integers(1, 4), st.integers(1, 7), st.integers(1, 3), st.randoms())
def test_processes_together_train_what_one_trains_update_by_update(size, number, updates, random):
    groups = [
        group(*(sample(k, random.random()) for k in range(random.randint(1, 4))), name=f"row {i}")
        for i in range(number)
    ]
    groups = advantages(groups, row("group_mean", "mask"))
    asked: list[list[int]] = [[] for _ in range(size)]
    alone = split_updates(batch_of(groups, keep_dead=True, updates=updates))
    shares = [
        split_updates(
            step_batch(
                groups,
                lambda i, rank=rank: asked[rank].append(i) or PROMPT,
                keep_dead=True,
                updates=updates,
                owners=[i % size for i in range(number)],
                world=World(rank, size),
            )
        )
        for rank in range(size)
    ]
    assert all(len(share) == len(alone) for share in shares)
    for k, whole in enumerate(alone):
        together = sorted((i for share in shares for i in share[k].items), key=lambda i: i.trajectory)
        assert together == whole.items
        assert all(share[k].advantage_S == whole.advantage_S for share in shares)
    assert sorted(i for theirs in asked for i in theirs) == list(range(number))  # each is encoded where it is trained


@pytest.fixture
def journal(tmp_path):
    run = SimpleNamespace(dir=tmp_path, id="20260101-000000-x-abcd")
    return SimpleNamespace(progress=Progress(), counted_before=(0, 0), warned=set(), watcher=Ears(), run=run, saved=[])


def count(journal, groups: Sequence[Group]) -> None:
    """Count the failures; `journal.saved` are the steps whose checkpoints were saved before an error."""
    count_failures(journal, groups, lambda: journal.saved.append(journal.progress.step))


def groups_with(failures: int, of: int) -> list[Group]:
    return [group(*(sample(k, 0.0, error="ValueError: boom" if k < failures else None) for k in range(of)))]


def test_a_few_failed_rewards_are_counted_shown_and_survived(journal):
    count(journal, groups_with(1, 1000))
    assert (journal.progress.reward_errors, journal.progress.samples) == (1, 1000)
    (told,) = journal.watcher.heard
    assert told.startswith("the reward failed for 1 sample, which was left out: ValueError: boom (row ")
    assert told.endswith(", sample 0)")
    count(journal, groups_with(10, 1000))  # 11 of 2,000
    assert journal.saved == []


def test_more_than_one_per_cent_of_failed_rewards_saves_and_then_stops(journal):
    journal.progress.step = 7
    with pytest.raises(RewardError, match="11 of 1000") as caught:
        count(journal, groups_with(11, 1000))
    assert journal.saved == [7]
    assert "--resume" in (caught.value.hint or "")


def test_one_failure_does_not_end_a_young_run(journal):
    count(journal, groups_with(2, 8))
    with pytest.raises(RewardError):
        count(journal, groups_with(1, 8))  # 3 of at least 200


def test_failures_of_an_attempt_before_do_not_stop_this_one(journal):
    journal.progress.samples, journal.progress.reward_errors = 1000, 500
    journal.counted_before = (1000, 500)
    count(journal, groups_with(0, 8))
    assert journal.saved == [] and journal.progress.reward_errors == 500


def test_nothing_failed_nothing_said(journal):
    count(journal, groups_with(0, 8))
    assert journal.watcher.heard == [] and journal.progress.samples == 8


def test_group_metrics_by_hand():
    scored = [
        group(sample(0, 1.0), sample(1, 0.0, "length")),
        group(sample(0, 0.5), sample(1, 0.5), name="q"),
        group(sample(0, math.nan, error="x"), sample(1, 0.2), name="r"),
    ]
    metrics = group_metrics(advantages(scored, row("group_mean", "keep")))
    assert metrics["reward/mean"] == pytest.approx((1 + 0 + 0.5 + 0.5 + 0.2) / 5)
    assert metrics["reward/part/reward"] == pytest.approx(2.2 / 5)
    assert metrics["reward/errors"] == 1
    assert metrics["rollout/dead_group_share"] == pytest.approx(2 / 3)
    assert metrics["rollout/truncated_share"] == pytest.approx(1 / 6)
    assert metrics["rollout/response_tokens_mean"] == 3
    assert [metrics[f"rollout/response_tokens_{name}"] for name in ("p10", "p50", "p90", "max")] == [3, 3, 3, 3]
    assert metrics["reward/low"] <= metrics["reward/mean"] <= metrics["reward/high"]


def test_the_lengths_of_a_step_have_quantiles():
    lengths = [1, 2, 3, 4, 11]
    samples = [
        replace(s, trajectory=replace(s.trajectory, segments=(Segment("assistant", tuple(range(n)), True),)))
        for k, n in enumerate(lengths)
        for s in [sample(k, 0.0)]
    ]
    metrics = group_metrics([group(*samples)])
    # Of five values the quantile q is at place 4 q, counted from 0: 1 + 0.4, the third, 4 + 0.6 * 7.
    assert metrics["rollout/response_tokens_p10"] == pytest.approx(1.4)
    assert metrics["rollout/response_tokens_p50"] == 3
    assert metrics["rollout/response_tokens_p90"] == pytest.approx(8.2)
    assert metrics["rollout/response_tokens_mean"] == pytest.approx(4.2)


def reflecting(*texts_and_scores: tuple[str, float | None], name: str = "p", source: str = "t") -> Group:
    samples = [
        replace(
            sample(k, 0.0), text=text,
            score=Score(math.nan, {}, error="x") if score is None else Score(score, {"accuracy": score}),
        )
        for k, (text, score) in enumerate(texts_and_scores)
    ]  # fmt: skip
    return Group(Row(name, source, "geometry3k", {}), "prompt", tuple(samples))


def source(name: str, task: Task) -> Any:
    return SimpleNamespace(name=name, task=task, reward=RewardSpec("r", lambda x: 0.0, {}, {}, accuracy="accuracy"))


def test_reflection_of_a_step_is_pooled_over_its_groups_and_sources():
    sources = [source("t", make_task("geometry3k", {})), source("u", make_task("mm_math", {}))]
    groups = [
        reflecting(("Wait, I verify.", 1.0), ("So 3.", 0.0)),
        reflecting(("The waiter.", 0.0), ("wait", None), name="q", source="u"),
    ]
    metrics = pooled_metrics(groups, sources)
    # default: 2 of 4 reflect ("waiter" does not); graded are three, of which one is right, and it reflects.
    ratios = [metrics[f"reflection/{name}"] for name in RATIOS]
    assert ratios == [2 / 4, 1 / 1, 0 / 2, 1 / 1, 0 / 2]
    # maye: 3 of 4 reflect; of the two wrong ones one does.
    assert [metrics[f"reflection/maye/{name}"] for name in RATIOS] == [3 / 4, 1 / 1, 1 / 2, 1 / 2, 0 / 1]
    assert metrics["reflection/words_per_1k_tokens"] == 1000 * 3 / 12  # four responses of three tokens
    assert metrics["reflection/maye/word/wait"] == 3.0 and metrics["reflection/count/graded"] == 3.0
    wrong = pooled_metrics([reflecting(("So 3.", 0.0))], sources)
    assert wrong["reflection/reflection_ratio_in_correct_answers"] is None
    assert "reflection/reflection_ratio_in_correct_answers" in json.dumps(encode(wrong))
    assert pooled_metrics(groups, [source("t", Task("a", "b", "c")), source("u", Task("a", "b", "c"))]) == {}


def test_a_task_that_cannot_count_a_response_loses_its_metrics_and_the_step_goes_on():
    def breaks(graded: Any) -> dict[str, int]:
        raise RecipeError("no")

    broken = replace(make_task("geometry3k", {}), set_metrics=PooledMetrics(breaks, lambda sums: {}))
    groups = [reflecting(("a", 1.0), ("b", 0.0))]
    assert pooled_metrics(groups, [source("t", broken)]) == {"reward/set_metrics_errors": 2.0}


def test_the_reward_of_one_group_has_no_interval():
    metrics = group_metrics(advantages([group(sample(0, 0.5), sample(1, 0.2))]))
    assert metrics["reward/mean"] == pytest.approx(0.35) and not {"reward/low", "reward/high"} & set(metrics)


def test_metrics_of_a_step_in_which_every_reward_failed_have_no_reward():
    metrics = group_metrics([replace(g) for g in groups_with(4, 4)])
    assert "reward/mean" not in metrics and metrics["reward/errors"] == 4


@pytest.mark.parametrize(
    ("note", "said"),
    [
        ("`near` is not a finite number", "`near` is not a finite number: it is left out of the means (row "),
        (f"the reward returned no `near`: {ABSENT}", f"the reward returned no `near`: {ABSENT} (row "),
    ],
)
def test_an_odd_result_of_the_reward_is_told_once_and_fails_nothing(journal, note, said):
    odd = Score(0.5, {"score": 0.5, "near": None}, note)
    groups = [group(*(replace(sample(k, 0.0), score=odd) if k < 5 else sample(k, 0.0) for k in range(8)))]
    count(journal, groups_with(0, 8))
    for _ in range(3):
        count(journal, groups)
    (told,) = journal.watcher.heard
    assert told.startswith(f"warning: {said}")
    assert told.endswith(", sample 2; and 2 more; later ones are not named)") and journal.progress.reward_errors == 0
    assert group_metrics(groups)["reward/errors"] == 0


def unavailable(of: int) -> list[Group]:
    scored = [sample(k, 0.0) for k in range(of)]
    down = Score(math.nan, {}, error="no answer from judge:8000", status="unavailable")
    return [group(*(replace(s, score=down, masked=True) for s in scored[:2]), *scored[2:])]


def test_a_service_that_is_down_is_said_and_is_no_failure(journal):
    groups = unavailable(8)
    for _ in range(100):
        count(journal, groups)
    assert journal.progress.reward_errors == 0 and journal.saved == []
    told = "the reward was unavailable for 2 samples, which were left out: no answer from judge:8000"
    assert journal.watcher.heard[0] == told
    metrics = group_metrics(groups)
    assert (metrics["reward/unavailable"], metrics["reward/errors"]) == (2, 0)
    assert "reward/inapplicable" not in metrics
    assert "reward/unavailable" not in group_metrics(groups_with(1, 8))


def test_responses_that_hung_the_reward_are_counted():
    hung = Score(0.0, {}, "no answer within 1 s; failed again when scored alone; scored as `on_timeout`")
    groups = [group(*(replace(sample(k, 0.0), score=hung) for k in range(3)), *(sample(k, 1.0) for k in range(5)))]
    metrics = group_metrics(groups)
    assert (metrics["reward/timeouts"], metrics["reward/errors"]) == (3, 0)
    assert "reward/timeouts" not in group_metrics(groups_with(1, 8))
