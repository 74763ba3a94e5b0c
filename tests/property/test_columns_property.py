"""Cells of a stranger's table: whatever is in them, the answer is a value or a DataError."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.data.cells import plain, read_image, read_messages, split_images
from vlmrl.errors import DataError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=20)
KEYS = st.sampled_from(
    ["role", "content", "from", "value", "type", "text", "image", "image_url", "url", "bytes", "path"]
)
WORDS = st.sampled_from(
    ["user", "assistant", "system", "text", "image", "../../etc/passwd", "data:image/png;base64,AA", "[{"]
)
CELLS = st.recursive(
    SCALARS | WORDS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


@pytest.mark.slow
@given(CELLS)
def test_any_prompt_cell_is_read_or_refused(cell) -> None:
    try:
        turns, response, _ = read_messages(cell, "row 1")
    except DataError as error:
        assert "row 1" in str(error.where)
        return
    assert any(turn.role == "user" for turn in turns) and all(isinstance(turn.content, str) for turn in turns)
    assert response is None or isinstance(response, str)


@pytest.mark.slow
@given(CELLS)
def test_any_image_cell_is_read_or_refused_and_never_leaves_its_folder(cell) -> None:
    root = Path(__file__).parent
    for value in split_images(cell):
        try:
            found = read_image(value, root, "row 1")
        except DataError as error:
            assert error.where == "row 1"
        else:
            assert isinstance(found, bytes) or found.is_relative_to(root)


@pytest.mark.slow
@given(CELLS)
def test_any_cell_becomes_a_json_value(cell) -> None:
    json.dumps(plain(cell), allow_nan=False)


def test_deep_nesting_in_a_cell_is_a_data_error_and_not_a_crash(tmp_path: Path) -> None:
    from vlmrl.data.open_dataset import open_dataset
    from vlmrl.recipe.schema import Data

    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "x", "extra": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(DataError):
        list(open_dataset(Data(path=str(path))).rows("train"))
    path.write_text('{"prompt": "x", "extra": ' + "[" * 900 + "]" * 900 + "}\n")
    with pytest.raises(DataError):
        list(open_dataset(Data(path=str(path))).rows("train"))
