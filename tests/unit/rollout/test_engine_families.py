"""For every family: engine and trainer say the same of what was sampled, and a prompt is stored once."""

from __future__ import annotations

import gc
import inspect
from dataclasses import replace
from functools import cache

import pytest
import torch
from parity import TOLERANCE, world
from tinyfamilies import BUILDERS, IMAGE, build
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from vlmrl.data.encode import EncodedPrompt
from vlmrl.model.caches import DecodeCache, SplitLayer, cache_name
from vlmrl.model.load import share_prefix
from vlmrl.model.packing import PromptTokens, TrainItem, make_row
from vlmrl.model.policy import Policy
from vlmrl.rollout.engine import SamplingRequest
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.types import Row, Sample, SamplingParams, Segment

BANNED = (IMAGE, 0)
WINDOW = 12
"""Of the sliding layers in tests/tinyfamilies.py."""
RAGGED = SamplingParams(max_new_tokens=WINDOW + 6, stop_ids=tuple(range(20, 320, 12)), banned_ids=BANNED)
"""Longer than the windows; stop tokens make the responses ragged, so that rows and prompts leave on the way."""
FULL = replace(RAGGED, stop_ids=())
TEMPERATURES = {"gemma3": 4.0}
"""Its tiny model is sharp: cooler, it would say one token again and again."""


class Letters:
    """Stands in for a tokenizer: every id is a letter."""

    pad_token_id = 0

    def decode(self, ids, skip_special_tokens=True) -> str:
        return "".join(chr(65 + i % 26) for i in ids)


@cache
def policy_of(name: str) -> Policy:
    family = build(name)
    share_prefix(family.model)
    return Policy(family.model, temperature=TEMPERATURES.get(name, 1.3), banned_ids=BANNED)


@cache
def prompts_of(name: str) -> list[PromptTokens]:
    """Two images; text alone, shorter than the windows; one image."""
    found = list({item.group: item.prompt for item in world(build(name))}.values())[:3]
    assert [p.num_images for p in found] == [2, 0, 1] and len(found[1].ids) < WINDOW < len(found[0].ids)
    return found


def generate(name: str, samples: int, params: SamplingParams, prompts=None, share: bool = True, seen=None):
    """Answers to each prompt. `seen` is called with the cache after every step."""
    requests = [
        SamplingRequest(
            EncodedPrompt(Row(str(k), "s", "t", {}), "", p.ids, p.kinds, p.images, p.num_images, 0, ()), samples, k
        )
        for k, p in enumerate(prompts or prompts_of(name))
    ]
    engine = TorchEngine(policy_of(name), Letters())
    assert engine.shares_prompts == (policy_of(name).sharing != "padded")
    engine.shares_prompts &= share
    if seen is not None:
        step = engine._step
        engine._step = lambda tokens, at, cache: (step(tokens, at, cache), seen(cache))[0]
    return engine.generate(requests, replace(params, temperature=engine.policy.temperature))


def trainer_gap(name: str, answers: list[list[Sample]]) -> float:
    """Largest difference between what the engine said of its samples and the trainer's log-probs of them."""
    items = [
        TrainItem(prompts_of(name)[k], k, (Segment("assistant", s.token_ids, True),), 100 * k + n)
        for k, group in enumerate(answers)
        for n, s in enumerate(group)
    ]
    with torch.no_grad():
        said = policy_of(name)(make_row(items)).logp
    return float((said - torch.tensor([x for g in answers for s in g for x in s.sampler_logp])).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
def test_what_was_sampled_has_the_same_log_probs_in_the_trainer(name):
    answers = generate(name, 4, RAGGED)
    assert len({len(s.token_ids) for g in answers for s in g}) > 3
    assert not {t for g in answers for s in g for t in s.token_ids} & set(BANNED)
    gap = trainer_gap(name, answers)
    print(f"{name}: {gap:.1e}")
    assert gap <= TOLERANCE, f"{gap:.1e}"


SHARING = [name for name in BUILDERS if name != "llava"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARING)
def test_a_prompt_stored_once_gives_the_samples_of_a_prompt_copied_to_each(name):
    for a, b in zip(*(generate(name, 4, RAGGED, share=share) for share in (True, False)), strict=True):
        assert [s.token_ids for s in a] == [s.token_ids for s in b]
        for x, y in zip(a, b, strict=True):
            assert y.sampler_logp == pytest.approx(x.sampler_logp, abs=TOLERANCE)


def stock_bytes(name: str, prompt: PromptTokens) -> tuple[int, int, int]:
    """Bytes of a prompt's keys and values, of a token's, and of a row's linear attention states, by transformers' own
    cache. A layer with a sliding window needs the last `window - 1` tokens."""
    model, ids = policy_of(name).model, torch.tensor([prompt.ids])
    cache = DynamicCache(config=model.config.get_text_config())
    kinds = (
        {"mm_token_type_ids": (ids == IMAGE).int()}
        if "mm_token_type_ids" in inspect.signature(model.model.forward).parameters
        else {}
    )
    with torch.inference_mode():
        model.model(input_ids=ids, **{cache_name(model.model): cache}, use_cache=True, **prompt.images, **kinds)
    whole = token = state = 0
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            state += sum(t.nbytes for t in (layer.conv_states[0], layer.recurrent_states[0]))
        elif layer.keys is not None:
            whole += layer.keys.nbytes + layer.values.nbytes
            token += (layer.keys.nbytes + layer.values.nbytes) // layer.keys.shape[-2]
    return whole, token, state


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARING)
def test_the_cache_at_32_samples_is_one_prompt_and_32_responses(name):
    prompt, held = prompts_of(name)[0], []
    generate(name, 32, FULL, [prompt], seen=lambda cache: held.append(cache.nbytes))
    whole, token, state = stock_bytes(name, prompt)
    assert (state > 0) == (policy_of(name).sharing == "forked")
    responses = 32 * FULL.max_new_tokens * token
    limit = 1.1 * (whole + responses) + 32 * state
    assert max(held) <= limit < 32 * whole + responses + 32 * state, "a copy of the prompt for each sample is above it"


@pytest.mark.slow
def test_nothing_else_keeps_the_prompts_alive():
    """A sliding layer of transformers' cache is a view of the whole prompt, which must not live on behind it."""
    found: list[int] = []

    def count(cache) -> None:
        layers = [t for layer in cache.attention for t in layer.tensors()]
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in layers)
        found.append(sum(isinstance(o, DynamicCache) for o in gc.get_objects()))

    gc.collect()
    before = sum(isinstance(o, DynamicCache) for o in gc.get_objects())
    generate("gemma3", 2, replace(FULL, max_new_tokens=3), seen=count)
    assert found == [before, before]


def wider_prompt(patch: pytest.MonkeyPatch) -> None:
    """A sliding layer sees one prompt token more than its window has."""
    right = SplitLayer.prompt_seen.fget
    patch.setattr(
        SplitLayer,
        "prompt_seen",
        property(lambda self: min(right(self) + 1, self.prompt_keys.shape[-2]) if self.window else right(self)),
    )


def wider_response(patch: pytest.MonkeyPatch) -> None:
    """A sliding layer sees one response token more than its window has."""
    right = SplitLayer.__init__

    def wrong(self, prefilled, longest):
        right(self, prefilled, longest)
        self.window = self.window and self.window + 1

    patch.setattr(SplitLayer, "__init__", wrong)
    seen = SplitLayer.prompt_seen.fget
    patch.setattr(SplitLayer, "prompt_seen", property(lambda self: max(0, seen(self) - bool(self.window))))


def seen_padding(patch: pytest.MonkeyPatch) -> None:
    """The padding of shorter prompts is seen."""
    right = DecodeCache._arrange
    patch.setattr(DecodeCache, "_arrange", lambda self, rows: (right(self, rows), setattr(self, "_bias", None)))


def mixed_states(patch: pytest.MonkeyPatch) -> None:
    """When rows leave, the linear attention states of the others move up by one row."""
    right = LinearAttentionLayer.reorder_cache
    patch.setattr(LinearAttentionLayer, "reorder_cache", lambda self, rows: right(self, rows.roll(1)))


def late(patch: pytest.MonkeyPatch) -> None:
    """Sampled tokens get positions one too high."""
    right = TorchEngine._prefill
    patch.setattr(TorchEngine, "_prefill", lambda self, *a: (lambda h, c, at: (h, c, at + 1))(*right(self, *a)))


MUTATIONS = [
    ("gemma3", wider_prompt),
    ("gemma4", wider_prompt),
    ("gemma3", wider_response),
    ("gemma4_shared_kv", wider_response),
    ("qwen2_5_vl", seen_padding),
    ("gemma3", seen_padding),
    ("qwen3_5", seen_padding),
    ("qwen3_5", mixed_states),
    ("minicpmv4_6", mixed_states),
    ("qwen3_5", late),
    ("gemma3", late),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mutation"), MUTATIONS, ids=lambda x: getattr(x, "__name__", x))
def test_the_comparison_sees_what_it_must_see(name, mutation, monkeypatch):
    mutation(monkeypatch)
    assert trainer_gap(name, generate(name, 4, RAGGED)) > 100 * TOLERANCE
