"""Runs whose responses are episodes with tools: trained, stopped and resumed, evaluated, scored again, looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Done, this_process
from small_runs import assert_same_run, make_place, recipe_text, train, train_in_parts
from wild_tools import SHOWS, WILD

from vlmrl.data.images import decode_image
from vlmrl.evaluate.records import read_evaluation
from vlmrl.store import layout
from vlmrl.store.media import RunImages
from vlmrl.store.rollouts import read_turns
from vlmrl.store.runs import Run

CODE = WILD + SHOWS
RECIPE = """
environment = {name = "PLACE/wild.py:Shows", tokens = 300, turns = 3}
rollout = {prompts_per_step = 3, samples_per_prompt = 3, max_new_tokens = 8, temperature = 0.9, stop = ["e", "a"]}
train = {steps = 3, tokens_per_row = 700}
optim.lr = 1e-3
eval = {every_steps = 3, max_rows = 3, at_start = false}
checkpoint = {every_steps = 1, keep_last = 9}
"""
REWARD = """
def score(x):
    assert not x.turns or (x.answer == x.turns[-1].text and x.response.endswith(x.answer))
    tools = [turn for turn in x.turns if turn.role == "tool"]
    looks = x.measured.get("reward", 0.0)
    return {"letters": min(1.0, len(set(x.response)) / 40), "looks": looks, "tools": len(tools) / 8}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, small_folder) -> Path:
    place = tmp_path_factory.mktemp("episodes")
    make_place(place, small_folder, RECIPE.replace("PLACE", str(place)), reward=REWARD)
    (place / "wild.py").write_text(CODE)
    return place


@pytest.fixture(scope="module")
def run(place, tmp_path_factory) -> Run:
    return train(place, tmp_path_factory.mktemp("whole"))


def vlmrl(run: Run, place: Path, *words: str) -> Done:
    return this_process(*words, "--runs", run.dir.parent, cwd=place)


def test_it_trains_on_episodes(run):
    lines = run.metrics("train")
    assert len(lines) == 3 and lines[-1]["optim/updates"] > 0
    for line in lines:
        assert line["policy/sampler_gap_max"] < 2e-5, "the engine saw what the trainer sees"
        shares = [value for name, value in line.items() if name.startswith("episode/ended/")]
        assert sum(shares) == pytest.approx(1.0) and 1.0 <= line["episode/turns"] <= 3.0
        assert line["episode/measured/reward"] == pytest.approx(line["reward/part/looks"])
    samples = [s for g in run.read_rollouts(0) for s in g.samples]
    assert {s.ending for s in samples} <= {"answer", "turn cut", "turn limit"} and any(
        len(s.turns) > 1 for s in samples
    )
    images = RunImages(run.dir)
    named = {m for s in samples for part in s.trajectory.segments for m in part.media}
    assert named and all(images.find(media) for media in named)
    [prompt] = run.manifest.prompts
    assert prompt["environment"]["tools"][""][0]["function"]["name"] == "look"


def test_stopped_and_resumed_equals_uninterrupted(place, run, tmp_path):
    assert_same_run(train_in_parts(place, tmp_path, stops=[1]), run)


def test_the_prompt_shows_the_tool(run):
    assert '"name": "look"' in run.read_rollouts(0)[0].prompt_text


def test_an_evaluation_equals_the_validation_of_the_same_step(run, place):
    done = vlmrl(
        run, place, "eval", run.id, "--checkpoint", "last", "--split", "validation", "--max-rows", "3", "--json"
    )
    assert done.code == 0, done.err
    (one,) = done.json["evaluations"]
    during = next(f for f in layout.eval_dirs(run.dir) if f.name.endswith("step-000003"))
    expected = json.loads((during / layout.EVAL_SUMMARY).read_text())["metrics"]
    found = json.loads((Path(one["folder"]) / layout.EVAL_SUMMARY).read_text())
    assert found["metrics"] == expected
    assert found["meta"]["environment"]["limits"]["turns"] == 3


def test_every_command_takes_it(run, place, tmp_path):
    checked = vlmrl(run, place, "reward-check", run.id, "--json").json
    assert checked["stored"]["equal"] and checked["samples"] == 27, checked["stored"]
    table = vlmrl(run, place, "runs", "show", run.id, "--rollout", "1").out.splitlines()[1:]
    prompts = [line.split("\t")[0] for line in table]
    said = "".join(vlmrl(run, place, "runs", "show", run.id, "--rollout", f"1/{p}").out for p in prompts)
    assert "the environment (" in said and "user: of <|im_end|>" in said and "tool: here <|im_end|> <image>" in said
    for words in (
        ("report", run.id, "-o", str(tmp_path / "r.html")),
        ("runs", "diagnose", run.id),
        ("runs", "verify", run.id),
    ):
        done = vlmrl(run, place, *words)
        assert done.code == 0, (words, done.err)
    assert (
        vlmrl(run, place, "merge", run.id, "--checkpoint", "last", "--out", tmp_path / "m", "--json").json["logp_gap"]
        < 1e-4
    )


def test_the_deep_check_runs_the_environment(place):
    settings = ("rollout.max_new_tokens=90", "environment.tokens=500", "rollout.stop=[]")
    words = ("check", place / "rl.toml", "--deep", "--deep-prompts", "2", *(w for s in settings for w in ("--set", s)))
    deep = this_process(*words, "--json", cwd=place).json["deep"]
    assert deep["agrees"] and deep["logp_max"] < 1e-4 and deep["sampler_gap"] < 2e-5
    authors = [author for author, _ in deep["stream"]]
    assert authors[:3] == ["prompt", "environment", "policy"] and len(authors) % 2
    assert "<|im_start|>assistant" in deep["stream"][1][1]
    shown = this_process(*words, cwd=place).out
    assert "environment" in shown and "seed" in shown
    (place / "wild.py").write_text(
        CODE.replace(
            "self.seed, self.shown = seed, ", "raise ValueError('no light')\n        self.seed, self.shown = seed, "
        )
    )
    try:
        done = this_process(*words, cwd=place)
    finally:
        (place / "wild.py").write_text(CODE)
    assert done.code == 2 and "it cannot begin an episode: ValueError: no light" in done.out


def test_a_changed_environment_is_told_at_a_resume(run, place):
    (place / "wild.py").write_text(CODE.replace("Look at a place.", "Look there."))
    try:
        done = vlmrl(run, place, "train", "--resume", run.id, "--set", "train.steps=4")
    finally:
        (place / "wild.py").write_text(CODE)
    assert done.code == 2 and "environment of" in done.err and "Look there." in done.err


def test_what_does_not_work_is_refused_in_words(place, tmp_path):
    for override, words in (
        ("environment.tokens=4", "may be longer than the whole episode"),
        ("environment.name=wild.py:Missing", "Missing"),
        ("environment.name=none.py:f", "none.py"),
    ):
        done = this_process("check", place / "rl.toml", "--set", override, cwd=place)
        assert done.code == 2 and words in done.err + done.out, (override, done.err, done.out)


def test_how_much_needs_the_tools_is_measured(run, place):
    words = ("eval", run.id, "--checkpoint", "last", "--split", "validation", "--max-rows", "3", "--json")
    normal = vlmrl(run, place, *words).json["evaluations"][0]
    for tools in ("blank", "off"):
        done = vlmrl(run, place, *words, "--tools", tools)
        assert done.code == 0, done.err
        (one,) = done.json["evaluations"]
        assert one["name"] == f"{normal['name']}-tools-{tools}" and one["meta"]["tools"] == tools
        probe = one["blind_probe"]
        assert probe["images"] == f"tools {tools}" and Path(probe["normal"]).name == normal["name"]
        assert probe["metrics"]["reward"]["n"] == 3 and f"(tools {tools};" in probe["conclusion"][0]
        assert "needs the tools" in probe["conclusion"][0]
        rows = read_evaluation(Path(one["folder"])).rows
        media = [m for row in rows if row["turns"] for turn in read_turns(row["turns"]) for m in turn.media]
        assert all(row["ending"] is None for row in rows) if tools == "off" else media
        for image in map(RunImages(run.dir).find, media):
            assert set(decode_image(image).getdata()) == {(128, 128, 128)}
    assert vlmrl(run, place, "eval", run.id, "--tools", "off", "--images", "blank").code == 2
    done = vlmrl(run, place, *words[:-1], "--tools", "off")
    assert "shown: tools off" in done.out + done.err and "without (tools off)" in done.out, done.out + done.err


def test_validation_rows_of_a_file_are_episodes_too(small_folder, tmp_path):
    for name, count in (("rows", 6), ("more", 3)):
        rows = [{"prompt": f"same or {name} {i}?", "answer": str(i)} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "wild.py").write_text(CODE)
    (tmp_path / "reward.py").write_text(
        "def score(x):\n    return len(set(x.response)) / 90 + x.measured['reward'] / 90\n"
    )
    rest = f'reward.name = "{tmp_path}/reward.py:score"\n[[data]]\npath = "{tmp_path}/rows.jsonl"\n'
    rest += f'validation = "{tmp_path}/more.jsonl"\n'
    recipe = (
        RECIPE.replace("PLACE", str(tmp_path))
        .replace("steps = 3", "steps = 1")
        .replace("every_steps = 3", "every_steps = 1")
    )
    (tmp_path / "rl.toml").write_text(recipe_text(small_folder, recipe) + rest)
    run = train(tmp_path, tmp_path / "runs")
    (folder,) = layout.eval_dirs(run.dir)
    rows = read_evaluation(folder).rows
    assert len(rows) == 3 and all(row["ending"] is not None for row in rows)
