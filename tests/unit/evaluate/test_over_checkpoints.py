"""Results over checkpoints: mean, the selected one, and the label of a maximum that was chosen on its own rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_builders import row

from vlmrl.evaluate.metrics import summarise
from vlmrl.evaluate.over_training import over_checkpoints, picked_by_hand, summary_over_steps, words_of_steps
from vlmrl.evaluate.records import Evaluation, write_evaluation
from vlmrl.store import layout
from vlmrl.store.runs import Run, create_run


def summary(step: int | None, accuracy: float | None, **meta: Any) -> dict[str, Any]:
    metrics = {} if accuracy is None else {"accuracy": {"value": accuracy, "better": "higher"}}
    return {"metrics": metrics, "meta": {"step": step, "role": "test", **meta}}


def test_mean_maximum_and_the_selected_step_by_hand():
    found = summary_over_steps([summary(20, 0.7), summary(10, 0.4), summary(30, 0.55)], "accuracy", 30)
    assert found is not None
    assert (found["steps"], found["values"], found["mean"]) == ([10, 20, 30], [0.4, 0.7, 0.55], pytest.approx(0.55))
    assert found["best"] == {
        "step": 20, "value": 0.7,
        "label": "best of 3 checkpoints, chosen on these test rows themselves: too good for new rows",
    }  # fmt: skip
    assert found["selected"] == {"step": 30, "value": 0.55, "by": "validation"}
    assert words_of_steps(found) == (
        "accuracy over 3 checkpoints: mean 0.550; 0.550 at step 30, which validation selected; 0.700 at step 20 "
        "(best of 3 checkpoints, chosen on these test rows themselves: too good for new rows)"
    )


def test_without_validation_the_last_step_counts_and_not_the_best():
    two = [summary(1, 0.9), summary(2, 0.1)]
    found = summary_over_steps(two, "accuracy", None)
    assert found is not None and found["selected"] == {"step": 2, "value": 0.1, "by": "the last step"}
    missing = summary_over_steps(two, "accuracy", 5)
    assert missing is not None and missing["selected"] is None
    assert summary_over_steps(two[:1], "accuracy", None) is None
    assert summary_over_steps([*two[:1], summary(3, None), summary(None, 0.5)], "accuracy", None) is None


def test_the_best_of_a_metric_that_is_better_when_lower_is_its_minimum():
    rows = [
        {"metrics": {"brier": {"value": v}}, "meta": {"step": i, "role": "validation"}}
        for i, v in enumerate((0.0, 0.3, 0.1))  # step 0 is not trained
    ]
    found = summary_over_steps(rows, "brier", None)
    assert found is not None and found["best"]["value"] == 0.1
    assert found["best"]["label"] == "best of 2 checkpoints, chosen on these validation rows"


def test_the_maximum_over_checkpoints_of_an_unchanging_policy_is_too_good():
    """The reason for the label: 30 evaluations of the same policy on 100 rows, whose accuracy is 0.3."""
    rng = np.random.default_rng(0)
    gains = []
    for _ in range(200):
        values = rng.binomial(100, 0.3, size=30) / 100
        found = summary_over_steps([summary(i, float(v)) for i, v in enumerate(values)], "accuracy", None)
        assert found is not None
        gains.append(found["best"]["value"] - found["mean"])
    assert 0.08 < np.mean(gains) < 0.11


def run_with_steps(root: Path, best: int | None = None, label: str = "") -> Run:
    run = create_run(root, kind="rl", recipe_name="r")
    with run:
        if label:
            run.add_label(label)
        if best is not None:
            run.set_best(best, "accuracy", 0.5)
        for step, confidence in ((1, 0.9), (2, 0.1)):
            for split, role in (("test", "test"), ("validation", "validation")):
                rows = [row(f"p{i}", confidence=confidence, score=0.5) for i in range(4)]
                folder = layout.eval_dir(run.dir, f"{split}-digits-step-{step:06d}")
                write_evaluation(folder, Evaluation(rows, summarise(rows)), {"step": step, "role": role})
        (run.dir / "eval" / "broken").mkdir()
        (run.dir / "eval" / "broken" / "summary.json").write_text("{")
    return run


def test_the_evaluations_of_a_run_are_grouped_by_their_rows(tmp_path: Path):
    entries = over_checkpoints(run_with_steps(tmp_path, best=2))
    assert [(e["evaluation"], e["metric"], e["role"]) for e in entries] == [
        ("test-digits", "accuracy", "test"), ("validation-digits", "accuracy", "validation"),
    ]  # fmt: skip
    assert entries[0]["selected"] == {"step": 2, "value": 0.0, "by": "validation"}
    assert (entries[0]["best"]["step"], entries[0]["best"]["value"]) == (1, 1.0)


def test_evaluations_of_one_name_by_other_rewards_are_other_groups(tmp_path: Path):
    rows = [row(f"p{i}", score=0.5) for i in range(4)]
    with create_run(tmp_path, kind="rl", recipe_name="r") as run:
        for step, name in ((1, "a"), (2, "a"), (3, "b"), (4, "b"), (5, "c")):
            reward = {"name": name, "version": 1, "weights": {}}
            folder = layout.eval_dir(run.dir, f"test-digits-step-{step:06d}")
            write_evaluation(
                folder, Evaluation(rows, summarise(rows)), {"step": step, "role": "test", "reward": reward}
            )
    entries = [(e["evaluation"], e["steps"]) for e in over_checkpoints(run) if e["metric"] == "accuracy"]
    assert entries == [
        ("test-digits, scored by a version 1, its own weights", [1, 2]),
        ("test-digits, scored by b version 1, its own weights", [3, 4]),
    ]


def test_a_run_that_was_validated_on_test_rows_says_so(tmp_path: Path):
    run = run_with_steps(tmp_path, 1, "validated on the test split")
    (entry, _) = over_checkpoints(run)
    assert "at step 1, the best of a run validated on the test split;" in words_of_steps(entry)


@pytest.mark.parametrize(("best", "warned"), [(1, 2), (2, 1), (None, 1)])
def test_an_evaluation_of_another_step_than_the_selected_one_is_pointed_out(tmp_path: Path, best, warned: int):
    run = run_with_steps(tmp_path, best)
    texts = {step: picked_by_hand(layout.eval_dir(run.dir, f"test-digits-step-{step:06d}"), run) for step in (1, 2)}
    assert [step for step, text in texts.items() if text] == [warned]
    assert "1 of 2 checkpoints evaluated on these rows" in texts[warned]
    assert not picked_by_hand(layout.eval_dir(run.dir, f"validation-digits-step-{warned:06d}"), run)
    assert not picked_by_hand(layout.eval_dir(run.dir, "test-digits-step-000001"), None)
