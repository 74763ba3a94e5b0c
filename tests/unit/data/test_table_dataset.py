"""Tables in every form and spelling, and everything that may be wrong with them."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vlmrl.data import table_dataset
from vlmrl.data.images import encode_png, image_hash
from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError
from vlmrl.recipe.schema import Data
from vlmrl.tasks import make_task

RED, BLUE = (encode_png(Image.new("RGB", (6, 4), color)) for color in ("red", "blue"))
TEXT64 = base64.b64encode(RED).decode()


def open_rows(path: Path | str, **keys: Any):
    dataset = open_dataset(Data(path=str(path), **keys))
    return dataset, list(dataset.rows(keys.get("split", "train")))


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def turns(dataset: Any, row: Any) -> list[tuple[str, str]]:
    task = make_task("table", dataset.info)
    assert task.messages is not None
    return [(turn.role, turn.content) for turn in task.messages(row)]


SPELLINGS = {
    "trl text": {"prompt": "Which?", "image": TEXT64, "solution": "red"},
    "trl chat": {"prompt": [{"role": "user", "content": "Which?"}], "images": [TEXT64], "solution": "red"},
    "trl parts": {
        "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}],
        "images": [{"bytes": TEXT64, "path": None}],
        "answer": "red",
    },
    "verl": {
        "data_source": "colours",
        "prompt": [{"role": "user", "content": "<image>Which?"}],
        "images": [{"image": "data:image/png;base64," + TEXT64}],
        "reward_model": {"style": "rule", "ground_truth": "red"},
        "extra_info": {"index": 3},
        "ability": "seeing",
    },
    "easyr1": {"problem": "<image>Which?", "images": [{"bytes": TEXT64}], "answer": "red"},
    "ms-swift": {
        "messages": [{"role": "user", "content": "<image>Which?"}, {"role": "assistant", "content": "It is red."}],
        "images": [TEXT64],
        "solution": "red",
    },
    "openai parts": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64," + TEXT64}},
                    {"type": "text", "text": "Which?"},
                ],
            },
        ],
        "answer": "red",
    },
    "sharegpt": {"conversations": [{"from": "human", "value": "<image>Which?"}], "image": TEXT64, "answer": "red"},
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_each_spelling_gives_the_same_prompt_image_and_answer(tmp_path: Path, name: str) -> None:
    dataset, (row,) = open_rows(write_jsonl(tmp_path / "rows.jsonl", [SPELLINGS[name]]))
    assert row.truth == {"answer": "red"}
    assert [media.sha256 for media in row.media] == [image_hash(RED)]
    assert (row.media[0].width, row.media[0].height) == (6, 4)
    assert [(role, text.removeprefix("<image>")) for role, text in turns(dataset, row)] == [("user", "Which?")]
    assert dataset.image(row.media[0]).getpixel((0, 0)) == (255, 0, 0)
    json.dumps(dict(row.columns), allow_nan=False)
    assert TEXT64 not in json.dumps(dict(row.columns))  # no image travels as text into rollouts


def test_verl_columns_reach_the_reward_and_ms_swift_answers_are_traces(tmp_path: Path) -> None:
    _, (row,) = open_rows(write_jsonl(tmp_path / "verl.jsonl", [SPELLINGS["verl"]]))
    assert row.columns["data_source"] == "colours" and row.columns["extra_info"] == {"index": 3}
    dataset, (row,) = open_rows(write_jsonl(tmp_path / "swift.jsonl", [SPELLINGS["ms-swift"]]))
    trace = make_task("table", dataset.info).trace
    assert trace is not None and trace(row, None) == "It is red."  # type: ignore[arg-type]
    dataset, _ = open_rows(write_jsonl(tmp_path / "trl.jsonl", [SPELLINGS["trl text"]]))
    assert make_task("table", dataset.info).trace is None


ROWS = [
    {"problem": 'a, "quoted"\nline', "images": [RED], "answer": "1"},
    {"problem": "two", "images": [BLUE, RED], "answer": "2"},
    {"problem": "none", "images": [], "answer": "3"},
]


def as_text(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "images": [base64.b64encode(data).decode() for data in row["images"]]} for row in rows]


def write(kind: str, folder: Path) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        return write_jsonl(path, as_text(ROWS))
    if kind == "json":
        path.write_text(json.dumps({"data": as_text(ROWS)}))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["problem", "images", "answer"])
            writer.writeheader()
            writer.writerows([{**row, "images": json.dumps(row["images"])} for row in as_text(ROWS)])
    else:
        image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        schema = pa.schema([("problem", pa.string()), ("images", pa.list_(image)), ("answer", pa.string())])
        rows = [{**row, "images": [{"bytes": data, "path": None} for data in row["images"]]} for row in ROWS]
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=2)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_each_kind_of_file_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    dataset, rows = open_rows(write(kind, tmp_path))
    assert [row.columns["problem"] for row in rows] == [row["problem"] for row in ROWS]
    assert [[media.sha256 for media in row.media] for row in rows] == [
        [image_hash(d) for d in r["images"]] for r in ROWS
    ]
    assert [row.truth["answer"] for row in rows] == ["1", "2", "3"]
    assert len({row.prompt_id for row in rows}) == 3
    again = pickle.loads(pickle.dumps(dataset))
    assert list(again.rows("train")) == rows and again.fingerprint == dataset.fingerprint
    assert again.image_bytes(rows[1].media[0]) == BLUE


def test_an_image_known_by_its_hash_alone_is_found_by_reading_the_rows(tmp_path: Path) -> None:
    path = write("parquet", tmp_path)
    _, rows = open_rows(path)
    assert open_dataset(Data(path=str(path))).image_bytes(rows[1].media[0]) == BLUE


def test_large_parquet_is_unpacked_once_and_reads_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("parquet", tmp_path)
    _, rows = open_rows(path)
    monkeypatch.setattr(table_dataset, "IN_MEMORY_BYTES", 1)
    monkeypatch.setenv("VLMRL_CACHE", str(tmp_path / "cache"))
    assert open_rows(path)[1] == rows
    (made,) = (tmp_path / "cache" / "tables").iterdir()
    state = made.stat().st_mtime_ns
    assert open_rows(path)[1] == rows and made.stat().st_mtime_ns == state


def test_a_folder_of_parquet_has_the_splits_its_names_say(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    source = write("parquet", tmp_path)
    for name in ("train-00000-of-00002", "train-00001-of-00002", "val-00000", "test"):
        (tmp_path / "data" / f"{name}.parquet").write_bytes(source.read_bytes())
    dataset = open_dataset(Data(path=str(tmp_path / "data")))
    assert dict(dataset.splits) == {"test": 3, "train": 6, "validation": 3}


def test_hub_datasets_come_through_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "repo" / "data"
    folder.mkdir(parents=True)
    features = datasets.Features(
        {"problem": datasets.Value("string"), "images": [datasets.Image()], "answer": datasets.Value("string")}
    )
    rows = [{**row, "images": [{"bytes": data, "path": None} for data in row["images"]]} for row in ROWS]
    datasets.Dataset.from_list(rows, features=features).to_parquet(folder / "train-00000-of-00001.parquet")
    datasets.Dataset.from_list(rows[:1], features=features).to_parquet(folder / "test-00000-of-00001.parquet")
    dataset, read = open_rows(f"hub:{tmp_path / 'repo'}")
    assert dataset.name == "repo" and dict(dataset.splits) == {"train": 3, "test": 1}
    assert [[media.sha256 for media in row.media] for row in read] == [
        [image_hash(d) for d in r["images"]] for r in ROWS
    ]
    assert dataset.image_bytes(read[1].media[0]) == BLUE
    saved = tmp_path / "saved"
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows, features=features)}).save_to_disk(saved)
    assert [row.media for row in open_rows(saved)[1]] == [row.media for row in read]


def test_a_hub_dataset_that_does_not_exist_is_the_users_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def missing(*args: Any) -> None:
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'no/such' doesn't exist on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", missing)
    with pytest.raises(DataError, match="`no/such` cannot be loaded: DatasetNotFoundError: Dataset 'no/such'"):
        open_dataset(Data(path="hub:no/such#config"))


def test_images_by_path_stay_in_their_folder(tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(RED)
    (tmp_path / "secret.png").write_bytes(BLUE)
    os.symlink(tmp_path / "secret.png", tmp_path / "pictures" / "link.png")
    inside = str(tmp_path / "pictures" / "red.png")
    for good in ("red.png", "./red.png", "../pictures/red.png", inside, f"file://{inside}"):
        path = write_jsonl(tmp_path / "table" / "rows.jsonl", [{"prompt": "?", "image": good}])
        _, (row,) = open_rows(path, images_root=str(tmp_path / "pictures"))
        assert row.media[0].sha256 == image_hash(RED)
    outside = str(tmp_path / "secret.png")
    for bad in ("../secret.png", outside, "link.png", f"file://{outside}", "/etc/passwd", "a\0b"):
        path = write_jsonl(tmp_path / "table" / "rows.jsonl", [{"prompt": "?", "image": bad}])
        with pytest.raises(DataError, match=r"leaves|not a path") as caught:
            open_rows(path, images_root=str(tmp_path / "pictures"))
        assert "rows.jsonl:1, column `image`" in str(caught.value.where)


@pytest.mark.parametrize("address", ["http://example.com/a.png", "https://x/y", "s3://bucket/a.png"])
def test_nothing_is_fetched_from_the_network(tmp_path: Path, address: str) -> None:
    with pytest.raises(DataError, match="nothing is fetched from the network"):
        open_rows(write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "?", "images": [{"url": address}]}]))


def test_an_image_file_that_changes_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(RED)
    dataset, (row,) = open_rows(write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "?", "image": "a.png"}]))
    (tmp_path / "a.png").write_bytes(BLUE)
    with pytest.raises(DataError, match="changed since it was first read"):
        dataset.image(row.media[0])


BAD = {
    "no prompt column": ({"prmpt": "?", "answer": 1}, "no prompt column", "rows.jsonl"),
    "image is a number": ({"prompt": "?", "image": 7}, "an image is 7", "rows.jsonl:1, column `image`"),
    "image is no image": ({"prompt": "?", "image": {"bytes": "aGVsbG8="}}, "no image file", "column `image`"),
    "image is missing": ({"prompt": "?", "image": "gone.png"}, "no image file 'gone.png'", "rows.jsonl:1"),
    "data uri is no image": ({"prompt": "?", "image": "data:text/html,hello"}, "not an image in", "column `image`"),
    "data uri is broken": ({"prompt": "?", "image": "data:image/png;base64,@@"}, "not base64", "column `image`"),
    "prompt is a number": ({"prompt": 5}, "the prompt is 5", "rows.jsonl:1, column `prompt`"),
    "prompt is null": ({"prompt": None}, "the prompt is None", "column `prompt`"),
    "unknown role": ({"messages": [{"role": "narrator", "content": "x"}]}, "the role 'narrator'", "message 0"),
    "no user message": ({"messages": [{"role": "system", "content": "x"}]}, "no user message", "column `messages`"),
    "bad part": ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "a content part", "message 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_cell_is_named_with_file_row_and_column(tmp_path: Path, name: str) -> None:
    row, message, where = BAD[name]
    with pytest.raises(DataError, match=message) as caught:
        open_rows(write_jsonl(tmp_path / "rows.jsonl", [row]))
    assert where in str(caught.value.where)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("big.png", "'big.png' has 1,001 bytes; the limit is 1,000"),
        ("A" * 1434, "the image has 1,434 base64 characters; the limit is 1,433"),  # 1000 * 4 // 3 + 100
    ],
)
def test_an_image_over_the_limit_is_refused_with_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str, message: str
) -> None:
    monkeypatch.setattr("vlmrl.data.table_values.MAX_FILE_BYTES", 1000)
    (tmp_path / "big.png").write_bytes(bytes(1001))
    with pytest.raises(DataError, match=message):
        open_rows(write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "?", "image": image}]))


def test_a_named_column_that_is_not_there_gets_the_nearest_name(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"frage": "?", "antwort": "ja"}])
    with pytest.raises(DataError, match="no column `antwrt`") as caught:
        open_rows(path, columns={"prompt": "frage", "answer": "antwrt"})
    assert "did you mean `antwort`" in str(caught.value.hint)
    with pytest.raises(DataError, match="`columns` names `promt`"):
        open_rows(path, columns={"promt": "frage"})
    _, (row,) = open_rows(path, columns={"prompt": "frage", "answer": "antwort"})
    assert row.truth == {"answer": "ja"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": \n', r"not JSON"),
        ("a.jsonl", "[1]\n", r"a row is \[1\], not an object"),
        ("a.jsonl", "\n\n", "has no rows"),
        ("a.json", '{"prompt": "x"}', "expected a list of objects"),
        ("a.json", '{"prompt": "x"}\n{"prompt": "y"}', "not JSON"),
        ("a.csv", "prompt,answer\nx,1,2\n", "3 cells, the header has 2"),
        ("a.csv", "prompt,prompt\nx,1\n", "repeated column name"),
        ("a.csv", 'prompt,answer\n"x,1\n', "not CSV"),
        ("a.parquet", "PAR1 not really", "not a readable Parquet"),
        ("a.txt", "hello", "not a kind of table"),
    ],
)
def test_a_broken_file_is_a_clear_error(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        open_rows(tmp_path / name)
    assert name in str(caught.value)


def test_a_missing_file_gets_the_nearest_name(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "colours.jsonl", [{"prompt": "x"}])
    with pytest.raises(DataError) as caught:
        open_rows(tmp_path / "colour.jsonl")
    assert "colours.jsonl" in str(caught.value.hint)


def test_a_prompt_id_follows_the_content_and_not_the_place(tmp_path: Path) -> None:
    rows = [{"prompt": str(i), "answer": i} for i in range(4)]
    _, first = open_rows(write_jsonl(tmp_path / "rows.jsonl", rows))
    _, second = open_rows(write_jsonl(tmp_path / "rows.jsonl", rows[::-1]))
    assert [row.prompt_id for row in second] == [row.prompt_id for row in first][::-1]
    assert len({row.prompt_id for row in first}) == 4


def test_columns_are_json_values_whatever_the_table_holds(tmp_path: Path) -> None:
    from datetime import datetime
    from decimal import Decimal

    values = {
        "prompt": "x",
        "nan": float("nan"),
        "when": datetime(2020, 1, 2),
        "cost": Decimal("1.50"),
        "raw": b"\0",
        "deep": {"a": [1.0]},
    }
    pq.write_table(pa.Table.from_pylist([values]), tmp_path / "rows.parquet")
    _, (row,) = open_rows(tmp_path / "rows.parquet")
    assert row.columns == {
        "prompt": "x",
        "nan": None,
        "when": "2020-01-02T00:00:00",
        "cost": 1.5,
        "raw": None,
        "deep": {"a": [1.0]},
    }


def test_opening_decodes_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("parquet", tmp_path)

    def refuse(*args: Any) -> None:
        raise AssertionError("an image was opened")

    monkeypatch.setattr("vlmrl.data.table_dataset.probe_image", refuse)
    dataset = open_dataset(Data(path=str(path)))
    assert len(dataset.rows("train")) == 3
    with pytest.raises(AssertionError):
        dataset.rows("train")[0]


def test_a_huge_claimed_size_in_a_row_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmrl.data.images.MAX_PIXELS", 10)
    with pytest.raises(DataError, match="6 x 4 pixels") as caught:
        open_rows(write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "?", "image": TEXT64}]))
    assert "rows.jsonl:1" in str(caught.value.where)


def test_a_gif_is_read_too(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(buffer, format="GIF")
    text = base64.b64encode(buffer.getvalue()).decode()
    _, (row,) = open_rows(
        write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "?", "image": "data:image/gif;base64," + text}])
    )
    assert (row.media[0].width, row.media[0].height) == (3, 2)


def test_half_characters_do_not_reach_files_or_tokenizers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a\\ud800b", "answer": "\\udfff", "caf\\u00e9": "\\u00e9"}\n')
    dataset, (row,) = open_rows(path)
    assert turns(dataset, row) == [("user", "a?b")] and row.truth == {"answer": "?"}
    assert row.columns["caf\u00e9"] == "\u00e9"
    json.dumps(dict(row.columns), ensure_ascii=False).encode()


def test_a_guess_between_two_columns_is_said_and_naming_one_settles_it(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "?", "solution": "long", "answer": "short"}])
    dataset, (row,) = open_rows(path)
    assert row.truth == {"answer": "long"} and "`solution`, not from `answer`" in dataset.notes[0]
    dataset, (row,) = open_rows(path, columns={"answer": "answer"})
    assert row.truth == {"answer": "short"} and not dataset.notes


@pytest.mark.parametrize(
    ("more", "is_noted"),
    [
        ({"picture": "scans/1.PNG"}, True),
        ({"picture": ["scans/1.png", "scans/2.png"]}, True),
        ({"picture": TEXT64}, True),
        ({"picture": {"bytes": TEXT64, "path": None}}, True),
        ({"picture": "a sunny day"}, False),
        ({"picture": None}, False),
        ({"image": TEXT64, "picture": "1.png"}, False),  # the name of the image that is read
        ({"image": TEXT64, "picture": TEXT64}, True),
    ],
)
def test_images_in_a_column_that_is_not_read_are_said_and_naming_it_settles_it(
    tmp_path: Path, more: dict[str, Any], is_noted: bool
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "?", **more}])
    notes = open_dataset(Data(path=str(path))).notes
    assert [n.partition(":")[0] for n in notes] == ["`picture` has images that are not read"] * is_noted
    if "image" not in more:
        assert not open_dataset(Data(path=str(path), columns={"images": "picture"})).notes


def test_a_conversation_without_its_answer_among_others_is_an_error_with_row_and_column(tmp_path: Path) -> None:
    talk = [[{"from": "human", "value": f"{i}?"}, {"from": "gpt", "value": str(i)}] for i in range(3)]
    talk[1].pop()
    path = write_jsonl(tmp_path / "t.jsonl", [{"conversations": turns} for turns in talk])
    rows = open_dataset(Data(path=str(path))).rows("train")
    assert [rows[i].truth for i in (0, 2)] == [{"answer": "0"}, {"answer": "2"}]
    with pytest.raises(DataError) as caught:
        rows[1]
    assert caught.value.where == f"{path}:2, column `conversations`"
    assert "add it to this row" in (caught.value.hint or "")
    # With an answer column, or where no row has an answer in its conversation, nothing is missing.
    named = write_jsonl(tmp_path / "named.jsonl", [{"conversations": turns, "answer": "x"} for turns in talk])
    assert [row.truth for row in open_dataset(Data(path=str(named))).rows("train")] == [{"answer": "x"}] * 3
    bare = write_jsonl(tmp_path / "bare.jsonl", [{"conversations": turns[:1]} for turns in talk])
    assert [row.truth for row in open_dataset(Data(path=str(bare))).rows("train")] == [{}] * 3


def test_the_fingerprint_resolves_a_repeated_path_once_and_is_that_of_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        Image.new("RGB", (8, 8), (len(name), ord(name), 0)).save(tmp_path / f"{name}.png")
    cells = ["a.png", "a.png", "gone.png", "b.png", ["a.png", "b.png"], ["b.png", "gone.png"], None] * 3
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"q{i}", "image": cell} for i, cell in enumerate(cells)])
    calls: list[Any] = []
    read = table_dataset.read_image
    monkeypatch.setattr(table_dataset, "read_image", lambda value, *more: calls.append(value) or read(value, *more))
    dataset: Any = open_dataset(Data(path=str(tmp_path / "rows.jsonl")))
    calls.clear()
    hashes = dataset._image_hashes()
    assert hashes == [image_hash((tmp_path / f"{name}.png").read_bytes()) for name in ("a", "b")]
    assert calls.count("a.png") == 1, "paths of a table often repeat, and each is looked up in the file system"


def test_a_system_message_and_earlier_turns_in_columns_of_their_own_are_in_the_prompt(tmp_path: Path) -> None:
    chat = {
        "conversations": [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "2"}],
        "system": "Count.",
    }
    dataset, (row, plain) = open_rows(write_jsonl(tmp_path / "sharegpt.jsonl", [chat, {**chat, "system": ""}]))
    assert turns(dataset, row) == [("system", "Count."), ("user", "How many?")]
    assert turns(dataset, plain) == [("user", "How many?")]
    assert make_task("table", dataset.info).trace(row, random.Random(0)) == "2"  # type: ignore[misc]
    asked = {"query": "And now?", "response": "3", "system": "Count.", "history": [["Hello", "Hi"], ["One?", "1"]]}
    rows = [asked, {**asked, "history": json.dumps(asked["history"])}, {**asked, "history": "a cough, 2019"}]
    dataset, (row, as_json, text) = open_rows(write_jsonl(tmp_path / "swift.jsonl", rows))
    assert turns(dataset, row) == turns(dataset, as_json)
    assert [role for role, _ in turns(dataset, row)] == ["system", *("user", "assistant") * 2, "user"]
    assert [content for _, content in turns(dataset, row)][1:] == ["Hello", "Hi", "One?", "1", "And now?"]
    assert turns(dataset, text) == [("system", "Count."), ("user", "And now?")]


def test_columns_of_the_conversation_that_cannot_be_read_are_errors_with_row_and_column(tmp_path: Path) -> None:
    odd = {"query": "And now?", "response": "3", "history": [["Hello"]]}
    dataset, (row,) = open_rows(write_jsonl(tmp_path / "odd.jsonl", [odd]))
    with pytest.raises(DataError, match=r"`history` has \['Hello'\], not \[question, answer\]") as caught:
        turns(dataset, row)
    assert "column `query`" in str(caught.value.where)
    two = {"messages": [{"role": "system", "content": "A"}, {"role": "user", "content": "b"}], "system": "C"}
    dataset, (row,) = open_rows(write_jsonl(tmp_path / "two.jsonl", [two]))
    with pytest.raises(DataError, match="the messages have a system message of their own"):
        turns(dataset, row)


def test_a_row_with_a_video_or_a_sound_is_an_error_and_not_a_row_of_text(tmp_path: Path) -> None:
    ask = {"messages": [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "2"}]}
    marked = {"messages": [{"role": "user", "content": "<video>How many?"}, {"role": "assistant", "content": "2"}]}
    clips = [
        {**ask, "videos": ["v.mp4"]},
        {**ask, "videos": '["clips/v"]'},
        {**ask, "video": "clips/V.MP4"},
        {**marked, "video": "v_17"},
        {**ask, "audios": [{"path": "a.wav"}]},
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", [*clips, {**ask, "videos": [], "video": "", "audio": "take 3"}])
    rows = open_dataset(Data(path=str(path))).rows("train")
    for index, row in enumerate(clips):
        with pytest.raises(DataError, match="is not read") as caught:
            rows[index]
        assert f"rows.jsonl:{index + 1}, column `{next(name for name in row if name != 'messages')}`" in str(
            caught.value
        )
    assert rows[5].columns["audio"] == "take 3"  # a name
    (tmp_path / "p.jinja").write_text("{{ messages[0].content }} of {{ videos }}")
    own = Data(path=str(path), prompt=str(tmp_path / "p.jinja"))
    assert open_dataset(own).rows("train")[0].columns["videos"] == ["v.mp4"]
