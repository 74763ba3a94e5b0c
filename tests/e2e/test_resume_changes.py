"""A run that goes on with changes, and one that forks: what may change, what is shown and recorded, what is exact."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import settings, this_process
from small_runs import (
    SIX_STEPS,
    Ears,
    assert_same_run,
    go_on,
    history,
    make_place,
    rollouts,
    same_tensors,
    train,
    weights,
)

from vlmrl.checkpoint import io
from vlmrl.errors import StoreError
from vlmrl.setup.run_records import Labels
from vlmrl.store.kept_recipe import newest_resolved, read_resolved
from vlmrl.store.runs import Run, open_run
from vlmrl.store.verify import verify_run
from vlmrl.tasks.digits import prepare_digits
from vlmrl.train.resume import ResumeRequest, changes_in_words, fork_run, notes_of, plan_fork, plan_resume
from vlmrl.train.start import run_session

CONSTANT = ("optim.schedule=constant",)


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    return make_place(tmp_path_factory.mktemp("place"), tiny_folder, SIX_STEPS, kinds=("rl", "sft"))


def fork(root: Path, ref: str, *overrides: str, stop_at: int | None = None) -> tuple[Run, str]:
    plan = plan_fork(root, ResumeRequest(ref, "rl", None, overrides))
    made, recipe, checkpoint = fork_run(root, plan, ["vlmrl"], Labels())
    status = run_session(made, recipe, root, Ears(stop_at), checkpoint)
    return open_run(root, made.id), status


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def learned(run: Run, begin: int = 0) -> str:
    """What a run measured in training, from a step on, for a comparison to the digit."""
    return json.dumps([m for m in history(run) if m["kind"] == "train" and m["step"] >= begin])


@pytest.fixture(scope="module")
def six(place, tmp_path_factory):
    """Six steps at once, at a constant learning rate."""
    return train(place, tmp_path_factory.mktemp("six"), *CONSTANT)


@pytest.fixture(scope="module")
def four(place, tmp_path_factory):
    """(root, a run that is done after four steps); copied by who changes it."""
    root = tmp_path_factory.mktemp("four")
    return root, train(place, root, "train.steps=4", *CONSTANT)


@pytest.fixture
def done(four, tmp_path):
    """(root, the run of `four`) in a place of its own."""
    root, run = four
    shutil.copytree(root, tmp_path / "runs")
    return tmp_path / "runs", open_run(tmp_path / "runs", run.id)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_four_steps_and_two_more_are_six_to_the_bit(place, six, tmp_path, kind):
    expected = six if kind == "rl" else train(place, tmp_path / "at-once", *CONSTANT, kind=kind)
    run = train(place, tmp_path, "train.steps=4", *CONSTANT, kind=kind)
    run, status = go_on(run, "train.steps=6")
    assert status == run.status == "done"
    # A first part of four steps ends with a checkpoint that six at once do not make.
    shutil.rmtree(run.dir / "checkpoints" / "step-000004")
    assert_same_run(run, expected)
    (change,) = run.manifest.attempts[1].changes
    assert (change["what"], change["old"], change["new"], change["kind"]) == ("train.steps", 4, 6, "free")
    assert not verify_run(run.dir).errors


@pytest.mark.slow
def test_cadences_and_batching_of_the_engine_change_nothing_that_is_learned(place, six, done):
    """The validation that ended the first part counts, once, though six at once under these cadences has none there."""
    _, run = done
    free = (
        "eval.every_steps=3",
        "checkpoint.every_steps=1",
        "checkpoint.keep_last=1",
        "log.sample_every_steps=0",
        "rollout.batch_tokens=100000",
        "train.max_seconds=100000",
    )
    run, status = go_on(run, "train.steps=6", *free)
    assert status == "done"
    assert same_tensors(weights(run), weights(six))
    assert learned(run) == learned(six)
    assert rollouts(run) == rollouts(six)
    assert {c["kind"] for c in run.manifest.attempts[1].changes} == {"free"}


@pytest.mark.slow
def test_a_last_validation_that_came_after_its_checkpoint_counts_when_the_run_goes_on(place, tmp_path):
    """Without it the best would be forgotten, its checkpoint deleted, and a worse one named the best."""
    cadence = ("eval.every_steps=3", "checkpoint.every_steps=2", "train.steps=2", "checkpoint.keep_last=1")
    run = train(place, tmp_path, *cadence, *CONSTANT)
    at_two = next(m for m in run.metrics("validation") if m["step"] == 2)
    saved = io.load_data(run.checkpoint_dirs()[-1])["progress"]
    assert saved["step"] == 2 and saved["validated"] == 0  # saved before it was validated
    run, _ = go_on(run, "train.steps=3", "checkpoint.every_steps=0", stop_at=3)
    progress = io.load_data(run.checkpoint_dirs()[-1])["progress"]
    values = {m["step"]: m["eval/metric"] for m in run.metrics("validation")}
    assert values[2] == at_two["eval/metric"]
    expected = 0
    for step in (2, 3):  # ties go to the trained model only against step 0
        if values[step] > values[expected] or (values[step] == values[expected] and expected == 0):
            expected = step
    assert progress["best_step"] == expected and run.manifest.best and run.manifest.best.step == expected


@pytest.mark.slow
def test_a_done_run_without_more_to_do_is_left_alone_and_the_command_that_gives_it_more_is_named(done):
    root, run = done
    before = files(run.dir)
    for overrides in ((), ("train.steps=3",), ("train.steps=4",), ("eval.every_steps=1",)):
        with pytest.raises(StoreError, match="has done all its") as caught:
            plan_resume(root, ResumeRequest(run.id, "rl", None, overrides))
        assert f"vlmrl train --resume {run.id} --set train.steps=" in (caught.value.hint or "")
    assert files(run.dir) == before


@pytest.mark.slow
def test_what_changes_the_learning_is_refused_with_a_diff_then_accepted_and_recorded(done):
    _, run = done
    before = files(run.dir)
    words = ("train.steps=6", "optim.lr=2e-3", "algo.clip_high=0.3")
    with pytest.raises(StoreError) as caught:
        go_on(run, *words)
    message = str(caught.value)
    assert "optim.lr: 0.001 -> 0.002" in message and "--set optim.lr=2e-3" in message
    assert "algo.clip_high: not set -> 0.3" in message and "--accept-changes" in message
    assert files(run.dir) == before, "a refused resume touched the run"
    run, status = go_on(run, *words, accept=True)
    assert status == "done"
    attempt = run.manifest.attempts[-1]
    assert attempt.accepted and attempt.from_step == 4 and attempt.number == 2 and attempt.start
    assert {c["what"]: (c["old"], c["new"]) for c in attempt.changes} == {
        "train.steps": (4, 6),
        "optim.lr": (1e-3, 2e-3),
        "algo.clip_high": (None, 0.3),
    }
    assert [m["optim/lr"] for m in run.metrics("train")] == [5e-4, 1e-3, 1e-3, 1e-3, 2e-3, 2e-3]
    event = next(e for e in run.metrics("event") if e["event"] == "resumed with changes")
    assert (event["step"], event["attempt"], sorted(event["changes"])) == (
        4,
        2,
        sorted(c["what"] for c in attempt.changes),
    )
    assert newest_resolved(run.dir).name == "resolved-a2.json"
    assert read_resolved(run.dir)["recipe"]["optim"]["lr"] == 2e-3
    assert read_resolved(run.dir)["origins"]["optim.lr"] == "--set"
    assert json.loads((run.dir / "resolved.json").read_text())["recipe"]["optim"]["lr"] == 1e-3
    # A third attempt begins from the second's recipe.
    run, _ = go_on(run, "train.steps=7")
    assert [c["what"] for c in run.manifest.attempts[-1].changes] == ["train.steps"]
    assert run.metrics("train")[-1]["optim/lr"] == 2e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "override",
    ["model.path=other", "lora.rank=4", "model.dtype=bfloat16", "optim.name=adamw_8bit", "algo.name=ppo", "kind=sft"],
)
def test_what_the_checkpoint_does_not_fit_is_refused_even_when_accepted_and_for_a_fork(done, override):
    root, run = done
    before = files(root)
    for plan, ref in ((plan_resume, run.id), (plan_fork, f"{run.id}@3")):
        with pytest.raises(StoreError) as caught:
            plan(root, ResumeRequest(ref, "rl", None, ("train.steps=6", override), True))
        assert "REFUSED" in str(caught.value) and override.split("=")[0].split(".")[0] in str(caught.value)
    assert files(root) == before


@pytest.mark.slow
def test_an_edited_recipe_file_is_compared_with_the_run(place, done, tmp_path):
    _, run = done
    text = (place / "rl.toml").read_text()
    edited = tmp_path / "edited.toml"
    edited.write_text(text.replace("steps = 6", "steps = 5").replace('schedule = "cosine"', 'schedule = "constant"'))
    run, status = go_on(run, recipe=edited)
    assert status == "done"
    assert [c["what"] for c in run.manifest.attempts[-1].changes] == ["train.steps"]
    assert (run.dir / "recipe-a2.toml").read_text() == edited.read_text()
    assert (run.dir / "recipe.toml").read_text() == text
    assert not verify_run(run.dir).errors


@pytest.mark.slow
def test_a_falling_learning_rate_cannot_be_continued_exactly_and_that_is_said(place, tmp_path):
    run = train(place, tmp_path, "train.steps=2", kind="sft")
    plan = plan_resume(tmp_path, ResumeRequest(run.id, "sft", None, ("train.steps=4",)))
    assert any("cosine" in note and "from step 2 on" in note for note in notes_of(plan))


@pytest.mark.slow
def test_an_edited_reward_is_shown_as_a_diff_and_wanted_accepted(place, tmp_path):
    reward = tmp_path / "mine.py"
    reward.write_text((place / "reward.py").read_text())
    named = f'reward.name="{reward}:score"'
    run = train(place, tmp_path, "train.steps=2", named, *CONSTANT)
    old = run.manifest.rewards[0]["sha256"]
    reward.write_text(reward.read_text().replace("12", "24"))
    before = files(run.dir)
    with pytest.raises(StoreError) as caught:
        go_on(run, "train.steps=3")
    message = str(caught.value)
    assert '-    return {"length": min(1.0, x.num_tokens / 12)' in message
    assert '+    return {"length": min(1.0, x.num_tokens / 24)' in message
    assert files(run.dir) == before
    run, status = go_on(run, "train.steps=3", accept=True)
    assert status == "done"
    change = next(c for c in run.manifest.attempts[-1].changes if c["what"].startswith("reward "))
    assert change["old"] == old and change["new"] == run.manifest.rewards[0]["sha256"] != old
    kept = sorted(p.name for p in (run.dir / "kept").glob("reward-*.py"))
    assert kept == sorted([f"reward-{old[:16]}.py", f"reward-{change['new'][:16]}.py"])
    # What was validated before was scored by another reward: the best begins anew, at the step the run went on from.
    assert run.manifest.best is not None and run.manifest.best.step >= 2
    validated = [(m["step"], m["attempt"]) for m in run.metrics("validation")]
    assert validated == [(0, 1), (2, 2), (3, 2)]


@pytest.mark.slow
def test_an_edited_prompt_is_shown_as_a_diff(place, tmp_path):
    template = tmp_path / "ask.jinja"
    template.write_text("<image><image>Same digit?\nAnswer with a number.\n")
    named = f'data.0.prompt="{template}"'
    run = train(place, tmp_path, "train.steps=2", named, kind="sft")
    template.write_text("<image><image>The same digit?\nAnswer with a number.\n")
    with pytest.raises(StoreError) as caught:
        go_on(run, "train.steps=3")
    message = str(caught.value)
    assert "-<image><image>Same digit?" in message and "+<image><image>The same digit?" in message


@pytest.mark.slow
def test_another_dataset_is_told_by_rows_and_fingerprint_and_begins_its_first_epoch(place, tmp_path):
    data = tmp_path / "digits"
    shutil.copytree(place / "digits", data)
    named = f'data.0.path="{data}"'
    run = train(place, tmp_path, "train.steps=2", named, kind="sft")
    moved = tmp_path / "moved"
    shutil.move(data, moved)
    plan = plan_resume(tmp_path, ResumeRequest(run.id, "sft", None, ("train.steps=3", f'data.0.path="{moved}"')))
    assert {c.what: c.kind for c in plan.changes} == {"train.steps": "free", "data.0.path": "free"}
    prepare_digits(data, num_pairs=36)
    with pytest.raises(StoreError) as caught:
        go_on(run, "train.steps=3")
    was, now = run.manifest.datasets[0], json.loads((data / "dataset.json").read_text())
    assert f"{was['rows']} rows" in str(caught.value) and was["fingerprint"][:12] in str(caught.value)
    assert now["fingerprint"][:12] in str(caught.value)
    ears = Ears()
    run, status = go_on(run, "train.steps=3", accept=True, ears=ears)
    assert status == "done"
    assert run.manifest.datasets[0]["fingerprint"] == now["fingerprint"]
    assert was in [dict(d) for d in run.manifest.all_datasets]
    stream = io.load_data(run.checkpoint_dirs()[-1])["stream"]
    assert stream["lengths"] == [run.manifest.datasets[0]["rows"]] and stream["decks"][0]["position"] == 7
    assert any("begins its first epoch anew" in text for text in ears.heard)


@pytest.mark.slow
def test_a_fork_without_changes_is_the_run_to_the_bit(six, done):
    root, parent = done
    forked, status = fork(root, f"{parent.id}@3", "train.steps=6")
    assert status == forked.status == "done"
    assert same_tensors(weights(forked), weights(six))
    assert learned(forked) == learned(six, 3)
    assert rollouts(forked, (3, 4, 5)) == rollouts(six, (3, 4, 5))
    assert forked.manifest.parent == {"run": parent.id, "checkpoint": "step-000003", "step": 3}
    assert forked.manifest.forked_at == 3 and forked.start_step == 3
    assert [m["step"] for m in forked.metrics("train")] == [3, 4, 5]
    assert forked.metrics("validation")[0]["step"] == 3, "its own best begins with what it began with"
    data = [io.load_data(r.checkpoint_dirs()[-1]) for r in (forked, six)]
    assert data[0]["stream"] == data[1]["stream"] and data[0]["progress"]["samples"] == data[1]["progress"]["samples"]
    with pytest.raises(StoreError, match="no rollouts of step 1") as caught:
        forked.read_rollouts(1)
    assert parent.id in (caught.value.hint or "")
    assert not verify_run(forked.dir).errors


@pytest.mark.slow
def test_a_fork_may_change_what_is_learned_lists_it_and_is_resumed_like_any_run(done):
    root, parent = done
    words = ("train.steps=6", "optim.lr=2e-3", "algo.kl_coef=0.1")
    before = files(parent.dir)
    whole, _ = fork(root, f"{parent.id}@3", *words)
    assert files(parent.dir) == before, "a fork wrote into its parent"
    step = whole.start_step
    assert {c["what"] for c in whole.manifest.attempts[0].changes} == {"train.steps", "optim.lr", "algo.kl_coef"}
    stopped, status = fork(root, f"{parent.id}@{step}", *words, stop_at=step + 1)
    assert status == "interrupted" and stopped.id != whole.id
    shutil.rmtree(parent.dir)  # a fork needs nothing of its parent's
    stopped, status = go_on(stopped)
    assert status == "done"
    assert same_tensors(weights(stopped), weights(whole))
    assert json.dumps(history(stopped)) == json.dumps(history(whole))
    assert all(m["optim/lr"] == 2e-3 for m in whole.metrics("train"))


@pytest.mark.slow
def test_a_fork_killed_before_its_first_own_checkpoint_goes_on_from_its_copy(done):
    root, parent = done
    forked, _ = fork(
        root, f"{parent.id}@3", "train.steps=6", "checkpoint.every_steps=0", "checkpoint.keep_best=false", stop_at=4
    )
    for folder in forked.checkpoint_dirs()[1:]:
        shutil.rmtree(folder)
    assert [p.name for p in forked.checkpoint_dirs()] == ["step-000003"]
    forked, status = go_on(forked)
    assert status == "done" and forked.manifest.attempts[-1].from_step == 3
    assert [m["step"] for m in forked.metrics("train")] == [3, 4, 5]


@pytest.mark.slow
def test_the_kl_of_a_fork_is_to_its_parents_first_weights_not_to_what_it_forked_from(place, tmp_path):
    """And those are another run's here, called `last` when the parent began."""
    grandparent = train(place, tmp_path, "train.steps=1", kind="sft")
    words = ('model.path="last"', "train.steps=3", "algo.kl_coef=0.5", "checkpoint.every_steps=1", *CONSTANT)
    parent = train(place, tmp_path, *words)
    forked, _ = fork(tmp_path, f"{parent.id}@1")
    assert forked.manifest.first_weights == parent.manifest.parent
    assert forked.manifest.first_weights and forked.manifest.first_weights["run"] == grandparent.id
    kl = [{m["step"]: m["loss/kl"] for m in r.metrics("train")} for r in (parent, forked)]
    assert kl[1] == {step: kl[0][step] for step in (1, 2)} and kl[0][1] > 0
    assert same_tensors(weights(forked), weights(parent))
    again, _ = fork(tmp_path, f"{forked.id}@2")
    assert again.manifest.first_weights == parent.manifest.parent and again.metrics("train")[0]["loss/kl"] == kl[0][2]


@pytest.mark.slow
def test_a_fork_of_an_adapter_is_the_run_to_the_bit(place, tmp_path):
    words = ("lora.rank=4", "train.steps=2", "algo.kl_coef=0.1", "checkpoint.every_steps=1", *CONSTANT)
    parent = train(place, tmp_path, *words)
    forked, status = fork(tmp_path, f"{parent.id}@1")
    assert status == "done"
    mine, theirs = weights(forked), weights(parent)
    assert same_tensors(mine, theirs) and any(bool(theirs[k].any()) for k in theirs if "lora_B" in k)
    assert forked.metrics("train")[0]["loss/kl"] == parent.metrics("train")[1]["loss/kl"] > 0


@pytest.mark.slow
def test_forks_that_cannot_be(done, monkeypatch):
    root, parent = done
    for ref, match in (
        (f"{parent.id}@1", "no checkpoint 1"),
        (f"{parent.id}", "train.steps = 4"),
        ("nobody@3", "no run"),
    ):
        with pytest.raises(StoreError, match=match):
            plan_fork(root, ResumeRequest(ref, "rl"))
    with pytest.raises(StoreError, match="was made by `vlmrl train`, not `vlmrl sft`"):
        plan_fork(root, ResumeRequest(parent.id, "sft"))
    monkeypatch.setattr(type(parent), "checkpoint", lambda self, which: root / "step-000009")  # its run removes it
    with pytest.raises(StoreError, match="step-000009 was removed meanwhile: the run goes on"):
        plan_fork(root, ResumeRequest(parent.id, "rl"))
    assert len(list(root.iterdir())) == 1


@pytest.mark.slow
def test_the_commands_show_ask_and_go_on(done):
    root, run = done
    more = (*settings("train.steps=5", "optim.lr=2e-3"), "--runs", root)
    refused = this_process("train", "--resume", run.id, *more, cwd=root)
    assert refused.code == 2 and "optim.lr: 0.001 -> 0.002" in refused.err and "--accept-changes" in refused.err
    resumed = this_process("train", "--resume", run.id, *more, "--accept-changes", "--json", cwd=root)
    assert resumed.json["steps"] == 5 and "optim.lr: 0.001 -> 0.002" in resumed.err
    forked = this_process(
        "train", "--from", f"{run.id}@3", "--set", "train.steps=4", "--name", "side", "--json", "--runs", root, cwd=root
    )
    assert forked.json["steps"] == 1 and f"forked from {run.id} at step 3" in forked.err
    for words in (
        ("--resume", "side", "--from", run.id),
        ("--from", "side", "--accept-changes"),
        (),
        ("--resume", run.id, "--tag", "late"),
    ):
        wrong = this_process("train", *words, "--runs", root, cwd=root)
        assert wrong.code == 2 and wrong.err.startswith("error: ") and "Traceback" not in wrong.err
    listed = this_process("runs", "list", "--runs", root, cwd=root).out
    assert f"fork of {run.id}@3" in listed
    shown = this_process("runs", "show", run.id, "--runs", root, cwd=root).out
    assert "at step 4: train.steps 4 -> 5; optim.lr 0.001 -> 0.002 (accepted)" in shown
    assert f"forked from {run.id} at step 3" in this_process("runs", "show", "side", "--runs", root, cwd=root).out
    compared = this_process("compare", run.id, "side", "--runs", root, cwd=root).out
    assert "train.steps\t5\t4" in compared and f"forked from {run.id} at step 3" in compared
    this_process("report", "side", "--runs", root, cwd=root)
    assert f"forked from {run.id} at step 3" in next(root.glob("*/report.html")).read_text()


def test_changes_for_people_hide_secrets_and_cut_hashes():
    from vlmrl.recipe.changes import Change, rule_of

    reward = rule_of(("reward", "args"))
    text = changes_in_words(
        [Change("reward.args.api_key", "abc1234567", "xyz", reward), Change("reward r", "a" * 64, "b" * 64, reward)]
    )
    assert "abc1234567" not in text and "xyz" not in text and "a" * 12 in text and "a" * 13 not in text
