"""`vlmrl try`: what it samples, what it says about it, and the rows it keeps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tinyworld import encoded, image

from vlmrl.data.dataset_writer import building
from vlmrl.data.images import store_decoded
from vlmrl.errors import DataError, Interruption, RewardError
from vlmrl.evaluate.trial import (
    Keep,
    Solved,
    Trial,
    check_target,
    choose_rows,
    measure_rate,
    parse_solved,
    rate_histogram,
    run_trial,
    seen_images,
    spread,
    summary,
    trial_run,
    why_none,
)
from vlmrl.recipe.load import load_recipe
from vlmrl.rewards.base import RewardSpec, UserReward
from vlmrl.setup.auto_choice import fill_for_run
from vlmrl.store.runs import open_run
from vlmrl.tasks.base import Task
from vlmrl.tasks.source import open_source
from vlmrl.types import Group, Media, Row, Score, ScoredSample, Segment, Trajectory

REWARD = """
RANGES = {"even": (0, 1), "easy": (0, 1)}
def score(x):
    return {"even": float(len(x.response) % 2 == 0), "easy": float(x.truth["answer"] == "a")}
"""


def picture(name: str) -> Image.Image:
    return image(sum(map(ord, name)))


@pytest.fixture
def world(tmp_path, monkeypatch, tiny_folder):
    """A table of six rows, a reward that likes even lengths, and a recipe for the tiny model."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for name in "abcdef":
        picture(name).save(tmp_path / f"{name}.png")
        rows.append({"question": f"<image>What is {name}?", "image": f"{name}.png", "answer": name, "level": len(rows)})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "recipe.toml").write_text(
        f"""[model]
path = "{tiny_folder}"
dtype = "float32"
device = "cpu"
[[data]]
path = "rows.jsonl"
columns = {{prompt = "question"}}
[reward]
name = "reward.py:score"
weights = {{even = 0.5, easy = 0.5}}
[rollout]
prompts_per_step = 4
max_new_tokens = 6
"""
    )
    return tmp_path


def tried(
    *,
    prompts: int | None,
    samples: int = 4,
    keep: Keep | None = None,
    overrides: tuple[str, ...] = (),
    solved: str | None = None,
):
    root = Path("runs")
    loaded, _ = fill_for_run(load_recipe("recipe.toml", overrides=overrides), root)
    with trial_run(loaded, root, ["vlmrl", "try"]) as run:
        trial = run_trial(
            loaded.recipe,
            run,
            root,
            prompts=prompts,
            samples=samples,
            keep=keep,
            solved=parse_solved(solved) if solved else None,
        )
    return open_run(root, run.id), trial


def test_every_row_is_tried_and_saved_like_a_runs_rollouts(world):
    run, trial = tried(prompts=None)
    saved = [group for step in run.rollout_files() for group in run.read_rollouts(step)]
    assert (run.manifest.kind, run.status, list(run.rollout_files())) == ("try", "done", [0, 1])  # batches of 4
    assert [g.row.truth["answer"] for g in saved] == list("abcdef")
    assert [[s.text for s in g.samples] for g in saved] == [[s.text for s in g.samples] for g in trial.groups]
    assert all(s.trajectory.version == 0 for g in saved for s in g.samples)


@pytest.mark.slow
def test_a_trial_repeats_itself(world):
    (_, first), (_, second) = tried(prompts=3), tried(prompts=3)
    assert [s.text for g in first.groups for s in g.samples] == [s.text for g in second.groups for s in g.samples]
    assert len(first.groups) == 3


def test_the_rows_tried_are_those_that_training_draws_first(world):
    from vlmrl.tasks.source import PromptStream

    loaded = load_recipe("recipe.toml")
    source = open_source(loaded.recipe.data[0], loaded.recipe.reward)
    drawn = PromptStream([6], [1.0], seed=5).next(4)
    assert [row for _, row in choose_rows([source], 5, 4)] == [draw.row for draw in drawn]
    assert len(choose_rows([source], 5, 20)) == 6  # a row is tried once


def test_the_summary_is_what_the_groups_say(world):
    _, trial = tried(prompts=None)
    told = summary(trial)
    values = [s.score.value for g in trial.groups for s in g.samples]
    assert told["reward/mean"] == pytest.approx(sum(values) / 24)
    assert told["responses"] == 24
    assert (
        told["rollout/dead_group_share"] == sum(len({s.score.value for s in g.samples}) == 1 for g in trial.groups) / 6
    )
    assert told["rollout/dead_group_share"] == sum(g.is_dead for g in trial.groups) / 6
    assert (
        told["rollout/truncated_share"]
        == sum(s.trajectory.finish == "length" for g in trial.groups for s in g.samples) / 24
    )
    assert sum(told["solve_rate/histogram"]) == 6


def test_the_pictures_are_the_images_as_the_model_sees_them(world):
    run, trial = tried(prompts=1)
    assert [path.parent for path in trial.pictures] == [run.dir / "media"]
    assert trial.first is not None
    name = trial.first.row.truth["answer"]
    # 56 x 56 fits the patches: nothing is resized, and normalising is undone to the pixel
    assert np.array_equal(np.asarray(Image.open(trial.pictures[0])), np.asarray(picture(name)))


def test_patches_are_laid_back_in_order_for_images_of_any_shape(tiny_encoder, tiny_processor):
    prompt = encoded(tiny_encoder, "two", [(112, 56), (56, 84)], name="shapes")
    seed = sum(map(ord, "shapes")) * 100
    seen = seen_images(prompt, tiny_processor.image_processor)
    assert [a.shape for a in seen] == [(56, 112, 3), (84, 56, 3)]
    for i, (pixels, size) in enumerate(zip(seen, [(112, 56), (56, 84)], strict=True)):
        assert np.array_equal(pixels, np.asarray(image(seed + i, *size)))


def test_a_prompt_without_images_has_no_pictures(tiny_encoder, tiny_processor):
    assert seen_images(encoded(tiny_encoder, "none"), tiny_processor.image_processor) == []


@pytest.mark.slow
def test_kept_rows_of_a_table_are_a_table_for_the_same_recipe(world):
    out = Path("kept.parquet")
    _, trial = tried(prompts=None, keep=Keep(0.3, 1.0, {"rows": out}))
    wanted = [g.row for g, rate in zip(trial.groups, trial.solve_rates, strict=True) if 0.3 <= rate <= 1.0]
    assert 0 < len(wanted) < 6, "the filter must divide the rows, or this shows nothing"
    assert trial.kept == {"rows": (out, len(wanted))}
    recipe = load_recipe("recipe.toml", overrides=["data.0.path=kept.parquet"]).recipe
    source = open_source(recipe.data[0], recipe.reward)
    kept = [source.rows[i] for i in range(len(source.rows))]
    assert [(row.truth, row.media, row.columns) for row in kept] == [
        (row.truth, row.media, row.columns) for row in wanted
    ]
    assert [source.messages(row)[0].content for row in kept] == [
        f"<image>What is {row.truth['answer']}?" for row in wanted
    ]
    _, again = tried(prompts=None, samples=1, overrides=("data.0.path=kept.parquet",))
    assert len(again.groups) == len(wanted)


def test_rows_above_the_filter_are_left_out(world):
    _, trial = tried(prompts=None, keep=Keep(0.0, 0.6, {"rows": Path("kept.parquet")}))
    low = sum(rate <= 0.6 for rate in trial.solve_rates)
    assert 0 < low < 6, "the filter must divide the rows, or this shows nothing"
    assert trial.kept["rows"][1] == low


def test_when_no_row_qualifies_nothing_is_written(world):
    _, trial = tried(prompts=None, keep=Keep(0.999, 0.9999, {"rows": Path("kept.parquet")}))
    assert trial.kept == {"rows": (None, 0)}
    assert not Path("kept.parquet").exists()


def make_pairs(folder: Path) -> None:
    """A prepared dataset of pairs with one level, in three splits."""
    with building(folder) as build:
        for split, names in {"train": "abcd", "validation": "ef", "test": "gh"}.items():
            rows = []
            for left, right in [(n, m) for n in names for m in names]:
                media = []
                for name in (left, right):
                    data, one = store_decoded(_png(picture(name)))[:2]
                    build.images.add(one.sha256, data)
                    media.append(one)
                truth = {"same": left == right, "distance": int(left != right), "letter": [left, right]}
                rows.append({"prompt_id": f"pairs-{left}{right}", "truth": truth, "images": media})
            build.write_rows(split, rows)
        build.finish({"name": "pairs", "task": "pairs", "levels": ["letter"], "args": {"seed": 0}, "counts": {"x": 1}})


def _png(picture: Image.Image) -> bytes:
    import io

    sink = io.BytesIO()
    picture.save(sink, "PNG")
    return sink.getvalue()


@pytest.mark.slow
def test_kept_rows_of_a_prepared_folder_are_a_prepared_folder(world):
    make_pairs(world / "pairs")
    sets = ("data.0.path=pairs", "data.0.columns={}", "data.0.task=pairs", "reward.weights={}")
    Path("reward.py").write_text("def score(x):\n    return float(x.truth['same'])\n")
    _, trial = tried(
        prompts=None, samples=2, keep=Keep(0.5, 1.0, {"pairs": Path("kept")}), overrides=sets, solved="reward>=1"
    )
    assert trial.kept == {"pairs": (Path("kept"), 4)}
    recipe = load_recipe("recipe.toml", overrides=[*sets, "data.0.path=kept"]).recipe
    kept, before = (
        open_source(recipe.data[0].model_copy(update={"path": p}), recipe.reward) for p in ("kept", "pairs")
    )
    assert kept.dataset.splits == {"train": 4, "validation": 4, "test": 4}
    assert [row.prompt_id for row in kept.rows] == ["pairs-aa", "pairs-bb", "pairs-cc", "pairs-dd"]
    assert kept.dataset.fingerprint != before.dataset.fingerprint
    assert kept.dataset.info["args"]["filter"] == [0.5, 1.0]
    assert "counts" not in kept.dataset.info
    for split in ("train", "validation", "test"):
        for row in kept.with_split(split).rows:
            for media in row.media:
                assert kept.dataset.image_bytes(media) == before.dataset.image_bytes(media)


def test_a_target_that_exists_or_has_the_wrong_form_is_refused_before_any_work(world):
    make_pairs(world / "pairs")
    recipe = load_recipe("recipe.toml").recipe
    table = open_source(recipe.data[0], recipe.reward)
    folder = open_source(recipe.data[0].model_copy(update={"path": "pairs", "columns": {}}), recipe.reward)
    assert check_target([table], Path("a/kept")) == {"rows": Path("a/kept.parquet")}
    assert check_target([folder], Path("kept")) == {"pairs": Path("kept")}
    assert check_target([table, folder], Path("both")) == {
        "rows": Path("both/rows.parquet"),
        "pairs": Path("both/pairs"),
    }
    with pytest.raises(DataError, match="become a folder"):
        check_target([folder], Path("kept.parquet"))
    with pytest.raises(DataError, match="exists; nothing was sampled or written"):
        check_target([folder], Path("pairs"))


def group_of(values: list[float | None], source: str = "s", acc: list[float | None] | None = None) -> Group:
    """A group with these scores, and this part `acc`; None = the reward failed."""
    samples = []
    for k, value in enumerate(values):
        parts = {"acc": acc[k]} if acc else {}
        trajectory = Trajectory("t", "p", 0, k, 0, k, (1,), (Segment("assistant", (2,), True, (0.0,)),), (), "stop")
        score = Score(float("nan"), {}, error="broke") if value is None else Score(value, {"x": value, **parts})
        samples.append(ScoredSample(trajectory, "", score))
    return Group(Row("p", source, "t", {}, (Media("h", 1, 1),)), "", tuple(samples))


def source_of(fn: str = "f", **spec: Any) -> Any:
    """A source whose task measures nothing, with this reward."""
    user = UserReward("r.py", fn, "", spec.pop("style", "vlmrl"), {})
    weights = spec.pop("weights", {})
    reward = RewardSpec("r.py:f", lambda x: 0.0, spec.pop("ranges", {}), weights, user=user, **spec)
    return SimpleNamespace(name="s", reward=reward, weights=weights, task=Task("t", "", "", lambda truth: []))


def test_without_a_maximum_or_an_accuracy_there_is_no_solve_rate():
    groups = [group_of([0.0, 0.02]), group_of([0.01])]  # the largest value seen says nothing of what is possible
    source = source_of()
    assert measure_rate(source, groups) is None
    assert measure_rate(source_of(ranges={"x": (0.0, math.inf)}, weights={"x": 1.0}), groups) is None
    told = why_none(source, groups)
    assert told == "it is not known which part of `s` means right. Name it, such as --solved 'x>=1' (parts: x, reward)"
    scored = SimpleNamespace(score=Score(0.0, {"form": 1.0, "length": 0.5, "hour": 0.0}))
    assert "--solved 'hour>=1'" in why_none(source, [SimpleNamespace(samples=[scored])])  # type: ignore[list-item]
    assert spread(groups[0]) == {"mean": 0.01, "min": 0.0, "max": 0.02, "std": 0.01}
    assert spread(group_of([None])) is None


def test_the_accuracy_of_the_reward_gives_the_share_of_right_responses():
    groups = [group_of([0.9, 0.1], acc=[1.0, 0.0]), group_of([0.9], acc=[None]), group_of([None, 0.5], acc=[1.0, 1.0])]
    rate = measure_rate(source_of(ranges={"x": (0.0, 1.0)}, weights={"x": 1.0}), groups)
    assert rate is not None and rate.words == "share of responses with accuracy >= 1"
    assert rate.by_group == (0.5, None, 1.0), "what does not apply, or failed, does not count"


def test_wrong_answers_of_minus_one_count_as_not_solved():
    rate = measure_rate(source_of(), [group_of([1.0, -1.0, 1.0, 1.0], acc=[1.0, -1.0, 1.0, 1.0])])
    assert rate is not None and rate.by_group == (0.75,)


def test_an_accuracy_in_between_gives_its_mean_and_one_beyond_gives_nothing():
    rate = measure_rate(source_of(), [group_of([0.0, 0.0], acc=[0.25, 0.5])])
    assert rate is not None and (rate.words, rate.by_group) == ("mean of accuracy", (0.375,))
    ranges = {"ranges": {"x": (0.0, 1.0)}, "weights": {"x": 1.0}}
    assert measure_rate(source_of(**ranges), [group_of([0.0, 0.0], acc=[25.0, 50.0])]) is None


def test_with_declared_ranges_it_is_the_mean_reward_on_their_scale():
    groups = [group_of([0.0, 1.0]), group_of([0.5]), group_of([-1.0, -1.0]), group_of([None, 1.0]), group_of([None])]
    rate = measure_rate(source_of(ranges={"x": (-0.5, 0.5)}, weights={"x": 2.0}), groups)
    assert rate is not None and rate.words == "the mean reward, of -1 to 1"
    assert rate.by_group == (0.75, 0.75, 0.0, 1.0, None)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("x>=0.5", 0.5), ("x > 0.5", 0.25), ("x<0.5", 0.5), ("x<=0.5", 0.75), ("x==0.5", 0.25), ("reward>=0.1", 0.75)],
)
def test_the_users_condition_says_what_is_solved(text, rate):
    group = group_of([0.0, 0.1, 0.5, 1.0], acc=[1.0] * 4)
    found = measure_rate(source_of(), [group], parse_solved(text))
    assert found is not None and found.by_group == (rate,)
    assert found.words == f"share of responses with {parse_solved(text)}"


def test_a_condition_is_a_part_a_sign_and_a_number():
    assert parse_solved(" my part >= 1e-1 ") == Solved("my part", ">=", 0.1) and str(parse_solved("a<2")) == "a < 2"
    assert measure_rate(source_of(), [group_of([1.0])], parse_solved("y>=1")) is None


@pytest.mark.parametrize("text", ["acc", "acc>=", ">=1", "acc=1", "acc=>1", "acc>=one", "acc>=nan", "acc>=inf", ""])
def test_what_is_no_condition_is_refused_with_the_form(text):
    with pytest.raises(RewardError, match="is not a condition") as error:
        parse_solved(text)
    assert "write --solved 'acc>=1'" in (error.value.hint or "")


@pytest.mark.slow
def test_a_reward_without_a_maximum_shows_its_spread_and_filters_nothing(world):
    Path("reward.py").write_text(REWARD.replace("RANGES", "OTHER"))
    _, trial = tried(prompts=2)
    assert trial.solve_rates == [None, None] and trial.rates == {"rows": None} and len(trial.no_rate) == 1
    told = summary(trial)
    assert not any(name.startswith("solve_rate") for name in told)
    values = [s.score.value for g in trial.groups for s in g.samples]
    assert (told["reward/min"], told["reward/max"]) == (min(values), max(values))
    with pytest.raises(RewardError, match="needs a solve rate, and a source has none; nothing was written") as error:
        tried(prompts=None, keep=Keep(0.1, 0.9, {"rows": Path("kept.parquet")}))
    assert "--solved 'even>=1'" in (error.value.hint or "") and not Path("kept.parquet").exists()
    _, trial = tried(prompts=None, keep=Keep(0.1, 1.0, {"rows": Path("kept.parquet")}), solved="even>=1")
    evens = [[s.score.parts["even"] for s in g.samples] for g in trial.groups]
    assert trial.solve_rates == [sum(e) / 4 for e in evens]
    assert trial.kept["rows"][1] == sum(sum(e) > 0 for e in evens)
    with pytest.raises(RewardError, match="no reward returns the part `odd` of --solved 'odd > 0'") as error:
        tried(prompts=1, solved="odd>0")
    assert "(parts: even, easy" in (error.value.hint or "")


def test_a_trial_that_fails_leaves_no_run(world):
    Path("reward.py").write_text("def score(x): return 1 / 0 if x.truth['answer'] == 'f' else 1.0\n")
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        tried(prompts=None, overrides=("reward.weights={}",))  # the last row is in the second batch
    assert list(Path("runs").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("batches", "kept"), [(0, False), (1, True)])
def test_an_interrupted_trial_leaves_what_it_has_scored(world, monkeypatch, batches, kept):
    from vlmrl.evaluate import trial as module

    calls, score = [], module.score_rollouts

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > batches:
            raise KeyboardInterrupt
        return score(*args, **kwargs)

    monkeypatch.setattr(module, "score_rollouts", interrupted)
    with pytest.raises(Interruption) as caught:
        tried(prompts=None)
    told = str(caught.value)
    if not kept:
        assert list(Path("runs").iterdir()) == [] and "nothing is kept" in told
        return
    run = open_run(Path("runs"), "last")
    assert run.status == "interrupted" and len(run.read_rollouts(0)) == 4
    assert f"interrupted: 16 scored responses are kept in {run.dir}" in told


def test_groups_fall_into_ten_bins_and_the_last_holds_one():
    assert rate_histogram([0.0, 0.09, 0.1, 0.3, 0.7, 0.99, 1.0]) == [2, 1, 0, 1, 0, 0, 0, 1, 0, 2]


def test_an_empty_trial_has_no_pictures():
    assert Trial().pictures == []
