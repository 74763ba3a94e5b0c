"""Prompts to token ids and pixels: what the processor itself would give, and errors in words."""

from __future__ import annotations

import pytest
import torch
from tinyworld import encoded, image

from vlmrl.data.encode import Encoder
from vlmrl.errors import CheckpointError, DataError
from vlmrl.types import Media, Message, Row


def row_of(*sizes: tuple[int, int]) -> Row:
    return Row("r", "source", "task", {}, tuple(Media(f"h{i}", *s) for i, s in enumerate(sizes)))


@pytest.mark.parametrize("sizes", [[(56, 56)], [(56, 84), (112, 56)], [(30, 200), (300, 300), (56, 56)]])
def test_ids_and_pixels_equal_those_of_the_processor(tiny_processor, sizes):
    encoder = Encoder(tiny_processor)
    images = [image(i, *s) for i, s in enumerate(sizes)]
    text = "first <image> then" + "<image>" * (len(sizes) - 1) + " same?"
    found = encoder.encode(row_of(*sizes), [Message("system", "yes"), Message("user", text)], images)
    expected = tiny_processor(text=[found.text], images=images, return_tensors="pt")
    assert list(found.prompt_ids) == expected["input_ids"][0].tolist()
    assert torch.equal(found.images["pixel_values"], expected["pixel_values"])
    assert torch.equal(found.images["image_grid_thw"], expected["image_grid_thw"])
    assert list(found.kinds) == expected["mm_token_type_ids"][0].tolist()
    assert found.num_images == len(sizes)
    assert found.num_image_tokens == sum(found.kinds) == int(expected["image_grid_thw"].prod(-1).sum()) // 4


def test_image_sizes_are_those_the_model_sees(tiny_processor):
    found = encoded(Encoder(tiny_processor, min_pixels=56 * 56, max_pixels=60 * 60), "same?", [(300, 300), (56, 56)])
    assert found.image_sizes == ((56, 56), (56, 56))
    assert found.num_image_tokens == 8
    found = encoded(Encoder(tiny_processor, min_pixels=112 * 112, max_pixels=224 * 224), "same?", [(28, 28)])
    assert found.image_sizes == ((112, 112),)


def test_two_encoders_with_other_bounds_do_not_share_pixels(tiny_processor):
    small = encoded(Encoder(tiny_processor, min_pixels=56 * 56, max_pixels=56 * 56), "x", [(112, 112)])
    large = encoded(Encoder(tiny_processor, min_pixels=112 * 112, max_pixels=112 * 112), "x", [(112, 112)])
    assert small.images["pixel_values"].shape != large.images["pixel_values"].shape


@pytest.mark.parametrize("text", ["no slot", "<image>", "<image><image><image>"])
def test_slots_and_images_that_do_not_match_are_an_error_with_the_row(tiny_encoder, text):
    with pytest.raises(DataError, match="2 images") as caught:
        tiny_encoder.encode(row_of((56, 56), (56, 56)), [Message("user", text)], [image(0), image(1)])
    assert "row r" in (caught.value.where or "")


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>"])
@pytest.mark.parametrize("images", [0, 1])
def test_a_placeholder_written_in_the_text_is_no_image(tiny_encoder, token, images):
    message = Message("user", "<image>" * images + f"what does {token} mean?")
    found = tiny_encoder.encode(row_of(*[(56, 56)] * images), [message], [image(0)] * images)
    assert found.num_images == images and found.num_image_tokens == 4 * images
    assert found.prompt_ids.count(tiny_encoder.tokenizer.convert_tokens_to_ids(token)) == (
        4 * images if "image" in token else 0
    )


def test_a_model_without_a_chat_template_is_an_error(tiny_folder):
    from vlmrl.model.load import load_processor
    from vlmrl.recipe.schema import Model

    processor = load_processor(Model(path=str(tiny_folder)))
    processor.chat_template = None
    with pytest.raises(CheckpointError, match="chat template"):
        encoded(Encoder(processor), "same?")


def test_images_are_processed_once_and_the_memory_for_them_is_bounded(tiny_processor, monkeypatch):
    encoder = Encoder(tiny_processor, min_pixels=56 * 56, max_pixels=56 * 56)
    made = encoder.processor.image_processor
    asked: list[int] = []

    def process(images, **kwargs):
        asked.append(len(images))
        return made(images=images, **kwargs)

    class Counting:
        image_processor = staticmethod(process)

        def __getattr__(self, name):
            return getattr(tiny_processor, name)

    for name in ("merge_size", "patch_size", "get_number_of_image_patches"):
        setattr(process, name, getattr(made, name))
    encoder.processor = Counting()
    one = 16 * 3 * 2 * 14 * 14 * 4 + 3 * 8  # 16 patches in float32, and the grid
    monkeypatch.setattr(encoder._cache, "limit_bytes", 3 * one)

    def see(*names: str) -> None:
        for name in names:
            encoded(encoder, "same?", [(56, 56)], name=name)

    see("a", "b", "a", "c")
    assert len(asked) == 3 and encoder._cache.bytes == 3 * one
    see("d")  # b has not been used for longest
    assert encoder._cache.bytes == 3 * one
    see("a", "c", "d")
    assert len(asked) == 4
    see("b")
    assert len(asked) == 5
