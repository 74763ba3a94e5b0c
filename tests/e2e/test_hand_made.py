"""A run whose responses are episodes: two turns of the policy with an image between them, and a demonstration."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Done, this_process
from episodes import Episodes
from small_runs import assert_same_run, make_place, train, train_in_parts

from vlmrl.store.media import RunImages
from vlmrl.store.runs import Run
from vlmrl.train import rl

RECIPE = """
rollout = {prompts_per_step = 3, samples_per_prompt = 3, max_new_tokens = 10, temperature = 0.9}
train = {steps = 3, tokens_per_row = 500}
optim.lr = 1e-3
eval = {every_steps = 0, max_rows = 3}
checkpoint = {every_steps = 1, keep_last = 9}
"""
REWARD = """
def score(x):
    images = sum(len(turn.media) for turn in x.turns)
    known = x.prompt_id != "" and len(x.media) == len(x.seen_sizes) == 2 and x.sample in (0, 1, 2)
    return {"letters": min(1.0, x.response.count("e") / 9 + len(x.response) / 80), "images": images, "known": known}
"""
DEMONSTRATION = "<answer>yes, eeee</answer>"


@pytest.fixture(scope="module")
def place(tmp_path_factory, small_folder) -> Path:
    return make_place(tmp_path_factory.mktemp("hand"), small_folder, RECIPE, reward=REWARD)


@pytest.fixture(scope="module")
def patched():
    """Runs within this module sample episodes."""
    make = rl.make_generator

    def episodes(recipe, policy, encoder, *more, **rest):
        return Episodes(make(recipe, policy, encoder, *more, **rest), policy, encoder, DEMONSTRATION)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, "make_generator", episodes)
        yield


@pytest.fixture(scope="module")
def run(place, tmp_path_factory, patched) -> Run:
    return train(place, tmp_path_factory.mktemp("whole"))


def vlmrl(run: Run, *words: str) -> Done:
    return this_process(*words, "--runs", run.dir.parent, cwd=run.dir.parent)


def test_it_learns_from_the_policys_tokens_alone(run):
    lines = run.metrics("train")
    assert len(lines) == 3 and lines[-1]["optim/updates"] > 0
    groups = run.read_rollouts(0)
    own = [s for g in groups for s in g.samples]
    episodes, shown = [s for s in own if s.turns], [s for s in own if not s.turns]
    assert len(episodes) == 6 and len(shown) == 3
    for s in episodes:
        assert [part.author for part in s.trajectory.segments] in (["policy", "environment", "policy"],)
        assert s.trajectory.num_sampled_tokens == s.trajectory.num_trained_tokens <= 10
        assert len(s.trajectory.response_ids) > s.trajectory.num_trained_tokens
        assert s.score.parts["images"] == 1.0 and s.score.parts["known"] == 1.0
        assert s.turns[0].calls[0].arguments == {"box": [0, 0, 9, 9]} and s.turns[1].media
    for s in shown:
        assert [part.author for part in s.trajectory.segments] == ["demonstration"] and s.text == DEMONSTRATION
        assert s.trajectory.num_trained_tokens == s.trajectory.num_sampled_tokens == 0 and not s.masked
    lengths = [s.trajectory.num_sampled_tokens for s in own]
    assert lines[0]["rollout/response_tokens_mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert all(line["policy/sampler_gap_max"] < 1e-5 for line in lines), "the trainer sees the image where it stood"


def test_stopped_and_resumed_equals_uninterrupted(place, run, tmp_path, patched):
    assert_same_run(train_in_parts(place, tmp_path, stops=[1]), run)


def test_the_images_of_a_tool_are_kept_with_the_run(run):
    images = RunImages(run.dir)
    named = {m for s in run.read_rollouts(1) for x in s.samples for part in x.trajectory.segments for m in part.media}
    assert named and all(images.find(media) for media in named)
    assert sorted(p.name for p in (run.dir / "media").iterdir()) == [f"00000{k}.arrow" for k in (1, 2, 3)]


def test_every_command_takes_it(run, place, tmp_path):
    assert vlmrl(run, "merge", run.id, "--out", tmp_path / "merged", "--json").json["logp_gap"] < 1e-4
    done = vlmrl(run, "eval", run.id, "--split", "validation", "--max-rows", "3", "--json")
    assert done.code == 0, done.err
    checked = vlmrl(run, "reward-check", run.id, "--json").json
    assert checked["stored"]["equal"] and checked["samples"] == 27, checked["stored"]
    page, packed = tmp_path / "r.html", tmp_path / "run.tar.gz"
    commands = (
        ("runs", "verify", run.id),
        ("runs", "diagnose", run.id),
        ("report", run.id, "-o", page),
        ("runs", "pack", run.id, "-o", packed),
        ("runs", "show", run.id),
    )
    for words in commands:
        done = vlmrl(run, *map(str, words))
        assert done.code == 0, (words, done.err)
    text = page.read_text()
    assert "zoom(" in text and '<div class="why">tool' in text


def test_responses_are_shown_in_words(run):
    table = vlmrl(run, "runs", "show", run.id, "--rollout", "2").out.splitlines()
    assert table[0].split("\t")[:2] == ["prompt", "samples"] and len(table) == 4
    prompt = table[1].split("\t")[0]
    said = vlmrl(run, "runs", "show", run.id, "--rollout", f"2/{prompt}").out
    assert "written by the policy (" in said and "the environment (" in said and "seen as 56 x 56" in said
    assert "written by a demonstration (" in said and "not trained on" in said and "tool: see  with 1 image" in said
    fields = vlmrl(run, "runs", "show", run.id, "--rollout", f"2/{prompt}/0", "--json").json["groups"][0]
    [sample] = fields["samples"]
    assert [s["author"] for s in sample["segments"]] == ["policy", "environment", "policy"]
    assert sample["turns"][0]["calls"] == [{"name": "zoom", "arguments": {"box": [0, 0, 9, 9]}}]
    assert all(image["seen"] == [56, 56] for image in fields["images"])
    for place, words in (
        ("9", "no rollouts of step 9"),
        ("x", "begin with a step"),
        ("2/zzz", "no prompt"),
        (f"2/{prompt}/7", "no sample 7"),
        ("0", "1 or more"),
    ):
        done = vlmrl(run, "runs", "show", run.id, "--rollout", place)
        assert done.code == 2 and words in done.err and not done.out
