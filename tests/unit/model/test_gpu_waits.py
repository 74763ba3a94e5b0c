"""What makes a GPU wait for the CPU, or be waited for: numbers read back, tensors made from Python lists. A test on a
CPU can count them: per row they may be few, per layer, response and chunk of log-probs none."""

from __future__ import annotations

from collections import Counter

import pytest
from parity import world
from tinyfamilies import TinyFamily, build
from waits import Waits

from vlmrl.model import attention as varlen_attention
from vlmrl.model import policy as logprobs
from vlmrl.model.load import share_prefix
from vlmrl.model.memory import HeadChunks
from vlmrl.model.packing import PackedRow, PromptTokens, TrainItem, make_row
from vlmrl.model.policy import Policy
from vlmrl.types import Segment


def row_of(family: TinyFamily, responses: int) -> PackedRow:
    prompt: PromptTokens = world(family)[0].prompt
    return make_row(
        [TrainItem(prompt, 0, (Segment("assistant", (30, 40 + k, 50), True),), k) for k in range(responses)]
    )


def waits(policy: Policy, row: PackedRow) -> Counter[str]:
    """Of a forward pass over a prompt that was seen before (its positions are kept), the vision tower left out: how it
    attends depends on the device."""
    policy(row)
    kept = dict(policy.model.model.get_image_features(**row.images).items())
    with pytest.MonkeyPatch.context() as patch, Waits() as counted:
        patch.setattr(policy.model.model, "get_image_features", lambda *args, **kwargs: type("Kept", (), kept)())
        policy(row)
    return counted.count


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_forward_pass_waits_as_often_for_many_responses_as_for_few(name, backend, monkeypatch):
    monkeypatch.setattr(varlen_attention, "_kernel", lambda: lambda q, *args, **kwargs: q)
    family = build(name)
    share_prefix(family.model)
    policy = Policy(family.model, backend=backend, banned_ids=[0, 3])
    few = waits(policy, row_of(family, 2))
    assert waits(policy, row_of(family, 9)) == few
    monkeypatch.setattr(logprobs, "chunks_for", lambda device: HeadChunks(2 * 320, 320))
    assert waits(policy, row_of(family, 9)) == few, "chunks of log-probs"
