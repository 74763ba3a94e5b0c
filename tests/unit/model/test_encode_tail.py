"""Images within a response become what they are in a prompt, for every family's processor."""

from __future__ import annotations

import pytest
import torch
from tinyprocessors import PROCESSORS
from tinyworld import encoded, image

from vlmrl.data.encode import Encoder
from vlmrl.errors import DataError
from vlmrl.types import Media

SEED = ord("p")  # as `encoded` draws the images of a row of this name
SIZES = [(56, 56), (112, 84)]


def pictures(sizes: list[tuple[int, int]]) -> tuple[list[Media], list]:
    media = [Media(f"p-{i}", *size) for i, size in enumerate(sizes)]
    return media, [image(SEED * 100 + i, *size) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("count", [1, 2])
def test_a_tail_has_the_kinds_and_tensors_of_a_prompt(name, count):
    encoder = Encoder(PROCESSORS[name]())
    prompt = encoded(encoder, "same?", SIZES[:count], name="p")
    encoder = Encoder(PROCESSORS[name]())  # one that has made none of these images yet
    kinds, tensors = encoder.encode_tail(prompt.prompt_ids, *pictures(SIZES[:count]), "here")
    assert [bool(k) for k in kinds] == [bool(k) for k in prompt.kinds] and any(kinds)
    assert tensors.keys() == prompt.images.keys()
    assert all(torch.equal(tensors[key], prompt.images[key]) for key in tensors)


def test_text_alone_has_neither(tiny_encoder):
    assert tiny_encoder.encode_tail((5, 6, 7), [], [], "here") == ((), {})


def test_tokens_that_are_not_of_these_images_are_an_error(tiny_encoder):
    prompt = encoded(tiny_encoder, "same?", SIZES, name="p")
    with pytest.raises(DataError, match="image tokens") as caught:
        tiny_encoder.encode_tail(prompt.prompt_ids, *pictures(SIZES[:1]), "the response to p, sample 3")
    assert caught.value.where == "the response to p, sample 3"
