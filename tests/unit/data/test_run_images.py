"""Images of a run whose rows came from a table of one's own."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from PIL import Image

from vlmrl.data.images import decode_image, encode_png
from vlmrl.data.open_dataset import open_dataset
from vlmrl.data.run_images import run_images
from vlmrl.recipe.schema import Data
from vlmrl.store import layout
from vlmrl.store.media import write_shard
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


def test_evaluations_are_read_once_and_only_for_an_image_that_the_run_lacks(run: Run, monkeypatch: pytest.MonkeyPatch):
    own, read = encode_png(Image.new("RGB", (6, 4), "white")), []
    write_shard(run.dir / layout.MEDIA / "000000.arrow", [(hashlib.sha256(own).hexdigest(), own)])
    layout.eval_dir(run.dir, "test-rows").mkdir(parents=True)
    (layout.eval_dir(run.dir, "test-rows") / layout.EVAL_SUMMARY).touch()
    monkeypatch.setattr("vlmrl.data.run_images.read_summary", lambda folder: read.append(folder) or {})
    images = run_images(run.dir)
    assert images.find(Media(hashlib.sha256(own).hexdigest(), 6, 4)) == own and read == []
    assert images.find(Media("0" * 64, 6, 4)) is images.find(Media("1" * 64, 6, 4)) is None
    assert [folder.name for folder in read] == ["test-rows"]


def test_a_damaged_manifest_leaves_the_runs_own_media(run: Run):
    (run.dir / layout.MANIFEST).write_text("{")
    assert run_images(run.dir).find(Media("0" * 64, 6, 4)) is None


@pytest.mark.parametrize("kept", ["its own entry", "a path alone", "an entry that is damaged"])
def test_the_rows_of_an_evaluation_are_found_where_it_read_them(kept: str, run: Run, tmp_path: Path):
    """Another file, whose images and columns have other places and names than those of the run's own table."""
    other, pictures = tmp_path / "work" / "other", tmp_path / "work" / "pictures"
    plain = kept == "a path alone"  # of an older version: relative to where the run was made
    for folder in (other, pictures):
        folder.mkdir()
    (tmp_path / "work" / "green.png" if plain else pictures / "green.png").write_bytes(
        encode_png(Image.new("RGB", (6, 4), "green"))
    )
    (column, file) = ("image", tmp_path / "work" / "test.jsonl") if plain else ("shot", other / "test.jsonl")
    file.write_text(json.dumps({"prompt": "Which?", column: "green.png", "answer": "green"}) + "\n")
    named = {} if plain else {"images_root": str(pictures), "columns": {"images": "shot"}}
    dataset = open_dataset(Data.model_validate({"path": str(file), **named}))
    (green,) = dataset.rows("train")[0].media
    meta: dict[str, object] = {"dataset": {"path": "test.jsonl"}}
    if not plain:
        meta["entry"] = dataset.info["entry"] if kept == "its own entry" else "nonsense"
    folder = layout.eval_dir(run.dir, "test-rows")
    folder.mkdir(parents=True)
    (folder / layout.EVAL_SUMMARY).write_text(json.dumps({"schema": 1, "metrics": {}, "meta": meta}))
    content = run_images(run.dir).find(green)
    assert (content is None) == (kept == "an entry that is damaged")


def test_the_entry_of_a_table_names_all_its_files_absolutely(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path / "work")
    entry = open_dataset(Data(path="table.jsonl", validation=0.5)).info["entry"]
    assert entry["path"] == str(tmp_path / "work" / "table.jsonl") and entry["images_root"] == str(tmp_path / "work")
    assert json.loads(json.dumps(entry)) == entry
