"""Mistakes in the functions and rows of a task of one's own: each is named with its place, none is a bug of ours."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from vlmrl.errors import DataError, RecipeError
from vlmrl.rewards.base import UNSCORED
from vlmrl.rewards.boxes.reading import Coordinates
from vlmrl.tasks import make_task
from vlmrl.tasks.dataset_assembly import Limits
from vlmrl.tasks.own_prep import prepare_own
from vlmrl.types import Media, RewardInput, Row

FILE = """
from vlmrl import Attack, NewRow, Task

def task(info):
    return Task(name="t", summary="s", template="<image> {{ a }}", prep=prep, validate=validate, outcome=outcome,
                set_metrics=whole, unit=unit, trace=trace, attacks=attacks)

def validate(truth):
    return []

def outcome(x, score):
    return {"accuracy": True, "near": None}

def whole(responses):
    return {"share": 0.5}

def unit(row):
    return row.truth["scene"]

def trace(row, rng):
    return "a"

def attacks(rows):
    return [Attack("one", "idea", "guess", lambda x: "1")]

def prep():
    from PIL import Image
    picture = Image.new("RGB", (28, 28))
    row = dict(truth={"answer": 1}, images=[picture], columns={"a": "b"})
    return {"train": [NewRow(**row)]}
"""
X = RewardInput("hm", {"answer": 1, "scene": "s"})
ROW = Row("id", "data", "t", {"answer": 1, "scene": "s"})


def load(folder: Path, old: str = "", new: str = "") -> Any:
    assert old in FILE
    (folder / "t.py").write_text(FILE.replace(old, new) if old else FILE)
    return make_task(f"{folder / 't.py'}:task", {})


def test_sound_results_come_through_as_plain_numbers(tmp_path: Path) -> None:
    task = load(tmp_path)
    assert task.validate({}) == [] and task.outcome(X, UNSCORED) == {"accuracy": 1.0, "near": None}
    assert type(task.outcome(X, UNSCORED)["accuracy"]) is float
    assert task.unit(ROW) == "s" and task.set_metrics([(X, UNSCORED, {})]) == {"share": 0.5}
    assert task.attacks([X])[0].make(X) == "1"


@pytest.mark.parametrize(
    ("old", "new", "call", "message", "line"),
    [
        ("return []\n", "return 'bad'\n", lambda t: t.validate({}), "`validate` of .*: it returned str 'bad', not", 8),
        ("return []\n", "return None\n", lambda t: t.validate({}), "`validate` of .*: it returned None, not", 8),
        ("True,", "'yes',", lambda t: t.outcome(X, UNSCORED), "the metric `accuracy` is 'yes', not a number", 11),
        ("True,", "float('nan'),", lambda t: t.outcome(X, UNSCORED), "the metric `accuracy` is nan, not a finite", 11),
        ('{"share": 0.5}', "0.5", lambda t: t.set_metrics([]), "`set_metrics` of .* returned float 0.5, not", 14),
        ("0.5}", "1e999}", lambda t: t.set_metrics([]), "the metric `share` is inf, not a finite number", 14),
        ('row.truth["scene"]', "row.scene", lambda t: t.unit(ROW), "`unit` of .* raised AttributeError", 18),
        ('row.truth["scene"]', "[1]", lambda t: t.unit(ROW), "it returned list \\[1\\], which cannot be a key", 17),
        ('return "a"', "return 3", lambda t: t.trace(ROW, None), "`trace` of .*: it returned int 3, not the text", 20),
        ('"guess"', '"gess"', lambda t: t.attacks([X]), "the attack `one` has the kind 'gess'", 23),
        ('"1")', "x.nothing)", lambda t: t.attacks([X])[0].make(X), "`attacks` of .* raised AttributeError", 24),
    ],
)
def test_a_wrong_result_is_named_with_the_function_and_its_line(
    tmp_path: Path, old: str, new: str, call: Any, message: str, line: int
) -> None:
    task = load(tmp_path, old, new)
    with pytest.raises(RecipeError, match=message) as error:
        call(task)
    assert error.value.where == f"{tmp_path / 't.py'}:{line}"
    assert "dataset.json" not in str(error.value.hint)  # that is the hint of the task's function alone


COUNTING = """
def count(graded):
    return {"long": len(graded[0].response) > 1, "all": 1.0}

def rate(sums):
    return {"share": sums["long"] / sums["all"]}
"""


def pooling(folder: Path, old: str = "", new: str = "") -> Any:
    text = FILE.replace("=whole", "=PooledMetrics(count, rate)").replace("NewRow,", "NewRow, PooledMetrics,", 1)
    (folder / "t.py").write_text(text + (COUNTING.replace(old, new) if old else COUNTING))
    return make_task(f"{folder / 't.py'}:task", {})


def test_counts_of_a_set_metric_come_through_as_integers_and_a_mistake_is_named(tmp_path: Path) -> None:
    metrics = pooling(tmp_path).set_metrics
    responses = [(X, UNSCORED, {}), (RewardInput("h", {}), UNSCORED, {})]
    assert metrics([*responses]) == {"share": 0.5}
    assert metrics.sums(responses) == {"long": 1, "all": 2} and type(metrics.sums(responses)["long"]) is int
    for old, new, message, line in (
        ("1.0}", "1.5}", "`count` of `set_metrics` of .*: the count `all` is 1.5, not a whole number", 32),
        ('sums["long"]', 'sums["short"]', "`metrics` of `set_metrics` of .* raised KeyError", 36),
    ):
        with pytest.raises(RecipeError, match=message) as error:
            pooling(tmp_path, old, new).set_metrics(responses)
        assert error.value.where == f"{tmp_path / 't.py'}:{line}"


def test_a_mean_over_nothing_is_a_metric_that_is_not_defined(tmp_path: Path) -> None:
    task = load(tmp_path, '{"share": 0.5}', '{"share": float("nan"), "none": None}')
    assert task.set_metrics([]) == {"share": None, "none": None}


def test_check_asks_a_set_metric_for_a_resample_that_holds_a_response_twice(tmp_path: Path) -> None:
    task = load(tmp_path, 'return {"share": 0.5}', "assert len(responses) < 2, 'twice'")
    with pytest.raises(RecipeError, match="raised AssertionError: twice"):
        task.measured_of_sets({"answer": 1})


@pytest.mark.parametrize(
    ("old", "new", "message", "where"),
    [
        ("images=[picture]", "images=picture", "`images` of a row of `prep` is <PIL.*, not a list", "train row 0"),
        ("images=[picture]", 'images="a.png"', "`images` of a row of `prep` is 'a.png', not a list", "train row 0"),
        ('truth={"answer": 1}', 'truth="A1"', "`truth` of a row of `prep` is 'A1', not a mapping", "train row 0"),
        ('columns={"a": "b"}', 'columns=["a"]', "`columns` of a row of `prep` is .*, not a mapping", "train row 0"),
        ("images=[picture]", "images=[picture] * 2", "the row has 2 images but its prompt has 1", "train row 0"),
        ('columns={"a": "b"}', "columns={}", "the prompt template fails: 'a' is undefined", "train row 0"),
        ("{{ a }}", "\\n{{ a }", "the prompt template is not valid Jinja", "template of {file}:2"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_its_place(
    tmp_path: Path, old: str, new: str, message: str, where: str
) -> None:
    task = load(tmp_path, old, new)
    with pytest.raises((DataError, RecipeError), match=message) as error:
        prepare_own(task, {}, tmp_path / "data", Limits(workers=1))
    assert error.value.where == where.format(file=tmp_path / "t.py") and not (tmp_path / "data").exists()


def test_an_import_of_a_file_beside_it_is_told_why_not(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("x = 1\n")
    with pytest.raises(RecipeError, match="No module named 'beside'") as error:
        load(tmp_path, "from vlmrl", "import beside\nfrom vlmrl")
    assert "a task is one file" in str(error.value.hint)


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    task = load(tmp_path, "True,", "__import__('numpy').float32(0.25),")
    assert task.outcome(X, UNSCORED)["accuracy"] == 0.25 and math.isfinite(task.outcome(X, UNSCORED)["accuracy"])


def test_what_a_task_is_made_of_is_found_by_dir() -> None:
    import vlmrl

    assert {*vlmrl.__all__} <= {*dir(vlmrl)} and vlmrl.RewardResult.__name__ == "RewardResult"


POSITIONS = """
import vlmrl
from vlmrl.tasks.positions import Mark
from vlmrl.tasks.positions import Positions
from vlmrl.rewards.boxes.planes import Box
from vlmrl.rewards.boxes.reading import Coordinates


def task(info):
    return vlmrl.Task("boxes", "where", "<image>", trace=trace, trace_sees=True, positions=positions)


def trace(row, rng, sizes):
    return str(sizes)


def positions(spec):
    return Positions(Coordinates("unit"), marks)


def marks(x, coordinates):
    return [Mark("truth", Box(0, 0, 1, 1))]
"""


def test_boxes_of_a_users_own_task_are_checked_where_they_are_returned(tmp_path: Path) -> None:
    def own(old: str = "", new: str = "") -> Any:
        (tmp_path / "boxes.py").write_text(POSITIONS.replace(old, new) if old else POSITIONS)
        return make_task(f"{tmp_path}/boxes.py:task", {})

    row = Row("r", "s", "t", {}, (Media("a", 640, 480),))
    assert own().correct_response(row, random.Random(0), [(56, 28)]) == "((56, 28),)"
    assert own().correct_response(row, random.Random(0)) == "((640, 480),)"  # unknown: as stored
    unit = Coordinates("unit")
    assert len(own().positions(None).marks(RewardInput(""), unit)) == 1
    with pytest.raises(RecipeError, match=r"it returned list .*not vlmrl\.tasks\.positions\.Positions"):
        own('return Positions(Coordinates("unit"), marks)', "return []").positions(None)
    with pytest.raises(RecipeError, match=r"not a list of vlmrl\.tasks\.positions\.Mark"):
        own('[Mark("truth", Box(0, 0, 1, 1))]', "[1]").positions(None).marks(RewardInput(""), unit)
    with pytest.raises(RecipeError, match="not a function"):
        own("positions=positions", "positions=3")
