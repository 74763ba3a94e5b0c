"""Encoding of messages and images as token ids and pixels.

Only this module, data/turns.py and model/packing.py handle image tokens.

A whole image's size after the image processor's resize is the size that a model's pixel coordinates refer to.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vlmrl.data.chat_template import IMAGE_SLOT, TEMPLATE_HINT, ControlTokens, guard_message, render_chat
from vlmrl.data.images import MAX_PIXELS, BoundedCache
from vlmrl.environments.calls import form_of, tools_text
from vlmrl.errors import DataError
from vlmrl.redaction.redact import first_line
from vlmrl.types import Media, Message, Row, Size
from vlmrl.untrusted import plural

if TYPE_CHECKING:
    from PIL.Image import Image


def seen_size(image_processor: Any, stored: Size, tile: Size | None) -> Size | None:
    """Return (width, height) of an image as the model sees it, for a processor without a grid of patches.

    If the model sees the image in tiles, it is the size of all tiles together; a thumbnail beside them has no effect.

    Args:
        image_processor: of transformers.
        stored: (width, height) of the image as stored.
        tile: (width, height) of one tile, or of the image if there are no tiles; None if the tensors do not show it.
    Returns: None if it is unknown, or if the model does not see the whole image (a crop of its centre).
    """
    width, height = stored
    if hasattr(image_processor, "get_sliced_grid"):
        return _of_slices(image_processor, stored)
    if hasattr(image_processor, "pooling_kernel_size"):
        return _of_pooled_patches(image_processor, stored)
    if tile is None:
        return None
    if getattr(image_processor, "do_center_crop", False) and width != height:
        return None
    if getattr(image_processor, "do_image_splitting", False):
        _, rows, columns = image_processor.get_number_of_image_patches(height, width, {})
        return (tile[0] * max(1, columns), tile[1] * max(1, rows))
    if hasattr(image_processor, "crop_to_patches"):
        return _of_canvas(image_processor, stored, tile)
    return tile


def _of_slices(image_processor: Any, stored: Size) -> Size:
    """Return the size for MiniCPM-V: an image that is cut into slices is resized to a multiple of the grid first."""
    size, scale = (stored[1], stored[0]), image_processor.scale_resolution
    grid = image_processor.get_sliced_grid(size, image_processor.max_slice_nums, scale)
    settings = {
        "scale_resolution": scale,
        "patch_size": image_processor.patch_size,
        "downsample_mode": image_processor.downsample_mode,
        "allow_upscale": True,
    }
    if not image_processor.slice_mode or grid is None:
        height, width = image_processor.find_best_resize(size, **settings)
    else:
        height, width = image_processor.get_refine_size(size, grid, **settings)
    return width, height


def _of_pooled_patches(image_processor: Any, stored: Size) -> Size | None:
    """Return the size for Gemma 4: it keeps the proportions, within a number of patches."""
    resize = getattr(import_module(type(image_processor).__module__), "get_aspect_ratio_preserving_size", None)
    if resize is None:
        return None
    pool = image_processor.pooling_kernel_size
    most = image_processor.max_soft_tokens * pool**2
    height, width = resize(stored[1], stored[0], image_processor.patch_size, most, pool)
    return width, height


def _of_canvas(image_processor: Any, stored: Size, tile: Size) -> Size | None:
    """Return the size for InternVL: the image is stretched to a canvas of tiles with nearly its proportions.

    Its processor always cuts images into tiles, whatever `crop_to_patches` of the image processor is.
    """
    canvas = getattr(import_module(type(image_processor).__module__), "get_optimal_tiled_canvas", None)
    if canvas is None:
        return None
    limits = image_processor.min_patches, image_processor.max_patches
    columns, rows = canvas((stored[1], stored[0]), (tile[1], tile[0]), *limits)
    return tile[0] * columns, tile[1] * rows


NOT_MODEL_INPUTS = (
    "input_ids",
    "attention_mask",
    "mm_token_type_ids",
    "token_type_ids",
    "num_crops",
    "num_patches",
    "rows",
    "cols",
    "num_soft_tokens_per_image",
    "grids",
    "num_patches_per_image",
)
"""Names of the processors' outputs that belong to the text and not to the images."""
END = "vlmrlEndMark"
"""Text behind the last message of an open prompt, which ends there."""
PROBE = "probe"
"""Text of a test message. A chat template works if the rendered message contains it."""
SIZE_HINT = "cut the image into pieces or take the row out; `vlmrl check` lists all such rows"
TOOLS_HINT = "use an instruction-tuned model whose chat template shows tools or a system message"
KEPT_TOOLS = 256
"""Number of sets of tools whose encoders are kept."""
CACHED_BYTES = 2**29
"""Maximum size in bytes of the cache of processed images; the least recently used images are removed first.

The cache is useful because pairs repeat images. 512 MiB are 7,000 digits of 56 x 56 pixels, or 20 images of one
megapixel. For a family without a grid of patches, whole prompts are cached.
"""


@dataclass(frozen=True)
class EncodedPrompt:
    """Prompt that is ready for a model. Letters: P prompt tokens, image placeholders expanded.

    Args:
        text: the rendered prompt, special tokens included, one image token per image; engines get this text.
        kinds: P values, 0 text, 1 image.
        images: processor tensors of its images (`pixel_values`, `image_grid_thw`, ...); empty without images.
        image_sizes: (width, height) in pixels of each image as the model sees it. If the model sees several tiles, the
            size of one tile; if the tensors do not contain the size, the size of the stored image.
        seen_sizes: (width, height) in pixels of each whole image as the model sees it, all tiles together; () if it is
            not known for every image. Coordinates in pixels refer to this size.
        unexpanded_ids: token ids with one placeholder per image, for an engine that runs the processor itself.
        pictures: the images before processing, for the same engine.
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
    seen_sizes: tuple[tuple[int, int], ...] = ()


class Encoder:
    """Encoder of prompts: it renders messages with the model's chat template and runs the model's processor.

    Args:
        processor: a transformers processor (tokenizer, image processor, chat template).
        min_pixels, max_pixels: bounds of an image's area after resizing, in pixels; None = the processor's own.
        thinking: "on" or "off" is passed to the chat template as `enable_thinking`; "template" passes nothing.

    Attributes:
        takes_pixel_bounds: whether `min_pixels` and `max_pixels` have an effect. Processors that resize an image to a
            grid of patches have such bounds; other processors (with a fixed size, tiles or crops) have none.
        image_arguments: arguments of the image processor besides the images.
        is_open: whether its prompts end within their last message; see `with_tools`.
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
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._form, self.is_open = "auto", False
        self._with_tools: dict[str, Encoder] = {}
        self._cache: BoundedCache[Mapping[str, Tensor]] = BoundedCache(CACHED_BYTES, tensor_bytes)

    def with_tools(self, tools: Sequence[Mapping[str, Any]], form: str = "auto", *, is_open: bool = False) -> Encoder:
        """Return an encoder whose prompts show tools; the same one for the same arguments.

        Args:
            tools: JSON schemas in the form that chat templates take: {"type": "function", "function": {"name",
                "description", "parameters"}}. A chat template that does not show them gets a system text instead.
            form: form of the calls that such a text describes (environments/calls.py); auto = that of the template.
            is_open: a prompt ends within its last message, which what an environment shows at its start goes on with.
        """
        if not tools and not is_open:
            return self
        key = json.dumps([form, is_open, list(tools)])
        if key not in self._with_tools:
            if len(self._with_tools) >= KEPT_TOOLS:  # a table may have other tools in each row
                self._with_tools.clear()
            _ = self._shows_schemas  # is the same for all tools, and takes two renderings
            other = self._with_tools[key] = copy.copy(self)
            other._tools, other._form, other.is_open, other._with_tools = tools, form, is_open, {}
            other.__dict__.pop("_shown", None)  # what this one has worked out
        return self._with_tools[key]

    @cached_property
    def control(self) -> ControlTokens:
        """The model's control tokens; in the text of a dataset, they stay letters.

        Raises: CheckpointError or DataError when the model has no chat template, or one that cannot be used.
        """
        return ControlTokens(self.processor, lambda text: self._render([Message("user", text)], False))

    @cached_property
    def _shown(self) -> tuple[Sequence[Mapping[str, Any]], str]:
        """The tools as prompts show them: (schemas for the chat template, guarded text of a system message).

        Schemas are the user's code, and yet a description may quote a control token. All strings of the schemas are
        guarded, names of parameters too; the words around them are the template's or those of `tools_text`.

        Raises: DataError when no way works.
        """
        if not self._tools:
            return (), ""
        if self._shows_schemas:
            return self.control.guard_values(self._tools), ""
        user = Message("user", "u")
        if PROBE not in self._render(with_system_text([user], PROBE), True):
            message = "the model's chat template shows neither tools nor a system message"
            raise DataError(message, hint=TOOLS_HINT)
        return (), self.control.guard_literal(tools_text(self._tools, self.form))

    @property
    def form(self) -> str:
        """Form of the calls of tools."""
        return form_of(str(self.processor.chat_template)) if self._form == "auto" else self._form

    @cached_property
    def _shows_schemas(self) -> bool:
        """Ability of the chat template to write the description of a tool, its guarded control tokens as they are."""
        description = self.control.guard(PROBE + "".join(self.control.names[:1]))
        parameters = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
        function = {"name": "probe_tool", "description": description, "parameters": parameters}
        schemas = [{"type": "function", "function": function}]
        user = Message("user", "u")
        try:
            if description not in self._render([user], True, schemas):
                return False
        except DataError:
            return False
        try:
            return description in self._render([Message("system", "s"), user], True, schemas)
        except DataError:  # a template without system messages
            return True

    def require_template(self) -> None:
        """Raise a CheckpointError or DataError when the model has no chat template, or one that cannot be used."""
        row = Row("", "a prompt of one image", "", {})
        text = self.render([Message("user", f"{IMAGE_SLOT}{PROBE}")])
        self.require_placeholders(text, 1, row)
        if PROBE not in text:
            raise DataError("the model's chat template does not write the user's text", hint=TEMPLATE_HINT)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text of a conversation from guarded messages, tools and generation prompt included."""
        schemas, text = self._shown
        return self._render(with_system_text(messages, text) if text else messages, True, schemas)

    def _marked_prompt(self, messages: Sequence[Message]) -> str:
        """Return the text of a prompt, guarded; of an open one without what follows its last message's text."""
        *before, last = [guard_message(self.control, m) for m in messages]
        if not self.is_open:
            return self.render([*before, last])
        return self.render([*before, replace(last, content=last.content + END)]).partition(END)[0]

    def _render(
        self, messages: Sequence[Message], generation_prompt: bool, schemas: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        return render_chat(
            self.processor, messages, generation_prompt=generation_prompt, settings=self._template, tools=schemas
        )

    def require_sizes(self, row: Row) -> None:
        """Raise a DataError for an image of a size that the image processor does not take; see `size_problem`."""
        for number, media in enumerate(row.media, start=1):
            if problem := self.size_problem(media.width, media.height):
                raise DataError(f"image {number} {problem}", where=row.place, hint=SIZE_HINT)

    def size_problem(self, width: int, height: int) -> str | None:
        """Return why the model's image processor does not accept images of this size; None = it accepts them.

        Processors that resize an image to a grid of patches refuse an image whose longer side is far longer than its
        shorter side. A processor that scales the shorter side to a fixed length would need too much memory for it.

        Args:
            width, height: in pixels, as stored.
        """
        shape = f"is {width} x {height} pixels, the longer side {max(width, height) / min(width, height):.0f} times"
        image_processor = self.processor.image_processor
        if hasattr(image_processor, "merge_size"):
            try:
                image_processor.get_number_of_image_patches(height, width, dict(self.image_arguments))
            except ValueError as error:
                return f"{shape} the shorter, which the model's image processor refuses: {first_line(error)}"
            return None
        edges = {name: edge for name, edge in dict(getattr(image_processor, "size", None) or {}).items() if edge}
        # After scaling, the sides are `edge` and edge * max / min. The area is compared without a division.
        if edges.keys() == {"shortest_edge"} and edges["shortest_edge"] ** 2 * max(width, height) > MAX_PIXELS * min(
            width, height
        ):
            return f"{shape} the shorter, which the model's image processor would enlarge to over {MAX_PIXELS:,} pixels"
        return None

    def count_image_tokens(self, row: Row) -> int | None:
        """Return the number of image tokens of a row, from the sizes of its images alone.

        Returns: None if only the processor can determine the number.
        """
        image_processor = self.processor.image_processor
        if not hasattr(image_processor, "merge_size"):
            return None
        count = image_processor.get_number_of_image_patches
        patches = [count(media.height, media.width, dict(self.image_arguments)) for media in row.media]
        # merge_size x merge_size patches make one token.
        return sum(number // image_processor.merge_size**2 for number in patches)

    def count_prompt_tokens(self, row: Row, messages: Sequence[Message]) -> int:
        """Return the number of prompt tokens without reading an image.

        If `count_image_tokens` returns None, image tokens are not counted.
        """
        marked = self._marked_prompt(messages)
        # Each image has one placeholder in the text, which its image tokens replace.
        return len(self.control.encode(marked)) - len(row.media) + (self.count_image_tokens(row) or 0)

    def require_fit(self, row: Row, max_prompt_tokens: int) -> None:
        """Raise a DataError, before any image is enlarged, for images with more tokens than a prompt may have."""
        self.require_sizes(row)
        tokens = self.count_image_tokens(row)
        if tokens is not None and tokens > max_prompt_tokens:
            raise DataError(
                f"the images alone have {tokens} tokens, more than rollout.max_prompt_tokens = {max_prompt_tokens}",
                where=row.place,
                hint="raise rollout.max_prompt_tokens, or lower model.min_pixels and model.max_pixels",
            )

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text of the data, such as a response to learn. Control tokens stay letters."""
        return tuple(self.control.encode(self.control.guard(text)))

    def encode(self, row: Row, messages: Sequence[Message], images: Sequence[Image]) -> EncodedPrompt:
        """Return the token ids and pixels of one row.

        Args:
            images: RGB, in the order of the slots; one for each of `row.media`.
        Raises: DataError when the numbers of `<image>` slots and of images differ, or an image is too long to be
            processed.
        """
        slots = sum(m.content.count(IMAGE_SLOT) for m in messages)
        if slots != len(images):
            raise DataError(
                f"the prompt has {slots} {IMAGE_SLOT} slot{plural(slots)} and the row {len(images)} "
                f"image{plural(len(images))}",
                where=row.place,
                hint=f"write {IMAGE_SLOT} once for each image, in order",
            )
        marked = self._marked_prompt(messages)
        return self.encode_rendered(row, marked, images, self.control)

    def encode_rendered(
        self, row: Row, marked: str, images: Sequence[Image], control: ControlTokens, images_before: int = 0
    ) -> EncodedPrompt:
        """Return the token ids and pixels of a text that the chat template wrote from text guarded by `control`.

        Args:
            row: with the images as `media`.
            images_before: number of images of the conversation before this text.
        Raises: DataError when the text does not hold one placeholder for each image, or the processor refuses them.
        """
        self.require_sizes(row)
        self.require_placeholders(marked, len(images), row)
        text, short = control.reveal(marked), tuple(control.encode(marked))
        if not images:
            return EncodedPrompt(row, text, short, (0,) * len(short), {}, 0, 0, (), short)
        if not hasattr(self.processor.image_processor, "merge_size"):
            return self._encode_whole(row, marked, short, images, control, images_before)
        features = [self._image_features(row, media, image) for media, image in zip(row.media, images, strict=True)]
        # Patches of each image, [p, ...] -> of all images in order, [sum of p, ...]; image_grid_thw: [images, 3].
        # One image is not copied: a copy takes longer than all the rest of an observation.
        joined = features[0] if len(images) == 1 else {k: torch.cat([f[k] for f in features]) for k in features[0]}
        ids, kinds = self._expand(marked, joined, control)
        sizes = tuple(self._model_size(f) for f in features)
        return EncodedPrompt(row, text, ids, kinds, joined, len(images), sum(kinds), sizes, short, tuple(images), sizes)

    def encode_tail(
        self, ids: Sequence[int], media: Sequence[Media], images: Sequence[Image], place: str
    ) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        """Return the kinds and image tensors of tokens that follow a prompt: a response that has images within it.

        Args:
            ids: the tokens, image placeholders expanded.
            media, images: its images (RGB), in order.
            place: place of the response, for errors.
        Returns: (0 text, 1 image for each token; tensors of the images); both empty without images.
        Raises: DataError when the processor refuses an image, or gives it another number of tokens.
        """
        if not images:
            return (), {}
        row = Row(place, "", "", {}, tuple(media), origin=place)
        if hasattr(self.processor.image_processor, "merge_size"):
            features = [self._image_features(row, m, image) for m, image in zip(media, images, strict=True)]
            tensors = {k: torch.cat([f[k] for f in features]) for k in features[0]}
            # image_grid_thw [images, 3] holds frames, rows and columns of patches: the product is their number.
            patches = sum(int(grid.prod()) for grid in tensors["image_grid_thw"])
            expected = patches // self.processor.image_processor.merge_size**2
            image_ids = {self.tokenizer.convert_tokens_to_ids(self.processor.image_token)}
        else:
            marked = "\n".join([self.processor.image_token] * len(images))
            whole = self._encode_whole(row, marked, (), images, self.control)
            tensors, expected = dict(whole.images), whole.num_image_tokens
            image_ids = {i for i, kind in zip(whole.prompt_ids, whole.kinds, strict=True) if kind}
        kinds = tuple(int(i in image_ids) for i in ids)
        if sum(kinds) != expected:
            raise DataError(
                f"the response has {sum(kinds)} image tokens, but its {len(images)} images make {expected}", where=place
            )
        return kinds, tensors

    def _encode_whole(
        self,
        row: Row,
        marked: str,
        short: tuple[int, ...],
        images: Sequence[Image],
        control: ControlTokens,
        images_before: int = 0,
    ) -> EncodedPrompt:
        """Encode a prompt for a family without a grid of patches.

        The processor makes ids and tensors of all images together, because it alone knows how many tokens an image gets
        (tiles, crops, pooled patches).
        """
        text, processor = control.reveal(marked), self.processor
        settings = {"return_tensors": "pt", "add_special_tokens": False}
        if images_before and getattr(processor, "default_use_image_id", False):  # MiniCPM-V would number from 0
            marked, settings["use_image_id"] = self._numbered(marked, images_before), False
        key = "\x1f".join((marked, *(media.sha256 for media in row.media)))
        prompt = control.reveal(marked)
        if control.is_ambiguous(marked):
            prompt, processor = marked, control.processor_over(processor)
        outputs = self._cached(key, row, lambda: processor(text=[prompt], images=list(images), **settings))
        ids = tuple(outputs["input_ids"][0].tolist())
        kinds = outputs.get("mm_token_type_ids", outputs.get("token_type_ids"))  # [1, P]
        if kinds is None:
            kinds = outputs["input_ids"] == self.processor.image_token_id
        tensors = {k: v for k, v in outputs.items() if k not in NOT_MODEL_INPUTS}
        shape = tensors["pixel_values"].shape  # [..., channels, height, width] of each tile, unless it is MiniCPM-V's
        tile = (int(shape[-1]), int(shape[-2])) if len(shape) >= 4 and "target_sizes" not in tensors else None
        sizes = tuple(tile or image.size for image in images)
        kinds = tuple(int(kind) for kind in kinds[0].tolist())
        whole = [seen_size(self.processor.image_processor, image.size, tile) for image in images]
        seen = tuple(size for size in whole if size is not None)
        seen = seen if len(seen) == len(images) else ()
        return EncodedPrompt(
            row, text, ids, kinds, tensors, len(images), sum(map(bool, kinds)), sizes, short, tuple(images), seen
        )

    def _numbered(self, marked: str, number: int) -> str:
        """Return the text with the number of its image before each placeholder; the first image has this number."""
        p = self.processor
        first, *rest = marked.split(p.image_token)
        texts = enumerate(rest, start=number)
        return first + "".join(f"{p.image_id_start_token}{i}{p.image_id_end_token}{p.image_token}{t}" for i, t in texts)

    def require_placeholders(self, marked: str, num_images: int, row: Row) -> None:
        """Raise a DataError when the chat template did not write one placeholder for each image."""
        token = getattr(self.processor, "image_token", None)
        written = marked.count(token) if token else num_images
        if written != num_images:
            raise DataError(
                f"the model's chat template wrote {written} placeholder{plural(written)} {token} for {num_images} "
                f"image{plural(num_images)}",
                where=row.place,
                hint=TEMPLATE_HINT,
            )

    def _expand(
        self, marked: str, joined: Mapping[str, Tensor], control: ControlTokens
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids with image placeholders expanded by the images' grids, and the kind of each token."""
        token = self.processor.image_token
        merge = self.processor.image_processor.merge_size**2
        pieces = marked.split(token)
        # [images, 3] -> one number of image tokens per image
        counts = [int(g.prod()) // merge for g in joined["image_grid_thw"]]
        expanded = pieces[0] + "".join(token * n + piece for n, piece in zip(counts, pieces[1:], strict=True))
        ids = tuple(control.encode(expanded))
        image_id = self.tokenizer.convert_tokens_to_ids(token)
        return ids, tuple(int(i == image_id) for i in ids)

    def _image_features(self, row: Row, media: Media, image: Image) -> dict[str, Tensor]:
        """Return the processor's tensors of one image, for a family with a grid of patches."""
        outputs = self._cached(
            media.sha256,
            row,
            lambda: self.processor.image_processor(images=[image], return_tensors="pt", **self.image_arguments),
        )
        return {k: v for k, v in outputs.items() if k not in NOT_MODEL_INPUTS}

    def _cached(self, key: str, row: Row, make: Callable[[], Mapping[str, Any]]) -> Mapping[str, Tensor]:
        """Return the tensors among the outputs of `make`, which is called if the cache has none for `key`.

        Raises: DataError with the row when the processor refuses its images.
        """

        def tensors() -> Mapping[str, Tensor]:
            try:
                return {k: v for k, v in make().items() if isinstance(v, Tensor)}
            except (ValueError, TypeError, ArithmeticError, LookupError) as error:
                message = f"the model's processor refuses the prompt of this row: {first_line(error)}"
                raise DataError(message, where=row.place) from error

        return self._cache.get(key, tensors)

    def _model_size(self, features: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return (width, height) in pixels of one image as the model sees it."""
        # image_grid_thw [1, 3]: frames, rows, columns of patches
        grid, patch = features["image_grid_thw"], self.processor.image_processor.patch_size
        return int(grid[0, 2]) * patch, int(grid[0, 1]) * patch


def with_system_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages with a text in front of the system message, which is added if there is none."""
    own = messages[0].content if messages and messages[0].role == "system" else ""
    rest = messages[1:] if messages and messages[0].role == "system" else messages
    return [Message("system", f"{text}\n\n{own}" if own else text), *rest]


def tensor_bytes(features: Mapping[str, Tensor]) -> int:
    """Return the size of the tensors in memory, in bytes."""
    return sum(t.numel() * t.element_size() for t in features.values())


def _takes_pixel_bounds(image_processor: Any) -> bool:
    size = getattr(image_processor, "size", None)
    edges = dict(size) if size is not None else {}
    return hasattr(image_processor, "merge_size") and {"shortest_edge", "longest_edge"} <= edges.keys()


def _size_argument(image_processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
    """Return the argument that sets the bounds of an image processor.

    In processors with bounds, the "shortest edge" and "longest edge" are areas in pixels, despite their names.
    """
    if min_pixels is None and max_pixels is None:
        return {}
    edges = dict(image_processor.size)
    return {
        "size": {
            "shortest_edge": min_pixels or edges["shortest_edge"],
            "longest_edge": max_pixels or edges["longest_edge"],
        }
    }
