"""The task counting: its reward by hand, its measures, drawn rows with exact counts, rows of published tables."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import ndimage
from task_tables import prepare, rows_of, sizes_of

from vlmrl.data.images import encode_png, image_hash
from vlmrl.errors import DataError, RewardError
from vlmrl.recipe.schema import Data, Reward
from vlmrl.rewards.base import UNSCORED, combine
from vlmrl.tasks.drawing import COLOURS
from vlmrl.tasks.perception.answer import ONES, TENS
from vlmrl.tasks.perception.reward import count, read_count
from vlmrl.tasks.perception.rows import QUESTION_KINDS, Drawing, drawn_rows, read_truth
from vlmrl.tasks.perception.task import counting_task, measure_counting
from vlmrl.tasks.source import open_source
from vlmrl.types import RewardInput

GOOD = "<think>one, two, three</think><answer>{}</answer>"

# (response, accuracy, format, nearness, words of the note); the truth is 3
SCORED = [
    (GOOD.format("3"), 1, 1, 1, ""),
    (GOOD.format(" 3\n"), 1, 1, 1, ""),
    (GOOD.format("3.0"), 1, 1, 1, ""),
    (GOOD.format("4"), 0, 1, 2 / 3, ""),
    (GOOD.format("0"), 0, 1, 0, ""),
    (GOOD.format("9"), 0, 1, 0, ""),  # a distance of 6, more than 3
    (GOOD.format("3").replace("<answer>", "\n<answer>"), 1, 1, 1, ""),
    (GOOD.format("three"), 1, 1, 1, ""),
    (GOOD.format("4 objects"), 0, 1, 2 / 3, ""),
    (GOOD.format("many"), 0, 0, 0, "not one number"),
    (GOOD.format("3.5"), 0, 0, 0, "not a whole number"),
    (GOOD.format("-3"), 0, 0, 0, "not a whole number"),
    (GOOD.format("2 or 3"), 0, 0, 0, "not one number"),
    (GOOD.format("1e9999"), 0, 0, 0, "not one number"),
    (GOOD.format("9" * 5000), 0, 0, 0, "not one number"),
    (GOOD.format("1 2 3 4 5"), 0, 0, 0, "not one number"),
    (GOOD.format("3") + "<answer>4</answer>", 0, 0, 0, "not exactly one closed <answer>"),
    (GOOD.format("3") + GOOD.format("3"), 0, 0, 0, "not exactly one closed <answer>"),
    ("<answer>3", 0, 0, 0, "not exactly one closed <answer>"),
    ("3", 0, 0, 0, "no <answer> tag"),
    ("", 0, 0, 0, "no <answer> tag"),
    ("<answer>3</answer>", 1, 0, 1, "not exactly one thought"),
    ("<think></think><answer>3</answer>", 1, 0, 1, "an empty thought"),
    ("<think>\u200b \u00a0</think><answer>3</answer>", 1, 0, 1, "an empty thought"),
    ("so " + GOOD.format("3"), 1, 0, 1, "text outside"),
    (GOOD.format("3") + " done", 1, 0, 1, "text outside"),
    ("<think>a</think><think>b</think><answer>3</answer>", 1, 0, 1, "not exactly one thought"),
    ("<answer>3</answer><think>a</think>", 1, 0, 1, "not exactly one thought"),
    ("<think><answer>3</answer></think>", 0, 0, 0, "within the thought"),
    ("<think>a<answer>3</answer>b</think>", 0, 0, 0, "within the thought"),
    ("<think>a<answer>3</answer>", 1, 0, 1, "not exactly one thought"),
    ("<THINK>a</THINK><answer>3</answer>", 1, 0, 1, "not exactly one thought"),
]


USUAL = Drawing(224, 6, QUESTION_KINDS, most=9)
SEVEN = (
    "7", "7.", " 7 ", "7\n", "07", "+7", "7.0", "7.00", "**7**", "*7*", "__7__", "`7`", "<b>7</b>", "# 7", "- 7", "(7)",
    "'7'", "\u201c7\u201d", "$7$", "\\(7\\)", "\\[7\\]", "\\boxed{7}", "$\\boxed{7}$", "\\boxed{7 \\text{ cubes}}",
    "\\text{seven}", "7 objects", "7 apples.", "7 red cubes and spheres", "seven", "Seven.", "SEVEN cubes",
    "7 (seven)", "seven (7)", "There are 7 objects", "There are **7** objects.", "There are seven (7) items.",
    "The answer is 7.", "Answer: 7", "= 7", "x = 7", "count-7", "7 objects, 7 in total", "7 cats under the table", "7!",
    "maybe 7", "about 7", "~7", "\u2248 7", "7-ish", "7?", "3 + 4 = 7", "3+4=7 objects", "8 - 1 = 7", "8-1=7",
    "10 \u2212 3 = 7",
    "8 minus 1 is 7", "3 red + 4 blue = 7", "3 red cubes + 4 blue cubes = 7 cubes", "5 + 3 - 1 = 7", "\u200b7\u200b",
    "7\u00a0objects", "3 red, 4 blue, 7 in total", "There are 7 objects: 3 red and 4 blue", "3 red, 4 blue: total 7",
    "7 (3 red, 4 blue)", "three plus four is seven", "3 plus 4 equals 7", "3 + 4 = 7, so 7", "7 A's", "7, I think",
    "7 T-shirts", "7 cubes and no spheres",
)  # fmt: skip
NOT_SEVEN = (
    "", "many", "several", "no idea", "6 or 7", "7 or 6", "6-7", "6 to 7", "7-8", "0-30", "between 6 and 8", "7 (6)",
    "1 2 3 4 5 6 7", "1,2,3,4,5,6,7", "7, 6", "7 7", "7,8", "seven eight", "-7", "\u22127", "not 7", "it isn't 7",
    "at least 7", "at most 7", "more than 7", "fewer than 7", "up to 7", "over 7", "almost 7", "7 or more", "7+", ">7",
    "\u22657", "7\u00b11", "7%", "7 percent", "7 million", "7 hundred", "seven hundred", "7 dozen", "7 and a half",
    "half of 7",
    "7.5", ".7", "7.7.7", "7:30", "7/2", "\\frac{7}{2}", "\\sqrt{7}", "7^2", "7\u00b2", "7th", "seventh", "x7", "7x",
    "7e1", "7 x 7", "7*1", "7 + 1", "3 + 4", "3 + 4 = 8", "8 - 2 = 7",
    "8 - 1", "3 red + 5 blue = 7", "8 - 1 not equals 7", "-1 + 8 = 7", "1 - 8 = 7", "3 + 4 never is 7",
     "\u0667", "77", "seventeen", "twenty-seven", "7 " * 600,
    "It is false that there are 7 cubes.", "7 is wrong", "hardly 7", "7? No.", "No, 7", "7 oder acht", "upwards of 7",
    "7 and up", "7 pairs", "twice 7", "7 squared", "7 k", "Except 7", "on 7 July", "July 7", "7 o'clock", "I doubt 7",
    "all but 7", "3 red, 4 blue, 7 green", "7 red, 3 blue, 4 green", "3 red, 5 blue, 7 in total",
    "3 to 4 to 7 in total",
    "7 objects: 3 red and 5 blue", "7: 3 4", "3, 4, 7 in total", "three plus five is seven", "seven plus one",
)  # fmt: skip
OTHERS = {"twenty-one": 21, "Twenty one cubes": 21, "nineteen": 19, "ninety": 90, "1,200": 1200, "1{,}200 stars": 1200,
          "none": 0, "None.": 0, "No cubes.": 0, "no red cubes": 0, "There are no cubes.": 0, "zero": 0,
          "nothing": 0,
          "a single cube": 1, "There is just a single cube.": 1, "not a single cube": None, "no one": None,
          "every single cube": None, "a single-digit number": None, "a single pair": None, "nothing to say": None,
          "thirty plus four is thirty-four": 34, "twenty three plus four is seven": None, "1 plus 2 is 3.5": None,
          "1 2 3": None, "1 or 2 or 3 in total": None,
          "none of these": None, "no way": None, "There are no more than 3": None}  # fmt: skip


@pytest.mark.parametrize("text", SEVEN)
def test_a_person_would_call_these_seven(text: str) -> None:
    assert read_count(GOOD.format(text)) == (7, "")


@pytest.mark.parametrize("text", NOT_SEVEN)
def test_nobody_would_call_these_seven(text: str) -> None:
    assert read_count(GOOD.format(text))[0] != 7


@pytest.mark.parametrize(("text", "number"), OTHERS.items())
def test_words_and_large_numbers(text: str, number: int | None) -> None:
    assert read_count(GOOD.format(text))[0] == number


@given(st.integers(0, 99), st.integers(0, 99))
def test_every_number_is_read_in_words_and_two_never_are(first: int, second: int) -> None:
    assert read_count(GOOD.format(f"There are {in_words(first)} cubes."))[0] == first
    if first != second:
        assert read_count(GOOD.format(f"{in_words(first)} or {second}"))[0] is None


def in_words(number: int) -> str:
    return ONES[number] if number < 20 else TENS[number // 10 - 2] + (f"-{ONES[number % 10]}" if number % 10 else "")


def scored(response: str, truth: Any = 3, finish: Any = "stop", **args: Any) -> dict[str, Any]:
    spec = count(**args)
    return dict(spec.fn(RewardInput(response, {"answer": truth}, finish=finish)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("response", "accuracy", "form", "nearness", "note"), SCORED)
def test_the_reward_by_hand(response: str, accuracy: float, form: float, nearness: float, note: str) -> None:
    parts = scored(response)
    assert (parts["accuracy"], parts["format"]) == (accuracy, form)
    assert parts["nearness"] == pytest.approx(nearness)
    assert note in parts["note"] and bool(note) == bool(parts["note"])


def test_nearness_at_a_truth_of_0() -> None:
    assert [scored(GOOD.format(n), truth=0)["nearness"] for n in (0, 1, 2)] == [1.0, 0.0, 0.0]


def test_a_cut_response_has_no_form_and_a_thought_may_be_optional() -> None:
    assert scored(GOOD.format("3"), finish="length")["format"] == 0
    assert scored("<answer>3</answer>", thought="optional")["format"] == 1
    assert scored(GOOD.format("3"), thought="optional")["format"] == 1
    assert scored("so <answer>3</answer>", thought="optional")["format"] == 0
    with pytest.raises(RewardError, match="sometimes"):
        count(thought="sometimes")


@pytest.mark.parametrize("truth", [None, "3", 3.0, True, -1])
def test_a_row_without_a_count_is_an_error_and_no_score_of_0(truth: Any) -> None:
    with pytest.raises(RewardError, match="not a whole number"):
        scored(GOOD.format("3"), truth)


@given(st.text(max_size=60), st.integers(0, 20))
def test_the_reward_is_bounded_and_only_the_truth_earns_accuracy(text: str, truth: int) -> None:
    for response in (text, GOOD.format(text), f"<answer>{text}</answer>"):
        parts = scored(response, truth)
        value, _ = combine({k: parts[k] for k in ("accuracy", "format", "nearness")}, count().weights)
        assert 0 <= value <= 1
        assert (parts["accuracy"] == 1) == (read_count(response)[0] == truth)


@pytest.mark.parametrize(
    ("response", "truth", "accuracy", "error", "bias", "failure"),
    [
        (GOOD.format("3"), 3, 1, 0, 0, 0),
        (GOOD.format("5"), 3, 0, 2, 2, 0),
        (GOOD.format("1"), 3, 0, 2, -2, 0),
        (GOOD.format("900000"), 3, 0, 100, 100, 0),
        ("no idea", 3, 0, 3, None, 1),
        ("no idea", 0, 0, 1, None, 1),
        ("no idea", 500, 0, 100, None, 1),
    ],
)
def test_measures_by_hand(
    response: str, truth: int, accuracy: float, error: float, bias: float | None, failure: float
) -> None:
    measures = measure_counting(RewardInput(response, {"answer": truth}), UNSCORED)
    assert measures == {
        "accuracy": accuracy,
        "absolute_error": error,
        "bias": bias,
        "parse_failure": failure,
    }


def components(image: Image.Image, names: set[str]) -> int:
    """Number of connected regions of these colours: an independent count for scenes without overlaps."""
    pixels = np.asarray(image.convert("RGB")).astype(int)
    return sum(ndimage.label((pixels == COLOURS[name]).all(axis=2), np.ones((3, 3)))[1] for name in names)


def test_drawn_counts_are_what_the_image_shows() -> None:
    splits = drawn_rows(
        "counting", Drawing(224, 6, ("colour", "all"), most=9, overlap=0.0), 3, {"train": 60, "test": 20}
    )
    for row in [*splits["train"], *splits["test"]]:
        image = Image.open(io.BytesIO(row.images[0]))
        named = set(COLOURS) if row.truth["asks"] == "all" else {row.columns["problem"].split()[2]}
        assert components(image, named) == row.truth["answer"], row.columns


def test_counts_and_questions_take_turns_and_a_seed_repeats() -> None:
    first, again = (drawn_rows("counting", USUAL, 1, {"train": 80})["train"] for _ in range(2))
    assert [row.images for row in first] == [row.images for row in again]
    assert [row.images for row in first] != [
        row.images for row in drawn_rows("counting", USUAL, 2, {"train": 80})["train"]
    ]
    counts = [row.truth["answer"] for row in first if row.truth["asks"] == "both"]
    assert sorted(counts) == sorted(list(range(10)) * 2)
    assert {row.truth["answer"] for row in first if row.truth["asks"] == "all"} == set(range(1, 10))
    assert len({row.images[0] for row in first}) == 80
    with pytest.raises(DataError, match="no new image"):
        drawn_rows("counting", Drawing(56, 6, QUESTION_KINDS, most=30, overlap=0.0), 0, {"train": 100})


def table(tmp_path: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl", key: str = "image_path") -> Path:
    """A table of rows, each with an image of its own, unless it names one."""
    folder = tmp_path / "source"
    folder.mkdir(exist_ok=True)
    for number, row in enumerate(rows):
        if key not in row:
            image = Image.new("RGB", (60 + number, 50), (number * 7 % 255, number * 31 % 255, 90))
            (folder / f"{name}{number}.png").write_bytes(encode_png(image))
            row[key] = f"{name}{number}.png"
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return folder / name


def test_a_drawn_dataset_is_sound_and_its_traces_earn_everything(tmp_path: Path) -> None:
    made = prepare("counting", tmp_path, synthetic=20, side=112, most=4, others=2)
    assert sizes_of(made.info) == {"train": 20, "validation": 20, "test": 40}
    assert prepare("counting", tmp_path, synthetic=20, side=112, most=4, others=2).outcome == "up to date"
    for variant, profile in (("think", "default"), ("direct", "default"), ("think", "rllava")):
        source = open_source(Data(path=str(made.path), variant=variant), Reward(profile=profile))
        assert source.task.trace is not None
        for row in [source.rows[i] for i in range(20)]:
            (message,) = source.messages(row)
            assert message.content.count("<image>") == 1 and str(row.columns["problem"]) in message.content
            text = source.task.trace(row, random.Random(0))
            assert combine(source.reward(RewardInput(text, row.truth)), source.reward.weights)[0] == 1.0


@pytest.mark.parametrize(
    ("row", "question", "answer", "objects"),
    [
        ({"problem": "How many items?", "answer": "<answer> 7 </answer>"}, "How many items?", 7, False),
        ({"problem": "<image>How many\n items?", "answer": "7"}, "How many items?", 7, False),
        ({"question": "How many items?", "ground_truth": 4}, "How many items?", 4, False),
        ({"question": "people", "ground_truth": 5}, "How many people are in the image?", 5, True),
        ({"label": "people", "count": 0}, "How many people are in the image?", 0, False),
    ],
    ids=["clevr", "marks", "superclevr", "pixmo in RLLaVA", "pixmo"],
)
def test_rows_of_published_tables(
    tmp_path: Path, row: dict[str, Any], question: str, answer: int, objects: bool
) -> None:
    source = table(tmp_path, [dict(row) for _ in range(3)])
    made = prepare("counting", tmp_path, source, objects=objects, validation_rows=0)
    (split,) = made.info["splits"]
    rows = rows_of(made, split)
    assert [(r.columns["problem"], r.truth["answer"]) for r in rows] == [(question, answer)] * 3
    assert str(tmp_path) not in (made.path / "dataset.json").read_text()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"ground_truth": 2.5}, "not a whole number"),
        ({"ground_truth": -1}, "not a whole number"),
        ({"ground_truth": "many"}, "not a whole number"),
        ({"ground_truth": None}, "not a whole number"),
        ({"ground_truth": True}, "not a whole number"),
        ({"question": "people"}, "--objects"),
        ({"question": ""}, "not a text"),
        ({"image_path": "../../x.png"}, "leaves"),
        ({"image_path": "https://example.org/a.png"}, "download it first"),
        ({"image_path": None}, "no image"),
    ],
)
def test_a_wrong_row_is_an_error_or_is_left_out_on_request(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    good = [{"question": "How many?", "ground_truth": n} for n in range(4)]
    source = table(tmp_path, [*good, {"question": "How many?", "ground_truth": 9, **fields}])
    with pytest.raises(DataError) as error:
        prepare("counting", tmp_path, source, validation_rows=0)
    assert "1 of 5 rows are wrong" in error.value.message and reason in error.value.message
    assert "rows.jsonl:5" in error.value.message and "--max-bad 0.2" in str(error.value.hint)
    assert not (tmp_path / "out").exists()
    made = prepare("counting", tmp_path, source, validation_rows=0, max_bad=0.2)
    assert len(rows_of(made, next(iter(made.info["splits"])))) == 4
    (line,) = (made.path / "dropped.jsonl").read_text().splitlines()
    assert json.loads(line)["origin"] == "rows.jsonl:5" and reason in json.loads(line)["reason"]


def test_wrong_rows_are_a_share_of_the_whole_table_whatever_split_they_are_cut_to(tmp_path: Path) -> None:
    """The answer is no number in 2 of 20 rows, whose images are sound; one is cut to validation.

    2 / 20 = 0.1, which is 1 of 18 or 19 rows of train, and 1 of 1 or 2 of validation.
    """
    rows: list[dict[str, Any]] = [{"question": "How many?", "ground_truth": n} for n in range(20)]
    source = table(tmp_path, rows)
    kept = prepare("counting", tmp_path, source, validation_rows=2)
    cut = {json.dumps(row.truth["answer"]) for row in rows_of(kept, "validation")}
    rows = [{**row, "ground_truth": "x"} if str(n) == min(cut) or n == 19 else row for n, row in enumerate(rows)]
    for max_bad in (0.0, 0.09):
        with pytest.raises(DataError, match=r" 2 of 20 rows are wrong, ") as error:
            prepare("counting", tmp_path, table(tmp_path, rows), validation_rows=2, max_bad=max_bad, force=True)
        assert "--max-bad 0.1 leaves" in str(error.value.hint)
    made = prepare("counting", tmp_path, table(tmp_path, rows), validation_rows=2, max_bad=0.1, force=True)
    assert len(rows_of(made)) == 17 and len(rows_of(made, "validation")) == 1


def test_an_image_that_is_damaged_after_its_header_is_a_wrong_row(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"question": "How many?", "ground_truth": n} for n in range(5)]
    source = table(tmp_path, rows)
    image = source.parent / rows[2]["image_path"]
    image.write_bytes(image.read_bytes()[:-30])
    Image.open(image)  # the header is sound
    with pytest.raises(DataError, match=r"1 of 5 rows are wrong.*\n  rows\.jsonl:3: broken image"):
        prepare("counting", tmp_path, source, validation_rows=0)
    assert not (tmp_path / "out").exists()
    made = prepare("counting", tmp_path, source, validation_rows=0, max_bad=0.2)
    assert len(rows_of(made)) == 4
    again = [{"question": "How many cats?", "ground_truth": 1, "image_path": rows[n]["image_path"]} for n in (0, 2)]
    made = prepare("counting", tmp_path, table(tmp_path, [*rows, *again]), validation_rows=0, max_bad=0.3, force=True)
    assert len(rows_of(made)) == 5 and len((made.path / "dropped.jsonl").read_text().splitlines()) == 2


def test_questions_are_no_names_of_objects(tmp_path: Path) -> None:
    rows = [{"question": "people", "ground_truth": 3}, {"question": "How many cats are there?", "ground_truth": 1}]
    with pytest.raises(DataError, match=r"rows\.jsonl:2.*is a question") as error:
        prepare("counting", tmp_path, table(tmp_path, rows), objects=True, validation_rows=0)
    assert "leave out --objects" in str(error.value.hint)


def test_rows_that_repeat_or_contradict_each_other_are_left_out(tmp_path: Path) -> None:
    rows = [{"question": "How many?", "ground_truth": 1}, {"question": "How many?", "ground_truth": 2}]
    source = table(tmp_path, rows)
    image = rows[0]["image_path"]
    more = [{"question": "How many?", "ground_truth": n, "image_path": image} for n in (1, 3)]
    made = prepare("counting", tmp_path, table(tmp_path, [*rows, *more], source.name), validation_rows=0)
    reasons = [json.loads(line)["reason"] for line in (made.path / "dropped.jsonl").read_text().splitlines()]
    assert reasons == ["the same row as rows.jsonl:1", "another answer to the image and question of rows.jsonl:1"]


def test_validation_rows_share_no_image_with_train_and_another_table_is_the_test(tmp_path: Path) -> None:
    rows = [{"question": "How many?", "ground_truth": n % 5} for n in range(40)]
    source = table(tmp_path, rows, "train.jsonl")
    twice = [{"question": "How many cats?", "ground_truth": 1, "image_path": row["image_path"]} for row in rows]
    source = table(tmp_path, [*rows, *twice], "train.jsonl")
    test = table(tmp_path, [{"question": "How many test items?", "ground_truth": 2} for _ in range(3)], "super.jsonl")
    made = prepare("counting", tmp_path, source, test=str(test), validation_rows=6)
    assert sizes_of(made.info) == {"train": 74, "validation": 6, "test": 3}
    images = {split: {row.media[0].sha256 for row in rows_of(made, split)} for split in made.info["splits"]}
    assert not images["train"] & images["validation"]
    assert all(row.columns["problem"] == "How many test items?" for row in rows_of(made, "test"))


def test_the_test_table_may_have_its_images_elsewhere(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("rows", "images", "test")]
    for place in places:
        place.mkdir()
    source = table(places[1], [{"question": "How many?", "ground_truth": n} for n in range(3)])
    source = source.rename(places[0] / "rows.jsonl")
    test = table(places[2], [{"question": "How many?", "ground_truth": 7}], "super.jsonl")
    (test.parent / "super.jsonl0.png").write_bytes(encode_png(Image.new("RGB", (33, 50))))
    roots: dict[str, Any] = {"images_root": places[1] / "source", "test": str(test), "validation_rows": 0}
    made = prepare("counting", tmp_path, source, **roots, test_images_root=test.parent)
    assert sizes_of(made.info) == {"train": 3, "test": 1}
    assert rows_of(made, "test")[0].media[0].sha256 == image_hash((test.parent / "super.jsonl0.png").read_bytes())
    with pytest.raises(DataError, match="is not a folder"):
        prepare("counting", tmp_path, source, **roots, test_images_root=tmp_path / "none", force=True)


def test_a_table_without_the_columns_says_which_it_needs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column `answer`"):
        prepare("counting", tmp_path, table(tmp_path, [{"question": "How many?"}]))
    with pytest.raises(DataError, match="no column `problem` or `label`"):
        prepare("counting", tmp_path, table(tmp_path, [{"answer": 3}]))
    with pytest.raises(DataError, match="--asks"):
        prepare("counting", tmp_path, synthetic=20, asks="size")
    with pytest.raises(DataError, match="leave one out"):
        prepare("counting", tmp_path, table(tmp_path, [{"answer": 3}]), synthetic=20)


def test_answers_of_cells() -> None:
    assert [read_truth(cell) for cell in (7, 7.0, "7", " <answer>7</answer> ")] == [7] * 4
    for cell in ("<answer>7", "7 or 8", float("nan"), float("inf"), 10**9, [7], b"7"):
        with pytest.raises(DataError):
            read_truth(cell)


def test_the_task_knows_its_truth() -> None:
    task = counting_task({})
    assert task.validate({"answer": 3}) == [] and task.validate({"answer": "3"}) and task.validate({})
