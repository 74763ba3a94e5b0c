"""From messages and images to the model's inputs: the encoder makes what real processor classes make.

That models read them as they should is in tests/unit/model/test_family_parity.py.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from tinyfamilies import IMAGE, build
from tinyprocessors import PROCESSORS
from tinyworld import encoded, image

from vlmrl.data.encode import Encoder

SIZES = [(40, 40), (200, 160)]
"""Of the two images of a prompt: the second has 20 times the pixels of the first."""
TEXT = "Are these two images the same digit?"


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSORS)
def test_the_encoder_makes_what_the_processor_makes(name):
    processor = PROCESSORS[name]()
    found = encoded(Encoder(processor), TEXT, SIZES, name="row")
    seed = sum(map(ord, "row")) * 100
    expected = processor(
        text=[found.text], images=[image(seed + i, *size) for i, size in enumerate(SIZES)], return_tensors="pt"
    )
    assert found.prompt_ids == tuple(expected["input_ids"][0].tolist())
    assert found.kinds == tuple(int(i == IMAGE) for i in found.prompt_ids)
    assert found.num_images == 2 and found.num_image_tokens == sum(found.kinds) > 0
    takes = inspect.signature(build(name).model.model.forward).parameters
    assert found.images.keys() <= takes.keys()
    assert {k for k in expected if k in takes and "input" not in k and "mask" not in k and "type" not in k} <= (
        found.images.keys()
    )
    for key, tensor in found.images.items():
        assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixel_bounds_act_exactly_where_the_encoder_says_so(name):
    processor = PROCESSORS[name]()
    free, bounded = (
        encoded(Encoder(processor, min_pixels=low, max_pixels=high), TEXT, SIZES[1:])
        for low, high in ((None, None), (32 * 32, 64 * 64))
    )
    acts = Encoder(processor).takes_pixel_bounds
    assert acts == (name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "glm46v"))
    assert (bounded.num_image_tokens < free.num_image_tokens) == acts
    assert (bounded.prompt_ids == free.prompt_ids) == (not acts)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_prompt_that_comes_again_is_not_processed_again(name, monkeypatch):
    processor = PROCESSORS[name]()
    encoder, asked = Encoder(processor), []
    kind = type(processor.image_processor)
    right = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda self, *a, **k: asked.append(1) or right(self, *a, **k))
    first = encoded(encoder, TEXT, SIZES)
    made = len(asked)
    again = encoded(encoder, TEXT, SIZES)
    assert made > 0 and len(asked) == made
    assert again.prompt_ids == first.prompt_ids and again.kinds == first.kinds
    assert first.images.keys() == again.images.keys()
    assert all(torch.equal(again.images[k], first.images[k]) for k in first.images)
    encoded(encoder, TEXT, SIZES, name="other")
    assert len(asked) > made
