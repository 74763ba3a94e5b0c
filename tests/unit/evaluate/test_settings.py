"""Settings of several runs: mean and band, the interval over rows and seeds, and what is no setting."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from shutil import copy
from typing import Any

import numpy as np
import pytest
from evaluation_builders import row
from scipy import stats

from vlmrl.errors import StoreError
from vlmrl.evaluate.compare import compare, open_side
from vlmrl.evaluate.metrics import summarise
from vlmrl.evaluate.records import Evaluation, write_evaluation
from vlmrl.evaluate.settings import (
    BY_RUNS,
    band,
    compare_settings,
    is_list,
    open_settings,
    setting_difference,
    shared_values,
)
from vlmrl.report.evaluations import eval_columns, eval_tables
from vlmrl.store import layout
from vlmrl.store.manifest import new_attempt, update_manifest
from vlmrl.store.runs import Run, create_run, open_run


def test_mean_and_band_by_hand():
    # Three runs of 4 rows: means 0.25, 0.5, 0.75: mean 0.5, standard deviation 0.25.
    values = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]], dtype=float)
    assert band(values) == {"mean": 0.5, "sd": pytest.approx(0.25), "runs": [0.25, 0.5, 0.75]}
    assert band(values[:1])["sd"] is None


def test_the_difference_of_settings_by_hand():
    # A: two runs of four rows, B: two runs. Row means A (1, 0, 1/2, 0), B (1, 1, 1, 1/2): d = (0, 1, 1/2, 1/2).
    a = np.array([[1, 0, 1, 0], [1, 0, 0, 0]], dtype=float)
    b = np.array([[1, 1, 1, 1], [1, 1, 1, 0]], dtype=float)
    found, p, method = setting_difference(a, b, [(i,) for i in range(4)], (0.0, 1.0))
    # Over rows: d - 1/2 = (-1/2, 1/2, 0, 0): 1/2 / 16 * 4/3 = 1/24. Over runs: means 1/2, 1/4 and 1, 3/4: variance
    # 1/32 each, of the mean 1/64. Sum 1/24 + 2/64 = 7/96.
    variance = 1 / 24 + 2 / 64
    # Freedom: of the runs 1 each; of the rows min(3, 2 / (2/16 / (1/2)^2 - 1/4)) = 3, as sum r^4 / (sum r^2)^2 = 1/2.
    freedom = variance**2 / ((1 / 24) ** 2 / 3 + 2 * (1 / 64) ** 2)
    half = stats.t.ppf(0.975, freedom) * math.sqrt(variance)
    assert method == BY_RUNS and found.mean == 0.5 and (found.n, found.clusters) == (4, 4)
    assert (found.low, found.high) == pytest.approx((0.5 - half, min(1.0, 0.5 + half)), abs=1e-12)
    assert p == pytest.approx(2 * stats.t.sf(0.5 / math.sqrt(variance), freedom), abs=1e-12)


def test_a_single_run_adds_nothing_and_two_single_runs_are_paired_as_ever():
    a, b = np.array([[1.0, 0, 0, 0] * 5]), np.array([[1.0, 1, 1, 0] * 5])
    ids = [(i,) for i in range(20)]
    _, p, method = setting_difference(a, b, ids, (0.0, 1.0))
    assert method == "exact McNemar" and p == pytest.approx(2 / 2**10)
    same_twice, _, _ = setting_difference(a, np.vstack([b, b]), ids, (0.0, 1.0))
    # No spread between runs: Student's t over the rows alone.
    difference = (b - a)[0]
    half = stats.t.ppf(0.975, 19) * difference.std(ddof=1) / math.sqrt(20)
    assert (same_twice.low, same_twice.high) == pytest.approx((0.5 - half, 0.5 + half), rel=1e-9)


def test_without_any_spread_or_with_one_cluster_there_is_no_interval():
    ones = np.ones((2, 5))
    for clusters in ([(i,) for i in range(5)], [("one",)] * 5):
        found, p, _ = setting_difference(ones * 0, ones, clusters, (0.0, 1.0))
        assert found.mean == 1.0 and math.isnan(found.low) and p == 1.0


def test_the_interval_holds_the_truth_over_new_rows_and_seeds_and_one_of_rows_alone_does_not():
    """100 rows of different difficulty; each run has a level of its own (standard deviation 0.05); B gains 0.1."""
    rng = np.random.default_rng(11)
    told, by_rows, worlds = 0, 0, 400
    for _ in range(worlds):
        hard = rng.uniform(0.2, 0.7, 100)
        a, b = (
            (rng.random((3, 100)) < np.clip(hard + gain + rng.normal(0, 0.05, (3, 1)), 0, 1)).astype(float)
            for gain in (0.0, 0.1)
        )
        found, _, _ = setting_difference(a, b, [(i,) for i in range(100)], (0.0, 1.0))
        told += found.low <= 0.1 <= found.high
        d = b.mean(0) - a.mean(0)
        by_rows += abs(d.mean() - 0.1) <= 1.984 * d.std(ddof=1) / 10
    # Slightly too wide by intention; over rows alone far too narrow.
    assert 0.94 <= told / worlds <= 0.995
    assert by_rows / worlds < 0.9


def make_run(root: Path, name: str, right: list[int], **changes: Any):
    recipe = {"train": {"seed": int(name[-1]), "steps": changes.pop("steps", 3)}}
    run = create_run(root, kind="rl", recipe_name="r", name=name, resolved={"recipe": recipe}, **changes)
    with run:
        rows = [row(f"p{i}", confidence=0.9 if x else 0.1, score=0.5 * x, images=()) for i, x in enumerate(right)]
        meta = {"split": "test", "role": "test", "source": "digits"}
        write_evaluation(layout.eval_dir(run.dir, "test-digits"), Evaluation(rows, summarise(rows)), meta)
    return run


RIGHT = {
    "a1": [1, 0, 0, 0] * 5, "a2": [1, 1, 0, 0] * 5, "b1": [1, 1, 1, 0] * 5, "b2": [1, 1, 1, 1] * 5,
    "c1": [1, 0, 0, 0] * 4 + [1, 0, 0, 1], "d1": [0, 0, 0, 0] * 5,
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, right in RIGHT.items():
        make_run(tmp_path, name, right)
    return tmp_path


def test_settings_are_compared_with_the_first(root: Path):
    found = compare_settings(open_settings(root, ["a1,a2", "b1,b2"]))
    (evaluation,) = found["evaluations"]
    assert evaluation["settings"]["A"]["accuracy"] == {
        "mean": 0.375,
        "sd": pytest.approx(0.1767767),
        "runs": [0.25, 0.5],
    }
    d = next(d for d in evaluation["differences"] if d["metric"] == "accuracy")
    assert (d["pair"], d["difference"], d["runs"], d["n"]) == ("B - A", 0.5, [2, 2], 20)
    assert d["test"]["comparisons"] == 1 and found["notes"] == []
    assert found["conclusion"]["evaluation"] == "test-digits"
    assert not [d for d in evaluation["differences"] if d["metric"] == "brier"], "only what is tested"


def test_several_settings_have_holms_correction_and_it_can_change_the_verdict(root: Path):
    found = compare_settings(open_settings(root, ["a1", "b1", "c1", "d1"]))
    by_pair = {d["pair"]: d for d in found["evaluations"][0]["differences"] if d["metric"] == "accuracy"}
    # Of B 10 rows tell, all for B: 2 / 2^10, times 3. Of C one row: 1. Of D five, all for A: 2 / 2^5, times 2.
    assert by_pair["B - A"]["test"]["p_holm"] == pytest.approx(3 * 2 / 2**10)
    assert by_pair["C - A"]["test"]["p"] == 1.0
    assert by_pair["D - A"]["test"]["p"] == 2 / 2**5 and by_pair["D - A"]["test"]["p_holm"] == 4 / 2**5
    assert {pair: d["verdict"] for pair, d in by_pair.items()} == {
        "B - A": "better", "C - A": "not clear", "D - A": "not clear",
    }  # fmt: skip
    assert by_pair["D - A"]["high"] < 0, "the interval of D alone excludes zero"
    assert "B is better than A: accuracy +0.500" in found["conclusion"]["text"]
    assert "It is not clear whether D is better than A" in found["conclusion"]["text"]


def test_runs_that_differ_in_more_than_their_seed_are_no_setting(root: Path):
    make_run(root, "a3", RIGHT["a1"], steps=9)
    notes = compare_settings(open_settings(root, ["a1,a2,a3", "b1"]))["notes"]
    assert notes[0] == "the runs of setting A differ in train.steps: they are not seeds of one setting"
    assert notes[1].startswith("setting B has one run") and len(notes) == 2


def test_what_a_resume_changed_is_a_difference_of_the_recipes(root: Path):
    changes = [
        {"what": "optim.lr", "old": 1e-3, "new": 5e-4, "kind": "asked"},
        {"what": "train.steps", "old": 2, "new": 3, "kind": "free"},
    ]
    run = make_run(root, "a3", RIGHT["a1"])
    resumed = new_attempt(2, run.manifest.start, (), Path("step-000006"), changes)
    copy(layout.resolved_path(run.dir), layout.resolved_path(run.dir, 2))
    update_manifest(run.dir, lambda m: replace(m, attempts=(*m.attempts, resumed)))
    notes = compare_settings(open_settings(root, ["a1,a3", "b1,b2"]))["notes"]
    assert notes == ["the runs of setting A differ in optim.lr: they are not seeds of one setting"]
    recipe = compare(open_side(root, "a1"), open_side(root, "a3"))["recipe"]
    assert next(row["b"] for row in recipe if row["key"] == "optim.lr") == "0.001 to step 6, then 0.0005"
    assert [row["key"] for row in recipe] == ["train.seed", "optim.lr"]


def test_what_came_from_different_rewards_is_not_compared(root: Path):
    rewards = [{"source": "digits", "name": "r", "sha256": "0", "weights": {"x": 1.0}}]
    make_run(root, "e1", RIGHT["b1"], rewards=rewards)
    found = compare_settings(open_settings(root, ["a1", "b1", "e1"]))
    assert {d["metric"] for d in found["evaluations"][0]["differences"]} == {"accuracy"}
    assert "scored by different rewards" in found["notes"][-1]


ONE = {"name": "r.py:f", "sha256": "0" * 64, "weights": {"answer": 0.9, "format": 0.1}}
OTHER = {**ONE, "weights": {}}
ARGV = ["vlmrl", "eval", "x", "--recipe", "rl.toml", "--split", "test.jsonl", "--step", "60", "--n=2", "--force"]


def scored_run(
    root: Path, name: str, right: list[int], rewards: dict[str, Any], prompt: str = "p", source: str = "flat"
):
    """A run with one evaluation of the same rows per reward, by the reward alone: the task has no accuracy."""
    with create_run(root, kind="sft", recipe_name="r", name=name) as run:
        pass
    for evaluation, reward in rewards.items():
        rows = [row(f"{prompt}{i}", score=x * (1.0 if reward is ONE else 2.0), images=()) for i, x in enumerate(right)]
        for one in rows:
            del one["outcome"]["accuracy"], one["accuracy"]
        meta = {"split": "test", "role": "test", "source": source, "reward": reward, "reward_args": {}, "argv": ARGV}
        write_evaluation(layout.eval_dir(run.dir, evaluation), Evaluation(rows, summarise(rows)), meta)
    return run


def rewards_of(found: dict[str, Any]) -> dict[str, float]:
    return {
        d["pair"]: d["difference"] for e in found["evaluations"] for d in e["differences"] if d["metric"] == "reward"
    }


def test_of_several_evaluations_of_the_same_rows_those_of_equal_rewards_are_compared(tmp_path: Path):
    scored_run(tmp_path, "kk", [1, 1, 1, 0] * 5, {"test": ONE})
    scored_run(tmp_path, "lora", [1, 0, 0, 0] * 5, {"test": OTHER, "same": ONE})
    scored_run(tmp_path, "rl", [1, 1, 1, 1] * 5, {"test": ONE})
    pair = compare(open_side(tmp_path, "kk"), open_side(tmp_path, "lora"))
    (evaluation,) = pair["evaluations"]
    assert evaluation["scored_alike"] and Path(evaluation["b"]).name == "same"
    assert pair["conclusion"]["answer"] == "worse" and evaluation["metrics"][0]["difference"] == -0.5
    assert "same" in next(note for note in pair["notes"] if "lora" in note)
    three = compare_settings(open_settings(tmp_path, ["kk", "lora", "rl"]))
    assert rewards_of(three) == {"B - A": -0.5, "C - A": 0.25}


def test_where_no_rewards_are_equal_a_command_makes_them_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Run, "checkpoint_dirs", lambda run: [run.dir])
    scored_run(tmp_path, "kk", [1, 0] * 5, {"test": ONE})
    scored_run(tmp_path, "lora", [1, 0] * 5, {"test": OTHER, "test-as-kk": OTHER})
    text = compare(open_side(tmp_path, "kk"), open_side(tmp_path, "lora"))["conclusion"]["text"]
    assert "vlmrl eval lora" in text and "--recipe rl.toml --split test.jsonl --n=2 --name test-as-kk-2" in text
    assert "--step" not in text and "--force" not in text and "RECIPE" not in text


@pytest.mark.parametrize("refs", [("tiny", "lora", "rl"), ("lora", "tiny", "rl")])
def test_a_run_of_another_reward_is_left_out_by_name_and_the_others_are_compared(refs: tuple[str, ...], tmp_path: Path):
    for name, right, reward in (("tiny", [0] * 20, ONE), ("lora", [1] * 20, OTHER), ("rl", [1, 0] * 10, ONE)):
        scored_run(tmp_path, name, right, {"test": reward})
    found = compare_settings(open_settings(tmp_path, refs))
    letters = dict(zip(refs, "ABC", strict=True))
    assert rewards_of(found) == {f"{letters['rl']} - {letters['tiny']}": 0.5}
    assert found["conclusion"]["text"].startswith(f"{letters['rl']} is better than {letters['tiny']}: reward +0.500")
    (note,) = found["notes"]
    assert note.startswith(f"test-flat: {letters['lora']} lora is left out: it was scored by another reward than tiny")


def test_a_run_of_other_rows_is_left_out_and_its_rows_are_the_reason(tmp_path: Path):
    for name, prompt, place in (("a", "p", "test"), ("b", "p", "test"), ("c", "q", "test"), ("d", "p", "mine")):
        scored_run(tmp_path, name, [1, 0] * 10, {place: ONE}, prompt, "flat" if place == "test" else "elsewhere")
    found = compare_settings(open_settings(tmp_path, ["a", "b", "c", "d"]))
    assert rewards_of(found) == {"B - A": 0.0}
    assert sorted(found["notes"]) == [
        "test-flat: C c is left out: it answered other rows",
        "test-flat: D d is left out: it has no evaluation of these rows",
    ]
    apart = compare_settings(open_settings(tmp_path, ["a", "c", "d"]))
    assert apart["evaluations"] == [] and "not known" in apart["conclusion"]["text"]


def test_runs_that_were_sampled_otherwise_are_told(tmp_path: Path):
    for name, limit in (("a", 64), ("b", 64), ("c", 8)):
        path = layout.eval_dir(scored_run(tmp_path, name, [1, 0] * 10, {"test": ONE}).dir, "test") / layout.EVAL_SUMMARY
        summary = json.loads(path.read_text())
        summary["meta"]["sampling"] = {"greedy": True, "max_new_tokens": limit}
        path.write_text(json.dumps(summary))
    assert compare_settings(open_settings(tmp_path, ["a,b", "b,a"]))["notes"] == []
    (note,) = compare_settings(open_settings(tmp_path, ["a", "b", "c"]))["notes"]
    assert note == "test: the runs were evaluated with different max_new_tokens"
    columns = [c for name in "abc" for c in eval_columns(open_run(tmp_path, name), name, 0)[0]]
    notes = [eval_tables(group)[0]["notes"] for group in (columns, columns[:2])]
    told = "These were evaluated with different max_new_tokens."
    assert told in notes[0] and told not in notes[1]


def test_rows_in_common_of_all_runs_count(root: Path):
    make_run(root, "f1", RIGHT["b1"][:6])
    found = compare_settings(open_settings(root, ["a1,a2", "f1"]))
    assert found["evaluations"][0]["rows"] == 6
    with create_run(root, kind="rl", recipe_name="r", name="empty"):
        pass
    none = compare_settings(open_settings(root, ["a1,a2", "empty"]))
    assert none["evaluations"] == [] and "no evaluation in common" in none["notes"][-1]
    assert "not known" in none["conclusion"]["text"]


def test_what_is_a_list_of_settings_and_what_is_not(root: Path, tmp_path: Path):
    assert is_list(["a,b", "c"]) and is_list(["a", "b", "c"])
    assert not is_list(["a", "b"]) and not is_list(["a,", "b"])
    (tmp_path / "with,comma").mkdir()
    assert not is_list([str(tmp_path / "with,comma"), "b"])
    with pytest.raises(StoreError, match="has the run a1 twice"):
        open_settings(root, ["a1,a1", "b1"])
    with pytest.raises(StoreError, match="no run `,`"):
        open_settings(root, [",", "a1,a2"])
    with pytest.raises(StoreError, match="at most 26"):
        open_settings(root, ["a1"] * 27)


def test_samples_of_a_prompt_give_pass_at_k_of_settings():
    def evaluation(*right: list[int]) -> Evaluation:
        rows = [
            row(f"p{i}", sample=k, confidence=0.9 if x else 0.1, images=())
            for i, own in enumerate(right)
            for k, x in enumerate(own)
        ]
        return Evaluation(rows, summarise(rows))

    one, other = evaluation([1, 0], [0, 0], [1, 1]), evaluation([0, 1], [0, 1], [1, 1])
    shared = shared_values([one, other])
    assert shared["pass@2"].value_EN.tolist() == [[1, 0, 1], [1, 1, 1]]
    assert shared["pass@1"].value_EN.tolist() == [[0.5, 0, 1], [0.5, 0.5, 1]]
    assert shared["accuracy"].value_EN.shape == (2, 6) and len(shared["mean@2"].clusters) == 3
