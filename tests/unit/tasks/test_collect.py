from __future__ import annotations

import zipfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlmrl.data.images import encode_png
from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError
from vlmrl.recipe.schema import Data, Reward
from vlmrl.tasks.dataset_assembly import Limits
from vlmrl.tasks.pairs.prep import parse_shares, prepare_folder
from vlmrl.tasks.source import open_source

MAKE = partial(prepare_folder, num_pairs=40, validation_pairs=10, test_pairs=20, limits=Limits())
OMNIGLOT = Path(__file__).parents[4] / "shared" / "data" / "omniglot" / "images_background_small1.zip"


def collection(folder: Path, groups: int = 3, classes: int = 4, images: int = 20) -> Path:
    number = 0
    for group in range(groups):
        for one in range(classes):
            place = folder / f"g{group}" / f"c{one}"
            place.mkdir(parents=True)
            for i in range(images):
                number += 1
                color = (number % 256, number // 256, group)
                (place / f"{i}.png").write_bytes(encode_png(Image.new("RGB", (6, 6), color)))
    return folder


def test_a_leaf_without_a_sibling_is_reported_and_the_pairs_are_made(tmp_path: Path) -> None:
    source = collection(tmp_path / "set")
    alone = source / "lonely" / "leaf"
    alone.mkdir(parents=True)
    for i in range(20):
        (alone / f"{i}.png").write_bytes(encode_png(Image.new("RGB", (6, 6), (i, 200, 200))))
    made = MAKE(source, "group,leaf", out=tmp_path / "out")
    for fields in made.info["splits"].values():
        assert {"reason": "no sibling", "class": "lonely/leaf", "distance": 1} in fields["reports"]
        assert fields["same"] * 2 == fields["rows"]
        assert 0 <= fields["by_distance"]["1"] - fields["by_distance"]["2"] <= 1
    rows = open_dataset(Data(path=str(tmp_path / "out"))).rows("train")
    assert any("lonely" in row.truth["group"] for row in rows)


def test_unseen_classes_make_half_of_the_test_and_are_nowhere_else(tmp_path: Path) -> None:
    made = MAKE(collection(tmp_path / "set"), "group,leaf", out=tmp_path / "out", unseen_classes=4)
    unseen = set(made.info["unseen_classes"])
    dataset = open_dataset(Data(path=str(tmp_path / "out")))
    classes = {
        split: Counter(
            f"{row.truth['group'][side]}/{row.truth['leaf'][side]}" for row in dataset.rows(split) for side in (0, 1)
        )
        for split in dataset.splits
    }
    assert len(unseen) == 4 and not unseen & (set(classes["train"]) | set(classes["validation"]))
    assert unseen <= set(classes["test"])
    rows = dataset.rows("test")
    assert sum(row.columns["unseen"] for row in rows) == 10 == len(rows) / 2
    for row in rows:
        names = {f"{row.truth['group'][side]}/{row.truth['leaf'][side]}" for side in (0, 1)}
        assert (names <= unseen) if row.columns["unseen"] else not (names & unseen)


def test_shares_of_distances_are_kept(tmp_path: Path) -> None:
    shares = "1=0.9,2=0.1"
    made = MAKE(collection(tmp_path / "set"), "group,leaf", out=tmp_path / "o", distance_shares=shares)
    assert made.info["splits"]["train"]["by_distance"] == {"0": 20, "1": 18, "2": 2}
    with pytest.raises(DataError, match="distances go from 1 to 2"):
        MAKE(tmp_path / "set", "group,leaf", out=tmp_path / "p", distance_shares="3=1")
    assert not (tmp_path / "p").exists()


def test_three_levels_and_one_level_work_alike(tmp_path: Path) -> None:
    source = collection(tmp_path / "set" / "top")
    made = MAKE(tmp_path / "set", "root,group,leaf", out=tmp_path / "three")
    train = made.info["splits"]["train"]
    assert train["by_distance"] == {"0": 20, "1": 10, "2": 10}
    assert {"reason": "no sibling", "class": "top", "distance": 3} in train["reports"]
    shutil_one = MAKE(source / "g0", "leaf", out=tmp_path / "one")
    assert shutil_one.info["splits"]["train"]["by_distance"] == {"0": 20, "1": 20}


def test_too_little_is_said_in_words_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no usable image in empty"):
        MAKE(tmp_path / "empty", "leaf", out=tmp_path / "out")
    source = collection(tmp_path / "set", groups=1, classes=1)
    with pytest.raises(DataError, match="split `train`: no different-class pair"):
        MAKE(source, "group,leaf", out=tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "set"]


@pytest.mark.parametrize("text", ["", "1", "1=", "a=1", "1=1,1=2", "1=-1", "1=1;2=1"])
def test_shares_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(DataError, match="is not of the form"):
        parse_shares(text)
    assert parse_shares("1=0.5, 2=.5") == {1: 0.5, 2: 0.5} and parse_shares(None) is None


@pytest.mark.slow
@pytest.mark.skipif(not OMNIGLOT.exists(), reason="the Omniglot archive is not beside this checkout")
def test_omniglot_becomes_a_pair_dataset_from_the_archive_and_from_its_folder(tmp_path: Path) -> None:
    counts: dict[str, Any] = {"num_pairs": 400, "validation_pairs": 100, "test_pairs": 200}
    make = partial(MAKE, levels="alphabet,character", name="omniglot", **counts)
    made = make(OMNIGLOT, out=tmp_path / "zip")
    assert made.info["counts"]["images"] == 2720 and made.info["counts"]["classes"] == 136
    assert made.info["dropped"] == [] and made.info["source"]["name"] == OMNIGLOT.name
    with zipfile.ZipFile(OMNIGLOT) as archive:
        archive.extractall(tmp_path / "files")
    folder = next((tmp_path / "files").iterdir())
    other = make(folder, out=tmp_path / "folder")
    assert other.info["source"]["fingerprint"] == made.info["source"]["fingerprint"]
    source = open_source(Data(path=str(made.path)), Reward())
    for split, count in zip(("train", "validation", "test"), counts.values(), strict=True):
        rows = source.with_split(split).rows
        assert len(rows) == count and sum(row.truth["same"] for row in rows) == count // 2
        assert not [problem for row in rows for problem in source.task.validate(row.truth)]
    row = source.rows[0]
    assert source.dataset.image(row.media[0]).size == (105, 105)
    assert "<alphabet>first; second</alphabet>" in source.messages(row)[0].content
