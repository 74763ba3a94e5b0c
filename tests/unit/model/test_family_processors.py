"""From messages and images to the model: real processor classes, the encoder, packed rows, the stock forward."""

from __future__ import annotations

import inspect

import pytest
import torch
from tinyfamilies import IMAGE, build
from tinyprocessors import PROCESSORS
from tinyworld import assert_close, encoded, image, items_of

from vlmrl.data.batch import make_row
from vlmrl.data.encode import Encoder
from vlmrl.model.load import share_prefix
from vlmrl.model.policy import Policy

SIZES = [(40, 40), (200, 160)]
"""Of the two images of a prompt: the second has 20 times the pixels of the first."""
TEXT = "Are these two images the same digit?"


def made(name: str):
    if name == "smolvlm":
        pytest.importorskip("num2words", reason="SmolVLM's processor needs it")
    return PROCESSORS[name]()


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_encoder_makes_what_the_processor_makes(name):
    processor = made(name)
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
def test_packed_rows_of_a_real_processor_equal_the_stock_forward(name):
    encoder, family = Encoder(made(name)), build(name)
    prompts = [
        encoded(encoder, TEXT, SIZES, name="two"), encoded(encoder, "yes or no?", name="text"),
        encoded(encoder, "7", SIZES[:1], name="one"),
    ]  # fmt: skip
    items = items_of(list(zip(prompts, ([5, 1], [3], [2, 6]), strict=True)))
    names = {"mm_token_type_ids", "token_type_ids"} & inspect.signature(family.model.forward).parameters.keys()
    expected = []
    with torch.no_grad():
        for item in items:
            ids = torch.tensor([[*item.prompt.ids, *item.segments[0].ids]])
            kinds = (ids == IMAGE).int()
            logits = family.model(
                input_ids=ids, attention_mask=torch.ones_like(ids), **item.prompt.images, **dict.fromkeys(names, kinds)
            ).logits[0, len(item.prompt.ids) - 1 : -1]
            chosen = torch.tensor(item.segments[0].ids)[:, None]
            expected.append(logits.log_softmax(-1).gather(-1, chosen)[:, 0])
        share_prefix(family.model)
        policy = Policy(family.model)
        assert policy.sharing != "padded"
        assert_close(policy(make_row(items)).logp, torch.cat(expected), name)
