"""vLLM, the real one (its CPU build): what it samples is what the trainer computes, with images, after every sync."""

from __future__ import annotations

import copy
import os
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tinyworld import RELATIVE_TOLERANCE, encoded, sampler_gap

from vlmrl.data.encode import Encoder
from vlmrl.errors import EngineError
from vlmrl.model.load import stop_ids_of
from vlmrl.model.lora import adapted_parts, adapter_off, adapter_rank, attach_adapter
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Lora
from vlmrl.rollout import weight_sync
from vlmrl.rollout.engine import SamplingRequest
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.rollout.vllm import engine as vllm_engine
from vlmrl.rollout.vllm.engine import VllmEngine
from vlmrl.rollout.vllm.settings import EngineSettings
from vlmrl.rollout.weight_sync import PolicyWeights
from vlmrl.types import SamplingParams

pytestmark = pytest.mark.slow

BLOCK = 128
"""Tokens in one block of the CPU build's key-value cache."""


@pytest.fixture(scope="module")
def encoder(tiny_processor):
    """With bounds that are not the processor's own: the engine has to be told them."""
    return Encoder(tiny_processor, min_pixels=28 * 56, max_pixels=84 * 112)


@pytest.fixture(scope="module")
def prompts(encoder):
    """With and without images; images that are enlarged, shrunk and kept; one longer than two blocks."""
    return [
        encoded(encoder, "same?", name="text"),
        encoded(encoder, "same or different?", [(56, 56), (56, 56)], name="two"),
        encoded(encoder, "yes no", [(112, 56), (84, 112)], name="sizes"),
        encoded(encoder, "3; 8", [(30, 41), (300, 170)], name="resized"),
        encoded(encoder, "0 1 2 3 4 5 6 7 8 9 yes no same different " * 12, [(112, 112), (84, 84)], name="long"),
    ]


@pytest.fixture(scope="module")
def policy(_tiny_model, tiny_banned):
    return Policy(copy.deepcopy(_tiny_model), temperature=0.7, banned_ids=tiny_banned)


@pytest.fixture(scope="module")
def said():
    return []


@pytest.fixture(scope="module")
def _engine(policy, tiny_folder, encoder, said):
    before = random.getstate(), np.random.get_state()[1].copy(), torch.random.get_rng_state(), torch.get_num_threads()
    os.environ["RANK"] = "3"
    engine = VllmEngine(
        PolicyWeights(policy.model, torch.float32, str(tiny_folder)),
        encoder.tokenizer,
        EngineSettings(str(tiny_folder), "float32", "cpu", 700, 2**28, encoder.image_arguments),
        say=said.append,
    )
    engine.before = before
    yield engine
    engine.close()


@pytest.fixture
def engine(_engine, policy, _tiny_model):
    """With the weights of the session's tiny model, whatever a test before did to them."""
    policy.model.load_state_dict(_tiny_model.state_dict())
    _engine.load_weights(0)
    return _engine


@pytest.fixture
def params(_tiny_model, tiny_processor, tiny_banned):
    stops = (*stop_ids_of(_tiny_model, tiny_processor.tokenizer), *range(20, 26))
    return SamplingParams(temperature=0.7, max_new_tokens=24, stop_ids=stops, banned_ids=tiny_banned)


def requests_of(prompts, num_samples: int = 4) -> list[SamplingRequest]:
    return [SamplingRequest(p, num_samples, 1_000 * (1 + i)) for i, p in enumerate(prompts)]


gap = partial(sampler_gap, relative=True)


def disturb(policy, seed: int, parts=("",), scale: float | None = None) -> None:
    """Change the trainer's weights, enough to be seen in every log-prob."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if p.ndim >= 2 and any(part in name for part in parts):
                p.add_((scale or 0.1 * p.std()) * torch.randn(p.shape, generator=rng))


def test_log_probs_equal_the_trainers(engine, policy, prompts, params):
    requests = requests_of(prompts)
    assert gap(policy, requests, engine.generate(requests, params)) <= RELATIVE_TOLERANCE


def test_the_engine_processes_no_image_that_the_trainer_has_processed(engine, policy, prompts, params):
    """Not when it is asked again either, as by the sync check, and after a sync, which empties its caches."""
    before = engine.pixels.made
    for version in (0, 1):
        engine.generate(requests_of(prompts, 1), params)
        engine.load_weights(version)
    requests = requests_of(prompts, 1)
    assert gap(policy, requests, engine.generate(requests, params)) <= RELATIVE_TOLERANCE
    assert engine.pixels.made == before


def test_more_prompts_than_one_step_of_the_engine_holds(engine, policy, encoder, params):
    """Their prompts do not fit one prefill together; each has seeds of its own all the same."""
    prompts = [encoded(encoder, f"{i} 0 1 2 3 4 5 6 7 8 9 yes no " * 12, name=f"many {i}") for i in range(60)]
    tokens = sum(len(p.prompt_ids) for p in prompts)
    assert tokens > 1.2 * vllm_engine.BATCHED_TOKENS, tokens
    requests = requests_of(prompts, 2)
    answers = engine.generate(requests, replace(params, max_new_tokens=6))
    assert gap(policy, requests[::10], answers[::10]) <= RELATIVE_TOLERANCE
    alone = engine.generate(requests[59:], replace(params, max_new_tokens=6))
    assert [s.token_ids for s in alone[0]] == [s.token_ids for s in answers[59]]


def test_same_greedy_tokens_as_the_built_in_engine(engine, policy, prompts, params, tiny_processor):
    greedy = replace(params, temperature=0.0)
    ours = TorchEngine(Policy(policy.model, banned_ids=policy.banned_ids), tiny_processor.tokenizer)
    requests = requests_of(prompts, 1)
    expected, found = ours.generate(requests, greedy), engine.generate(requests, greedy)
    for [a], [b] in zip(expected, found, strict=True):
        assert (a.token_ids, a.text, a.finish, a.seed) == (b.token_ids, b.text, b.finish, b.seed)
        assert b.sampler_logp == pytest.approx(a.sampler_logp, rel=1e-4, abs=1e-5)


def test_samples_differ_and_are_those_of_their_seeds(engine, prompts, params):
    requests = requests_of(prompts)
    together = engine.generate(requests, params)
    assert all(len({s.token_ids for s in samples}) > 1 for samples in together)
    assert [[s.seed for s in samples] for samples in together] == [[r.seed + k for k in range(4)] for r in requests]
    again = engine.generate(requests[::-1], params)[::-1]
    alone = [
        [engine.generate([SamplingRequest(r.prompt, 1, r.seed + k)], params)[0][0] for k in range(4)] for r in requests
    ]
    for other in (again, alone):
        assert [[s.token_ids for s in g] for g in other] == [[s.token_ids for s in g] for g in together]


def test_banned_ids_never_appear_even_where_they_are_likeliest(engine, prompts, params):
    free = replace(params, banned_ids=(), temperature=0.0)
    first = [s.token_ids[0] for [s] in engine.generate(requests_of(prompts, 1), free)]
    banned = (*params.banned_ids, *first)
    for temperature in (0.0, 0.7):
        for samples in engine.generate(
            requests_of(prompts), replace(params, banned_ids=banned, temperature=temperature)
        ):
            assert not {i for s in samples for i in s.token_ids} & set(banned)


def test_stop_ids_and_strings_end_responses_as_in_the_built_in_engine(engine, policy, prompts, params, tiny_processor):
    greedy = replace(params, temperature=0.0, stop_ids=(), max_new_tokens=16)
    plain = [s for [s] in engine.generate(requests_of(prompts, 1), greedy)]
    assert all(s.finish == "length" and len(s.token_ids) == 16 for s in plain)
    stops = tuple({s.text[3:6] for s in plain if len(s.text) > 6})
    ours = TorchEngine(Policy(policy.model, banned_ids=policy.banned_ids), tiny_processor.tokenizer)
    for changed in (replace(greedy, stop=stops), replace(greedy, stop_ids=(plain[0].token_ids[4],))):
        expected, found = (e.generate(requests_of(prompts, 1), changed) for e in (ours, engine))
        assert [(s.token_ids, s.text, s.finish) for [s] in found] == [
            (s.token_ids, s.text, s.finish) for [s] in expected
        ]
        assert any(s.finish == "stop" and len(s.token_ids) < 16 for [s] in found)


def test_new_weights_leave_nothing_old_behind(engine, policy, prompts, params):
    """Prompts of several blocks and with images, asked twice before and after: keys, values and image features of the
    old weights are in the engine's caches when the new weights come."""
    requests = requests_of(prompts)
    assert len(prompts[-1].prompt_ids) > 2 * BLOCK and prompts[-1].num_images == 2
    for version, parts in enumerate([("visual",), ("language_model",), ("",)], start=1):
        engine.generate(requests, params)
        disturb(policy, version, parts)
        assert gap(policy, requests, engine.generate(requests, params)) > 1e-3, "the change was too small to be seen"
        engine.load_weights(version)
        for _ in range(2):
            answers = engine.generate(requests, params)
            assert gap(policy, requests, answers) <= RELATIVE_TOLERANCE
            assert {s.version for g in answers for s in g} == {version}


def test_where_nothing_changed_only_the_version_does(engine, policy, prompts, params, monkeypatch):
    requests = requests_of(prompts)
    before = engine.generate(requests, params)
    monkeypatch.setattr(engine, "_send_all", lambda version: pytest.fail("weights were sent"))
    engine.load_weights(6, changed=False)
    after = engine.generate(requests, params)
    assert [[replace(s, version=0) for s in g] for g in after] == before
    assert {s.version for g in after for s in g} == {6}


def test_a_tensor_that_the_engine_drops_is_named(engine, policy, prompts, params, monkeypatch):
    name = "model.layers.1.self_attn.k_proj.weight"
    real = weight_sync.base_tensors
    monkeypatch.setattr(weight_sync, "base_tensors", lambda *a: (x for x in real(*a) if x[0] != name))
    with pytest.raises(EngineError, match=r"1 tensor.*layers\.1\.self_attn\.k_proj\.weight"):
        engine.load_weights(1)
    monkeypatch.setattr(weight_sync, "base_tensors", lambda *a: (x for x in real(*a) if x[0] != "lm_head.weight"))
    with pytest.raises(EngineError, match=r"1 tensor.*lm_head\.weight"):
        engine.load_weights(1)
    monkeypatch.setattr(weight_sync, "base_tensors", real)
    engine.load_weights(2)
    requests = requests_of(prompts)
    assert gap(policy, requests, engine.generate(requests, params)) <= RELATIVE_TOLERANCE


def test_a_prompt_that_the_engine_reads_differently_is_refused(engine, prompts, params):
    ids = prompts[3].prompt_ids
    wrong = replace(prompts[3], prompt_ids=(*ids[:5], ids[5] + 1, *ids[6:]))
    with pytest.raises(EngineError, match="differ from token 5 on") as caught:
        engine.generate([SamplingRequest(prompts[0], 2, 1), SamplingRequest(wrong, 2, 1)], params)
    assert caught.value.where == "row resized of source"
    assert engine.generate([SamplingRequest(prompts[3], 2, 1)], params)[0][0].finish in ("stop", "length")


def test_what_the_engine_cannot_do_is_said(engine, prompts, params):
    with pytest.raises(EngineError, match="700"):
        engine.generate(requests_of(prompts), replace(params, max_new_tokens=600))
    with pytest.raises(EngineError, match=r"temperature 0\.001"):
        engine.generate(requests_of(prompts), replace(params, temperature=0.001))


def test_building_the_engine_disturbs_nothing_else(engine, said):
    python, numpy, torch_state, threads = engine.before
    assert random.getstate() == python and torch.get_num_threads() == threads
    assert np.array_equal(np.random.get_state()[1], numpy)
    assert torch.equal(torch.random.get_rng_state(), torch_state)
    assert os.environ.pop("RANK") == "3" and "WORLD_SIZE" not in os.environ
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    engine.sleep()
    engine.wake()
    engine.sleep()
    assert len(said) == 1 and "cannot sleep" in said[0]


@pytest.fixture(scope="module", params=[False, True], ids=["language", "vision too"])
def adapted(request, _tiny_model, tiny_banned):
    """A policy with an adapter that changes something."""
    settings = Lora(rank=4, alpha=8, vision=request.param)
    model = attach_adapter(copy.deepcopy(_tiny_model), settings, dtype=torch.float32)
    return Policy(model, temperature=0.7, banned_ids=tiny_banned)


@pytest.fixture(scope="module")
def lora_engine(adapted, tiny_folder, encoder):
    settings = EngineSettings(
        str(tiny_folder),
        "float32",
        "cpu",
        700,
        2**28,
        encoder.image_arguments,
        lora_rank=adapter_rank(adapted.model),
        lora_vision="vision" in adapted_parts(adapted.model),
    )
    weights = PolicyWeights(adapted.model, torch.float32, str(tiny_folder))
    engine = VllmEngine(weights, encoder.tokenizer, settings, say=str)
    yield engine
    engine.close()


def test_an_adapter_is_synced_alone_and_each_version_is_itself(lora_engine, adapted, prompts, params):
    requests = requests_of(prompts)
    folder = lora_engine._folder.path
    for version in (3, 4, 5):
        disturb(adapted, version, (".lora_",), scale=0.1)
        lora_engine.load_weights(version)
        for _ in range(2):
            answers = lora_engine.generate(requests, params)
            assert gap(adapted, requests, answers) <= RELATIVE_TOLERANCE
            assert {s.version for g in answers for s in g} == {version}
        assert len(list(folder.iterdir())) == 1, "adapters of older versions are left"
    with adapter_off(adapted.model):
        assert gap(adapted, requests, answers) > 1e-3, "the adapter changes too little to be seen"
    names = {p.name for p in folder.glob("*/*")}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
