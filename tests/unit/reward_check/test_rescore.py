from __future__ import annotations

import hashlib
import io
import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from reward_runs import make_pair_run, make_table_run, scored_groups

from vlmrl.errors import RewardError, StoreError
from vlmrl.reward_check.rescore import groups_of, named_rewards, own_rewards, parse_weights, scan_saved
from vlmrl.reward_check.run import RewardQuestion, check_rewards
from vlmrl.reward_check.scores import Coded, Scores
from vlmrl.reward_check.scoring import open_saved
from vlmrl.reward_check.statistics import compare_stored, disagreements, mean, part_table, reasons
from vlmrl.rewards import reward_record
from vlmrl.rewards.scoring import Scorer
from vlmrl.store.media import write_shard
from vlmrl.store.runs import create_run
from vlmrl.tasks.builtin_rewards import REWARDS, load_reward
from vlmrl.types import Group, Media, Row, Score, ScoredSample, Segment, Trajectory

EXACT = "def reward(completions, answer, **kwargs): return [float(a == c) for c, a in zip(completions, answer)]\n"


def rescored(root: Path, ref: str = "last"):
    saved = open_saved(ref, root)
    own = own_rewards(saved)
    return saved, own, scan_saved(saved, [own])


def compared(found, scores=None):
    return compare_stored(found.facts, found.stored, found.sides[0] if scores is None else Scores.of(scores))


def rows_in(saved) -> int:
    return sum(chunk.rows for chunk in saved.reader.chunks())


def test_a_run_scored_again_says_the_same_to_the_digit(tmp_path):
    run = make_pair_run(tmp_path)
    saved, own, found = rescored(tmp_path)
    result = compared(found)
    assert (result["equal"], result["different"], result["largest_difference"]) == (True, 0, 0.0)
    assert own["digits"].changed == ""
    assert len(found.sides[0]) == 48 and len(groups_of(found.facts)) == 12
    stored = [s for step in (0, 1) for g in run.read_rollouts(step) for s in g.samples]
    samples = list(saved.pick(range(48)).values())
    numbers = [replace(s.score, detail=None) for s in stored]  # columns keep no details
    assert numbers == [s.score for s in samples] == list(found.stored)
    assert [s.text for s in stored] == [s.input.response for s in samples]
    assert {s.input.num_tokens for s in samples} == set(found.facts.tokens_N.tolist()) == {3}
    assert found.facts.chars_N.tolist() == [len(s.text) for s in stored]
    assert found.facts.advantages_N.tolist() == [s.advantage for s in stored]


def test_one_changed_digit_is_found(tmp_path):
    make_pair_run(tmp_path)
    saved, _, found = rescored(tmp_path)
    scores = list(found.sides[0])
    value, parts = scores[7].value, scores[7].parts
    scores[7] = Score(math.nextafter(value, 2), parts)
    result = compared(found, scores)
    assert not result["equal"] and result["different"] == 1
    assert result["largest_difference"] == math.nextafter(value, 2) - value
    assert result["worst"][0]["row"] == 7 and saved.pick([7])[7].where == "step 1, row 0-1 of digits, sample 3"
    scores[7] = Score(value, {**parts, "format": 0.25})
    assert compared(found, scores)["different"] == 1
    scores[7] = Score(math.nan, {}, error="no answer from judge:8000", status="unavailable")
    assert compared(found, scores)["equal"], "a service that is down says nothing of the reward"
    scores[7] = Score(math.nan, {}, error="ValueError: mine")
    assert compared(found, scores)["different"] == 1


def test_the_places_rollouts_may_be_named_by(tmp_path):
    run = make_pair_run(tmp_path)
    for ref in ("last", "im", run.id, run.id[:10], str(run.dir)):
        assert rows_in(open_saved(ref, tmp_path)) == 48
    folder = open_saved(str(run.dir / "rollouts"), tmp_path / "elsewhere")
    assert rows_in(folder) == 48 and folder.run is not None and folder.run.id == run.id
    one = open_saved(str(next((run.dir / "rollouts").glob("*.parquet"))), tmp_path)
    assert rows_in(one) == 24 and one.run is not None
    later = open_saved("last", tmp_path, steps=(1, 5))
    assert {s.step for s in later.pick(range(48)).values()} == {1}
    for bad in ({"steps": (7, 9)}, {"source": "birds"}):
        with pytest.raises(StoreError, match="no saved rollouts"):
            open_saved("last", tmp_path, **bad)
    with pytest.raises(StoreError, match="no such rollout file"):
        open_saved(str(tmp_path / "x.parquet"), tmp_path)


def test_loose_files_and_a_damaged_manifest_are_still_read(tmp_path):
    run = make_pair_run(tmp_path / "runs")
    (run.dir / "manifest.json").write_text('{"schema": 1, "id"')
    saved = open_saved(str(run.dir / "rollouts"), tmp_path)
    assert rows_in(saved) == 48 and saved.run is None and "cannot be read" in saved.notes[0]
    with pytest.raises(RewardError, match="not recorded which reward"):
        own_rewards(saved)
    again = scan_saved(saved, [named_rewards(saved, "taxonomy", args={}, weights=None)])
    assert compared(again)["equal"]  # the levels are found in the truth
    with pytest.raises(StoreError, match=r"manifest\.json is cut off"):
        open_saved(str(run.dir), tmp_path)


AT_75082C1 = "33af6ce6b71c533cc1ffc60aaac03d3868f9f443e005848dda2761ec0512ffcb"
"""What runs of that commit recorded for the reward `taxonomy`."""


@pytest.mark.parametrize(
    ("known_by", "told"),
    [
        ({"sha256": AT_75082C1}, ""),
        (
            {"version": 2},
            "the built-in `taxonomy` has changed since the run: it is version 1, and the run has version 2",
        ),
        ({"sha256": "4" * 64}, "changed since the run: it is version 1, and the run has source 444444444444"),
        ({}, "it is version 1, and the run has version unknown"),
    ],
)
def test_a_built_in_of_another_version_is_told(tmp_path, monkeypatch, known_by, told):
    monkeypatch.setitem(REWARDS, "taxonomy", replace(REWARDS["taxonomy"], version=1))
    run = make_pair_run(tmp_path)
    manifest = json.loads((run.dir / "manifest.json").read_text())
    del manifest["rewards"][0]["version"]
    manifest["rewards"][0] |= known_by
    (run.dir / "manifest.json").write_text(json.dumps(manifest))
    changed = own_rewards(open_saved("last", tmp_path))["digits"].changed
    assert changed.endswith(told) and bool(changed) == bool(told)


def test_a_users_reward_is_scored_again_and_a_changed_file_is_told(tmp_path):
    file = tmp_path / "r.py"
    file.write_text(EXACT)
    make_table_run(tmp_path / "runs", file)
    saved, own, found = rescored(tmp_path / "runs")
    assert compared(found)["equal"] and own["sums"].changed == ""
    file.write_text(EXACT.replace("a == c", "a in c"))
    _, own, found = rescored(tmp_path / "runs")
    assert own["sums"].changed == f"{file} has changed since the run"
    assert compared(found)["equal"]
    file.unlink()
    with pytest.raises(RewardError, match="there is no reward file"):
        own_rewards(saved)


def test_a_reward_over_the_batch_is_called_as_in_training(tmp_path):
    file = tmp_path / "r.py"
    file.write_text("def reward(completions, **kwargs): return [float(len(completions)) for c in completions]\n")
    make_table_run(tmp_path / "runs", file)
    _, _, found = rescored(tmp_path / "runs")
    assert {s.value for s in found.sides[0]} == {12.0} and compared(found)["equal"]


def test_rows_that_failed_in_training_may_fail_again_but_new_failures_stop(tmp_path):
    file = tmp_path / "r.py"
    file.write_text("def reward(x): return float(x.response)\n")
    make_table_run(tmp_path / "runs", file)
    _, _, found = rescored(tmp_path / "runs")
    result = compared(found)
    assert (result["equal"], result["failed_then"], result["failed_now"]) == (True, 4, 4)
    told = reasons(found.sides[0])
    assert told[0]["count"] == 4 and "could not convert" in told[0]["example"]
    file.write_text("def reward(x):\n    return 1 / int(x.response)\n")
    with pytest.raises(RewardError, match="ZeroDivisionError") as error:
        rescored(tmp_path / "runs")
    assert error.value.where == "step 1, row r0 of sums, sample 0" and "r.py:2 in reward" in error.value.message


def test_part_table_by_hand():
    scores = [Score(1.0, {"a": 1.0, "b": None}), Score(0.0, {"a": 0.0, "b": 0.5}), Score(0.5, {"a": 1.0, "b": 0.5})]
    table = part_table(Scores.of([*scores, Score(math.nan, {}, error="x")]))
    assert table["value"]["mean"] == 0.5 and table["value"]["share_at_max"] == pytest.approx(1 / 3, abs=1e-12)
    assert table["a"]["mean"] == pytest.approx(2 / 3, abs=1e-12) and table["a"]["share_at_min"] == 1 / 3
    # a = (1, 0, 1), value = (1, 0, .5): cov = 1/6, sd = sqrt(2/9), sqrt(1/6) -> (1/6) / sqrt(1/27) = 0.8660
    assert table["a"]["correlation"] == pytest.approx(math.sqrt(0.75), abs=1e-12)
    assert table["b"] == {
        "mean": 0.5,
        "min": 0.5,
        "max": 0.5,
        "share_at_min": 1.0,
        "share_at_max": 1.0,
        "correlation": None,
        "none": 1,
    }
    assert part_table(Scores.of([]))["value"]["mean"] is None


def test_reasons_are_counted_by_kind():
    notes = ["the answer '7' is not a number", "the answer 'x y' is not a number", "no <think>", ""]
    found = reasons(Scores.of([Score(0.0, {}, n) for n in notes]))
    assert [(r["count"], r["share"]) for r in found] == [(2, 0.5), (1, 0.25)]
    assert found[0]["example"] == notes[0]


def test_disagreements_are_found_where_reward_and_accuracy_part(tmp_path):
    make_pair_run(tmp_path)
    saved, _, scan = rescored(tmp_path)
    scores, texts = scan.sides[0], [s.input.response for s in saved.pick(range(48)).values()]

    def found(scored):
        return disagreements(scan.facts, Scores.of(scored), scan.right_N)

    first = found(list(scores))
    # some of the saved responses have the right answer below the wrong names: the gate gives them nothing
    assert first is not None and 0.5 < first["agreement"] < 1 and 0 < first["accuracy"] < 1
    assert "contradicts the names" in first["right_but_unpaid"][0]["new"]["note"]
    by_answer = found([Score(float("<answer>" in text), {}) for text in texts])
    assert by_answer is not None and by_answer["wrong_but_paid"][0]["new"]["value"] == 1.0
    turned = found([Score(-s.value, s.parts) for s in scores])
    assert turned is not None and turned["agreement"] == pytest.approx(1 - first["agreement"], abs=1e-12)


def disagreeing(values, right, sources=None):
    """`disagreements` of one group, or of rows of these sources; right is 1, 0 or NaN."""
    made = [Score(v, {}, error="failed" if math.isnan(v) else None) for v in values]
    facts = SimpleNamespace(
        groups_N=np.zeros(len(values), np.int64),
        rows_N=np.arange(len(values)),
        sources=Coded.of(sources or ["s"] * len(values)),
    )
    found = disagreements(facts, Scores.of(made), np.asarray(right, np.float64), most=9)  # type: ignore[arg-type]
    assert found is not None
    paid, unpaid = ([r["row"] for r in found[k]] for k in ("wrong_but_paid", "right_but_unpaid"))
    assert len(paid) == found["wrong"]["paid"] and len(unpaid) == found["right"]["unpaid"]
    return paid, unpaid, found


def test_a_wrong_answer_that_earns_the_least_is_not_called_paid():
    """Wrong: rows 1 (0), 2 (0.3), 4 (0.1); right: rows 0 (1), 3 (0.2). Means (0 + 0.3 + 0.1) / 3, (1 + 0.2) / 2."""
    paid, unpaid, found = disagreeing([1.0, 0.0, 0.3, 0.2, 0.1], [1, 0, 0, 1, 0])
    assert paid == [2, 4] and unpaid == [3]
    assert found["wrong"] == {"number": 3, "mean": pytest.approx(0.4 / 3, abs=1e-15), "paid": 2}
    assert found["right"] == {"number": 2, "mean": pytest.approx(0.6, abs=1e-15), "unpaid": 1}


def test_what_is_the_least_depends_on_the_reward():
    assert disagreeing([-1.0, -0.5, 1.0], [0, 0, 1])[:2] == ([1], []), "a penalty: the least is the lowest score"
    assert disagreeing([1.0, 1.0], [0, 1])[:2] == ([0], []), "all earn 1, so the wrong one is paid: the least is 0"
    assert disagreeing([0.0, 0.0, 0.0], [0, 0, 1])[:2] == ([], []), "nobody earns anything"
    two = disagreeing([-2.0, 1.0, 0.0, 5.0], [0, 1, 0, 1], ["a", "a", "b", "b"])
    assert two[:2] == ([], []), "each source has a least and a most of its own"
    assert disagreeing([0.5], [0])[2]["right"] == {"number": 0, "mean": None, "unpaid": 0}


def test_a_failed_reward_is_neither_paid_nor_unpaid():
    paid, unpaid, found = disagreeing([math.nan, 0.0, 1.0], [0, 0, 1])
    assert paid == unpaid == [] and found["wrong"]["number"] == 1


@given(st.lists(st.one_of(st.floats(-1e9, 1e9), st.just(math.nan)), max_size=30), st.randoms())
def test_a_mean_leaves_out_nan_and_does_not_depend_on_order(values, rng):
    there = [Fraction(v) for v in values if not math.isnan(v)]
    told = mean(np.asarray(values, np.float64))
    assert told == (float(sum(there)) / len(there) if there else None)
    rng.shuffle(values)
    assert mean(np.asarray(values, np.float64)) == told
    assert mean(np.asarray([True, False, False, True])) == 0.5


def test_agreement_is_the_share_of_pairs_won_as_a_slow_loop_counts_them(tmp_path):
    make_pair_run(tmp_path, steps=3)
    _, _, scan = rescored(tmp_path)
    values, right, won, pairs = scan.sides[0].values_N, scan.right_N, 0.0, 0
    for group in groups_of(scan.facts):
        for u in (i for i in group if right[i] == 1):
            for d in (i for i in group if right[i] == 0):
                won += 1.0 if values[u] > values[d] else 0.5 if values[u] == values[d] else 0.0
                pairs += 1
    told = disagreements(scan.facts, scan.sides[0], right)
    assert pairs > 20 and told is not None and told["agreement"] == pytest.approx(won / pairs, abs=1e-12)


def test_a_task_without_a_measure_has_no_disagreements(tmp_path):
    file = tmp_path / "r.py"
    file.write_text(EXACT)
    make_table_run(tmp_path / "runs", file)
    _, _, scan = rescored(tmp_path / "runs")
    assert disagreements(scan.facts, scan.sides[0], scan.right_N) is None


@pytest.mark.slow
def test_each_source_has_the_accuracy_of_its_own_reward(tmp_path):
    """Sources share the columns of parts. None of them has a part because another has it."""
    bodies = {
        "plain": "return {'length': 0.25}",
        "named": "return {'score': 0.5, 'acc': float(x.response == x.truth['answer'])}",
        "graded": "return {'overall': 0.5, 'accuracy': float(x.response != x.truth['answer'])}",
    }
    specs = {}
    for name, body in bodies.items():
        (tmp_path / f"{name}.py").write_text(f"def score(x):\n    {body}\n")
        specs[name] = load_reward(f"{tmp_path}/{name}.py:score")
    records = [{"source": name, **reward_record(spec, spec.weights)} for name, spec in specs.items()]
    run = create_run(tmp_path / "runs", kind="rl", recipe_name="three", rewards=records)
    groups = []
    for name, spec in specs.items():
        with Scorer(spec) as scorer:
            groups += scored_groups([(Row(f"{name}-1", name, "table", {"answer": "1"}), ["1", "2", "2"])], scorer)
    run.write_rollouts(0, groups)
    run.finish("done")
    report = check_rewards(open_saved("last", tmp_path / "runs"), RewardQuestion()).report
    told = {name: described["accuracy"] for name, described in report["rewards"].items()}
    assert told == {"plain": None, "named": "acc", "graded": "accuracy"}
    assert report["disagreements"]["accuracy"] == pytest.approx((1 + 2) / 6), "named: 1 of 3 right; graded: 2 of 3"
    right = scan_saved(open_saved("last", tmp_path / "runs"), [own_rewards(open_saved("last", tmp_path / "runs"))])
    assert np.array_equal(right.right_N, [math.nan] * 3 + [1, 0, 0] + [0, 1, 1], equal_nan=True)


def test_weights_as_text():
    assert parse_weights("a=1, b=0.5") == {"a": 1.0, "b": 0.5}
    for bad in ("a", "a=", "=1", "a=x", "a=1,,b=2", "a=nan"):
        with pytest.raises(RewardError, match="part=number"):
            parse_weights(bad)


def test_a_reward_that_looks_at_images_gets_those_of_the_run(tmp_path):
    file = tmp_path / "r.py"
    file.write_text("def reward(x): return float(x.images[0].getpixel((1, 1))[0])\n")
    spec = load_reward(f"{file}:reward")
    run = create_run(
        tmp_path / "runs", kind="rl", recipe_name="i", rewards=[{"source": "s", **reward_record(spec, {})}]
    )
    groups, files = [], []
    for red in (7, 200):
        image = Image.new("RGB", (3, 2), (red, 0, 0))
        png = io.BytesIO()
        image.save(png, "PNG")
        media = Media(hashlib.sha256(png.getvalue()).hexdigest(), 3, 2)
        files.append((media.sha256, png.getvalue()))
        t = Trajectory(
            "table", f"r{red}", 0, 0, 0, 1, (1,), (Segment("assistant", (5,), True, (-1.0,)),), (media,), "stop"
        )
        score = Score(float(red), {"reward": float(red)})
        groups.append(
            Group(Row(f"r{red}", "s", "table", {"answer": "x"}, (media,)), "p", (ScoredSample(t, "x", score),))
        )
    run.write_rollouts(0, groups)
    run.finish("done")
    assert spec.needs_images
    with pytest.raises(StoreError, match="cannot be found"):
        rescored(tmp_path / "runs")
    write_shard(run.dir / "media" / "images-00000.arrow", files)
    _, _, found = rescored(tmp_path / "runs")
    assert found.sides[0].values_N.tolist() == [7.0, 200.0] and compared(found)["equal"]


def test_the_mean_of_numbers_whose_sum_is_beyond_a_float():
    assert mean(np.array([1e308, 1e308, np.nan, 1e308])) == pytest.approx(1e308)
    assert mean(np.array([np.nan])) is None
