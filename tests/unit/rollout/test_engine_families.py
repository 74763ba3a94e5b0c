"""The built-in engine and the trainer say the same of what was sampled, for every family."""

from __future__ import annotations

import pytest
import torch
from parity import world
from tinyfamilies import BUILDERS, IMAGE, build

from vlmrl.data.batch import TrainItem, make_row
from vlmrl.data.encode import EncodedPrompt
from vlmrl.model.load import share_prefix
from vlmrl.model.policy import Policy
from vlmrl.rollout.engine import Request
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.types import Row, SamplingParams, Segment

SAMPLES = 3


class Letters:
    """Stands in for a tokenizer: every id is a letter."""

    pad_token_id = 0

    def decode(self, ids, skip_special_tokens=True) -> str:
        return "".join(chr(65 + i % 26) for i in ids)


@pytest.mark.parametrize("name", BUILDERS)
def test_what_was_sampled_has_the_same_log_probs_in_the_trainer(name):
    family = build(name)
    share_prefix(family.model)
    policy = Policy(family.model, temperature=0.8, banned_ids=[IMAGE, 0])
    prompts = list({item.group: item.prompt for item in world(family)}.values())[:3]
    assert [p.num_images for p in prompts] == [2, 0, 1] and len({len(p.ids) for p in prompts}) == 3
    requests = [
        Request(EncodedPrompt(Row(str(k), "s", "t", {}), "", p.ids, p.kinds, p.images, p.num_images, 0, ()), SAMPLES, k)
        for k, p in enumerate(prompts)
    ]
    # Longer than the sliding windows; stop tokens make the responses ragged.
    params = SamplingParams(temperature=0.8, max_new_tokens=16, stop_ids=tuple(range(150, 160)), banned_ids=(IMAGE, 0))
    answers = TorchEngine(policy, Letters()).generate(requests, params)
    samples = [s for group in answers for s in group]
    items = [
        TrainItem(prompts[k], k, (Segment("assistant", s.token_ids, True, s.sampler_logp),), k * SAMPLES + n)
        for k, group in enumerate(answers) for n, s in enumerate(group)
    ]  # fmt: skip
    with torch.no_grad():
        said = policy(make_row(items)).logp
    sampled = torch.tensor([x for s in samples for x in s.sampler_logp])
    gap = float((said - sampled).abs().max())
    assert gap <= 2e-5, f"{name}: {gap:.1e}"
    assert IMAGE not in {t for s in samples for t in s.token_ids}
