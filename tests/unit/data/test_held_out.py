"""`validation = 0.1`: which rows are held out, and that nothing of them is in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError
from vlmrl.recipe.schema import Data
from vlmrl.types import Row


def table(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def draw(folder: Path, count: int) -> None:
    for i in range(count):
        Image.new("RGB", (8, 8), (i, 2 * i % 256, 200)).save(folder / f"{i}.png")


def parts(data: Data) -> tuple[list[Row], list[Row]]:
    dataset = open_dataset(data)
    train, held_out = (list(dataset.rows(split)) for split in (data.split, "validation"))
    assert dataset.splits == {data.split: len(train), "validation": len(held_out)}
    return train, held_out


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(st.sets(st.integers(0, 11), max_size=2), st.integers(0, 30)), min_size=8, max_size=40),
    share=st.floats(0.05, 0.5),
    seed=st.integers(0, 3),
)
def test_no_image_and_no_text_is_in_both(tmp_path_factory, rows, share, seed):
    folder = tmp_path_factory.mktemp("rows")
    draw(folder, 12)
    path = table(
        folder,
        [
            {"question": f"q  {text}", "images": [f"{i}.png" for i in sorted(own)], "n": n}
            for n, (own, text) in enumerate(rows)
        ],
    )
    data = Data(path=str(path), validation=share, validation_seed=seed)
    try:
        train, held_out = parts(data)
    except DataError as error:
        assert "can be held out" in error.message
        return
    assert 1 <= len(held_out) <= max(1, round(share * len(rows)))
    assert len(train) + len(held_out) >= 0.9 * len(rows)
    images = [{media.sha256 for row in split for media in row.media} for split in (train, held_out)]
    assert not images[0] & images[1]
    texts = [{row.columns["question"] for row in split if not row.media} for split in (train, held_out)]
    assert not texts[0] & texts[1]
    numbers = [row.columns["n"] for row in train + held_out]
    assert len(set(numbers)) == len(numbers)
    assert [row.columns["n"] for row in parts(data)[1]] == [row.columns["n"] for row in held_out]


def test_texts_are_kept_apart_where_they_can_be_and_images_always(tmp_path: Path):
    draw(tmp_path, 20)
    # Ten questions, each about two images: both rows of a question go the same way.
    ask = [{"question": f"question {i % 10}", "image": f"{i}.png", "answer": i} for i in range(20)]
    train, held_out = parts(Data(path=str(table(tmp_path, ask)), validation=0.2))
    assert (len(train), len(held_out)) == (16, 4)
    assert not {r.columns["question"] for r in train} & {r.columns["question"] for r in held_out}
    # One question about all images: images alone decide. Each image is in two rows.
    same = [{"question": "how many?", "image": f"{i // 2}.png", "answer": i} for i in range(40)]
    train, held_out = parts(Data(path=str(table(tmp_path, same, "same.jsonl")), validation=0.2))
    assert (len(train), len(held_out)) == (32, 8)
    assert not {m.sha256 for r in train for m in r.media} & {m.sha256 for r in held_out for m in r.media}


def test_conversations_share_the_text_of_their_prompt_and_not_the_answer(tmp_path: Path):
    rows = [
        {"conversations": [{"from": "human", "value": f"question {i // 2}"}, {"from": "gpt", "value": f"answer {i}"}]}
        for i in range(20)
    ]
    train, held_out = parts(Data(path=str(table(tmp_path, rows)), validation=0.3))
    asked_of = [{row.columns["conversations"][0]["value"] for row in split} for split in (train, held_out)]
    assert len(held_out) == 6 and not asked_of[0] & asked_of[1]


def test_the_seed_and_the_rows_decide_and_the_fingerprint_says_which(tmp_path: Path):
    rows = [{"question": f"question {i}", "answer": i} for i in range(60)]
    path = str(table(tmp_path, rows))
    choices = {
        seed: [r.prompt_id for r in parts(Data(path=path, validation=0.2, validation_seed=seed))[1]] for seed in (0, 1)
    }
    assert choices[0] != choices[1] and all(len(chosen) == 12 for chosen in choices.values())
    prints = [
        open_dataset(Data.model_validate({"path": path, **more})).fingerprint
        for more in ({}, {"validation": 0.2}, {"validation": 0.2, "validation_seed": 1}, {"validation": 0.3})
    ]
    assert len(set(prints)) == 4
    assert prints[1] == open_dataset(Data(path=path, validation=0.2)).fingerprint
    table(tmp_path, rows[:30])  # the same file with other rows
    assert len(parts(Data(path=path, validation=0.2))[1]) == 6


def test_the_first_rows_alone_are_divided_with_max_rows(tmp_path: Path):
    path = str(table(tmp_path, [{"question": f"question {i}", "answer": i} for i in range(60)]))
    train, held_out = parts(Data(path=path, validation=0.1, max_rows=20))
    assert (len(train), len(held_out)) == (18, 2)
    assert {row.columns["answer"] for row in train + held_out} == set(range(20))


def test_what_cannot_be_divided_is_said(tmp_path: Path):
    draw(tmp_path, 1)
    rows = [{"question": f"question {i}", "image": "0.png"} for i in range(20)]
    with pytest.raises(DataError, match="no 2 of 20 rows can be held out"):
        open_dataset(Data(path=str(table(tmp_path, rows)), validation=0.1))
    with pytest.raises(DataError) as caught:
        unread = [{"question": "What hour?", "bild": f"{i}.png"} for i in range(20)]
        open_dataset(Data(path=str(table(tmp_path, unread)), validation=0.1))
    assert "`bild` has images that are not read" in (caught.value.hint or "")
    folder = tmp_path / "splits"
    folder.mkdir()
    for split in ("train", "validation"):
        table(folder, [{"question": "a"}, {"question": "b"}], f"{split}.jsonl")
    with pytest.raises(DataError, match="there is a split `validation`"):
        open_dataset(Data(path=str(folder), validation=0.1))


def test_a_row_that_cannot_be_read_is_left_to_the_checks(tmp_path: Path):
    draw(tmp_path, 12)
    rows = [{"question": f"question {i}", "image": f"{i}.png"} for i in range(20)]  # 12 to 19 have no file
    dataset = open_dataset(Data(path=str(table(tmp_path, rows)), validation=0.25))
    assert dataset.splits == {"train": 15, "validation": 5}


def test_the_columns_of_the_prompt_template_are_the_prompt(tmp_path: Path) -> None:
    rows = [{"id": f"r{i}", "claim": f"{i // 2} is odd", "note": f"n{i}", "label": "01"[i % 2]} for i in range(40)]
    prompt = tmp_path / "p.jinja"
    prompt.write_text("Is it true? {{ claim }}")
    data = Data(path=str(table(tmp_path, rows)), prompt=str(prompt), columns={"answer": "label"}, validation=0.2)  # pyright: ignore
    train, held_out = parts(data)
    assert len(held_out) == 8 and not {r.columns["claim"] for r in train} & {r.columns["claim"] for r in held_out}


def test_a_share_whose_rows_have_other_images_than_training_is_said(tmp_path: Path):
    draw(tmp_path, 90)
    texts = [{"question": f"What is {i} plus {i}?", "image": None} for i in range(5)]
    same = [{"question": "Which colour?", "image": f"{i}.png"} for i in range(90)]
    dataset = open_dataset(Data(path=str(table(tmp_path, texts + same)), validation=0.1))
    (note,) = dataset.notes
    assert note.startswith("0 of 5 validation rows have images, and 90 of 90 in training: rows that share an image")
    assert 'validation = "rows.jsonl"' in note
    again = open_dataset(Data(path=str(tmp_path / "rows.jsonl"), validation=0.1))  # whose cut is remembered
    assert list(again.notes) == [note]
    own = [{**row, "question": f"{row['question']} {i}"} for i, row in enumerate(same)]
    assert not open_dataset(Data(path=str(table(tmp_path, texts + own, "own.jsonl")), validation=0.1)).notes
