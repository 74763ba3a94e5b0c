"""The average precision of detections: equal to pycocotools, for resamples too, and by hand.

tests/golden/coco/average_precision.json.gz has what pycocotools 2.0.11 computed; tests/golden/coco/record.py writes it.
"""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vlmrl.evaluate.set_metrics import summarise_sets
from vlmrl.rewards.base import UNSCORED
from vlmrl.rewards.boxes.planes import Box
from vlmrl.tasks.base import AccumulatedMetrics
from vlmrl.tasks.perception.answer import Detection
from vlmrl.tasks.perception.average_precision import accumulate, match
from vlmrl.tasks.perception.task import detection_task
from vlmrl.types import RewardInput

FILE = Path(__file__).parents[2] / "golden" / "coco" / "average_precision.json.gz"
GOLDEN = json.loads(gzip.decompress(FILE.read_bytes()))
TINY = 1e-12


def matched(rows: list[Any]) -> list[Any]:
    return [
        match(category, [Detection(Box(*b), c) for b, c in zip(boxes, sure, strict=True)], [Box(*b) for b in truths])
        for category, truths, boxes, sure in rows
    ]


def agrees(metrics: Any, recorded: list[Any]) -> None:
    """Check the metrics against [mAP, AP50, AP75, category -> mAP], where -1 is a metric without objects."""
    *of_all, own = recorded
    for name, value in zip(("map", "ap50", "ap75"), of_all, strict=True):
        assert (-1 if metrics[name] is None else metrics[name]) == pytest.approx(value, abs=TINY), name
    for category, value in own.items():
        if f"map/{category}" in metrics:
            mine = metrics[f"map/{category}"]
            assert (-1 if mine is None else mine) == pytest.approx(value, abs=TINY), category


def test_it_is_that_of_pycocotools_once_and_resampled() -> None:
    assert len(GOLDEN) == 40 and sum(one["once"][0] > 0.05 for one in GOLDEN) > 30
    several = 0
    for one in GOLDEN:
        measure = accumulate(matched(one["rows"]))
        once = measure(np.ones(len(one["rows"]), dtype=np.int64))
        agrees(once, one["once"])
        agrees(measure(np.array(one["counts"])), one["resampled"])
        several += sum(name.startswith("map/") for name in once)
    assert several > 40


def test_boxes_of_equal_confidence_count_together_in_any_order_of_the_rows() -> None:
    box, other = [0, 0, 10, 10], [50, 50, 60, 60]
    rows = [["cat", [box], [box], [1.0]], ["cat", [box], [other], [1.0]], ["cat", [box], [box, other], [1.0, 1.0]]]
    once = np.ones(3, dtype=np.int64)
    found = {accumulate(matched(order))(once)["map"] for order in itertools.permutations(rows)}
    # Two of four boxes are right, and two of three objects are found: 67 recalls at a precision of 1/2.
    assert list(found) == [pytest.approx(67 * 0.5 / 101)]


def test_by_hand() -> None:
    # Two objects in two rows; boxes by confidence: right, wrong, right. Precision 1, 1/2, 2/3; made monotone 1, 2/3,
    # 2/3; recall 1/2, 1/2, 1. Of 101 recalls 51 are at most 1/2: (51 + 50 * 2/3) / 101.
    box, other = [0, 0, 10, 10], [50, 50, 60, 60]
    rows = [["cat", [box], [box, other], [0.9, 0.8]], ["cat", [box], [box], [0.7]]]
    expected = (51 + 50 * 2 / 3) / 101
    metrics = accumulate(matched(rows))(np.ones(2, dtype=np.int64))
    assert metrics == {name: pytest.approx(expected) for name in ("map", "ap50", "ap75")}
    # The second row twice: three objects, precision 1, 1/2, 2/3, 3/4; recall 1/3, 1/3, 2/3, 1: 34 recalls at 1.
    assert accumulate(matched(rows))(np.array([1, 2]))["map"] == pytest.approx((34 + 67 * 3 / 4) / 101)


def test_a_second_box_on_one_object_is_wrong_and_so_is_a_box_where_there_is_none() -> None:
    box = [0, 0, 10, 10]
    once = np.ones(1, dtype=np.int64)
    # the right box first: all of the recall is reached at precision 1
    assert accumulate(matched([["cat", [box], [box, box], [0.9, 0.8]]]))(once)["map"] == pytest.approx(1.0)
    both = np.ones(2, dtype=np.int64)
    rows = [["cat", [], [box], [0.9]], ["cat", [box], [box], [0.8]]]
    assert accumulate(matched(rows))(both)["map"] == pytest.approx(0.5)  # the wrong box is surer: precision 1/2
    none = accumulate(matched([["cat", [], [], []], ["dog", [], [box], [1.0]]]))(both)
    assert none == {"map": None, "ap50": None, "ap75": None, "map/cat": None, "map/dog": None}


def test_of_two_true_boxes_with_equal_iou_the_last_is_taken() -> None:
    # The surer box has an IoU of 90/110 with both objects. Only if it takes the last, the other box finds the first.
    first, last = [0, 0, 100, 100], [20, 0, 120, 100]
    rows = [["cat", [first, last], [[10, 0, 110, 100], first], [0.9, 0.8]]]
    assert accumulate(matched(rows))(np.ones(1, dtype=np.int64))["ap75"] == pytest.approx(1.0)
    rows = [["cat", [last, first], [[10, 0, 110, 100], first], [0.9, 0.8]]]
    assert accumulate(matched(rows))(np.ones(1, dtype=np.int64))["ap75"] == pytest.approx(51 / 101)


@pytest.mark.parametrize(("num_categories", "has_own"), [(1, False), (2, True), (20, True), (21, False)])
def test_few_categories_have_metrics_of_their_own(num_categories: int, has_own: bool) -> None:
    box = [0, 0, 10, 10]
    rows = [[f"c{k}", [box], [box], [1.0]] for k in range(num_categories)]
    metrics = accumulate([*matched(rows), None])(np.ones(num_categories + 1, dtype=np.int64))
    assert len(metrics) == 3 + (num_categories if has_own else 0)
    assert all(value == pytest.approx(1.0) for value in metrics.values())


def responses(num_rows: int) -> tuple[list[Any], list[dict[str, Any]]]:
    truth = {"boxes": [[100, 100, 300, 300]], "space": "thousand", "width": 64, "height": 48, "category": "cat"}
    texts = ['[{"bbox_2d": [100, 100, 300, 300], "confidence": 0.9}]', "[]", "there"]
    given = [RewardInput(f"<answer>{texts[i % 3]}</answer>", truth) for i in range(num_rows)]
    records = [{"prompt_id": str(i), "sample": 0, "truth": truth, "images": [f"{i}"]} for i in range(num_rows)]
    return [(x, UNSCORED, {}) for x in given], records


def test_resamples_examine_no_response_again_and_equal_those_that_do() -> None:
    of_task = detection_task({}, "thousand_direct").set_metrics
    assert isinstance(of_task, AccumulatedMetrics)
    examined = []

    def examine(graded: Any) -> Any:
        examined.append(graded)
        return of_task.examine(graded)

    given, records = responses(30)
    units = list(range(30))
    once = summarise_sets(AccumulatedMetrics(examine, of_task.accumulate), given, records, units, 50)
    assert len(examined) == 30
    again = summarise_sets(lambda some: of_task(some), given, records, units, 50)
    assert once == again
    value, low, high = (once["metrics"]["map"][key] for key in ("value", "low", "high"))
    assert value == pytest.approx(34 / 101)  # a third of the objects at precision 1
    assert 0 < low < value < high


def test_the_interval_of_the_task_is_reflected_at_the_value_and_cut_to_0_and_1() -> None:
    of_task = detection_task({}, "thousand_direct").set_metrics
    assert isinstance(of_task, AccumulatedMetrics) and of_task.reflected == (0.0, 1.0)
    given, records = responses(30)
    plain = summarise_sets(lambda some: of_task(some), given, records, list(range(30)), 50)
    own = summarise_sets(of_task, given, records, list(range(30)), 50)
    assert own["set_metrics"]["replicates"] == plain["set_metrics"]["replicates"]
    assert "reflected percentiles" in own["set_metrics"]["method"]
    assert plain["set_metrics"]["method"].startswith("percentiles of 50 resamples")
    value, low, high = (plain["metrics"]["map"][key] for key in ("value", "low", "high"))
    assert own["metrics"]["map"]["low"] == pytest.approx(2 * value - high)
    assert own["metrics"]["map"]["high"] == pytest.approx(2 * value - low)
    few = AccumulatedMetrics(of_task.examine, of_task.accumulate, reflected=(0.3, 0.4))
    cut = summarise_sets(few, given, records, list(range(30)), 50)["metrics"]["map"]
    assert (cut["low"], cut["high"]) == (0.3, 0.4)
