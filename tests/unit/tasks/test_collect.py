from __future__ import annotations

import zipfile
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from vlmrl.data.images import encode_png
from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError
from vlmrl.recipe.schema import Data, Reward
from vlmrl.tasks.pairs.prep import parse_shares, prepare_folder
from vlmrl.tasks.source import open_source

COUNTS = {"train": 40, "validation": 10, "test": 20}
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
    made = prepare_folder(source, ["group", "leaf"], out=tmp_path / "out", num_pairs=COUNTS)
    for fields in made.info["splits"].values():
        assert {"reason": "no sibling", "class": "lonely/leaf", "distance": 1} in fields["reports"]
        assert fields["same"] * 2 == fields["rows"]
        assert 0 <= fields["by_distance"]["1"] - fields["by_distance"]["2"] <= 1
    rows = open_dataset(Data(path=str(tmp_path / "out"))).rows("train")
    assert any("lonely" in row.truth["group"] for row in rows)


def test_unseen_classes_make_half_of_the_test_and_are_nowhere_else(tmp_path: Path) -> None:
    made = prepare_folder(
        collection(tmp_path / "set"), ["group", "leaf"], out=tmp_path / "out", num_pairs=COUNTS, unseen_classes=4
    )
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
    shares = {1: 0.9, 2: 0.1}
    made = prepare_folder(
        collection(tmp_path / "set"), ["group", "leaf"], out=tmp_path / "o", num_pairs=COUNTS, distance_shares=shares
    )
    assert made.info["splits"]["train"]["by_distance"] == {"0": 20, "1": 18, "2": 2}
    with pytest.raises(DataError, match="distances go from 1 to 2"):
        prepare_folder(
            tmp_path / "set", ["group", "leaf"], out=tmp_path / "p", num_pairs=COUNTS, distance_shares={3: 1}
        )
    assert not (tmp_path / "p").exists()


def test_three_levels_and_one_level_work_alike(tmp_path: Path) -> None:
    source = collection(tmp_path / "set" / "top")
    made = prepare_folder(tmp_path / "set", ["root", "group", "leaf"], out=tmp_path / "three", num_pairs=COUNTS)
    train = made.info["splits"]["train"]
    assert train["by_distance"] == {"0": 20, "1": 10, "2": 10}
    assert {"reason": "no sibling", "class": "top", "distance": 3} in train["reports"]
    shutil_one = prepare_folder(source / "g0", ["leaf"], out=tmp_path / "one", num_pairs=COUNTS)
    assert shutil_one.info["splits"]["train"]["by_distance"] == {"0": 20, "1": 20}


def test_too_little_is_said_in_words_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no usable image in empty"):
        prepare_folder(tmp_path / "empty", ["leaf"], out=tmp_path / "out", num_pairs=COUNTS)
    source = collection(tmp_path / "set", groups=1, classes=1)
    with pytest.raises(DataError, match="split `train`: no different-class pair"):
        prepare_folder(source, ["group", "leaf"], out=tmp_path / "out", num_pairs=COUNTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "set"]


@pytest.mark.parametrize("text", ["", "1", "1=", "a=1", "1=1,1=2", "1=-1", "1=1;2=1"])
def test_shares_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(DataError, match="is not of the form"):
        parse_shares(text)
    assert parse_shares("1=0.5, 2=.5") == {1: 0.5, 2: 0.5} and parse_shares(None) is None


@pytest.mark.slow
@pytest.mark.skipif(not OMNIGLOT.exists(), reason="the Omniglot archive is not beside this checkout")
def test_omniglot_becomes_a_pair_dataset_from_the_archive_and_from_its_folder(tmp_path: Path) -> None:
    levels = ["alphabet", "character"]
    counts = {"train": 400, "validation": 100, "test": 200}
    made = prepare_folder(OMNIGLOT, levels, name="omniglot", out=tmp_path / "zip", num_pairs=counts)
    assert made.info["counts"]["images"] == 2720 and made.info["counts"]["classes"] == 136
    assert made.info["dropped"] == [] and made.info["source"]["name"] == OMNIGLOT.name
    with zipfile.ZipFile(OMNIGLOT) as archive:
        archive.extractall(tmp_path / "files")
    folder = next((tmp_path / "files").iterdir())
    other = prepare_folder(folder, levels, name="omniglot", out=tmp_path / "folder", num_pairs=counts)
    assert other.info["source"]["fingerprint"] == made.info["source"]["fingerprint"]
    source = open_source(Data(path=str(made.path)), Reward())
    for split in ("train", "validation", "test"):
        rows = source.with_split(split).rows
        assert len(rows) == counts[split] and sum(row.truth["same"] for row in rows) == counts[split] // 2
        assert not [problem for row in rows for problem in source.task.validate(row.truth)]
    row = source.rows[0]
    assert source.dataset.image(row.media[0]).size == (105, 105)
    assert "<alphabet>first; second</alphabet>" in source.messages(row)[0].content
