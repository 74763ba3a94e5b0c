"""Pictures that a model saw in the place of the true images, drawn again for a page."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from vlmrl.data.blinded_images import ImageChange, draw_picture, noise_key, picture_file
from vlmrl.data.images import decode_image
from vlmrl.errors import VlmrlError
from vlmrl.evaluate.records import Evaluation
from vlmrl.store.evaluated_rows import SHOWN_IMAGES, images_of
from vlmrl.store.media import Resolver, RunImages
from vlmrl.types import Media


def shown_pictures(evaluation: Evaluation, images: RunImages) -> Resolver:
    """Return a function that draws a picture of an evaluation again; it returns None for all other images.

    Args:
        images: of the run; the true images come from there.
    """
    meta = evaluation.summary.get("meta") or {}
    text, seed = images_of(meta), meta.get("seed") or 0

    @cache
    def places() -> Mapping[str, tuple[Media, str]]:
        """Content of a picture -> the true image, and the text that random pixels come from."""
        return {
            shown["sha256"]: (Media.of(own), noise_key(seed, row["prompt_id"], position))
            for row in evaluation.rows
            for position, (shown, own) in enumerate(zip(row.get(SHOWN_IMAGES) or (), row["images"], strict=False))
            if shown["sha256"] != own["sha256"]
        }

    def draw(media: Media) -> bytes | None:
        if text is None or media.sha256 not in places():
            return None
        own, key = places()[media.sha256]
        try:
            change = ImageChange.parse(text)
            original = decode_image(images.read(own)) if change.kind == "low" else None
        except VlmrlError:
            return None
        if change.kind == "shuffled":
            return None
        return picture_file(draw_picture(change, original, (media.width, media.height), key))

    return draw
