"""Pictures of an evaluation with changed images are drawn again as the model saw them, or not at all."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlmrl.data.blinded_images import BlindedDataset, Blinding, ImageChange
from vlmrl.data.images import decode_image, image_hash
from vlmrl.evaluate.records import Evaluation
from vlmrl.report.page_parts import shown_pictures
from vlmrl.store.media import RunImages
from vlmrl.types import Media, Row


class OneImage:
    """A dataset of one image."""

    def __init__(self) -> None:
        sink = io.BytesIO()
        Image.linear_gradient("L").resize((40, 20)).convert("RGB").save(sink, "PNG")
        self.data = sink.getvalue()
        self.media = Media(image_hash(self.data), 40, 20)
        self.name = self.path = "one"
        self.info, self.splits, self.notes = {}, {}, []

    def image_bytes(self, media: Media) -> bytes:
        return self.data

    def image(self, media: Media) -> Any:
        return decode_image(self.data)


@pytest.mark.parametrize("text", ["blank", "noise", "low:5"])
def test_they_have_the_bytes_that_the_model_saw(tmp_path: Path, text: str) -> None:
    dataset = OneImage()
    row = Row("r", "s", "t", {}, (dataset.media, dataset.media))
    blinding = Blinding(dataset, [], ImageChange.parse(text), 3)  # type: ignore[arg-type]
    shown = blinding.row(0, row).media
    record = {
        "prompt_id": "r",
        "images": [m.fields() for m in row.media],
        "shown_images": [m.fields() for m in shown],
    }
    images = RunImages(tmp_path, resolvers=[lambda media: dataset.data if media == dataset.media else None])
    draw = shown_pictures(Evaluation([record], {"meta": {"images": text, "seed": 3}}), images)
    for media in shown:
        reference = Media.of(media.fields())
        images.add_resolvers([draw])
        assert images.find(reference) == BlindedDataset(dataset).image_bytes(media)  # type: ignore[arg-type]
    assert draw(dataset.media) is None and draw(Media("other", 1, 1)) is None
    # Another seed gives other noise: it is left out rather than shown.
    other = shown_pictures(Evaluation([record], {"meta": {"images": text, "seed": 4}}), images)
    plain = RunImages(tmp_path, resolvers=[lambda media: dataset.data if media == dataset.media else None, other])
    assert (plain.find(Media.of(shown[0].fields())) is None) == (text == "noise")


def test_without_the_true_image_a_low_one_is_left_out(tmp_path: Path) -> None:
    record = {
        "prompt_id": "r",
        "images": [Media("a", 9, 9).fields()],
        "shown_images": [Media("b", 9, 9).fields()],
    }
    draw = shown_pictures(Evaluation([record], {"meta": {"images": "low:3", "seed": 0}}), RunImages(tmp_path))
    assert draw(Media("b", 9, 9)) is None
