"""`vlmrl prep geometry3k` and `mm_math` from MAYE's files and from published rows: answers, marks, images, splits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import task_tables
from PIL import Image
from task_tables import checks_of, rows_of, sizes_of

from vlmrl.data.doctor import visit
from vlmrl.data.images import encode_png
from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError
from vlmrl.recipe.schema import Data
from vlmrl.tasks.dataset_assembly import Prepared
from vlmrl.tasks.geometry.prepare import place_marks, read_answer
from vlmrl.tasks.geometry.task import GEOMETRY3K, GEOQA, MM_MATH, TEXT_MATH, Collection

Fields = Mapping[str, Any]


def picture(number: int) -> bytes:
    """A picture that looks like no other: a white square on its own place."""
    image = Image.new("L", (64, 64), 0)
    image.paste(255, (number * 7 % 50, number * 11 % 50, number * 7 % 50 + 6 + number, number * 11 % 50 + 9))
    return encode_png(image)


def maye_row(name: str, number: int, **fields: Any) -> dict[str, Any]:
    """A row as MAYE publishes it."""
    return {
        "question": f"<image>Find $x$ ({name} {number}).",
        "answer": str(number),
        "solution": f"\\boxed{{{number}}}",
        "id": f"{name}_{number}",
        "image": f"images/{name}_{number}.png",
        **fields,
    }


def maye_folder(folder: Path, files: Mapping[str, Sequence[Fields]]) -> Path:
    """MAYE's layout: JSONL files with an image folder beside them. Rows name their images."""
    (folder / "images").mkdir(parents=True)
    number = 0
    for file, rows in files.items():
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        for row in rows:
            number += 1
            (folder / str(row["image"])).write_bytes(picture(number))
    return folder


def geometry_folder(tmp_path: Path, **last: Any) -> Path:
    """A small Geometry3K of MAYE; `last`: fields of the last training row."""
    return maye_folder(
        tmp_path / "geometry3k",
        {
            "geometry3k_rl_v0.jsonl": [*(maye_row("a", i) for i in range(5)), maye_row("a", 5, **last)],
            "geometry3k_validation_v0.jsonl": [maye_row("b", i) for i in range(2)],
            "geometry3k_test_v0.jsonl": [maye_row("c", i) for i in range(3)],
        },
    )


def prepare(tmp_path: Path, source: Path | str | None, collection: Collection = GEOMETRY3K, **options: Any) -> Prepared:
    return task_tables.prepare(collection.name, tmp_path, source, **options)


def test_mayes_folder_keeps_its_splits_answers_and_images(tmp_path: Path) -> None:
    source = geometry_folder(tmp_path, solution="So $x = 2 \\cdot 3$. Thus $x = \\boxed{6}$, as \\boxed{ 6\\sqrt{3} }")
    prepared = prepare(tmp_path, source)
    assert sizes_of(prepared.info) == {"train": 6, "validation": 2, "test": 3}
    train = rows_of(prepared, "train")
    assert [row.truth["answer"] for row in train] == ["0", "1", "2", "3", "4", "6\\sqrt{3}"]  # the last box
    assert train[5].truth["solution"].endswith("\\boxed{ 6\\sqrt{3} }")
    assert train[0].columns["problem"] == "<image>Find $x$ (a 0)."
    dataset = open_dataset(Data(path=str(prepared.path)))
    assert dataset.image_bytes(train[2].media[0]) == (source / "images" / "a_2.png").read_bytes()
    finding = checks_of(prepared.info)["answers"][1]
    assert "1 rows spell another answer" in finding and "train line 6" in finding


@pytest.mark.parametrize("is_drawn", [False, True])
def test_prep_and_doctor_say_alike_what_guessing_earns(tmp_path: Path, is_drawn: bool) -> None:
    options = {"synthetic": 12, "topics": "squares", "width": 112} if is_drawn else {}
    prepared = prepare(tmp_path, None if is_drawn else geometry_folder(tmp_path), **options)
    dataset = open_dataset(Data(path=str(prepared.path)))
    old = {"check": "labels", "verdict": "ok", "finding": "none to count"}  # of a dataset of an earlier version
    dataset.info["doctor"]["checks"].append(old)
    visited = visit(dataset, lambda row: 1, workers=1)["checks"]
    for checks in (prepared.info["doctor"]["checks"], visited):
        of_labels = {c["check"]: c["finding"] for c in checks if c["check"] in ("labels", "majority class")}
        assert list(of_labels) == ["majority class"] and "train: always `" in of_labels["majority class"]


def test_many_different_answers_are_no_classes(tmp_path: Path) -> None:
    rows = {f"geometry3k_{name}_v0.jsonl": [maye_row(name, i) for i in range(20)] for name in ("rl", "test")}
    rows["geometry3k_rl_v0.jsonl"].append(maye_row("rl", 20))
    prepared = prepare(tmp_path, maye_folder(tmp_path / "geometry3k", rows))
    (check,) = [c for c in prepared.info["doctor"]["checks"] if c["check"] == "majority class"]
    assert check["finding"].startswith("none to count")


def test_the_same_folder_gives_the_same_dataset_and_no_path_is_kept(tmp_path: Path) -> None:
    first = prepare(tmp_path / "one", geometry_folder(tmp_path / "one"))
    second = prepare(tmp_path / "two", geometry_folder(tmp_path / "two"))
    assert first.info["fingerprint"] == second.info["fingerprint"]
    assert (first.path / "dataset.json").read_text() == (second.path / "dataset.json").read_text()
    assert str(tmp_path) not in (first.path / "dataset.json").read_text()
    assert prepare(tmp_path / "one", tmp_path / "one" / "geometry3k").outcome == "up to date"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"solution": "x is 5."}, "there is no box"),
        ({"solution": "\\boxed{}"}, "the last box is empty"),
        ({"solution": "\\boxed{5} and \\boxed{ }"}, "the last box is empty"),
        ({"solution": "\\boxed{5"}, "not closed"),
        ({"solution": None}, "`solution` is None"),
        ({"solution": f"\\boxed{{{'1' * 501}}}"}, "501 characters"),
        ({"solution": "\\boxed{\\int_0^1 x}"}, "cannot be graded: it is a calculation that is not worked out"),
        ({"question": "<image><image>Find $x$."}, "1 image, but 2 <image> marks"),
        ({"question": "<image> "}, "not a text"),
        ({"question": 7}, "not a text"),
        ({"image": "images/../../a.png"}, "leaves"),
        ({"image": "https://example.org/a.png"}, "download it first"),
        ({"image": None}, "no image"),
    ],
)
def test_a_wrong_row_is_an_error_with_its_line_and_nothing_is_written(
    tmp_path: Path, fields: Fields, reason: str
) -> None:
    source = geometry_folder(tmp_path)
    file = source / "geometry3k_rl_v0.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows[:5], {**rows[5], **fields}]))
    with pytest.raises(DataError) as error:
        prepare(tmp_path, source)
    assert "1 of 11 rows are wrong" in error.value.message
    assert "train line 6" in error.value.message and reason in error.value.message
    assert "--max-bad 0.1 leaves them out" in str(error.value.hint)
    assert not (tmp_path / "out").exists()


def test_wrong_rows_are_left_out_on_request_and_listed(tmp_path: Path) -> None:
    source = geometry_folder(tmp_path, solution="no answer here")
    (source / "images" / "a_1.png").write_bytes(b"\x89PNG but broken")
    prepared = prepare(tmp_path, source, max_bad=0.2)
    assert prepared.info["splits"]["train"]["rows"] == 4
    listing = (prepared.path / "dropped.jsonl").read_text().splitlines()
    assert [json.loads(line)["origin"] for line in listing] == ["train line 2", "train line 6"]
    assert checks_of(prepared.info)["rows that are wrong"][1].startswith("2 of 11 rows")


def hub_table(path: Path, rows: Sequence[Fields]) -> Path:
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("images", pa.list_(image)), ("problem", pa.string()), ("answer", pa.string())])
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], schema=schema), path)
    return path


def hub_row(number: int, **fields: Any) -> dict[str, Any]:
    """A row in the published format of the hub."""
    images = [{"bytes": picture(number), "path": None}]
    return {"images": images, "problem": f"<image>Find $y$ ({number}).", "answer": f"{number}\\sqrt{{2}}", **fields}


def test_hub_rows_need_no_solution_and_a_boxed_answer_is_unboxed(tmp_path: Path) -> None:
    rows = [hub_row(1), hub_row(2, answer="\\boxed{7}"), hub_row(3, problem="Find $y$ (3).")]
    prepared = prepare(tmp_path, hub_table(tmp_path / "hub" / "train-0.parquet", rows), validation_rows=0)
    train = rows_of(prepared, "train")
    assert [row.truth["answer"] for row in train] == ["1\\sqrt{2}", "7", "3\\sqrt{2}"]
    assert {row.truth["solution"] for row in train} == {None}
    assert [row.columns["problem"] for row in train] == [
        "<image>Find $y$ (1).",
        "<image>Find $y$ (2).",
        "<image>Find $y$ (3).",
    ]


def test_validation_is_cut_off_train_by_figure_and_other_rows_become_the_test(tmp_path: Path) -> None:
    rows = [hub_row(i % 20, problem=f"<image>Question {i}.") for i in range(40)]  # two questions on each figure
    train = hub_table(tmp_path / "hub" / "train-0.parquet", rows)
    test = maye_folder(tmp_path / "mathverse", {"math_verse_test_v0.jsonl": [maye_row("v", 90 + i) for i in range(3)]})
    prepared = prepare(tmp_path, train, MM_MATH, test=f"{test}@test", validation_rows=100, seed=2)
    figures = {
        split: {media.sha256 for row in rows_of(prepared, split) for media in row.media}
        for split in ("train", "validation", "test")
    }
    assert len(rows_of(prepared, "validation")) == 4  # a tenth of 40, though 100 were asked for
    assert not figures["train"] & figures["validation"] and len(figures["test"]) == 3
    assert [row.truth["answer"] for row in rows_of(prepared, "test")] == ["90", "91", "92"]
    assert prepared.info["task"] == "mm_math" and prepared.info["args"]["test"] == "mathverse@test"


def test_another_test_source_replaces_the_sources_own(tmp_path: Path) -> None:
    test = hub_table(tmp_path / "other.parquet", [hub_row(33)])
    prepared = prepare(tmp_path, geometry_folder(tmp_path), test=str(test))
    assert [row.truth["answer"] for row in rows_of(prepared, "test")] == ["33\\sqrt{2}"]
    two = maye_folder(tmp_path / "two", {"train.jsonl": [maye_row("x", 1)], "val.jsonl": [maye_row("y", 2)]})
    with pytest.raises(DataError, match="no split `test`"):
        prepare(tmp_path, tmp_path / "geometry3k", test=str(two), out=tmp_path / "other")


def test_rows_that_repeat_one_are_left_out_and_rows_that_contradict_one_are_wrong(tmp_path: Path) -> None:
    rows = [hub_row(1), hub_row(2), hub_row(1), hub_row(4), hub_row(4, answer="5"), hub_row(6)]
    table = hub_table(tmp_path / "rows.parquet", rows)
    with pytest.raises(DataError, match="2 of 6 rows are wrong") as error:
        prepare(tmp_path, table)
    assert "different answers in different rows" in error.value.message
    prepared = prepare(tmp_path, table, max_bad=0.4, validation_rows=0)
    assert [row.truth["answer"] for row in rows_of(prepared, "train")] == ["1\\sqrt{2}", "2\\sqrt{2}", "6\\sqrt{2}"]
    assert prepared.info["counts"]["dropped"] == 3


def test_a_table_without_a_needed_column_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "p", "images": ["a.png"]}) + "\n")
    with pytest.raises(DataError, match="no column `solution` or `answer`"):
        prepare(tmp_path, tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "p", "image": "a.png", "answer": "1"}) + "\n")
    with pytest.raises(DataError, match="no column `problem`"):
        prepare(tmp_path, tmp_path / "rows.jsonl")


def test_a_source_is_needed_where_no_rows_are_published(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs a source") as error:
        prepare(tmp_path, None, MM_MATH)
    assert "--synthetic" in str(error.value.hint)
    with pytest.raises(DataError, match="makes the rows"):
        prepare(tmp_path, "rows.jsonl", synthetic=20)
    with pytest.raises(DataError, match="topic"):
        prepare(tmp_path, None, MM_MATH, synthetic=20, topics="angels")
    assert not (tmp_path / "out").exists()


def test_paths_without_files_are_one_error_that_says_where_the_images_are(tmp_path: Path) -> None:
    rows = [
        {"image_path": f"./Geo170K/{i}.png", "question": f"Angle {i} is ()", "ground_truth": "140\u00b0"}
        for i in range(4)
    ]
    table = tmp_path / "prompts.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(DataError, match="4 of 4 rows name an image file that is not there") as error:
        prepare(tmp_path, table, GEOQA)
    assert "prompts.jsonl:1" in error.value.message and "0.png" in error.value.message
    assert "--images-root" in str(error.value.hint) and "Geo170K" in str(error.value.hint)
    for number in range(4):
        image = tmp_path / "figures" / "Geo170K" / f"{number}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(picture(number))
    prepared = prepare(tmp_path, table, GEOQA, images_root=tmp_path / "figures", validation_rows=0)
    assert [row.truth["answer"] for row in rows_of(prepared, "train")] == ["140\u00b0"] * 4
    assert {row.columns["problem"] for row in rows_of(prepared, "train")} >= {"<image>Angle 2 is ()"}


def chat(text: str, *others: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be brief."}, *({"role": "user", "content": one} for one in (text, *others))]


def test_text_rows_are_chats_or_texts_and_worked_solutions_are_kept_beside_known_answers(tmp_path: Path) -> None:
    rows = [
        {"prompt": chat("1+1?"), "reward_model": {"ground_truth": "2"}, "target": [{"content": "So \\boxed{2}."}]},
        {"prompt": "1+2?", "reward_model": {"ground_truth": 3}, "target": "It is \\boxed{3}"},
        {"prompt": "1+3?", "reward_model": {"ground_truth": "4"}, "target": "without a box"},
        {"prompt": "1+4?", "reward_model": {"ground_truth": "5"}, "target": "\\boxed{6}"},
    ]
    table = tmp_path / "rows.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = prepare(tmp_path, table, TEXT_MATH)
    found = [(row.columns["problem"], row.truth["answer"], row.truth["solution"]) for row in rows_of(prepared, "train")]
    assert found == [
        ("1+1?", "2", "So \\boxed{2}."),
        ("1+2?", "3", "It is \\boxed{3}"),
        ("1+3?", "4", None),
        ("1+4?", "5", None),
    ]
    assert not any(row.media for row in rows_of(prepared, "train"))
    for wrong, reason in (
        ({"prompt": chat("1?", "2?")}, "a chat of 2 messages"),
        ({"prompt": [{"role": "assistant", "content": "1"}]}, "one of a user"),
        ({"prompt": "<image>1?"}, "0 images, but 1 <image> mark"),
        ({"prompt": 5}, "not a text"),
        ({"reward_model": {"style": "rule"}}, "there is no solution"),
    ):
        table.write_text(json.dumps({**rows[0], **wrong}) + "\n")
        with pytest.raises(DataError) as error:
            prepare(tmp_path, table, TEXT_MATH, out=tmp_path / "other")
        assert reason in error.value.message


def test_answers_that_the_parser_cannot_read_are_counted_and_named(tmp_path: Path) -> None:
    answers = [
        "f(x",
        "x \\text{ undefined macro \\foo}",
        "2√{3}",
        "6米",
        "(-\\infty, 3]",
        "\\text{SAS}",
        "B",
        "x \\ne 2",
    ]
    table = tmp_path / "rows.jsonl"
    table.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": text}) + "\n" for n, text in enumerate(answers)))
    prepared = prepare(tmp_path, table, TEXT_MATH)
    assert prepared.info["splits"]["train"]["rows"] >= 6
    (note,) = [c for c in prepared.info["doctor"]["checks"] if c["check"] == "unread answers"]
    assert note["verdict"] == "look" and note["finding"].startswith("2 rows have an answer that cannot be read")
    assert "1 'f(x'" in note["finding"] and "undefined macro" in note["finding"] and "√" not in note["finding"]


def test_a_solution_that_is_an_answer_tag_is_the_answer() -> None:
    assert read_answer("<answer> 145\u00b0 </answer>", None, has_solution=True) == ("145\u00b0", None, False)
    with pytest.raises(DataError, match="no box"):
        read_answer("<answer> </answer>", None, has_solution=True)
    with pytest.raises(DataError, match="no box"):
        read_answer("<answer>1</answer><answer>2</answer>", None, has_solution=True)


def test_answers_and_marks_as_they_stand_in_tables() -> None:
    assert read_answer("is \\boxed{\\frac{1}{2}}", "0.5", has_solution=True) == (
        "\\frac{1}{2}",
        "is \\boxed{\\frac{1}{2}}",
        True,
    )
    assert read_answer("\\boxed{2 \\pi}", "$2\\pi$", has_solution=True).differs is False
    assert read_answer("\\boxed{2}", "\\boxed{2}", has_solution=True).differs is False
    assert read_answer(None, 12, has_solution=False) == ("12", None, False)
    for empty in (None, "", "  ", True, ["1"]):
        with pytest.raises(DataError):
            read_answer(None, empty, has_solution=False)
    assert place_marks(" Find x. ", 2) == "<image><image>Find x."
    assert place_marks("In <image> and <image> find x.", 2) == "In <image> and <image> find x."
    with pytest.raises(DataError, match=r"2 images, but 1 <image> mark$"):
        place_marks("<image>Find x.", 2)


def test_a_killed_run_goes_on_where_it_was_and_writes_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare(tmp_path / "whole", geometry_folder(tmp_path / "whole"))
    source = geometry_folder(tmp_path / "killed")
    with monkeypatch.context() as patch:

        def killed(*args: object, **options: object) -> None:
            raise KeyboardInterrupt

        patch.setattr("vlmrl.tasks.geometry.prepare.assemble", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path / "killed", source)
    again = prepare(tmp_path / "killed", source)
    assert any("were not made again" in note for note in again.leftovers)
    assert (again.path / "dataset.json").read_bytes() == (whole.path / "dataset.json").read_bytes()
