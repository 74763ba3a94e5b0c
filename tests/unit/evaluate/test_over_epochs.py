"""Results over epochs: means, maxima and selected checkpoints of runs and of their seeds, by hand."""

from __future__ import annotations

import json
import math

import pytest
from epoch_runs import PAPER, epoch_run
from typer.testing import CliRunner

from vlmrl.cli.app import app
from vlmrl.evaluate.over_training import (
    RunEpochs,
    epoch_means,
    group_runs,
    notes_of_maxima,
    over_epochs,
    published_here,
    read_epochs,
    words_of_start,
)

TEST, VALIDATION = "test/pass8/pass@8", "validation/pass8/pass@8"
# Epochs 0 to 3. Seed 1: mean (0.3 + 0.5 + 0.4) / 3 = 0.4, maximum 0.5 at epoch 2, selected epoch 3: 0.4.
# Seed 2: mean (0.4 + 0.4 + 0.7) / 3 = 0.5, maximum 0.7 at epoch 3, selected epoch 1: 0.4.
SEEDS = ({TEST: [0.2, 0.3, 0.5, 0.4]}, {TEST: [0.3, 0.4, 0.4, 0.7]})


def read(run) -> RunEpochs:
    epochs = read_epochs(run)
    assert epochs is not None
    return epochs


def only(entries, metric):
    (entry,) = [entry for entry in entries if entry["metric"] == metric]
    return entry


def test_base_mean_maximum_and_selected_over_two_seeds_by_hand(tmp_path):
    runs = [epoch_run(tmp_path, f"rl-{i}", SEEDS[i], seed=i, best=(3, 1)[i]) for i in range(2)]
    (group,) = group_runs(runs)
    entry = only(over_epochs([("A", [read(run) for run in group])]), TEST)
    (setting,) = entry["settings"]
    assert setting["runs"] == ["rl-0", "rl-1"] and setting["epochs"] == 3 and setting["kind"] == "rl"
    # The standard deviation of two numbers is their difference over the root of 2.
    for column, values in (("base", [0.2, 0.3]), ("mean", [0.4, 0.5]), ("max", [0.5, 0.7]), ("selected", [0.4, 0.4])):
        band = setting[column]
        assert band["runs"] == pytest.approx(values)
        assert band["mean"] == pytest.approx(sum(values) / 2)
        assert band["sd"] == pytest.approx((values[1] - values[0]) / math.sqrt(2), abs=1e-12)
    assert setting["at"] == [2.0, 3.0]
    assert setting["paper"] == {"base": 0.29, "mean": 0.352, "max": 0.427}
    assert entry["role"] == "test"
    label = "best of 3 epochs and the start, chosen on these test rows themselves: too good for new rows"
    assert setting["best_of"] == label and notes_of_maxima([entry]) == [f"A: {label}"]
    assert setting["selected_at"] == [3.0, 1.0] and words_of_start(setting) == ""


def test_columns_of_sft_and_rl_have_their_own_published_numbers(tmp_path):
    rl = epoch_run(tmp_path, "rl", {TEST: [0.2, 0.4], VALIDATION: [0.3, 0.5]})
    sft = epoch_run(tmp_path, "sft", {TEST: [0.2, 0.1], VALIDATION: [0.3, 0.4]}, kind="sft")
    entries = over_epochs([("SFT", [read(sft)]), ("RL", [read(rl)])])
    papers = [s["paper"] for s in only(entries, TEST)["settings"]]
    assert papers == [{"base": 0.29, "mean": 0.252, "max": 0.32}, {"base": 0.29, "mean": 0.352, "max": 0.427}]
    of_validation = only(entries, VALIDATION)
    assert [s["paper"] for s in of_validation["settings"]] == [
        {"base": 0.36},
        {"base": 0.36, "mean": 0.485, "max": 0.557},
    ]
    label = "best of 1 epoch and the start, chosen on these validation rows"
    assert [s["best_of"] for s in of_validation["settings"]] == [label, label]
    assert [s["max"]["sd"] for s in of_validation["settings"]] == [None, None]


def test_a_start_that_validation_selected_is_marked_and_counts_for_the_maximum(tmp_path):
    runs = [epoch_run(tmp_path, f"rl-{i}", {VALIDATION: [0.9, 0.7, 0.8]}, seed=i, best=i) for i in (0, 2)]
    short = epoch_run(tmp_path, "short", {VALIDATION: [0.5, 0.6]}, lr=1.0, best=0)
    settings = [("A", [read(run) for run in runs]), ("B", [read(short)])]
    entries = over_epochs(settings)
    first, second = only(entries, VALIDATION)["settings"]
    assert (first["max"]["runs"], first["at"], first["selected"]["runs"]) == ([0.9, 0.9], [0.0, 0.0], [0.9, 0.8])
    assert [words_of_start(s) for s in (first, second)] == ["at epochs 0, 2", "at epoch 0"]
    rows = "chosen on these validation rows"
    notes = [f"A: best of 2 epochs and the start, {rows}", f"B: best of 1 epoch and the start, {rows}"]
    assert notes_of_maxima(entries) == notes


def test_runs_are_one_setting_if_nothing_but_seeds_differs(tmp_path):
    values = {TEST: [0.2, 0.4]}
    first = epoch_run(tmp_path, "a", values, seed=1)
    other_lr = epoch_run(tmp_path, "b", values, seed=1, lr=2e-6)
    second = epoch_run(tmp_path, "c", values, seed=2)
    supervised = epoch_run(tmp_path, "d", values, kind="sft")
    names = [[run.manifest.name for run in group] for group in group_runs([first, other_lr, second, supervised])]
    assert names == [["a", "c"], ["b"], ["d"]]


def test_the_leading_metric_and_the_largest_k_of_each_set_and_setting(tmp_path):
    values = {
        "accuracy": [0.1, 0.1], "reward": [0.5, 0.5],  # once more, of the rows that select
        "validation/pass8/accuracy": [0.1, 0.2], "validation/pass8/accuracy_low": [0.0, 0.1],
        "validation/pass8/reward": [0.5, 0.6], "validation/pass8/pass@2": [0.2, 0.3],
        "validation/pass8/pass@8": [0.3, 0.4], "validation/pass8/pass@8_low": [0.2, 0.3],
        "validation/pass8/mean@8": [0.1, 0.2], "validation/pass8/part/accuracy": [1.0, 1.0],
        "test/greedy/reward": [0.4, 0.5],
    }  # fmt: skip
    found = read(epoch_run(tmp_path, "a", values))
    assert [*found.values] == ["validation/pass8/accuracy", VALIDATION, "test/greedy/reward"]
    plain = read(epoch_run(tmp_path, "b", {"accuracy": [0.1, 0.2], "reward": [0.5, 0.5]}))
    assert [*plain.values] == ["accuracy"] and plain.values["accuracy"] == [0.1, 0.2]


def test_means_of_training_over_an_epoch_are_weighted_by_responses():
    lines = [
        {"step": 0, "reward/accuracy": 0.0, "rollout/samples": 1},
        {"step": 1, "reward/accuracy": 1.0, "rollout/samples": 3},
        {"step": 2, "reward/accuracy": 0.5, "rollout/samples": 4},
        {"step": 3, "rollout/samples": 4},
        {"step": 4, "reward/accuracy": 0.25, "rollout/samples": 4},
    ]
    # Validations at steps 0, 2, 4: (0 x 1 + 1 x 3) / 4 before step 2; only step 2 has a value before step 4. Step 4 is
    # after the last validation.
    assert epoch_means(lines, [0, 2, 4], "reward/accuracy") == [None, 0.75, 0.5]


def test_a_run_that_is_validated_at_steps_has_no_results_over_epochs(tmp_path):
    run = epoch_run(tmp_path, "a", {TEST: [0.1, 0.2]})
    path = run.dir / "metrics.jsonl"
    path.write_text(path.read_text().replace('"eval/epoch"', '"eval/other"'))
    assert read_epochs(run) is None and over_epochs([]) == []


def test_published_numbers_of_one_evaluation():
    paper = {"numbers": {**PAPER["numbers"], "accuracy": 0.9, "accuracy/genus": 0.8, "test/brier": 0.1}}
    assert published_here(paper, {"split": "test", "setting": "pass8"}) == {
        "pass@8": "base 0.29, sft 0.252, rl 0.352, sft_max 0.32, rl_max 0.427",
        "accuracy": 0.9, "accuracy/genus": 0.8, "test/brier": 0.1,
    }  # fmt: skip
    without = published_here(paper, {"split": "test"})
    assert without["brier"] == 0.1 and without["accuracy/genus"] == 0.8 and "pass@8" not in without
    assert published_here({}, {"split": "test"}) == {}


def test_compare_shows_settings_over_epochs(tmp_path):
    for i in range(2):
        epoch_run(tmp_path, f"rl-{i}", SEEDS[i], seed=i, best=(3, 1)[i])
        epoch_run(tmp_path, f"sft-{i}", {TEST: [0.2, 0.1, 0.1, 0.1]}, seed=i, kind="sft")
    words = ["compare", "sft-0,sft-1", "rl-0,rl-1", "--runs", str(tmp_path)]
    shown = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "Over epochs, mean over runs +- one standard deviation" in shown.output
    assert "0.450 +- 0.071" in shown.output and "0.600 +- 0.141" in shown.output
    assert "0.290, 0.352, 0.427".replace("0.290", "0.29") in shown.output
    assert "chosen on these test rows themselves" in shown.output
    result = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    (entry,) = result["epochs"]
    assert [s["label"] for s in entry["settings"]] == ["A", "B"]
    two = json.loads(CliRunner().invoke(app, ["compare", "sft-0", "rl-0", "--runs", str(tmp_path), "--json"]).output)
    assert [s["mean"]["mean"] for s in two["epochs"][0]["settings"]] == pytest.approx([0.1, 0.4])
