"""Pictures in the place of images: what they show, that they are drawn again alike, and which images stay."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vlmrl.data.blinded_images import GREY, BlindedDataset, Blinding, ImageChange, parse_changes
from vlmrl.data.images import decode_image, image_hash
from vlmrl.errors import RecipeError
from vlmrl.types import Media, Row


class Pictures:
    """A dataset of a few drawn images, by their hash."""

    name, path, fingerprint, info, notes = "pictures", "nowhere", "f", {}, ()
    splits: Mapping[str, int] = {"train": 1}

    def __init__(self, *images: Image.Image) -> None:
        self.files: dict[str, bytes] = {}
        self.media: list[Media] = []
        for one in images:
            sink = io.BytesIO()
            one.save(sink, "PNG")
            self.media.append(Media(image_hash(sink.getvalue()), *one.size))
            self.files[self.media[-1].sha256] = sink.getvalue()

    def rows(self, split: str) -> Sequence[Row]:
        raise AssertionError

    def image_bytes(self, media: Media) -> bytes:
        return self.files[media.sha256]

    def image(self, media: Media) -> Image.Image:
        return decode_image(self.files[media.sha256])

    def place_of(self, media: Media) -> str:
        return f"place {media.sha256[:4]}"


def halves(width: int, height: int) -> Image.Image:
    """A picture, white on its left half and black on its right one, with a thin red line at the top."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : width // 2] = 255
    pixels[0] = (255, 0, 0)
    return Image.fromarray(pixels)


def row(dataset: Pictures, name: str = "r1", images: slice = slice(None)) -> Row:
    return Row(name, "s", "t", {"answer": 1}, tuple(dataset.media[images]))


def pixels(blinding: Blinding, media: Media) -> Any:
    image = blinding.dataset.image(media)
    assert image.size == (media.width, media.height) and image.mode == "RGB"
    assert np.array_equal(np.asarray(decode_image(blinding.dataset.image_bytes(media))), np.asarray(image))
    return np.asarray(image)


def test_the_choices_of_the_option() -> None:
    assert parse_changes(None) == ()
    assert [str(c) for c in parse_changes("blank, low,noise,low:7,shuffled,masked,masked:8:0.5,blank")] == [
        "blank",
        "low:32",
        "noise",
        "low:7",
        "shuffled",
        "masked:14:0.6",
        "masked:8:0.5",
    ]
    assert ImageChange.parse("masked:8:1") == ImageChange.parse("masked:8:1.0") == ImageChange("masked", 8, 1.0)
    assert ImageChange.parse("masked:8") == ImageChange("masked", 8, 0.6)
    assert [str(ImageChange.parse(str(c))) for c in parse_changes("masked:9:.25,masked:9:.0001")] == [
        "masked:9:0.25",
        "masked:9:0.0001",
    ]
    for text in (
        "masked:",
        "masked:0:0.5",
        "masked:8:0",
        "masked:8:2",
        "masked:8:x",
        "masked:8:0.5:1",
        "masked:8:0.12345",
    ):
        with pytest.raises(RecipeError, match="--images cannot be") as wrong:
            ImageChange.parse(text)
        assert "masked:14:0.6" in str(wrong.value.hint)
    for text in ("", "blink", "low:", "low:0", "low:x", "blank:3", "low:9999", "low:\u0663"):
        with pytest.raises(RecipeError, match="--images cannot be"):
            ImageChange.parse(text)
    with pytest.raises(RecipeError) as refused:
        ImageChange.parse("blnk")
    assert "blank" in str(refused.value.hint)


def test_a_blank_image_is_grey_and_of_the_same_size() -> None:
    dataset = Pictures(halves(20, 10), halves(6, 30))
    blinding = Blinding(dataset, [], ImageChange("blank"), 0)
    shown = blinding.row(0, row(dataset))
    assert shown.prompt_id == "r1" and shown.truth == {"answer": 1}
    for own, new in zip(dataset.media, shown.media, strict=True):
        assert (new.width, new.height) == (own.width, own.height) and new.sha256 != own.sha256
        assert (pixels(blinding, new) == GREY).all()


def test_noise_depends_on_seed_row_and_position_alone() -> None:
    dataset = Pictures(halves(20, 10), halves(20, 10))
    first = Blinding(dataset, [], ImageChange("noise"), 7)
    one, other = first.row(0, row(dataset)).media
    assert one.sha256 != other.sha256  # the same image twice
    picture = pixels(first, one)
    assert 100 < picture.mean() < 155 and len(np.unique(picture)) > 150
    again = Blinding(dataset, [], ImageChange("noise"), 7).row(5, row(dataset)).media
    assert [m.sha256 for m in again] == [one.sha256, other.sha256]
    assert Blinding(dataset, [], ImageChange("noise"), 8).row(0, row(dataset)).media[0].sha256 != one.sha256
    assert first.row(0, row(dataset, "r2")).media[0].sha256 != one.sha256
    # shake_128 of "7<unit separator>r1<unit separator>0": the same pixels in every version and on every machine.
    assert picture[0, 0].tolist() == [21, 56, 206]


def test_a_low_image_keeps_size_and_coarse_content_and_loses_details() -> None:
    dataset = Pictures(halves(64, 32))
    blinding = Blinding(dataset, [], ImageChange("low", 4), 0)
    (media,) = blinding.row(0, row(dataset)).media
    picture = pixels(blinding, media)
    assert picture.shape == (32, 64, 3)
    assert picture[16, 4].mean() > 240 and picture[16, 60].mean() < 15  # 4 x 2 cells: white left, black right
    assert not (picture[0, 48:] == (255, 0, 0)).all(axis=-1).any()  # the red line of one pixel is gone
    assert picture[0, 60, 0] < 40


def test_a_masked_image_has_whole_black_patches_of_its_seed_row_and_position():
    white = Image.new("RGB", (50, 30), (255, 250, 245))
    dataset = Pictures(white, white)
    blinding = Blinding(dataset, [], ImageChange("masked", 8, 0.5), 7)
    one, other = blinding.row(0, row(dataset)).media
    picture = pixels(blinding, one)
    assert one.sha256 != other.sha256  # the same image twice
    patches = [picture[y : y + 8, x : x + 8] for y in range(0, 30, 8) for x in range(0, 50, 8)]
    black = [bool((patch == 0).all()) for patch in patches]
    assert all(is_black or (patch == (255, 250, 245)).all() for patch, is_black in zip(patches, black, strict=True))
    # shake_128 of "7<unit separator>r1<unit separator>0", four bytes a patch, little-endian, below half of 2^32.
    numbers = np.frombuffer(hashlib.shake_128(b"7\x1fr1\x1f0").digest(4 * 28), "<u4")
    assert len(black) == 28 and black == (numbers < 2**31).tolist()
    again = Blinding(dataset, [], ImageChange("masked", 8, 0.5), 7).row(3, row(dataset)).media
    assert [m.sha256 for m in again] == [one.sha256, other.sha256]
    assert Blinding(dataset, [], ImageChange("masked", 8, 0.5), 8).row(0, row(dataset)).media[0].sha256 != one.sha256
    whole = Blinding(dataset, [], ImageChange("masked", 8, 1.0), 7)
    assert (pixels(whole, whole.row(0, row(dataset)).media[0]) == 0).all()
    assert Blinding(dataset, [], ImageChange("masked", 8, 0.0), 7).row(0, row(dataset)).media[0] is dataset.media[0]


def test_the_share_of_black_patches_is_that_of_the_mask():
    dataset = Pictures(Image.new("RGB", (400, 400), (9, 9, 9)))
    blinding = Blinding(dataset, [], ImageChange("masked", 4, 0.6), 0)
    picture = pixels(blinding, blinding.row(0, row(dataset)).media[0])
    assert (picture == 0).mean() == pytest.approx(0.6, abs=0.02)  # 10,000 patches: four standard deviations


def test_an_image_that_is_small_already_stays_as_it_is() -> None:
    dataset = Pictures(halves(32, 20), halves(33, 20))
    shown = Blinding(dataset, [], ImageChange("low", 32), 0).row(0, row(dataset))
    assert shown.media[0] is dataset.media[0] and shown.media[1].sha256 != dataset.media[1].sha256


def test_a_picture_is_drawn_again_when_the_cache_has_lost_it() -> None:
    dataset = Pictures(halves(20, 10))
    (media,) = Blinding(dataset, [], ImageChange("noise"), 7).row(0, row(dataset)).media
    sent = pickle.loads(pickle.dumps(media))  # as between processes
    fresh = BlindedDataset(dataset)
    assert image_hash(fresh.image_bytes(sent)) == media.sha256 == sent.sha256


def test_shuffled_rows_show_the_images_at_the_given_places() -> None:
    dataset = Pictures(halves(20, 10), halves(8, 8), halves(9, 9))
    rows = [row(dataset, "a", slice(0, 2)), row(dataset, "b", slice(1, 3))]
    blinding = Blinding(dataset, rows, ImageChange("shuffled"), 0, [((1, 1), (1, 0)), ()])
    shown = blinding.row(0, rows[0])
    assert shown.media == (dataset.media[2], dataset.media[1]) and shown.prompt_id == "a"
    assert blinding.dataset.image_bytes(shown.media[0]) == dataset.files[dataset.media[2].sha256]
