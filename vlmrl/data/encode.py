"""From messages and images to token ids and pixels: the only place, with batch.py, that knows image tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vlmrl.errors import DataError
from vlmrl.types import Media, Message, Row

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SLOT = "<image>"
NOT_MODEL_INPUTS = (
    "input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "num_crops", "num_patches", "rows", "cols",
    "num_soft_tokens_per_image", "grids", "num_patches_per_image",
)  # fmt: skip
"""What processors return besides the tensors of images: the text, and how it was made."""
CACHED_BYTES = 2**29
"""Processed images kept in memory, by content, the least recently used going first: pairs repeat images. 512 MiB are
7,000 digits of 56 x 56 pixels, or 20 images of one megapixel. Where a family has no grid of patches: whole prompts.
"""


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt ready for a model.

    Letters: P prompt tokens, image placeholders expanded.
    Args:
        text: the rendered prompt, special tokens included, one image token an image (what an engine is given).
        prompt_ids: P token ids.       kinds: P values, 0 text, 1 image.
        images: processor tensors of its images (`pixel_values`, `image_grid_thw`, ...); empty without images.
        num_images, num_image_tokens: counts.
        image_sizes: (width, height) in pixels as the model sees each image; of one tile where it sees several, and as
            stored where the tensors do not tell.
        unexpanded_ids: token ids with one placeholder an image, and pictures: its images as given; what an engine that
            runs the processor itself starts from.
    """

    row: Row
    text: str
    prompt_ids: tuple[int, ...]
    kinds: tuple[int, ...]
    images: Mapping[str, Tensor]
    num_images: int
    num_image_tokens: int
    image_sizes: tuple[tuple[int, int], ...]
    unexpanded_ids: tuple[int, ...] = ()
    pictures: tuple[Image, ...] = ()


class Encoder:
    """Renders chat messages with the model's chat template and runs its processor.

    Args:
        processor: a transformers processor (tokenizer, image processor, chat template).
        min_pixels, max_pixels: bounds of an image's area after resizing, in pixels; None leaves the processor's own.
        thinking: "on" or "off" is passed to the chat template as `enable_thinking`; "template" passes nothing.
    Attributes:
        takes_pixel_bounds: whether `min_pixels` and `max_pixels` do anything: the processors that fit an image to a
            grid of patches have such bounds, the others (a fixed size, tiles, crops) none.
        image_arguments: what the image processor is called with besides the images.
    """

    def __init__(
        self,
        processor: Any,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        thinking: str = "template",
    ) -> None:
        self.processor, self.tokenizer = processor, processor.tokenizer
        self.takes_pixel_bounds = _takes_pixel_bounds(processor.image_processor)
        bounded = self.takes_pixel_bounds
        self.image_arguments = _size_argument(processor.image_processor, min_pixels, max_pixels) if bounded else {}
        self._template = {} if thinking == "template" else {"enable_thinking": thinking == "on"}
        self._cache: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._cached_bytes = 0

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt as text: each `<image>` becomes an image entry of the chat template; generation prompt added.

        Raises: DataError when the model has no chat template.
        """
        turns = [{"role": m.role, "content": _content(m.content)} for m in messages]
        if not getattr(self.processor, "chat_template", None):
            raise DataError(
                "the model has no chat template", hint="use an instruction-tuned model, or add chat_template.jinja"
            )
        return self.processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False, **self._template)

    def encode(self, row: Row, messages: Sequence[Message], images: Sequence[Image]) -> EncodedPrompt:
        """Token ids and pixels of one row.

        Args: images: RGB, in the order of the slots; one for each of `row.media`.
        Raises: DataError when the number of `<image>` slots and of images differ.
        """
        slots = sum(m.content.count(IMAGE_SLOT) for m in messages)
        if slots != len(images):
            raise DataError(
                f"the prompt has {slots} {IMAGE_SLOT} slots and the row {len(images)} images",
                where=f"{row.source} row {row.prompt_id}",
                hint=f"write {IMAGE_SLOT} once for each image, in order",
            )
        text = self.render(messages)
        self._no_stray_placeholders(text, len(images), row)
        if not images:
            ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            return EncodedPrompt(row, text, ids, (0,) * len(ids), {}, 0, 0, (), ids)
        if not hasattr(self.processor.image_processor, "merge_size"):
            return self._encode_whole(row, text, images)
        features = [self._image_features(media, image) for media, image in zip(row.media, images, strict=True)]
        joined = {k: torch.cat([f[k] for f in features]) for k in features[0]}
        ids, kinds = self._expand(text, joined)
        sizes = tuple(self._model_size(f) for f in features)
        short = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return EncodedPrompt(row, text, ids, kinds, joined, len(images), sum(kinds), sizes, short, tuple(images))

    def _encode_whole(self, row: Row, text: str, images: Sequence[Image]) -> EncodedPrompt:
        """Families without a grid of patches: the processor makes ids and tensors of all images together, because how
        many tokens an image gets (tiles, crops, pooled patches) is known to it alone."""
        key = "\x1f".join((text, *(media.sha256 for media in row.media)))
        made = self._cached(
            key, lambda: self.processor(text=[text], images=list(images), return_tensors="pt", add_special_tokens=False)
        )
        ids = tuple(made["input_ids"][0].tolist())
        kinds = made.get("mm_token_type_ids", made.get("token_type_ids"))
        if kinds is None:
            kinds = made["input_ids"] == self.processor.image_token_id
        tensors = {k: v for k, v in made.items() if k not in NOT_MODEL_INPUTS}
        shape = tensors["pixel_values"].shape
        tile = (int(shape[-1]), int(shape[-2])) if len(shape) >= 4 and "target_sizes" not in tensors else None
        sizes = tuple(tile or image.size for image in images)
        kinds = tuple(int(kind) for kind in kinds[0].tolist())
        short = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return EncodedPrompt(
            row, text, ids, kinds, tensors, len(images), sum(map(bool, kinds)), sizes, short, tuple(images)
        )

    def _no_stray_placeholders(self, text: str, num_images: int, row: Row) -> None:
        """Raises: DataError when the text itself holds a placeholder: the model would take it for an image."""
        for kind, wanted in (("image", num_images), ("video", 0)):
            token = getattr(self.processor, f"{kind}_token", None)
            if token and text.count(token) != wanted:
                raise DataError(
                    f"the prompt's text holds the model's own {kind} placeholder {token}",
                    where=f"{row.source} row {row.prompt_id}",
                    hint=f"write {IMAGE_SLOT} where an image belongs, and take {token} out of the text",
                )

    def refuse_placeholders(self, response: str, where: str) -> None:
        """Raises: DataError when a response to learn from holds the model's own image or video placeholder."""
        for kind in ("image", "video"):
            token = getattr(self.processor, f"{kind}_token", None)
            if token and token in response:
                raise DataError(
                    f"the response holds the model's own {kind} placeholder {token}, for which there is no {kind}",
                    where=where, hint=f"take {token} out of the response",
                )  # fmt: skip

    def _expand(self, text: str, joined: Mapping[str, Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids with image placeholders expanded by the images' grids, and the kind of each token."""
        token = self.processor.image_token
        merge = self.processor.image_processor.merge_size**2
        pieces = text.split(token)
        counts = [int(g.prod()) // merge for g in joined["image_grid_thw"]]
        expanded = pieces[0] + "".join(token * n + piece for n, piece in zip(counts, pieces[1:], strict=True))
        ids = tuple(self.tokenizer(expanded, add_special_tokens=False)["input_ids"])
        image_id = self.tokenizer.convert_tokens_to_ids(token)
        return ids, tuple(int(i == image_id) for i in ids)

    def _image_features(self, media: Media, image: Image) -> dict[str, Tensor]:
        made = self._cached(
            media.sha256,
            lambda: self.processor.image_processor(images=[image], return_tensors="pt", **self.image_arguments),
        )
        return {k: v for k, v in made.items() if k not in NOT_MODEL_INPUTS}

    def _cached(self, key: str, make: Callable[[], Mapping[str, Any]]) -> Mapping[str, Tensor]:
        """The tensors that `make` returns, made once while they are in the cache."""
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        made = {k: v for k, v in make().items() if isinstance(v, Tensor)}
        self._cache[key] = made
        self._cached_bytes += _bytes(made)
        while self._cached_bytes > CACHED_BYTES and len(self._cache) > 1:
            self._cached_bytes -= _bytes(self._cache.popitem(last=False)[1])
        return made

    def _model_size(self, features: Mapping[str, Tensor]) -> tuple[int, int]:
        grid, patch = features["image_grid_thw"], self.processor.image_processor.patch_size
        return int(grid[0, 2]) * patch, int(grid[0, 1]) * patch


def _bytes(features: Mapping[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in features.values())


def _content(text: str) -> list[dict[str, str]]:
    """Text with `<image>` slots as the content list of a chat template."""
    parts: list[dict[str, str]] = []
    for index, piece in enumerate(text.split(IMAGE_SLOT)):
        if index:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _takes_pixel_bounds(image_processor: Any) -> bool:
    size = getattr(image_processor, "size", None)
    edges = dict(size) if size is not None else {}
    return hasattr(image_processor, "merge_size") and {"shortest_edge", "longest_edge"} <= edges.keys()


def _size_argument(image_processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
    """How an image processor with bounds is told them. In these processors the two "edges" are areas in pixels."""
    if min_pixels is None and max_pixels is None:
        return {}
    edges = dict(image_processor.size)
    return {
        "size": {
            "shortest_edge": min_pixels or edges["shortest_edge"],
            "longest_edge": max_pixels or edges["longest_edge"],
        }
    }
