"""Rows of the family table through the whole step: rollouts, advantages, update, checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_runs import finite, make_place, paying, train

from vlmrl.algo.algorithms import ALGORITHMS
from vlmrl.model import policy
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.train import rl

RECIPE = """
rollout = {prompts_per_step = 3, samples_per_prompt = 3, max_new_tokens = 8}
train = {steps = 2, tokens_per_row = 400}
optim.lr = 1e-3
eval = {every_steps = 0, max_rows = 2}
checkpoint.every_steps = 1
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    return make_place(tmp_path_factory.mktemp("place"), tiny_folder, RECIPE, reward=paying(tokens=8, letters=5))


@pytest.mark.parametrize(("reward", "changed"), [("same", False), ("score", True)])
def test_a_step_of_dead_groups_alone_sends_nothing_to_the_engine_and_checks_nothing(
    place, tmp_path, monkeypatch, reward, changed
):
    synced = []

    class Copying(TorchEngine):
        """Takes itself for an engine with weights of its own."""

        copies_weights = True

        def load_weights(self, version: int, *, changed: bool = True) -> None:
            super().load_weights(version, changed=changed)
            synced.append((version, changed))

    monkeypatch.setattr(rl, "make_generator", lambda r, policy, encoder, *_, **__: Copying(policy, encoder.tokenizer))
    run = train(place, tmp_path, f"reward.name={place}/reward.py:{reward}")
    assert synced == [(0, True), (0, False), (1, changed), (2, changed)]
    assert ["policy/sync_gap_max" in line for line in run.metrics("train")] == [changed, changed]
    versions = [s.trajectory.version for step in range(2) for g in run.read_rollouts(step) for s in g.samples]
    assert versions == [0] * 9 + [1] * 9


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_row_trains(place, tmp_path, name):
    reads_more = ('teacher.path="start"', 'teacher.reveal="{{ truth.same }}"', "rollout.max_prompt_tokens=512")
    more = () if ALGORITHMS[name].teacher == "none" else reads_more
    last = train(place, tmp_path, f'algo.name="{name}"', *more).metrics("train")[-1]
    assert last["optim/updates"] == 2 and finite(last)
    # Nearly all responses of this model are cut: under MAYE's rule their scores are equal.
    assert last["optim/grad_norm"] > 0 or ALGORITHMS[name].truncated_score is not None


def test_otb_takes_each_tokens_baseline_from_the_policys_own_energies(place, tmp_path, monkeypatch):
    """With an energy of 1 for each token, a baseline is the plain mean of the samples that reach the position."""

    def ones(hidden, target, head, **_):
        return torch.ones(len(target))

    monkeypatch.setattr(policy, "gradient_energy", ones)
    for cells in ([], ["algo.kl_coef=0.1", 'algo.kl_in="reward"', "algo.kl_target=0.1"]):
        run = train(place, tmp_path, 'algo.name="otb"', "train.steps=1", "rollout.samples_per_prompt=4", *cells)
        groups = [g for g in run.read_rollouts(0) if not g.is_dead]
        assert groups and run.metrics("train")[0]["optim/updates"] == 1
        for group in groups:
            scores = [s.score.value for s in group.samples]
            lengths = [s.trajectory.num_trained_tokens for s in group.samples]
            for sample, score, length in zip(group.samples, scores, lengths, strict=True):
                means = [
                    sum(x for x, n in zip(scores, lengths, strict=True) if n > t) / sum(n > t for n in lengths)
                    for t in range(length)
                ]
                found = sample.token_advantages or (sample.advantage,) * length
                assert list(found) == pytest.approx([score - m for m in means], abs=1e-4)  # the KL of step 0 is 0


def test_remax_samples_a_greedy_answer_that_is_not_trained_on(place, tmp_path):
    run = train(place, tmp_path, 'algo.name="remax"', "rollout.samples_per_prompt=1", "train.steps=1")
    (line,) = run.metrics("train")
    assert line["rollout/samples"] == 3 and line["optim/updates"] == 1
    advantages = [s.advantage for g in run.read_rollouts(0) for s in g.samples]
    scores = [s.score.value for g in run.read_rollouts(0) for s in g.samples]
    # score - greedy, averaged
    assert sum(advantages) / 3 == pytest.approx(sum(scores) / 3 - line["reward/greedy_mean"])


def test_the_filter_draws_until_its_tries_are_over_and_then_makes_no_update(place, tmp_path):
    same = f'reward.name="{place}/reward.py:same"'
    run = train(place, tmp_path, 'algo.name="dapo"', "algo.filter_tries=2", "train.steps=1", same)
    (line,) = run.metrics("train")
    assert (line["rollout/draws"], line["rollout/prompts_passed"], line["optim/updates"]) == (2, 0, 0)
    assert line["rollout/samples"] == 2 * 3 * 3  # all that was sampled is recorded
    assert len(run.read_rollouts(0)) == 6


def test_the_filter_takes_what_passes_at_once(place, tmp_path):
    (line,) = train(place, tmp_path, 'algo.name="dapo"', "train.steps=1").metrics("train")
    assert line["rollout/prompts_passed"] == 3 and line["optim/updates"] == 1


def test_the_kl_in_the_loss_is_steered_too(place, tmp_path):
    steered = ("algo.kl_coef=0.5", "algo.kl_target=10.0", "algo.kl_horizon=90")
    first, second = train(place, tmp_path, 'algo.name="grpo"', *steered).metrics("train")
    assert (first["policy/kl_coef"], second["policy/kl_coef"]) == (0.5, pytest.approx(0.49, rel=1e-9))
    assert second["loss/kl"] > 0 and "policy/kl_in_reward" not in second


def test_the_kl_in_the_reward_is_steered_and_the_coefficient_survives_a_resume(place, tmp_path):
    wanted = (
        'algo.name="reinforce++"',
        'algo.kl="k3"',
        "algo.kl_coef=0.5",
        "algo.kl_target=10.0",
        "algo.kl_horizon=90",
    )
    run = train(place, tmp_path, *wanted)
    first, second = run.metrics("train")
    # on the first step the policy is its reference: KL 0, error -1 limited to -0.2: 0.5 x (1 - 0.2 x 9 / 90) = 0.49
    assert first["policy/kl_in_reward"] == pytest.approx(0.0, abs=1e-6) and first["policy/kl_coef"] == 0.5
    assert second["policy/kl_in_reward"] > 0 and second["policy/kl_coef"] == pytest.approx(0.49, rel=1e-9)
    assert "loss/kl" not in second
    saved = json.loads((run.checkpoint_dirs()[0] / "data.json").read_text())
    assert saved["progress"]["kl_coef"] == pytest.approx(0.49, rel=1e-9)


@pytest.mark.parametrize(
    "overrides",
    [
        ('algo.name="kl_cov"', "train.updates_per_step=2"),
        ('algo.name="gdpo"',),
        ('algo.name="maye"',),
        ('algo.name="grpo"', 'algo.importance="mask"', 'algo.importance_level="sequence"', "algo.overlong_tokens=4"),
    ],
    ids=["kl_cov", "gdpo", "maye", "importance"],
)
def test_a_step_of_the_less_usual_kinds(place, tmp_path, overrides):
    (line,) = train(place, tmp_path, *overrides, "train.steps=1").metrics("train")
    assert line["optim/updates"] >= 1 and finite(line)
    if "importance" in str(overrides):
        assert line["policy/importance_weight"] == pytest.approx(1.0, abs=1e-3)
    if "maye" in str(overrides):
        assert line["loss/kl"] == pytest.approx(0.0, abs=1e-6)
