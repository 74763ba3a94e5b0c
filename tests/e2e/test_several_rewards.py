"""A run with several rewards: what it records, resumes, refuses, and what scores and evaluates it again."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from command_line import this_process
from small_runs import TWO_STEPS, assert_same_run, copy_digits, go_on, recipe_text, train, train_in_parts

from vlmrl.errors import StoreError
from vlmrl.evaluate import eval
from vlmrl.reward_check.run import RewardQuestion, check_rewards
from vlmrl.reward_check.scoring import open_saved
from vlmrl.rewards.identity import identity_of
from vlmrl.store.removal import removable, remove_runs
from vlmrl.store.runs import Run
from vlmrl.store.verify import verify_run

MINE = """
from pathlib import Path

def letters(completions, **columns):
    return [None if len(c) % 5 == 4 else min(1.0, c.count("e") / 2) for c in completions]

def judge(x, log):
    with Path(log).open("a") as file:
        file.write(x.response.encode().hex() + "\\n")
    return {"tone": len(x.response) / 50, "note": "judged", "detail": {"length": len(x.response)}}
"""
LISTED = """
[[data]]
path = "{place}/digits"
task = "digits"
[[rewards]]
name = "task"
label = "grade"
[[rewards]]
name = "{place}/mine.py:letters"
weight = 0.5
[[rewards]]
name = "{place}/mine.py:judge"
gate = "letters"
weight = 2.0
args = {{ log = "{place}/judged.txt" }}
[[rewards]]
name = "ending"
weight = 0.25
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    folder = tmp_path_factory.mktemp("place")
    copy_digits(folder / "digits")
    (folder / "mine.py").write_text(MINE)
    (folder / "rl.toml").write_text(recipe_text(tiny_folder, TWO_STEPS, "rl") + LISTED.format(place=folder))
    return folder


@pytest.fixture(scope="module")
def run(place, tmp_path_factory) -> Run:
    return train(place, tmp_path_factory.mktemp("runs"))


def test_the_record_is_the_sum_of_the_rewards_and_a_closed_gate_is_never_judged(place, run):
    (place / "judged.txt").unlink()
    judged = train(place, run.dir.parent / "again", "eval.enabled=false")
    texts = set((place / "judged.txt").read_text().split())
    seen = {"open": 0, "closed": 0, "none": 0}
    for step in (0, 1):
        for group in judged.read_rollouts(step):
            for sample in group.samples:
                text, score = sample.text, sample.score
                letters = None if len(text) % 5 == 4 else min(1.0, text.count("e") / 2)
                is_open = letters is not None and letters > 0
                seen["none" if letters is None else "open" if is_open else "closed"] += 1
                assert score.parts["letters"] == letters and score.parts["judge.gate"] == float(is_open)
                assert score.parts.get("judge.tone") == (len(text) / 50 if is_open else None)
                assert score.error is None and ("judge" in (score.detail or {})) == is_open
                grade = [score.parts[f"grade.{name}"] for name in ("format", "answer", "loop", "digit")]
                assert grade == [0.0] * 4  # the tiny model never answers in the form
                ending = 0.0 if sample.trajectory.finish == "stop" else -1.0
                tone = len(text) / 50 if is_open else 0.0
                assert score.value == math.fsum([0.5 * (letters or 0.0), 2.0 * tone, 0.25 * ending])
                assert (text.encode().hex() in texts) == is_open
    assert min(seen.values()) > 0, seen


def test_the_run_says_what_each_reward_gave(run):
    step = run.metrics("train")[0]
    parts = {name.removeprefix("reward/part/") for name in step if name.startswith("reward/part/")}
    assert {"letters", "judge.gate", "ending", "grade.answer"} <= parts
    assert 0 < step["reward/part/judge.gate"] < 1 and step["reward/accuracy"] == 0.0 and step["reward/errors"] == 0
    (record,) = run.manifest.rewards
    assert [one["label"] for one in record["rewards"]] == ["grade", "letters", "judge", "ending"]
    assert identity_of(record).words.count("weight") == 4
    assert not verify_run(run.dir).errors


def test_an_interrupted_run_is_the_whole_one(place, run, tmp_path):
    assert_same_run(train_in_parts(place, tmp_path), run)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("rewards.1.weight=1.0", "rewards.1.weight: 0.5 -> 1.0"),
        ("rewards.2.gate=ending", "rewards.2.gate: letters -> ending"),
        ("rewards.3.name=language", "rewards.3.name: ending -> language"),
    ],
)
def test_another_list_is_refused_as_another_reward_is(run, override, named):
    with pytest.raises(StoreError) as error:
        go_on(run, override, "train.steps=3")
    assert named in f"{error.value}" and "--accept-changes" in f"{error.value}"


def test_a_changed_file_of_one_reward_is_refused_with_its_diff(place, run):
    before = (place / "mine.py").read_text()
    try:
        (place / "mine.py").write_text(before.replace("/ 50", "/ 40"))
        with pytest.raises(StoreError) as error:
            go_on(run, "train.steps=3")
    finally:
        (place / "mine.py").write_text(before)
    assert "judge" in f"{error.value}" and "/ 40" in f"{error.value}"


def test_scored_again_every_response_has_its_recorded_score(run):
    checked = check_rewards(open_saved(run.id, run.dir.parent), RewardQuestion())
    stored = checked.report["stored"]
    assert (stored["equal"], stored["different"]) == (True, 0)
    (shown,) = checked.report["rewards"].values()
    assert shown["name"] == "grade + letters + judge + ending" and shown["changed"] == ""
    assert shown["weights"] == {"grade": 1.0, "letters": 0.5, "judge": 2.0, "ending": 0.25}
    assert set(checked.report["parts"]) >= {"grade.answer", "judge.tone", "judge.gate"}
    other = check_rewards(open_saved(run.id, run.dir.parent), RewardQuestion(weights={"ending": 1.0}))
    assert other.report["diff"] is not None and set(other.scores.values_N.tolist()) <= {0.0, -1.0}


def test_commands_take_the_list(place, run):
    root = run.dir.parent
    evaluated = this_process("eval", run.id, "--runs", str(root), "--max-rows", "3", "--json", cwd=place)
    assert evaluated.code == 0 and '"part/judge.gate"' in evaluated.out
    checked = this_process("check", "rl.toml", "--set", "rollout.max_new_tokens=40", cwd=place)
    assert checked.code == 0 and "grade + letters + judge + ending" in checked.out
    probed = this_process("reward-check", run.id, "--runs", str(root), "--set", "x=1", cwd=place)
    assert probed.code == 2 and "the run has several" in probed.err


def test_a_run_that_is_removed_while_it_is_evaluated_does_not_come_back(place, run, tmp_path, monkeypatch):
    shutil.copytree(run.dir, tmp_path / "runs" / run.id)
    evaluate = eval.evaluate_responses

    def removing(*args, **settings):
        done = evaluate(*args, **settings)
        remove_runs(removable(tmp_path / "runs", [run.id]))
        return done

    monkeypatch.setattr(eval, "evaluate_responses", removing)
    done = this_process("eval", run.id, "--runs", tmp_path / "runs", "--max-rows", "2", cwd=place)
    assert done.code == 2 and "the run was removed while it was evaluated" in done.err
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["unfinished"]
    assert list((tmp_path / "runs" / "unfinished").glob("*.jsonl"))
