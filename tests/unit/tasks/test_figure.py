"""Figures of a task: counted by hand, and refused where they are beyond what a report shows."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from vlmrl.errors import DataError
from vlmrl.tasks.figure import Counted, Histogram, Lines, Table, figures_from_json, figures_to_json

HISTOGRAM = Histogram("sizes", {"small": [0.0, 0.49, 0.5], "large": [1.0, 7.0]}, "pixels", (0.0, 1.0), 2, "Two bins.")
LINES = Lines("precision", {"disc": [(0.0, 1.0), (1.0, 0.5)]}, "recall", "precision")
TABLE = Table("confusion", ["true", "disc", "ring"], [["disc", 3, None], ["ring", 0.5, 2]])


def test_figures_come_back_as_they_were_kept():
    kept = json.loads(json.dumps(figures_to_json([HISTOGRAM, LINES, TABLE])))
    counted, lines, table = figures_from_json(kept)
    assert counted == Counted("sizes", {"small": [2, 1], "large": [0, 2]}, "pixels", [0.0, 1.0], "Two bins.")
    assert lines == Lines("precision", {"disc": [[0.0, 1.0], [1.0, 0.5]]}, "recall", "precision")
    assert table == Table("confusion", ["true", "disc", "ring"], [["disc", 3, None], ["ring", 0.5, 2]])


def test_numbers_of_arrays_are_numbers():
    (kept,) = figures_to_json([Lines("x", {"y": [(np.float32(0.5), np.int64(2))]})])
    assert kept["series"] == {"y": [[0.5, 2.0]]}


@pytest.mark.parametrize(
    ("figure", "said"),
    [
        ("a picture", "a figure is a str"),
        (Histogram("h", {}), "`?'h'`? is not within the limits"),
        (Histogram("h", {"a": [1], "b": [1], "c": [1]}), "is not within the limits"),
        (Histogram("h", {"a": [math.nan]}), "cannot be counted"),
        (Histogram("h", {"a": ["x"]}), "cannot be counted"),
        (Histogram("h", {"a": [1]}, range=(1.0, 1.0)), "cannot be counted"),
        (Histogram("h", {"a": [1]}, bins=0), "cannot be counted"),
        (Lines("l", {str(i): [(0, 0)] for i in range(7)}), "is not within the limits"),
        (Lines("l", {"a": [(0, math.inf)]}), "is not within the limits"),
        (Lines("l", {"a": [(0, 0)] * 2001}), "is not within the limits"),
        (Lines("l", {"a": [0.5]}), "cannot be read"),
        (Table("t", ["a"], [["x", "y"]]), "is not within the limits"),
        (Table("t", ["a"], [["x"]] * 201), "is not within the limits"),
        (Table("t", ["a"], [["x" * 501]]), "is not within the limits"),
        (Table("t" * 501, ["a"], []), "is not within the limits"),
    ],
)
def test_what_a_report_cannot_show_is_refused(figure, said):
    with pytest.raises(DataError, match=said):
        figures_to_json([figure])


@pytest.mark.parametrize(
    "kept",
    [
        None,
        {},
        [1],
        [{}],
        [{"kind": "lines"}],
        [{"kind": "table", "title": 1}],
        [{"kind": "script", "title": "x"}],
        [{"kind": "table", "title": "x", "header": ["a"], "rows": [], "note": 3}],
        [{"kind": "histogram", "title": "x", "groups": {"a": [-1]}, "axis": "", "range": [0, 1], "note": ""}],
        [{"kind": "table", "title": "x", "header": ["a"], "rows": [], "note": "", "more": 1}],
        [{}] * 9,
    ],
)
def test_damage_in_a_summary_is_a_sentence(kept):
    with pytest.raises(DataError):
        figures_from_json(kept)
