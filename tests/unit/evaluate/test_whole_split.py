"""Metrics from counts over a whole split: from records on disk, piece by piece, as from responses in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from evaluation_builders import row

from vlmrl.dist.world import ALONE
from vlmrl.errors import DataError, StoreError
from vlmrl.evaluate.metrics import EvalColumns, summarise_columns
from vlmrl.evaluate.records import GradedPieces, Piece, merge_pieces
from vlmrl.evaluate.set_metrics import PooledMetrics, WholeSplit, graded_of, summarise_sets
from vlmrl.tasks import make_task
from vlmrl.tasks.reflection import REFLECTION, ReflectionCounts
from vlmrl.types import RewardInput, Score

TASK = make_task("geometry3k", {})
TEXTS = ["Wait, let me re-check.", "So 3.", "the waiter", "I verify it", "yes", "no"] * 4


def records() -> list[dict[str, Any]]:
    made = []
    for k, text in enumerate(TEXTS):
        accuracy = None if k % 5 == 4 else float(k % 3 == 0)
        made.append({**row(f"p{k}", score=0.5, images=(f"i{k}",)), "text": text, "num_tokens": 3 + k})
        made[-1] |= {"outcome": {"accuracy": accuracy}, "accuracy": accuracy}
    return made


def test_counts_from_pieces_on_disk_are_those_of_responses_in_memory(tmp_path):
    rows = records()
    responses = [
        (RewardInput(r["text"], r["truth"], num_tokens=r["num_tokens"]), Score(0.5, {}), r["outcome"]) for r in rows
    ]
    expected = summarise_sets(REFLECTION, responses, rows)
    pieces = GradedPieces(tmp_path / "pieces")
    for number in range(4):
        pieces.write(number, Piece(rows[6 * number : 6 * number + 6]))
    merged = merge_pieces(pieces, 4, ALONE)
    whole = WholeSplit(TASK)
    assert not whole.is_needed, "the records are enough, so pieces of a killed evaluation can be used again"
    summary = whole.add_to({"metrics": {}}, merged.rows)
    assert summary["metrics"] == expected["metrics"] and summary["set_metrics"] == expected["set_metrics"]
    counts = ReflectionCounts.from_flat(summary["set_metrics"]["counts"], "maye")
    # In each set of six texts: wait and re-check, the waiter, verify; "yes" and "no" are no "yet".
    assert (counts.responses, counts.reflecting) == (24, 12) and counts.words["wait"] == 8


def test_a_task_with_units_or_figures_of_its_own_still_gets_its_responses():
    assert WholeSplit(replace(TASK, unit=lambda row: row.prompt_id)).is_needed
    assert WholeSplit(replace(TASK, figures=lambda responses: ())).is_needed
    assert WholeSplit(replace(TASK, set_metrics=lambda responses: {})).is_needed
    assert not WholeSplit(replace(TASK, set_metrics=None)).is_needed


def test_a_record_is_the_graded_that_it_was_made_from():
    record = records()[0] | {"score": None, "status": "unavailable", "error": "down", "num_tokens": None}
    x, score, outcome = graded_of(record)
    assert (x.response, x.num_tokens, x.truth, outcome) == (TEXTS[0], 0, record["truth"], record["outcome"])
    assert (score.value != score.value, score.status, score.error) == (True, "unavailable", "down")


def test_answers_vote_as_numbers_whatever_their_type():
    # Python's own hashes of -1 and -2 are equal. Five samples of one prompt: -1 (right) twice, -2 three times.
    votes = [-1, -1.0, -2, -2.0, -2]
    rows = [
        row("p", sample=k, score=float(v == -1))
        | {"detail": {"grade": {"answer_value": v}}, "accuracy": float(v == -1)}
        for k, v in enumerate(votes)
    ]
    for one in rows:
        one["outcome"] = {"accuracy": one["accuracy"]}
    metrics = summarise_columns(EvalColumns((), rows))["metrics"]
    assert metrics["maj@5"]["value"] == 0.0
    # 4 of the 5: without one -1 (2 ways) -2 wins; without one -2 (3 ways) it is a tie, half right: 3/5 x 1/2
    assert metrics["maj@4"]["value"] == pytest.approx(0.3)


@pytest.mark.parametrize("value", [0.5, None, 1 << 63])
def test_a_count_that_is_no_whole_number_is_an_error_with_its_name(value: Any):
    pooled = PooledMetrics(count=lambda graded: {"words": 1, "odd": value}, metrics=lambda counts: {})
    graded = (RewardInput("a"), Score(0.5, {}), {})
    with pytest.raises(DataError, match="the count `odd` of a response is"):
        summarise_sets(pooled, [graded], records()[:1])


def test_a_damaged_piece_says_which_file_to_remove(tmp_path):
    pieces = GradedPieces(tmp_path / "pieces")
    pieces.write(0, Piece(records()[:6], image_bytes=6, files={"a" * 64: b"abc"}))
    assert pieces.read(0).image_bytes == 6
    (tmp_path / "pieces" / "000000.arrow").unlink()
    with pytest.raises(StoreError, match="images are missing") as error:
        pieces.read(0)
    assert "remove this file" in str(error.value.hint)
    (tmp_path / "pieces" / "000000.parquet").write_bytes(b"PAR1")
    with pytest.raises(StoreError, match="cannot be read") as error:
        pieces.read(0)
    assert "remove this file" in str(error.value.hint)
