"""Responses of many shapes against the stock forward: who begins, who ends, and where the images are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from parity import TOLERANCE, adapted, differences, join, packed, reference
from tinyfamilies import IMAGE, TinyFamily, build

from vlmrl.model.load import share_prefix
from vlmrl.model.packing import PromptTokens, TrainItem
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Lora
from vlmrl.types import Segment

SHAPES = (("p", "ep", "pe", "peep"), ("IpIp", "pIIp", "eIp", "zp"), ("pzp",), ("Ip", "dIp", "pIeze"))
"""Of the responses of each group: p = the policy, z = it says nothing, d = a demonstration that is learned from, e = an
environment's text, I = its image without a text."""
IMAGES = (0, 2, 1, 1)
"""Of the prompt of each group."""


def episodes(family: TinyFamily) -> Iterator[TrainItem]:
    g = torch.Generator().manual_seed(3)

    def text(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(20, 190, (count,), generator=g).tolist())

    number = 0
    for group, (shapes, count) in enumerate(zip(SHAPES, IMAGES, strict=True)):
        shown = [family.picture(k == 1, g) for k in range(count)]
        ids = (*text(3), *(i for _, tokens in shown for i in (*tokens, *text(1))), *text(2))
        prompt = PromptTokens(ids, tuple(int(i == IMAGE) for i in ids), join(family, [x for x, _ in shown]), count)
        for shape in shapes:
            segments, images = [], []
            for letter in shape:
                if letter == "I":
                    tensors, tokens = family.picture(False, g)
                    images.append(tensors)
                    segments.append(Segment("tool", tuple(tokens), False, author="environment"))
                elif letter == "e":
                    segments.append(Segment("tool", text(2), False, author="environment"))
                else:
                    author = "demonstration" if letter == "d" else "policy"
                    segments.append(Segment("assistant", text(0 if letter == "z" else 3), True, author=author))
            kinds = tuple(int(i == IMAGE) for s in segments for i in s.ids)
            yield TrainItem(prompt, group, tuple(segments), number, kinds if images else (), join(family, images))
            number += 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sharing"), [("qwen2_5_vl", "packed"), ("qwen3_5", "forked"), ("qwen2_5_vl", "padded")]
)
@pytest.mark.parametrize("lora", [None, Lora(rank=4)], ids=["full", "lora"])
def test_episodes_of_any_shape_equal_the_stock_forward(name: str, sharing: str, lora: Lora | None) -> None:
    def model():
        return build(name).model if lora is None else adapted(build(name).model, lora)

    family = build(name)
    items = list(episodes(family))
    expected, trained = reference(model(), family, items), model()
    share_prefix(trained)
    policy = Policy(trained, shared_prefix=sharing != "padded")
    assert policy.sharing == sharing
    for budget in (10_000, 40):
        assert max(differences(packed(policy, items, budget), expected)) <= TOLERANCE
