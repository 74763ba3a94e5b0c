"""Cells and shards as other programs write them: base64, data URIs, Python text, differing types, changed images."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, PngImagePlugin

from vlmrl.data.images import decode_image, probe_image
from vlmrl.data.table_dataset import TableDataset, open_tables
from vlmrl.data.table_values import map_columns, read_answer, read_image, read_messages, read_tools, split_images
from vlmrl.errors import DataError
from vlmrl.recipe.schema import Data


def png(shade: int = 0) -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (20, 10), (shade, 255, 250)).save(sink, "PNG")
    content = sink.getvalue()
    while len(content) % 3 != 1:  # so that base64 needs padding; what follows the last chunk is not read
        content += b"\xff"
    return content


@pytest.mark.parametrize("url_alphabet", [False, True])
@pytest.mark.parametrize("head", ["", "data:image/png;base64,", "data:image/png;charset=utf-8;base64,"])
def test_base64_is_read_without_padding_and_in_the_alphabet_of_urls(head: str, url_alphabet: bool) -> None:
    encode = base64.urlsafe_b64encode if url_alphabet else base64.b64encode
    text = encode(png()).decode()
    assert text.endswith("=")
    for form in (text, text.rstrip("=")):
        assert read_image(head + form, None, "here") == png()


@pytest.mark.parametrize("cell", ["[{'role': 'user', 'content': 'x'}]", "{'role': 'user'}", '[{"role": "user"'])
def test_text_that_begins_like_a_list_and_is_no_json_is_an_error(cell: str) -> None:
    for read in (lambda: read_messages(cell, "row 1"), lambda: split_images(cell, "row 1")):
        with pytest.raises(DataError, match=r"is not JSON") as error:
            read()
        assert error.value.where == "row 1" and "json.dumps" in str(error.value.hint)


def test_structured_cells_as_json_text_are_read() -> None:
    assert read_messages('[{"role": "user", "content": "x"}]', "")[0][0].content == "x"
    assert read_answer('{"style": "rule", "ground_truth": "7"}', "") == "7"
    assert split_images("[]") == [] and split_images('["a.png", null]') == ["a.png"]
    row = {"prompt": "x", "reward_model": '{"ground_truth": "7"}', "answer": "8"}
    assert map_columns(list(row), {}, row, "").answer == "reward_model"
    assert read_answer("[1, 2]", "") == "[1, 2]"  # an answer may look like a list


def test_a_cell_that_is_nested_too_deep_is_told_with_its_place() -> None:
    cell: Any = "x"
    for _ in range(60):
        cell = [cell]
    function = {"name": "f", "parameters": {"x": cell}, "arguments": {"x": cell}}
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [function]}]
    for read, value in ((read_answer, cell), (read_tools, [function]), (read_messages, chat)):
        with pytest.raises(DataError, match="nested more than 50 deep") as error:
            read(value, "row 1")
        assert str(error.value.where).startswith("row 1")


def test_an_absolute_path_says_which_root_would_hold_it(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        read_image("/somewhere/a.png", tmp_path, "row 1")
    assert 'images_root = "/"' in str(error.value.hint)


def test_dark_32_bit_pixels_stay_and_16_bit_ones_are_scaled() -> None:
    for values, expected in (([0, 200], [0, 200]), ([0, 65535], [0, 255]), ([0, 2**31 - 1], [0, 127])):
        sink = io.BytesIO()
        Image.fromarray(np.array([values], dtype=np.int32)).save(sink, "TIFF")
        assert np.asarray(decode_image(sink.getvalue()))[0, :, 0].tolist() == expected


def test_a_png_with_a_long_text_is_an_image() -> None:
    texts = PngImagePlugin.PngInfo()
    texts.add_text("workflow", "x" * 3_000_000, zip=True)
    sink = io.BytesIO()
    Image.new("RGB", (20, 10)).save(sink, "PNG", pnginfo=texts)
    assert probe_image(sink.getvalue())[0].width == 20 and decode_image(sink.getvalue()).size == (20, 10)


def test_shards_of_differing_types_are_one_table(tmp_path: Path) -> None:
    tables = [
        pa.table({"a": pa.array(["x"]), "n": pa.array([1]), "l": pa.array([["u"]])}),
        pa.table({"a": pa.array(["y"], pa.large_string()), "n": pa.array([2.5]), "l": pa.array([["v"]])}),
        pa.table({"a": pa.array(["z"]).dictionary_encode(), "n": pa.array([3]), "l": pa.array([["w"]])}),
    ]
    for number, table in enumerate(tables):
        pq.write_table(table, tmp_path / f"train-{number}.parquet")
    rows = open_tables(str(tmp_path))["train"]
    assert [rows.row(i) for i in range(3)] == [
        {"a": "x", "n": 1.0, "l": ["u"]},
        {"a": "y", "n": 2.5, "l": ["v"]},
        {"a": "z", "n": 3.0, "l": ["w"]},
    ]
    pq.write_table(pa.table({"a": pa.array([b"bytes"]), "n": pa.array(["text"])}), tmp_path / "train-9.parquet")
    with pytest.raises(DataError, match="do not fit those of") as error:
        open_tables(str(tmp_path))
    assert str(error.value.where).endswith("train-9.parquet")


def test_the_fingerprint_covers_image_files(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    (tmp_path / "t.jsonl").write_text('{"problem": "<image>x", "images": ["a.png"], "answer": "1"}\n')

    def mark() -> str:
        return TableDataset(Data(path=str(tmp_path / "t.jsonl"))).fingerprint

    before = mark()
    assert mark() == before
    (tmp_path / "a.png").write_bytes(png(2))
    assert mark() != before


def test_the_last_turn_is_the_truth_and_a_task_of_ones_own_gets_its_columns(tmp_path: Path) -> None:
    (tmp_path / "llava.json").write_text(
        '[{"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "two dogs"}]}]'
    )
    assert TableDataset(Data(path=str(tmp_path / "llava.json"))).rows("train")[0].truth == {"answer": "two dogs"}
    (tmp_path / "own.jsonl").write_text('{"bar": "Cem", "value": 2}\n')
    data = Data(path=str(tmp_path / "own.jsonl"), task="chart.py:task", prompt="p.jinja")
    assert TableDataset(data).rows("train")[0].truth == {"bar": "Cem", "value": 2}
    (tmp_path / "whole.jsonl").write_text('{"bar": "Cem", "truth": {"value": 2}}\n')
    data = Data(path=str(tmp_path / "whole.jsonl"), task="chart.py:task", prompt="p.jinja")
    assert TableDataset(data).rows("train")[0].truth == {"value": 2}
