"""The task we_math: its reward by hand, metrics over sets, intervals, drawn sets with exact answers, published rows."""

from __future__ import annotations

import base64
import io
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image
from scipy import ndimage
from task_tables import checks_of, prepare

from vlmrl.data.images import encode_png
from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError, RewardError
from vlmrl.evaluate.set_metrics import summarise_sets
from vlmrl.recipe.schema import Data
from vlmrl.rewards.base import UNSCORED, combine
from vlmrl.tasks import make_task
from vlmrl.tasks.base import GradedResponse
from vlmrl.tasks.dataset_assembly import Prepared
from vlmrl.tasks.drawing import COLOURS
from vlmrl.tasks.we_math.rewards import we_math
from vlmrl.tasks.we_math.rows import Drawing, drawn_rows
from vlmrl.tasks.we_math.task import set_metrics, unit_of
from vlmrl.tasks.we_math.truth import read_options, truth_problems
from vlmrl.types import RewardInput, Row

GOOD = "<think>as shown</think><answer>{}</answer>"
OPTIONS = "A. 300;B. 400; C. 31.4 cm;E. No correct answer"
CHOICE = {"answer": "B", "options": OPTIONS}
REWARD = we_math()


def parts_of(response: str, truth: dict[str, Any], finish: str = "stop") -> dict[str, float]:
    result: Any = REWARD(RewardInput(response, truth, finish=finish))
    return {name: result[name] for name in ("accuracy", "format", "share")}


@pytest.mark.parametrize(
    ("answer", "accuracy", "form"),
    [
        ("B", 1, 1), ("b", 1, 1), (" (B) ", 1, 1), ("B.", 1, 1), ("B. 400", 1, 1), ("\\boxed{B}", 1, 1), ("C", 0, 1),
        ("C. 400", 0, 0), ("B. 300", 0, 0), ("Because", 0, 0), ("B or C", 0, 0), ("B, C", 0, 0), ("D", 0, 0),
        ("A B C E", 0, 0), ("400", 0, 0), ("", 0, 0), ("H", 0, 0), ("not B", 0, 0),
        ("A \\boxed{B}", 0, 0), ("\\boxed{A} \\boxed{B}", 0, 0), ("The answer is \\boxed{B}", 1, 1),
        ("not \\boxed{B}", 0, 0), ("The answer isn't $\\boxed{B}$", 0, 0), ("not C but \\boxed{B}", 1, 1),
    ],
)  # fmt: skip
def test_an_option_is_one_letter_alone_or_with_its_own_text(answer: str, accuracy: float, form: float) -> None:
    parts = parts_of(GOOD.format(answer), CHOICE)
    assert (parts["accuracy"], parts["format"]) == (accuracy, form)


# (truth, answer, accuracy, share)
FREE = [
    ("8, 6, 37.68", "8, 6, 37.68", 1, 1),
    ("8, 6, 37.68", "8, 6, 40", 0, 2 / 3),
    ("8, 6, 37.68", "6, 8, 37.68", 0, 1 / 3),  # each value has its own place
    ("8, 6, 37.68", "8, 6", 0, 0),
    ("8, 6, 7", "8, 6 and 7", 1, 1),
    ("8, 6, 7", "8, 6, \\text{ and } 7", 1, 1),
    ("8, 6", "8 and 6", 1, 1),
    ("8, 6, 7", "8, 6 or 7", 0, 0),
    ("8, 6, 7", "1 2 3 4 5 6 7 8 9 10", 0, 0),  # a list of numbers
    ("8, 6, 7", "1, 2, 3, 4, 5, 6, 7, 8", 0, 0),
    ("Cone 5 3 47.1", "Cone, 5, 3, 47.1", 1, 1),
    ("Cone 5 3 47.1", "47.1 3 5 Cone", 0, 0),
    ("(1) 4 (2) 5", "(1) 4 (2) 5", 1, 1),
    ("(1) 4 (2) 5", "(1) 4 (2) 6", 0, 1 / 2),
    ("(1) 4 (2) 5", "4 5", 0, 0),
    ("50\u00b0 or 130\u00b0", "130", 1, 1),
    ("50\u00b0 or 130\u00b0", "50 or 130", 1, 1),
    ("50\u00b0 or 130\u00b0", "50, 130", 1, 1),
    ("50\u00b0 or 130\u00b0", "130 or 50", 1, 1),
    ("50\u00b0 or 130\u00b0", "50, 50", 0, 0),
    ("12, 13", "12 13", 1, 1),
    ("12, 13", "13 12", 0, 0),
    ("50\u00b0 or 130\u00b0", "50 or 70", 0, 0),
    ("1,000", "1000", 1, 1),
    ("12 cm", "0.12 m", 1, 1),
    ("\\frac{1}{2}", "0.5", 1, 1),
    ("obtuse triangle", "Obtuse triangle", 1, 1),
    ("5", "the area is 5 or 6", 0, 0),
]


@pytest.mark.parametrize(("truth", "answer", "accuracy", "share"), FREE)
def test_several_values_must_all_be_there_in_their_order(
    truth: str, answer: str, accuracy: float, share: float
) -> None:
    parts = parts_of(GOOD.format(answer), {"answer": truth, "options": None})
    assert parts["accuracy"] == accuracy and parts["share"] == pytest.approx(share) and parts["format"] == 1
    assert combine(parts, REWARD.weights)[0] == pytest.approx(0.9 * accuracy + 0.1)


def test_the_form_is_one_thought_and_one_answer() -> None:
    for response in ("B", "<answer>B</answer>", GOOD.format("B") + "<answer>C</answer>", "<think>Answer: B</think>"):
        assert parts_of(response, CHOICE)["format"] == 0
    assert parts_of("<answer>B</answer>", CHOICE)["accuracy"] == 1
    assert parts_of("<think><answer>B</answer></think>", CHOICE)["accuracy"] == 0
    assert parts_of(GOOD.format("B") + "<answer>C</answer>", CHOICE)["accuracy"] == 0
    assert parts_of(GOOD.format("B"), CHOICE, finish="length") == {"accuracy": 1, "format": 0, "share": 1}
    direct: Any = we_math(thought="optional")(RewardInput("<answer>B</answer>", CHOICE))
    assert direct["format"] == 1
    with pytest.raises(RewardError, match="thought"):
        we_math(thought="none")
    with pytest.raises(RewardError, match="answer"):
        REWARD(RewardInput(GOOD.format("B"), {"answer": None}))


def test_options_are_read_as_they_are_published() -> None:
    assert read_options(OPTIONS) == {"A": "300", "B": "400", "C": "31.4 cm", "E": "No correct answer"}
    assert list(read_options("A. \u2460;B\uff0e\u2461;C. \u2462; D. Cannot be determined")) == list("ABCD")
    assert read_options("A. Yes, A needs;B. No, A. turned") == {"A": "Yes, A needs", "B": "No, A. turned"}
    assert read_options("A. To point ;O.;B. Angle AB;C.; C. No.;F. None") == {
        "A": "To point ;O.",
        "B": "Angle AB;C.",
        "C": "No.",
        "F": "None",
    }
    assert read_options("") == read_options("none") == {}


def responses_of(sets: dict[str, tuple[str, bool]], sample: int = 0) -> list[GradedResponse]:
    """Responses of sets: name -> (right or wrong of each sub-problem as 1 and 0, that of the composite problem)."""
    made = []
    for name, (parts, whole) in sets.items():
        steps = [*((str(i), bit == "1") for i, bit in enumerate(parts, 1)), ("multi", whole)]
        for step, is_right in steps:
            truth = {"set": name, "step": step, "num_steps": len(parts) if step == "multi" else 1}
            made.append((RewardInput("", truth, sample=sample), UNSCORED, {"accuracy": float(is_right)}))
    return made


def test_each_class_by_hand() -> None:
    sets = {
        "a": ("11", True),  # CM
        "b": ("111", True),  # CM
        "c": ("11", False),  # IG
        "d": ("01", False),  # IK
        "e": ("000", False),  # IK
        "f": ("101", True),  # strictly RM, loosely CM
        "g": ("00", True),  # RM
        "h": ("000", True),  # RM
    }
    # strictly: IK 2, IG 1, CM 2, RM 3 of 8; loosely: CM 3, RM 2
    assert set_metrics(responses_of(sets)) == {
        "score_strict": (8 - 0.5 - 3 - 2) / 8,
        "score_loose": (8 - 0.5 - 2 - 2) / 8,
        "IK": 2 / 8,
        "IG": 1 / 8,
        "CM_strict": 2 / 8,
        "CM_loose": 3 / 8,
        "RM_strict": 3 / 5,
        "RM_loose": 2 / 5,
    }


def test_incomplete_sets_and_rows_without_a_set_do_not_count_and_samples_are_sets_of_their_own() -> None:
    whole = responses_of({"a": ("11", True)})
    free = (RewardInput("", {"answer": "5"}), UNSCORED, {"accuracy": 1.0})
    other = responses_of({"b": ("11", False)})
    assert set_metrics([*whole, free, *other[:2]]) == set_metrics([*whole, *other[1:]]) == set_metrics(whole)
    assert set(set_metrics([free]).values()) == {None}
    both = [*whole, *responses_of({"a": ("11", False)}, sample=1)]
    assert set_metrics(both)["IG"] == 0.5 and set_metrics(whole * 3) == set_metrics(whole)
    assert set_metrics(responses_of({"a": ("11", False)}))["RM_strict"] is None
    unmeasured = [(x, score, {}) for x, score, _ in whole]
    assert set_metrics(unmeasured)["IK"] == 1.0  # a response without an accuracy is wrong


def test_intervals_resample_whole_sets() -> None:
    rng = random.Random(0)
    sets = {f"s{i}": ("".join(rng.choice("01") for _ in range(2 + i % 2)), rng.random() < 0.5) for i in range(60)}
    responses = responses_of(sets)
    units = [unit_of(x.truth, str(i)) for i, (x, _, _) in enumerate(responses)]
    records = [
        {"prompt_id": str(i), "sample": 0, "truth": x.truth, "images": []} for i, (x, _, _) in enumerate(responses)
    ]
    summary = summarise_sets(set_metrics, responses, records, units, 200)
    for name, value in set_metrics(responses).items():
        interval = summary["metrics"][name]
        assert interval["value"] == pytest.approx(value) and interval["clusters"] == 60
        assert interval["low"] < interval["value"] < interval["high"]
    share = summary["metrics"]["IK"]
    width = 2 * 1.96 * (share["value"] * (1 - share["value"]) / 60) ** 0.5  # of the share of 60 independent sets
    assert share["high"] - share["low"] == pytest.approx(width, rel=0.25)


def test_drawn_sets_have_exact_answers() -> None:
    rows = drawn_rows({"train": 12, "test": 6}, Drawing(side=140, most=3), seed=4)
    assert [len([row for row in rows[split] if row.truth["step"] == "multi"]) for split in rows] == [12, 6]
    images: dict[str, set[bytes]] = {split: {row.images[0] for row in rows[split]} for split in rows}
    assert not images["train"] & images["test"]
    for split in rows:
        for name in {row.truth["set"] for row in rows[split]}:
            members = {row.truth["step"]: row for row in rows[split] if row.truth["set"] == name}
            assert members["multi"].truth["num_steps"] == len(members) - 1
            values = []
            for step in list(members)[:-1]:
                values.append(counted(members[step].images[0], str(members[step].columns["problem"])))
                assert number_of(members[step]) == values[-1]
            question = str(members["multi"].columns["problem"])
            if "How many more" in question:
                expected = values[0] - values[1]
            else:
                expected = values[0] * values[1] + (values[2] if len(values) == 3 else 0)
            assert number_of(members["multi"]) == expected
    again = drawn_rows({"train": 12, "test": 6}, Drawing(side=140, most=3), seed=4)
    assert [row.truth for row in again["test"]] == [row.truth for row in rows["test"]]
    letters = [row.truth["answer"] for row in drawn_rows({"train": 100}, Drawing(side=140, most=3), seed=1)["train"]]
    assert all(0.18 < letters.count(letter) / len(letters) < 0.32 for letter in "ABCD")
    with pytest.raises(DataError, match="no room"):
        drawn_rows({"train": 4}, Drawing(side=30, most=9), seed=0)


def number_of(row: Any) -> int:
    """The number of the right option."""
    return int(read_options(row.truth["options"])[row.truth["answer"]])


def counted(image: bytes, question: str) -> int:
    """Return the number of shapes of the look that the question names, from the pixels alone."""
    match = re.match(r"How many (\w+) (\w+)s are", question)
    assert match is not None
    pixels = np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))
    labels, number = ndimage.label((pixels == COLOURS[match[1]]).all(-1))
    kinds = []
    for place in ndimage.find_objects(labels)[:number]:
        box = labels[place] > 0
        share = box.mean()  # a square fills its box, a circle about 0.79, a triangle about half
        kinds.append("square" if share > 0.95 else "circle" if share > 0.65 else "triangle")
    return kinds.count(match[2])


def picture(number: int) -> str:
    image = Image.new("RGB", (64, 64), (number * 40 % 256, 90, 200))
    image.paste((0, 0, 0), (number * 5 % 40, 3, number * 5 % 40 + 9, 20))
    return base64.b64encode(encode_png(image)).decode()


def published_row(number: int, step: str = "1", **fields: Any) -> dict[str, Any]:
    """A row as We-Math publishes it."""
    return {
        "ID": "2steps_1",
        "split": "testmini",
        "knowledge concept": "Area of Circles",
        "question": f"What is the radius? ({number})",
        "option": OPTIONS,
        "answer": "C",
        "image_path": f"{number}.png",
        "key": f"2steps_{step}",
        "question number": number,
        **fields,
    }


def prepared_from(tmp_path: Path, rows: list[dict[str, Any]], test: list[dict[str, Any]], **options: Any) -> Prepared:
    for name, table in (("train.jsonl", rows), ("testmini.json", test)):
        for row in table:
            image = Image.new("RGB", (64, 64), (int(row["question"][-2]) * 25, 90, 200))
            image.save(tmp_path / row["image_path"])
        text = json.dumps(table) if name.endswith(".json") else "".join(json.dumps(row) + "\n" for row in table)
        (tmp_path / name).write_text(text)
    test_table = str(tmp_path / "testmini.json")
    return prepare("we_math", tmp_path, tmp_path / "train.jsonl", test=test_table, validation_rows=0, **options)


def test_published_rows_with_and_without_options(tmp_path: Path) -> None:
    train = [
        {
            "question": "How long is AB? (1)",
            "answer": "5 cm",
            "image_path": "1.png",
            "solution": "<think>It is 5.</think>",
        },
        {
            "question": "How long is AB? (2)",
            "answer": "<answer>7</answer>",
            "image_path": "2.png",
            "solution": "Seven.",
        },
    ]
    test = [published_row(n, step) for n, step in ((3, "1"), (4, "2"), (5, "multi"))]
    prepared = prepared_from(tmp_path, train, test)
    dataset = open_dataset(Data(path=str(prepared.path)))
    first, second = dataset.rows("train")
    assert (first.truth["answer"], first.truth["options"], first.truth["solution"]) == ("5 cm", None, "It is 5.")
    assert (second.truth["answer"], second.truth["set"]) == ("7", None)
    places = [(row.truth["set"], row.truth["step"], row.truth["num_steps"]) for row in dataset.rows("test")]
    assert places == [("2steps_1", "1", 1), ("2steps_1", "2", 1), ("2steps_1", "multi", 2)]
    task = make_task("we_math", dataset.info)
    assert task.trace is not None
    assert task.trace(first, random.Random(0)) == "<think>It is 5.</think>\n<answer>5 cm</answer>"
    assert parts_of(task.trace(first, random.Random(0)), dict(first.truth))["accuracy"] == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"answer": "D"}, "no option"), ({"answer": "300"}, "no option"), ({"key": "2steps_3"}, "2steps_3"),
        ({"key": "4steps_1"}, "4steps_1"), ({"ID": None}, "`ID`"), ({"answer": None}, "`answer`"),
        ({"option": "none"}, "no option"), ({"option": None, "answer": "7" * 501}, "more than 500 characters"),
        ({"option": None, "answer": "\\frac{1}{" * 12}, "cannot be graded"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_an_error_that_says_why(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    train = [{"question": "How long is AB? (1)", "answer": "5 cm", "image_path": "1.png"}]
    with pytest.raises(DataError) as error:
        prepared_from(tmp_path, train, [published_row(3), published_row(4, **fields)])
    assert "1 of 3 rows are wrong" in error.value.message and reason in error.value.message
    assert not (tmp_path / "out").exists()


def test_sets_that_are_not_whole_are_noted(tmp_path: Path) -> None:
    train = [{"question": "How long is AB? (1)", "answer": "5 cm", "image_path": "1.png"}]
    whole = [published_row(n, step) for n, step in ((3, "1"), (4, "2"), (5, "multi"))]

    def note(rows: list[dict[str, Any]], name: str) -> str:
        made = prepared_from(tmp_path, train, rows, out=tmp_path / name)
        return checks_of(made.info).get("sets", ("", ""))[1]

    assert note(whole, "whole") == ""
    assert "1 of 1 sets lack a sub-problem or the whole, such as '2steps_1'" in note(whole[:2], "lacking")
    double = note([*whole, {**published_row(6, "1"), "question": "Another? (6)"}], "double")
    assert "1 of 1 sets have a problem twice" in double


@pytest.mark.parametrize("number", ["two", math.nan, 10**9, -1, None, 2.5, True])
def test_a_number_of_steps_that_is_none_is_named_and_stops_no_evaluation(number: Any) -> None:
    truth = {"answer": "5", "options": None, "set": "a", "step": "multi", "num_steps": number}
    assert "`num_steps`" in truth_problems(truth)[0]
    graded = (RewardInput("", truth), UNSCORED, {"accuracy": 1.0})
    assert set_metrics([graded])["CM_strict"] is None


def test_splits_of_the_hub_get_the_names_of_splits_here_and_steps_are_checked(tmp_path: Path) -> None:
    folder = tmp_path / "table"
    tables = {
        split: datasets.Dataset.from_list([{"question": f"Long? ({number})", "answer": "5", "image": picture(number)}])
        for number, split in enumerate(("sft", "testmini"))
    }
    datasets.DatasetDict(tables).save_to_disk(str(folder))
    prepared = prepare("we_math", tmp_path, folder)
    assert list(prepared.info["splits"]) == ["train", "test"]
    with pytest.raises(DataError, match="--steps"):
        prepare("we_math", tmp_path, synthetic=20, steps="4", out=tmp_path / "x")


def test_attacks_of_the_task_earn_less_than_the_truth() -> None:
    task = make_task("we_math", {})
    for truth in (CHOICE, {"answer": "8, 6, 7", "options": None}):
        x = RewardInput("", truth)
        for attack in task.attacks([x]):
            response = attack.write(x)
            assert response is not None
            parts: Any = REWARD(response)
            assert combine(parts, REWARD.weights)[0] <= 0.1 + 1e-9, attack.name


def test_a_truth_names_a_step_and_a_trace_of_the_direct_variant_has_no_thought() -> None:
    assert make_task("we_math", {}).validate({"answer": "B", "options": OPTIONS, "set": "s", "step": "9"})
    row = Row("r", "s", "we_math", {"answer": "B", "options": OPTIONS}, (), {})
    direct = make_task("we_math", {}, "direct")
    assert direct.trace is not None and direct.trace(row, random.Random(0)) == "<answer>B</answer>"
