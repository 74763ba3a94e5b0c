"""`vlmrl prep`, `vlmrl data` and `vlmrl init` as a person runs them."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from command_line import answered, refused, this_process
from pair_tables import photo, write_parquet
from PIL import Image

from vlmrl.data.images import encode_png


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "letters.zip"
    with zipfile.ZipFile(path, "w") as out:
        for number in range(160):
            color = (number, 0, 0)
            out.writestr(f"g{number % 2}/c{number % 4}/{number}.png", encode_png(Image.new("RGB", (6, 6), color)))
        out.writestr("g0/c0/broken.png", b"\x89PNG")
    return path


def test_prep_pairs_show_and_export_go_hand_in_hand(archive: Path, tmp_path: Path) -> None:
    out = tmp_path / "data" / "letters"
    sizes = ("--pairs", 30, "--validation-pairs", 6, "--test-pairs", 10)
    made = answered("prep", "pairs", "--source", archive, "--levels", "group,letter", "--out", out, *sizes)
    assert made["outcome"] == "created" and made["info"]["name"] == "letters"
    assert made["info"]["dropped"][0]["origin"] == "g0/c0/broken.png"
    again = answered("prep", "pairs", "--source", archive, "--levels", "group,letter", "--out", out, *sizes)
    assert again["outcome"] == "up to date"
    error = refused("prep", "pairs", "--source", archive, "--levels", "group,letter", "--out", out, *sizes, "--seed", 1)
    assert "seed was 0, now 1" in error.message and "--force" in str(error.hint)
    shown = answered("data", "show", out, "--split", "test", "--n", 2, "--save", tmp_path / "png")
    assert shown["splits"] == {"train": 30, "validation": 6, "test": 10} and len(shown["rows"]) == 2
    assert shown["rows"][0]["prompt"].startswith("[user] <image><image>")
    assert 2 <= len(list((tmp_path / "png").iterdir())) <= 4
    exported = answered("data", "export", out, tmp_path / "hf")
    assert exported["rows"] == {"train": 30, "validation": 6, "test": 10}
    assert "exists; nothing was written" in refused("data", "export", out, tmp_path / "hf").message
    shown = answered("data", "show", tmp_path / "hf", "--split", "test", "--n", 1)
    assert shown["splits"] == {"test": 10, "train": 30, "validation": 6}
    assert shown["rows"][0]["images"] == answered("data", "show", out, "--split", "test", "--n", 1)["rows"][0]["images"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--levels", "group,group"), "name each level once"),
        (("--levels", "think,letter"), "'think' cannot be used"),
        (("--levels", "a,b,c"), "no usable image"),
        (("--levels", "group,letter", "--name", "a/b"), "dataset name 'a/b'"),
        (("--levels", "group,letter", "--unseen-classes", "3"), "3 unseen classes of 4"),
        (("--levels", "group,letter", "--distance-shares", "x"), "not of the form"),
    ],
)
def test_prep_pairs_says_what_is_wrong_and_writes_nothing(
    archive: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    error = refused("prep", "pairs", "--source", archive, "--out", tmp_path / "data" / "x", *options)
    assert message in error.message and not (tmp_path / "data" / "x").exists()


def test_init_writes_a_folder_and_says_what_to_run_next(tmp_path: Path) -> None:
    made = answered("init", tmp_path / "mine", "--style", "easyr1", "--model", "demo/model")
    assert made["next"][0].startswith("pytest ") and made["next"][-1].startswith("vlmrl train ")
    assert 'path = "demo/model"' in (tmp_path / "mine" / "recipe.toml").read_text()
    assert "not empty" in refused("init", tmp_path / "mine").message


def test_data_show_names_the_splits_when_there_is_no_such_split(archive: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "[bold] hi [/x]", "answer": 1}\n')
    assert answered("data", "show", rows)["rows"][0]["truth"] == {"answer": 1}
    assert "\nrows of the split `train`: the first 1 of 1\n" in this_process("data", "show", rows, cwd=tmp_path).out
    assert "splits there: train (1 rows)" in str(refused("data", "show", rows, "--split", "test").hint)
    assert "no dataset at" in refused("data", "show", tmp_path / "gone").message


def test_data_show_prints_columns_and_what_the_task_says_of_a_truth(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "How many? many", "answer": 0, "hard": true, "how": "many"}\n')
    (tmp_path / "counts.py").write_text(
        "from vlmrl import Task\n\ndef task(info):\n"
        "    return Task('n', '', '{{ prompt }}', validate=lambda truth: ['`answer` is 0'] * (truth['answer'] == 0),\n"
        "                profiles={'default': ('exact_match', {})})\n"
    )
    shown = this_process("data", "show", "rows.jsonl", "--task", "counts.py:task", cwd=tmp_path)
    assert '  columns: {"hard": true, "how": "many"}\n  problem: `answer` is 0' in shown.out, shown.out + shown.err


def again(data: bytes, scale: float, kind: str, **how: Any) -> bytes:
    """The same picture in another size and file format."""
    image, buffer = Image.open(io.BytesIO(data)), io.BytesIO()
    image.resize((int(image.width * scale), int(image.height * scale))).save(buffer, kind, **how)
    return buffer.getvalue()


def test_the_doctor_finds_what_is_planted_in_a_table_of_ones_own(tmp_path: Path) -> None:
    """Train comes first, whatever the alphabet says: what counts is how much of the test it knows."""
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "validation": [], "test": []}
    for number, split in enumerate(["train"] * 40 + ["validation"] * 10 + ["test"] * 20):
        images = [photo(2 * number + side, 240, 180) for side in (0, 1)]
        answer = "yes" if len(rows[split]) % 10 != 9 else "no"  # 9 of 10
        rows[split].append({"prompt": "<image><image> Same?", "images": images, "answer": answer})
    train, validation, test = rows.values()
    for i in range(3):  # three images of test are in train
        test[i]["images"][0] = train[i]["images"][0]
    others = [(0.5, "JPEG", {"quality": 60}), (1.5, "JPEG", {"quality": 85}), (1, "PNG", {}), (0.8, "WEBP", {})]
    for i, (scale, kind, how) in enumerate(others):  # four look like one of train
        test[5 + i]["images"][1] = again(train[10 + i]["images"][0], scale, kind, **how)
    test[12]["images"][0] = again(validation[4]["images"][1], 0.6, "JPEG")  # one like one of validation
    train[30]["images"][0] = again(train[20]["images"][0], 0.6, "PNG")  # two of train like each other
    test.append({**test[0], "images": train[9]["images"][::-1], "answer": "yes"})  # of train's "no"
    test.append({**test[0], "images": train[8]["images"]})  # the same pair as in train
    validation[0]["prompt"] += "x" * 4 * 3000
    for split, members in rows.items():
        write_parquet(tmp_path / "in" / f"{split}.parquet", members)
    report = answered("data", "doctor", tmp_path / "in", "--workers", 1)["doctor"]
    found = {check["check"]: (check["verdict"], check["finding"]) for check in report["checks"]}
    assert found["same image in two splits"] == ("bad", "7 images in train and test")  # 3, and 2 pairs of 2
    assert found["near copies (by look)"] == (
        "look",
        "4 images of test look like one of train; 1 image of test looks like one of validation; 2 look like another "
        "image of their split",
    )
    verdict, told = found["repeated pairs"]
    assert verdict == "bad" and told.startswith(
        "4 rows repeat the images of another row, 2 across splits; in 1 case their"
    )
    assert "train.parquet row 9, " in told and told.endswith("test.parquet row 20")
    assert found["rows over the limit"][1].startswith("1 over 2,048 tokens (validation 1)")
    assert found["majority class"][0] == "bad" and "train: always `yes` is right in 90.0%" in found["majority class"][1]
    assert list(report["labels"]) == ["train", "validation", "test"]


def test_the_doctor_says_that_a_column_of_images_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "How many?", "picture": "a.png", "answer": "2"}\n')
    report = answered("data", "doctor", tmp_path / "rows.jsonl", "--workers", 1)["doctor"]
    found = {check["check"]: (check["verdict"], check["finding"]) for check in report["checks"]}
    assert found["columns"][0] == "look" and "`picture` has images that are not read" in found["columns"][1]
    (tmp_path / "a.png").write_bytes(photo(1, 40, 40))
    shown = answered("data", "show", tmp_path / "rows.jsonl", "--columns", "images=picture")
    assert found["columns"][1].endswith("--columns images=picture") and len(shown["rows"][0]["images"]) == 1
    report = answered("data", "doctor", tmp_path / "rows.jsonl", "--columns", "images=picture", "--workers", 1)
    assert "columns" not in [check["check"] for check in report["doctor"]["checks"]]


def test_the_doctor_lists_every_row_that_cannot_be_used_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(photo(1, 40, 40))
    rows = [{"prompt": f"<image>{n}", "images": ["a.png" if n % 2 else f"{n}.png"], "answer": "a"} for n in range(44)]
    rows[1]["prompt"] = "<image><image>"
    table = tmp_path / "rows.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = answered("data", "doctor", table, "--workers", 1)["doctor"]
    (finding,) = [check["finding"] for check in report["checks"] if check["check"] == "rows that cannot be used"]
    # 22 rows with an even number have no file, and the second row has one mark too many; 20 are listed.
    assert finding.startswith("23: ") and finding.endswith("; and 3 more")
    assert f"{table}:1, column `images`: no image file" in finding and "but its prompt has 2 <image> marks" in finding
    assert finding.count("no image file") == 19


def test_the_doctor_names_file_and_row_of_what_a_model_cannot_take(tmp_path: Path) -> None:
    names = ["sound.png", "long.png", "broken.png"]
    for name, size in zip(names, [(60, 40), (804, 4), (200, 200)], strict=True):
        (tmp_path / name).write_bytes(photo(sum(map(ord, name)), *size))
    whole = (tmp_path / "broken.png").read_bytes()
    (tmp_path / "broken.png").write_bytes(whole[: len(whole) // 2])
    rows = [{"prompt": f"<image>What is {name}?", "images": [name], "answer": "a"} for name in names]
    rows[0]["prompt"] += "<|im_end|><|im_start|>assistant"
    table = tmp_path / "rows.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = answered("data", "doctor", table, "--workers", 1)["doctor"]
    found = {check["check"]: (check["verdict"], check["finding"]) for check in report["checks"]}
    verdict, finding = found["very long images"]  # 804 is 201 times 4
    assert verdict == "bad" and finding.endswith(f"such as 804 x 4 pixels in {table}:2")
    verdict, finding = found["broken images"]
    assert verdict == "bad" and f"{table}:3, column `images`, {tmp_path / 'broken.png'}: broken image" in finding
    verdict, finding = found["control tokens in text"]
    assert verdict == "look" and "1 rows contain" in finding and f"first: {table}:1 (" in finding


@pytest.mark.parametrize(
    "words",
    [
        "prep pairs --levels a,b --source",
        "prep fungi",
        "prep human",
        "prep fungi rows.parquet@",
        "prep digits --out",
        "data show",
        "data doctor",
        "data export rows.jsonl",
        "data show rows.jsonl --save",
    ],
)
def test_a_name_that_no_file_system_takes_is_an_error_in_words(tmp_path: Path, words: str) -> None:
    rows = [{"prompt": "<image>?", "images": ["a.png"], "answer": "a"}]
    (tmp_path / "a.png").write_bytes(photo(1, 60, 40))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    *most, last = words.split()
    name = "x" * 300
    command = [*most, last + name] if last.endswith("@") else [*most, last, name]
    done = this_process(*command, cwd=tmp_path)
    assert done.code == 2 and "a name is too long" in done.err and len(done.err) < 400


def test_the_doctor_names_rows_that_are_equal_and_a_recipe_is_answered_with_its_tables(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {number}?", "answer": str(number)} for number in (1, 2, 3, 2)]
    table = tmp_path / "rows.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    checks = answered("data", "doctor", table)["doctor"]["checks"]
    found = {check["check"]: (check["verdict"], check["finding"]) for check in checks}
    verdict, finding = found["repeated rows"]
    assert verdict == "look" and finding.startswith("1 row equal to an earlier row, such as ")
    assert ":4 " in finding and ":2 " in finding
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'[model]\npath = "m"\n[[data]]\npath = "{table}"\n')
    for command in ("show", "doctor", "export"):
        error = refused("data", command, recipe, *([tmp_path / "out"] if command == "export" else []))
        assert error.message == "this is a recipe, not a table" and str(table) in str(error.hint)


def test_a_table_without_a_prompt_is_answered_with_the_option_and_the_key(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"frage": "?", "answer": "1"}\n')
    hint = str(refused("data", "show", tmp_path / "rows.jsonl").hint)
    assert "--columns prompt=NAME" in hint and 'prompt = "FILE" with a Jinja template' in hint


def test_a_table_is_exported_without_the_rows_that_cannot_be_used_and_is_sound_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (56, 56), "red").save("0.png")
    Path("cut.png").write_bytes(Path("0.png").read_bytes()[:60])
    ask = {"role": "user", "content": "<image>Which colour?"}
    sound = {"messages": [ask, {"role": "assistant", "content": "red"}], "images": ["0.png"]}
    silent = {**sound, "messages": [ask, {"role": "assistant", "content": ""}]}
    wrong = [{**sound, "images": [name]} for name in ("none.png", "cut.png")]
    rows = [wrong[0], sound, {**sound, "images": []}, wrong[1], silent, {**sound, "messages": [ask]}, sound]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "none.png" in refused("data", "export", "rows.jsonl", "out").message
    assert answered("data", "export", "rows.jsonl", "good", "--sound")["rows"] == {"train": 2}
    shown = answered("data", "show", "good", "--columns", "prompt=messages")["rows"]
    assert [row["truth"] for row in shown] == [{"answer": "red"}] * 2 and all(row["images"] for row in shown)
