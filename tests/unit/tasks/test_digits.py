from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from vlmrl.data.images import decode_image
from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError
from vlmrl.recipe.schema import Data, Reward
from vlmrl.tasks import make_task
from vlmrl.tasks.digits import prepare_digits, render_scan
from vlmrl.tasks.source import open_source, open_validation


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_digits(tmp_path_factory.mktemp("data") / "digits", seed=3).path


@pytest.mark.slow
def test_splits_share_no_scan_and_have_the_promised_sizes(made: Path) -> None:
    dataset = open_dataset(Data(path=str(made)))
    scans = {split: {m.sha256 for row in dataset.rows(split) for m in row.media} for split in dataset.splits}
    assert sum(map(len, scans.values())) == len(set().union(*scans.values())) > 1700
    assert dict(dataset.splits) == {"train": 6000, "start": 400, "validation": 300, "test": 1200}
    origins = {split: {o for row in dataset.rows(split) for o in row.columns["origins"]} for split in dataset.splits}
    assert not origins["train"] & origins["test"]


def test_max_rows_cuts_the_split_that_is_trained_on_alone(made: Path) -> None:
    data = Data(path=str(made), max_rows=50)
    train, validation = open_source(data, Reward()), open_validation(data, Reward())
    assert validation is not None and (len(train.rows), len(validation.rows)) == (50, 300)


@pytest.mark.slow
def test_half_of_each_split_is_the_same_digit_and_the_rest_is_balanced_over_distance(made: Path) -> None:
    dataset = open_dataset(Data(path=str(made)))
    for split, count in dataset.splits.items():
        distances = Counter(row.truth["distance"] for row in dataset.rows(split))
        assert distances == {0: count // 2, 1: count // 4, 2: count // 4}
        pairs = {frozenset(m.sha256 for m in row.media) for row in dataset.rows(split)}
        assert len(pairs) == count and all(len(pair) == 2 for pair in pairs)


@pytest.mark.slow
def test_every_row_is_true_to_the_scans_it_names(made: Path) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    dataset = open_dataset(Data(path=str(made)))
    task = make_task("digits", dataset.info)
    for row in dataset.rows("validation"):
        assert task.validate(row.truth) == []
        for side, (origin, media) in enumerate(zip(row.columns["origins"], row.media, strict=True)):
            index = int(origin.removeprefix("scan "))
            digit = int(digits.target[index])
            assert row.truth["digit"][side] == str(digit)
            assert row.truth["loop"][side] == ("closed" if digit in (0, 6, 8, 9) else "open")
            assert dataset.image_bytes(media) == render_scan(digits.images[index])


def test_the_digit_says_little_about_whether_a_pair_is_the_same(made: Path) -> None:
    rows = open_dataset(Data(path=str(made))).rows("train")
    same, different = Counter(), Counter()
    for row in rows:
        for digit in row.truth["digit"]:
            (same if row.truth["same"] else different)[digit] += 1
    assert all(abs(same[d] - different[d]) < 0.25 * same[d] for d in same) and len(same) == 10


def test_a_scan_is_drawn_dark_on_white_seven_times_enlarged() -> None:
    scan = np.zeros((8, 8))
    scan[2:6, 2:6] = 16
    image = np.asarray(decode_image(render_scan(scan)))
    assert image.shape == (56, 56, 3)
    assert image[0, 0].tolist() == [255] * 3 and image[28, 28].tolist() == [0] * 3


def test_dataset_json_tells_what_was_made_and_what_was_not(made: Path) -> None:
    info = json.loads((made / "dataset.json").read_text())
    assert info["seed"] == 3 and info["counts"]["images"] == 1797 and info["counts"]["classes"] == 10
    assert info["doctor"]["image_tokens"]["train"]["bins"] == [[8, 12, 6000]]
    assert "estimate" in info["doctor"]["note"] and info["dropped"] == []
    text = json.dumps(info)
    assert str(made.parent) not in text and "/tmp" not in text


@pytest.mark.slow
def test_prep_is_byte_identical_and_another_seed_is_not_overwritten(made: Path, tmp_path: Path) -> None:
    again = prepare_digits(tmp_path / "digits", seed=3)
    assert {p.name: p.read_bytes() for p in made.iterdir()} == {p.name: p.read_bytes() for p in again.path.iterdir()}
    with pytest.raises(DataError, match="seed was 3, now 4"):
        prepare_digits(tmp_path / "digits", seed=4)
    other = prepare_digits(tmp_path / "other", seed=4)
    assert other.info["fingerprint"] != again.info["fingerprint"]
