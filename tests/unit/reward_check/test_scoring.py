"""One pass over many rows: several processes say what one says, memory is bounded, words are a fair sample."""

from __future__ import annotations

import random
from dataclasses import fields

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reward_runs import LEVELS, make_pair_run, pair_texts, pair_truth

from vlmrl.reward_check import response_tables, scoring
from vlmrl.reward_check.rescore import named_rewards, own_rewards, scan_saved
from vlmrl.reward_check.response_tables import open_table
from vlmrl.reward_check.responses import ResponseColumns
from vlmrl.reward_check.scores import Coded, Scores, same_scores
from vlmrl.reward_check.scoring import open_saved
from vlmrl.types import Score


def pair_table(path, rows, seed=0):
    rng = random.Random(seed)
    made = []
    for group in range(rows // 4):
        truth = pair_truth(rng)
        for text in pair_texts(truth, 4, rng):
            made.append({"response": text, "truth": truth, "group": f"g{group}", "step": group % 5})
    pq.write_table(pa.Table.from_pylist(made), path, row_group_size=37)
    return path


def equal(a, b) -> bool:
    if isinstance(a, Coded):
        return [a[i] for i in range(len(a))] == [b[i] for i in range(len(b))]
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [False, True])
def test_two_processes_say_what_one_says(fault, tmp_path, monkeypatch):
    monkeypatch.setattr(response_tables, "CHUNK_ROWS", 23)
    monkeypatch.setattr(scoring, "POOL_ROWS", 40)
    monkeypatch.setattr(scoring, "MAX_TEXTS", 60)
    path = pair_table(tmp_path / "rows.parquet", 400)

    changed = {"levels": LEVELS, "answer": "truncated_bce" if fault else "brier"}

    def scanned(jobs):
        saved = open_table(path, task="pairs")
        side = named_rewards(saved, "taxonomy", args={"levels": LEVELS}, weights=None)
        other = named_rewards(saved, "taxonomy", args=changed, weights=None)
        return scan_saved(saved, [side, other], jobs=jobs)

    one, two = scanned(1), scanned(2)
    assert len(one.facts) == 400 and one.texts == two.texts and 20 < len(one.texts) < 200
    for field in fields(ResponseColumns):
        assert equal(getattr(one.facts, field.name), getattr(two.facts, field.name)), field.name
    assert equal(one.right_N, two.right_N) and 0 < np.nanmean(one.right_N) < 1
    for a, b in zip(one.sides, two.sides, strict=True):
        assert same_scores(a, b).all() and equal(a.notes, b.notes)
    assert same_scores(one.sides[0], one.sides[1]).all() != fault


@pytest.mark.slow
def test_a_failing_reward_stops_in_a_process_too_with_its_row(tmp_path, monkeypatch):
    from vlmrl.errors import RewardError

    monkeypatch.setattr(response_tables, "CHUNK_ROWS", 23)
    monkeypatch.setattr(scoring, "POOL_ROWS", 40)
    rows = [{"response": "1", "answer": "one" if i == 77 else "1"} for i in range(100)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    saved = open_table(tmp_path / "rows.parquet")
    side = named_rewards(saved, "number_match", args={}, weights=None)
    with pytest.raises(RewardError, match="the expected answer 'one' is not a number") as error:
        scan_saved(saved, [side], jobs=2)
    assert error.value.where is not None and error.value.where.endswith("rows.parquet row 77")
    found = scan_saved(saved, [side], jobs=2, keep_going=True)
    assert found.sides[0].failed_N.tolist() == [i == 77 for i in range(100)]


@pytest.mark.slow
def test_texts_are_kept_by_whole_groups_and_do_not_depend_on_the_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "MAX_TEXTS", 40)
    path = pair_table(tmp_path / "rows.parquet", 400)
    kept = []
    for size in (7, 64, 1000):
        monkeypatch.setattr(response_tables, "CHUNK_ROWS", size)
        found = scan_saved(open_table(path, task="pairs"), [])
        kept.append(found.texts)
        groups = [found.facts.groups_N[row] for row in found.texts]
        assert all(groups.count(g) == 4 for g in set(groups))
    assert kept[0] == kept[1] == kept[2] and 8 <= len(kept[0]) <= 120


def test_a_run_is_read_in_pieces_as_a_whole(tmp_path, monkeypatch):
    from vlmrl.reward_check import responses

    make_pair_run(tmp_path)
    saved = open_saved("last", tmp_path)
    whole = scan_saved(saved, [own_rewards(saved)])
    monkeypatch.setattr(responses, "CHUNK_ROWS", 5)
    saved = open_saved("last", tmp_path)
    pieces = scan_saved(saved, [own_rewards(saved)])
    for field in fields(ResponseColumns):
        assert equal(getattr(whole.facts, field.name), getattr(pieces.facts, field.name)), field.name
    assert same_scores(whole.sides[0], pieces.sides[0]).all() and same_scores(whole.stored, pieces.stored).all()
    only = open_saved("last", tmp_path, source="digits").pick([0, 13, 47, 99])
    assert list(only) == [0, 13, 47] and only[13].input.response == saved.pick([13])[13].input.response


def test_columns_and_scores_round_trip():
    scores = [
        Score(1.0, {"a": 1.0, "b": None}, "fine"),
        Score(float("nan"), {}, error="broke"),
        Score(0.5, {"c": 0.25}, ""),
        Score(float("nan"), {}, error="down", status="unavailable"),
    ]
    table = Scores.concat([Scores.of(scores[:2]), Scores.of([]), Scores.of(scores[2:])])
    assert [s.status for s in table] == ["ok", "failed", "ok", "unavailable"]
    assert table.unavailable_N.tolist() == [False, False, False, True]
    assert table.at(np.array([3, 1])).unavailable_N.tolist() == [True, False]
    table = table.at(np.arange(3))
    assert [s.value for s in table if s.error is None] == [1.0, 0.5]
    assert table[0].parts == {"a": 1.0, "b": None, "c": None} and table[0].note == "fine"
    assert table[1].error == "broke" and table[1].parts == {} and table.failed_N.tolist() == [False, True, False]
    assert table[2].parts == {"a": None, "b": None, "c": 0.25}
    assert list(table.at(np.array([2, 0])).values_N) == [0.5, 1.0]


def test_the_hash_spreads_consecutive_and_large_numbers():
    for numbers in (np.arange(100_000), np.arange(100_000) << 32, np.arange(100_000) * 16 + (7 << 40)):
        low = scoring.hashes(numbers) < scoring.HASH_RANGE // 8
        assert abs(float(low.mean()) - 1 / 8) < 0.01
