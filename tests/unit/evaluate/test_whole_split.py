"""Metrics from counts over a whole split: from records on disk, piece by piece, as from verdicts in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from evaluation_builders import row

from vlmrl.dist.world import ALONE
from vlmrl.evaluate.graded_pieces import GradedPieces, Piece, merge_pieces
from vlmrl.evaluate.set_metrics import summarise_sets
from vlmrl.evaluate.whole_split import WholeSplit, verdict_of
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


def test_counts_from_pieces_on_disk_are_those_of_verdicts_in_memory(tmp_path):
    rows = records()
    verdicts = [
        (RewardInput(r["text"], r["truth"], num_tokens=r["num_tokens"]), Score(0.5, {}), r["outcome"]) for r in rows
    ]
    expected = summarise_sets(REFLECTION, verdicts, rows)
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


def test_a_task_with_units_or_figures_of_its_own_still_gets_its_verdicts():
    assert WholeSplit(replace(TASK, unit=lambda row: row.prompt_id)).is_needed
    assert WholeSplit(replace(TASK, figures=lambda verdicts: ())).is_needed
    assert WholeSplit(replace(TASK, set_metrics=lambda verdicts: {})).is_needed
    assert not WholeSplit(replace(TASK, set_metrics=None)).is_needed


def test_a_record_is_the_verdict_that_it_was_made_from():
    record = records()[0] | {"score": None, "status": "unavailable", "error": "down", "num_tokens": None}
    x, score, outcome = verdict_of(record)
    assert (x.response, x.num_tokens, x.truth, outcome) == (TEXTS[0], 0, record["truth"], record["outcome"])
    assert (score.value != score.value, score.status, score.error) == (True, "unavailable", "down")
