"""PPO and the full KL by the command line: a step, what is saved, resumed and merged, and what stands in elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import Done, settings, this_process
from small_runs import assert_same_run, begin, finite, go_on, make_place, paying, train, train_in_parts

from vlmrl.checkpoint import io
from vlmrl.errors import CheckpointError
from vlmrl.store.checkpoints import VALUE_HEAD
from vlmrl.store.runs import Run, open_run
from vlmrl.train import collect, rl
from vlmrl.train.update import fill_logps

RECIPE = """
algo.name = "ppo"
rollout = {prompts_per_step = 3, samples_per_prompt = 2, max_new_tokens = 8}
train = {steps = 3, tokens_per_row = 300}
optim.lr = 1e-3
eval = {every_steps = 0, max_rows = 2}
checkpoint = {every_steps = 1, keep_last = 9}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, small_folder) -> Path:
    return make_place(tmp_path_factory.mktemp("critic"), small_folder, RECIPE, reward=paying(tokens=8, letters=5))


def vlmrl(place: Path, root: Path, *words: str) -> Done:
    return this_process(*words, "--runs", root, cwd=place)


def vlmrl_train(place: Path, root: Path, *overrides: str) -> Run:
    done = vlmrl(place, root, "train", "rl.toml", *settings(*overrides), "--json")
    assert done.json["status"] == "done"
    return open_run(root, "last")


@pytest.fixture(scope="module")
def trained(place, tmp_path_factory) -> tuple[Path, Run]:
    """(runs folder, a run of PPO of two steps with the KL in the reward)."""
    root = tmp_path_factory.mktemp("runs")
    return root, vlmrl_train(place, root, "train.steps=2", "train.updates_per_step=2", "algo.kl_coef=0.1")


def test_a_critic_learns_from_its_first_step_on(trained):
    _, run = trained
    first, second = run.metrics("train")
    assert first["value/mean"] == 0.0 and first["optim/updates"] == 2 and second["optim/updates"] == 4
    # a value of 0 explains nothing of its targets: 1 - variance(target) / variance(target)
    assert first["value/explained_variance"] == pytest.approx(0.0, abs=1e-12)
    assert first["loss/value"] > 0 and second["value/mean"] > 0.0 and finite(first | second)
    assert first["policy/kl_in_reward"] == pytest.approx(0.0, abs=1e-6) and second["policy/kl_in_reward"] > 0
    assert "loss/kl" not in second


def test_its_value_head_is_saved_verified_and_in_no_merged_model(place, trained, tmp_path):
    root, run = trained
    folder = run.checkpoint_dirs()[-1]
    head = io.load_value_head(folder)
    assert {n: (t.dtype, tuple(t.shape)) for n, t in head.items()} == {
        "weight": (torch.float32, (1, 64)),
        "bias": (torch.float32, (1,)),
    }
    assert all(bool(t.any()) for t in head.values())
    assert "exp_avg.value_head.weight" in io.load_optimizer_tensors(folder)
    assert vlmrl(place, root, "runs", "verify", run.id).code == 0
    done = vlmrl(place, root, "merge", run.id, "--checkpoint", "last", "--out", str(tmp_path / "out"), "--json")
    assert done.json["logp_gap"] < 1e-4
    names = [n for path in (tmp_path / "out").glob("*.safetensors") for n in io.load_file(path)]
    assert names and not [n for n in names if "value" in n]
    assert not (tmp_path / "out" / VALUE_HEAD).exists()


def test_where_there_is_no_critic_what_stands_in_is_said(place, trained):
    root, run = trained
    words = ("try", "rl.toml", "--prompts", "2")
    tried = vlmrl(place, root, *words, "--json").json
    assert "critic" in tried["stand_in"] and tried["summary"]["rollout/dead_group_share"] == 0.0
    assert "an untrained critic, with the value 0 everywhere" in " ".join(vlmrl(place, root, *words).out.split())
    plain = vlmrl(place, root, *words, "--set", "algo.name=grpo")
    assert "replaces" not in plain.out
    words = ("reward-check", run.id, "--diff", f"{place}/reward.py:same")
    diff = vlmrl(place, root, *words, "--json").json["diff"]
    assert diff["advantages"]["estimator"] == "gae" and "critic" in diff["advantages"]["stand_in"]
    assert diff["groups"]["dead_first"] == diff["groups"]["dead_second"] == 0
    assert "an untrained critic, with the value 0 everywhere" in " ".join(vlmrl(place, root, *words).out.split())


def test_one_sample_a_prompt_is_enough_and_equal_scores_teach(place, tmp_path):
    lone = ("rollout.samples_per_prompt=1", f"reward.name={place}/reward.py:same", "train.steps=1")
    (line,) = vlmrl_train(place, tmp_path, *lone).metrics("train")
    assert line["rollout/samples"] == 3 and line["optim/updates"] == 1
    assert line["loss/value"] > 0 and line["rollout/dead_group_share"] == 0.0


def test_a_critic_learns_also_where_no_token_has_an_advantage(place, tmp_path):
    """One token is its own mean: whitened, its advantage is 0; its value is still wrong."""
    lone = ("rollout.prompts_per_step=1", "rollout.samples_per_prompt=1", "rollout.max_new_tokens=1", "train.steps=1")
    (line,) = vlmrl_train(place, tmp_path, *lone).metrics("train")
    assert line["rollout/dead_group_share"] == 1.0 and line["loss/policy"] == 0.0
    assert line["optim/updates"] == 1 and line["loss/value"] > 0 and line["optim/grad_norm"] > 0


def test_the_old_log_probs_of_several_updates_are_those_of_their_own_rows(place, tmp_path, monkeypatch):
    """So that the first has ratios of exactly 1, in bfloat16 too."""
    asked, trained, equal = [], [], []
    update, fill_stats = rl.update, collect.fill_stats

    def filling(policy, batch, into, tokens_per_row):
        asked.append([i.trajectory for i in batch.items])
        fill_stats(policy, batch, into, tokens_per_row)

    def updating(policy, optimizer, batch, objective, **more):
        if not trained:
            again: dict[int, torch.Tensor] = {}
            fill_logps(policy, batch, again, more["tokens_per_row"])
            equal.extend(torch.equal(again[i.trajectory], batch.old_logp[i.trajectory]) for i in batch.items)
        trained.append([i.trajectory for i in batch.items])
        return update(policy, optimizer, batch, objective, **more)

    monkeypatch.setattr(collect, "fill_stats", filling)
    monkeypatch.setattr(rl, "update", updating)
    begin(place, tmp_path, "train.steps=1", "train.updates_per_step=2", "model.dtype=bfloat16")
    assert asked == trained == [[0, 1, 4, 5], [2, 3]]
    assert equal == [True] * 4


def test_stopped_and_resumed_equals_uninterrupted(place, tmp_path):
    more = ("train.updates_per_step=2", "train.steps=2")
    assert_same_run(train_in_parts(place, tmp_path / "b", *more), train(place, tmp_path / "a", *more))


@pytest.mark.slow
def test_with_an_adapter_the_value_head_is_saved_beside_it_and_resumes(place, tmp_path):
    more = ("lora.rank=4", "algo.kl=full", "algo.kl_coef=0.1", "train.steps=2")
    whole = train(place, tmp_path / "a", *more)
    assert whole.metrics("train")[-1]["policy/kl_in_reward"] > 0
    assert_same_run(train_in_parts(place, tmp_path / "b", *more), whole)
    done = vlmrl(place, tmp_path / "a", "merge", whole.id, "--checkpoint", "last", "--json")
    assert done.json["logp_gap"] < 1e-4


def test_a_checkpoint_without_the_value_head_it_should_have_is_refused(place, tmp_path):
    run, _ = begin(place, tmp_path, "train.steps=2", stop_at=1)
    (run.checkpoint_dirs()[-1] / VALUE_HEAD).unlink()
    with pytest.raises(CheckpointError, match=r"value_head.safetensors is missing"):
        go_on(run)


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize("lora", [(), ("lora.rank=4",)], ids=["whole", "lora"])
def test_the_full_kl_trains_in_the_loss_and_in_the_reward(place, tmp_path, kl_in, lora):
    name = "grpo" if kl_in == "loss" else "reinforce++"
    more = (f"algo.name={name}", "algo.kl=full", f"algo.kl_in={kl_in}", "algo.kl_coef=0.1", *lora, "optim.lr=1e-2")
    first, second = vlmrl_train(place, tmp_path, *more, "train.steps=2").metrics("train")
    key = "loss/kl" if kl_in == "loss" else "policy/kl_in_reward"
    assert first[key] == pytest.approx(0.0, abs=1e-6)  # the first step is at the reference
    assert second[key] > 1e-5 and finite(first | second)
