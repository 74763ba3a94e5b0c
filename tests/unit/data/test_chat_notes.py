"""Notes on a chat table that is not as it should be: its marks, its tools, the links of its images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlmrl.data.table_dataset import TableDataset
from vlmrl.data.table_values import read_image
from vlmrl.errors import DataError
from vlmrl.recipe.schema import Data
from vlmrl.tasks.prompt import place_images
from vlmrl.types import Media, Message, Row


def chat(call: str, tools: tuple[str, ...], result: str = "3") -> dict[str, Any]:
    calls = [{"function": {"name": call, "arguments": {"x": 1}}}]
    messages = [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": "3"},
    ]
    return {"messages": messages, "tools": [{"type": "function", "function": {"name": name}} for name in tools]}


def notes(place: Path, *rows: dict[str, Any]) -> list[str]:
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [note for note in TableDataset(Data(path=str(place / "rows.jsonl"))).notes if "calls" in note]


def test_a_call_of_a_tool_that_the_row_does_not_list_is_told(tmp_path: Path) -> None:
    good = chat("price", ("price", "zoom"))
    assert notes(tmp_path, good) == [] and notes(tmp_path, chat("prise", ())) == []
    (note,) = notes(tmp_path, good, chat("prise", ("price", "zoom")))
    assert "rows.jsonl:2 calls `prise`, which its `tools` does not list (price, zoom)" in note


def test_the_number_of_images_in_a_message_is_that_of_the_row() -> None:
    media = Media("a" * 64, 4, 2)
    with pytest.raises(DataError, match="the row has 1 image but its chat has 2 <image> marks"):
        place_images((Message("user", "<image>What?"),), Row("p", "s", "t", {}, (), response_media=(media,)))
    with pytest.raises(DataError, match="the row has 2 images but its prompt has 1 <image> mark"):
        place_images((Message("user", "<image>What?"),), Row("p", "s", "t", {}, (media, media)))


def test_a_link_out_of_the_folder_is_called_a_link(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    Image.new("RGB", (4, 2)).save(outside / "0.png")
    (inside / "pics").symlink_to(outside)
    with pytest.raises(DataError) as caught:
        read_image("pics/0.png", inside, "rows.jsonl:1")
    assert f"leaves {inside.resolve()} by a link, to {outside.resolve() / '0.png'}" in caught.value.message
    assert "images_root" in str(caught.value.hint) and "link" in str(caught.value.hint)
    with pytest.raises(DataError) as caught:
        read_image("../out/0.png", inside, "rows.jsonl:1")
    assert caught.value.message.endswith(f"leaves {inside.resolve()}") and "images_root" in str(caught.value.hint)
