"""Runs with demonstrations and hints: what is kept, what the samples begin with, where they come from, resume."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from small_runs import (
    TWO_STEPS,
    Ears,
    assert_same_run,
    begin,
    go_on,
    make_place,
    paying,
    recipe_text,
    train,
    train_in_parts,
)

from vlmrl.errors import DataError, StoreError
from vlmrl.recipe.checks import Catalogs, check_recipe
from vlmrl.recipe.load import load_recipe
from vlmrl.setup.check import quick_look
from vlmrl.store.prune import RolloutRule, Rules, prune_run
from vlmrl.store.rollouts import read_rollouts
from vlmrl.store.verify import verify_run


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    return make_place(tmp_path_factory.mktemp("place"), tiny_folder, TWO_STEPS.replace("12, temp", "160, temp"))


def fused(name: str, *more: str) -> tuple[str, ...]:
    return (f'algo.name="{name}"', "rollout.max_prompt_tokens=512", *more)


def test_demonstrations_are_scored_kept_apart_and_counted_in_no_metric_of_the_policy(place, tmp_path):
    run = train(place, tmp_path, *fused("luffy"))
    (first, _), samples = run.metrics("train"), run.read_rollouts(0)
    kept = read_rollouts(run.dir / "demonstrations" / "000001.parquet")
    assert len(samples) == len(kept) == 5 and all(len(g.samples) == 3 for g in samples)
    for group, shown in zip(samples, kept, strict=True):
        (one,) = shown.samples
        assert shown.row.prompt_id == group.row.prompt_id and one.trajectory.sample == 3
        assert [s.author for s in one.trajectory.segments] == ["demonstration"] and "<answer>" in one.text
        # The advantages of a group with its demonstration are centred.
        assert sum(s.advantage for s in group.samples) + one.advantage == pytest.approx(0, abs=1e-6)
    assert first["demonstration/share"] == 1 and first["rollout/samples"] == 15
    assert first["demonstration/score_mean"] == pytest.approx(sum(g.samples[0].score.value for g in kept) / 5)
    assert not verify_run(run.dir).errors


def test_a_hint_is_the_beginning_of_the_demonstration_in_front_of_what_the_policy_writes(place, tmp_path):
    run = train(place, tmp_path, *fused("uft", "train.steps=1", "algo.hint_most=1.0"))
    whole = train(place, tmp_path / "b", *fused("luffy", "train.steps=1"))
    texts = {g.row.prompt_id: g for g in read_rollouts(whole.dir / "demonstrations" / "000001.parquet")}
    hints = 0
    for group in run.read_rollouts(0):
        demonstration = texts[group.row.prompt_id].samples[0].trajectory.response_ids
        beginnings = {s.trajectory.segments[0].ids for s in group.samples if len(s.trajectory.segments) == 2}
        for ids in beginnings:  # all samples of a prompt have the same one
            hints += 1
            assert len(beginnings) == 1 and demonstration[: len(ids)] == ids
            assert all(s.trajectory.segments[0].author == "demonstration" for s in group.samples)
    assert hints >= 3
    # The engine went on from the hint just as the trainer reads it.
    (line,) = run.metrics("train")
    assert line["policy/sampler_gap_max"] < 1e-4 and line["loss/demonstrations"] > 0


@pytest.mark.parametrize(("most", "share"), [(0, 0.0), (2, 0.0), (3, 1.0)])
def test_only_prompts_that_are_not_solved_get_a_demonstration(place, tmp_path, most, share):
    (tmp_path / "right.py").write_text("def right(x):\n    return {'right': 1.0}\n")  # of all three samples
    run = train(
        place,
        tmp_path,
        *fused("hpt", "train.steps=1", f"algo.most_solved={most}"),
        f'reward.name="{tmp_path}/right.py:right"',
        'reward.accuracy="right"',
    )
    (line,) = run.metrics("train")
    assert line["demonstration/share"] == share and ("loss/demonstrations" in line) == bool(share)


@pytest.mark.parametrize("name", ["luffy", "hpt", "uft"])
def test_resumed_runs_are_the_same(place, tmp_path, name):
    more = fused(name, "train.steps=3", "checkpoint.every_steps=1", "data.0.demonstration_share=0.7")
    assert_same_run(train_in_parts(place, tmp_path / "a", *more, stops=(1,)), train(place, tmp_path / "b", *more))


def test_responses_of_a_file_and_of_a_run_are_demonstrations(place, tmp_path):
    stops = 'rollout.stop=["a", "e", "i", "o", "t", "n", "s"]'
    source = train(place, tmp_path, "train.steps=1", "rollout.max_new_tokens=40", stops)
    whole = [(g, [s for s in g.samples if s.trajectory.finish == "stop"]) for g in source.read_rollouts(0)]
    best = {g.row.prompt_id: max(own, key=lambda s: s.score.value) for g, own in whole if own}
    assert len(best) >= 3
    file, ears = tmp_path / "answers.jsonl", Ears()
    lines = [
        {"prompt_id": name, "response": s.text, "score": s.score.value, "finish": "stop"} for name, s in best.items()
    ]
    lines.insert(0, lines[0] | {"response": "worse", "score": -1.0})
    lines.insert(1, lines[0] | {"response": "cut", "score": 9.0, "finish": "length"})
    lines[-1]["response"] = "a b c " * 200
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for where in (source.id, str(file)):
        more = fused("chord", "train.steps=1", f'data.0.demonstrations="{where}"')
        run, _ = begin(place, tmp_path, *more, ears=ears)
        kept = {g.row.prompt_id: g.samples[0] for g in read_rollouts(run.dir / "demonstrations" / "000001.parquet")}
        assert kept.keys() == best.keys() - ({lines[-1]["prompt_id"]} if where == str(file) else set())
        assert all(kept[name].text == best[name].text for name in kept)
    assert any(lines[-1]["prompt_id"] in text and "its demonstration has" in text for text in ears.heard)
    assert len(json.loads((run.dir / "manifest.json").read_text())["datasets"][0]["demonstrations_sha256"]) == 64
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    with pytest.raises(StoreError, match="demonstrations of digits"):
        go_on(run, "train.steps=2")
    go_on(run, "train.steps=2", accept=True)
    assert (run.dir / "demonstrations" / "000001.parquet").exists()
    prune_run(run.dir, Rules(rollouts=RolloutRule(1, 0)))
    assert not (run.dir / "demonstrations" / "000001.parquet").exists() and list(run.rollout_files()) == [1]
    file.write_text(json.dumps(lines[0] | {"prompt_id": "another"}) + "\n")
    with pytest.raises(DataError, match="none of its 1 responses is to a prompt of digits"):
        begin(place, tmp_path, *fused("chord", f'data.0.demonstrations="{file}"'))


def test_rows_without_a_response_are_trained_as_usual_and_counted_before(tmp_path, tiny_folder):
    place = make_table_place(tmp_path, tiny_folder, ["yes", None, "", "no", "yes"])
    ears = Ears()
    run, status = begin(place, tmp_path, *fused("luffy"), ears=ears)
    assert status == "done" and any("demonstrations of rows: 3 of 5 prompts have one" in text for text in ears.heard)
    assert run.metrics("train")[0]["demonstration/share"] == pytest.approx(0.6)

    def problems(*responses: object) -> list[str]:
        place = make_table_place(tmp_path, tiny_folder, responses)
        found, _ = quick_look(load_recipe(place / "rl.toml", overrides=fused("luffy"), kind="rl"))
        return [p.message for p in found if p.level == "error"]

    assert problems(None, None) == ["none of 2 prompts of rows has a demonstration"]
    assert problems("yes", None) == []


def make_table_place(folder: Path, model: Path, responses: Sequence[object]) -> Path:
    """A place with a table of questions without images, and the rows' responses."""
    lines = [{"question": f"Is {k} even?", "answer": "yes", "response": r} for k, r in enumerate(responses)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "reward.py").write_text(paying(tokens=12, letters=20))
    rest = f'reward.name = "{folder}/reward.py:score"\n[[data]]\npath = "{folder}/rows.jsonl"\n'
    (folder / "rl.toml").write_text(
        recipe_text(model, TWO_STEPS.replace("eval = {every_steps = 2, max_rows = 5}\n", "")) + rest
    )
    return folder


def test_what_does_not_go_with_demonstrations_is_refused_in_words(place, tmp_path):
    def problems(*overrides: str) -> str:
        loaded = load_recipe(place / "rl.toml", overrides=overrides, kind="rl")
        return "\n".join(p.message for p in check_recipe(loaded, Catalogs()) if p.level == "error")

    assert "a critic" in problems('algo.name="chord"', 'algo.advantage="gae"')
    assert "a ratio of whole responses" in problems('algo.name="chord"', 'algo.ratio="sequence"')
    assert "picks or joins tokens" in problems('algo.name="chord"', 'algo.surrogate="vespo"')
    assert "a baseline for each token" in problems('algo.name="luffy"', 'algo.advantage="optimal_token"')
    assert "the KL in the reward" in problems('algo.name="chord"', 'algo.kl_in="reward"', "algo.kl_coef=0.1")
    assert "unless they are mixed" in problems('algo.name="chord"', 'algo.demonstration_loss="shaped"')
    assert "no source has any" in problems('algo.name="luffy"', 'data.0.demonstrations="none"')
    assert "nowhere/a.jsonl" in problems('algo.name="luffy"', 'data.0.demonstrations="nowhere/a.jsonl"')
    assert not problems('algo.name="luffy"')
