"""Images of a run whose rows came from a table of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from vlmrl.data.images import decode_image, encode_png
from vlmrl.data.open_dataset import open_dataset
from vlmrl.data.run_images import run_images
from vlmrl.recipe.schema import Data
from vlmrl.store import layout
from vlmrl.store.runs import Run, create_run
from vlmrl.types import Media


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that was made in `work`, from a table named by a relative path, and is looked at from elsewhere."""
    work = tmp_path / "work"
    work.mkdir()
    for name in ("red", "blue"):
        (work / f"{name}.png").write_bytes(encode_png(Image.new("RGB", (6, 4), name)))
    lines = [{"prompt": "Which?", "image": f"{name}.png", "answer": name} for name in ("red", "blue")]
    (work / "table.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(work)
    data = Data(path="table.jsonl")
    made = create_run(
        tmp_path / "runs",
        kind="rl",
        recipe_name="t",
        resolved={"recipe": {"data": [data.model_dump()]}},
        datasets=[{"name": "table", "path": "table.jsonl"}],
    )
    made.finish()
    monkeypatch.chdir(tmp_path)
    return made


def media_of(folder: Path) -> list[Media]:
    rows = open_dataset(Data(path=str(folder / "table.jsonl"))).rows("train")
    return [media for row in rows for media in row.media]


def test_images_of_a_table_are_found_by_content_from_another_folder(run: Run, tmp_path: Path):
    images = run_images(run.dir)
    red, blue = media_of(tmp_path / "work")
    assert decode_image(images.read(blue)).getpixel((0, 0)) == (0, 0, 255)
    assert decode_image(images.read(red)).getpixel((0, 0)) == (255, 0, 0)
    assert images.find(Media("0" * 64, 6, 4)) is None and images.notes == []


def test_a_table_that_is_gone_is_told_once(run: Run, tmp_path: Path):
    (red, blue) = media_of(tmp_path / "work")
    (tmp_path / "work" / "table.jsonl").unlink()
    images = run_images(run.dir)
    assert images.find(red) is None and images.find(blue) is None
    assert len([note for note in images.notes if "cannot be opened" in note]) == 1


def test_a_damaged_manifest_leaves_the_runs_own_media(run: Run):
    (run.dir / layout.MANIFEST).write_text("{")
    assert run_images(run.dir).find(Media("0" * 64, 6, 4)) is None
