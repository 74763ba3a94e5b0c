"""The built-in engine: the trainer's policy, independent samples, filters and stops as documented."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from tinyworld import RELATIVE_TOLERANCE, mixed_prompts, prompt_tokens, sampler_gap

from vlmrl.errors import OutOfMemoryError
from vlmrl.model.load import stop_ids_of
from vlmrl.model.packing import TrainItem, make_row
from vlmrl.model.policy import Policy
from vlmrl.rollout.engine import SamplingRequest
from vlmrl.rollout.torch_engine import TorchEngine, _filtered
from vlmrl.types import SamplingParams, Segment


@pytest.fixture(scope="module")
def prompts(tiny_encoder):
    return mixed_prompts(tiny_encoder)


@pytest.fixture
def policy(frozen_tiny_model, tiny_banned):
    return Policy(frozen_tiny_model, temperature=0.7, banned_ids=tiny_banned)


@pytest.fixture
def params(frozen_tiny_model, tiny_processor, tiny_banned):
    """T = 0.7, and a dozen end tokens, so that responses end at all lengths."""
    stops = (*stop_ids_of(frozen_tiny_model, tiny_processor.tokenizer), *range(20, 32))
    return SamplingParams(temperature=0.7, max_new_tokens=24, stop_ids=stops, banned_ids=tiny_banned)


@pytest.fixture
def engine(policy, tiny_processor):
    return TorchEngine(policy, tiny_processor.tokenizer)


def requests_of(prompts, num_samples: int = 6) -> list[SamplingRequest]:
    return [SamplingRequest(p, num_samples, 1_000 * (1 + i)) for i, p in enumerate(prompts)]


def test_log_probs_equal_the_trainers(engine, policy, prompts, params):
    requests = requests_of(prompts)
    gap = sampler_gap(policy, requests, engine.generate(requests, params), relative=True)
    assert gap <= RELATIVE_TOLERANCE


def test_responses_end_at_all_lengths_and_at_their_first_end_token(engine, prompts, params):
    samples = [s for g in engine.generate(requests_of(prompts), params) for s in g]
    for s in samples:
        assert not set(s.token_ids[:-1]) & set(params.stop_ids)
        assert (s.finish == "stop") == (s.token_ids[-1] in params.stop_ids)
        assert len(s.token_ids) == params.max_new_tokens if s.finish == "length" else len(s.token_ids) >= 1
        assert len(s.sampler_logp) == len(s.token_ids)
    assert len({len(s.token_ids) for s in samples}) > 5 and {s.finish for s in samples} == {"stop", "length"}


def test_samples_carry_their_seed_and_the_engines_version(engine, prompts, params):
    engine.load_weights(7)
    samples = engine.generate([SamplingRequest(prompts[0], 3, 500)], params)[0]
    assert [s.seed for s in samples] == [500, 501, 502]
    assert {s.version for s in samples} == {7}


def test_samples_do_not_depend_on_the_order_of_the_prompts(engine, prompts, params):
    requests = requests_of(prompts)
    expected = engine.generate(requests, params)
    order = [3, 0, 4, 1, 2]
    found = engine.generate([requests[i] for i in order], params)
    for place, i in enumerate(order):
        assert [s.token_ids for s in found[place]] == [s.token_ids for s in expected[i]]


@pytest.mark.slow
@pytest.mark.parametrize("batch_tokens", [1, 150, 400, 1000])
def test_samples_do_not_depend_on_the_batching(policy, tiny_processor, engine, prompts, params, batch_tokens):
    requests = requests_of(prompts)
    small = TorchEngine(policy, tiny_processor.tokenizer, batch_tokens=batch_tokens)
    expected, found = engine.generate(requests, params), small.generate(requests, params)
    assert [[s.token_ids for s in g] for g in found] == [[s.token_ids for s in g] for g in expected]
    for a, b in zip(expected, found, strict=True):
        for x, y in zip(a, b, strict=True):
            assert (x.finish, x.seed, x.text) == (y.finish, y.seed, y.text)
            assert y.sampler_logp == pytest.approx(x.sampler_logp, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("batch_tokens", [1, 150, 400])
def test_batches_hold_every_sample_once_and_keep_the_budget(policy, tiny_processor, prompts, batch_tokens):
    requests = requests_of(prompts)
    engine = TorchEngine(policy, tiny_processor.tokenizer, batch_tokens=batch_tokens)
    batches = engine._batches(requests, 24)
    assert sorted(x for b in batches for x in b) == [(i, s) for i in range(5) for s in range(6)]
    for batch in batches:
        prompts_held = {i for i, _ in batch}
        longest = max(len(requests[i].prompt.prompt_ids) for i in prompts_held)
        assert len(batch) == 1 or len(prompts_held) * longest + len(batch) * 24 <= batch_tokens


def ask_for_too_much(engine: TorchEngine, rows: int, monkeypatch) -> list[int]:
    """Make the engine ask for more memory than there is when more samples than these decode together."""
    step, held = engine._step, []

    def one_more(tokens, positions, cache):
        held.append(len(tokens))
        if len(held) % 3 == 0 and len(tokens) > rows:  # not at once: some samples are done by then
            torch.empty(1 << 60, dtype=torch.uint8)
        return step(tokens, positions, cache)

    monkeypatch.setattr(engine, "_step", one_more)
    return held


@pytest.mark.slow
@pytest.mark.parametrize("shares", [True, False])
def test_a_batch_that_does_not_fit_is_halved_once_and_the_samples_are_the_same(
    policy, tiny_processor, engine, prompts, params, monkeypatch, shares
):
    told = []
    short = TorchEngine(policy, tiny_processor.tokenizer, batch_tokens=100_000, on_halved=told.append)
    short.shares_prompts = shares
    requests, finished = requests_of(prompts), []
    expected = engine.generate(requests, params)
    held = ask_for_too_much(short, 20, monkeypatch)
    found = short.generate(requests, params, finished.append)
    assert max(held) == 30 and [len(g) for g in found] == [6] * 5
    assert [[s.token_ids for s in g] for g in found] == [[s.token_ids for s in g] for g in expected]
    assert sum(finished) == 30
    [load] = told
    assert load.budget == "rollout.batch_tokens" and load.responses == 30
    assert load.tokens == (5 if shares else 30) * max(len(p.prompt_ids) for p in prompts) + 30 * 24
    assert load.image_tokens == sum(p.num_image_tokens for p in prompts) > 0
    assert any("row two of source (6 responses; images 56 x 56, 56 x 56)" in row for row in load.rows)
    assert short.batch_tokens == load.tokens // 2 and not short.may_halve
    del held[:]
    short.generate(requests, params)
    assert max(held) <= 20 and len(told) == 1, "the half is kept"
    ask_for_too_much(short, 1, monkeypatch)
    with pytest.raises(OutOfMemoryError, match=r"tokens .* at once; peak ") as caught:
        short.generate(requests, params)
    assert len(told) == 1 and caught.value.load is not None and caught.value.load.responses > 1


def test_a_single_sample_that_does_not_fit_is_not_tried_again(engine, prompts, params, monkeypatch):
    ask_for_too_much(engine, 0, monkeypatch)
    with pytest.raises(OutOfMemoryError, match="1 response at once") as caught:
        engine.generate(requests_of(prompts[3:4], 1), params)
    assert caught.value.where == "row one of source (1 response; images 56 x 84)" and engine.may_halve


def test_samples_do_not_depend_on_how_many_the_others_have(engine, prompts, params):
    expected = engine.generate(requests_of(prompts, 6), params)
    more = [replace(r, num_samples=2 + 3 * i) for i, r in enumerate(requests_of(prompts))]
    found = engine.generate(more, params)
    for a, b in zip(expected, found, strict=True):
        shared = min(len(a), len(b))
        assert [s.token_ids for s in a[:shared]] == [s.token_ids for s in b[:shared]]


def test_the_same_seeds_give_the_same_samples_and_other_seeds_others(engine, prompts, params):
    requests = requests_of(prompts)
    assert engine.generate(requests, params) == engine.generate(requests, params)
    other = engine.generate([replace(r, seed=r.seed + 77) for r in requests], params)
    assert other != engine.generate(requests, params)


def test_progress_counts_every_response_once(engine, prompts, params):
    heard: list[int] = []
    engine.generate(requests_of(prompts), params, heard.append)
    assert sum(heard) == 30


def test_banned_ids_never_appear_even_when_the_model_wants_nothing_else(engine, prompts, params):
    likely = Counter(t for g in engine.generate(requests_of(prompts), params) for s in g for t in s.token_ids)
    banned = (*params.banned_ids, *(t for t, _ in likely.most_common(40)))
    found = engine.generate(requests_of(prompts), replace(params, banned_ids=banned, stop_ids=()))
    assert not {t for g in found for s in g for t in s.token_ids} & set(banned)
    greedy = engine.generate(requests_of(prompts), replace(params, banned_ids=banned, stop_ids=(), temperature=0.0))
    assert not {t for g in greedy for s in g for t in s.token_ids} & set(banned)
    assert all(math.isfinite(x) for g in found + greedy for s in g for x in s.sampler_logp)


def test_sampled_tokens_follow_the_policys_distribution(engine, policy, prompts, params):
    """Chi-square of 6,000 first tokens against softmax(logits / 0.7) without the banned ids. Fixed seeds: no flake."""
    from scipy.stats import chisquare

    prompt, n = prompts[1], 6_000
    samples = engine.generate([SamplingRequest(prompt, n, 12_345)], replace(params, max_new_tokens=1))[0]
    with torch.no_grad():
        row = make_row([TrainItem(prompt_tokens(prompt), 0, (Segment("a", (9,), True),), 0)])
        hidden = policy._packed(row)
        logits = policy.model.lm_head(hidden)[0].double() / 0.7
        logits[list(policy.banned_ids)] = -math.inf
    p = logits.softmax(-1).numpy()
    counts = np.bincount([s.token_ids[0] for s in samples], minlength=len(p))
    assert not counts[p == 0].any()
    common = p * n >= 5
    assert common.sum() > 10
    observed = [*counts[common], counts[~common].sum()]
    expected = [*(p[common] * n), p[~common].sum() * n]
    assert chisquare(observed, expected).pvalue > 0.01
    flat = [*([n / len(expected)] * len(expected))]
    assert chisquare(observed, flat).pvalue < 1e-6  # the test can fail


def test_greedy_equals_transformers_own_generate(engine, frozen_tiny_model, prompts, params, tiny_processor):
    for prompt in prompts:
        ours = engine.generate([SamplingRequest(prompt, 1, 0)], replace(params, temperature=0.0))[0][0]
        theirs = frozen_tiny_model.generate(
            input_ids=torch.tensor([prompt.prompt_ids]),
            attention_mask=torch.ones(1, len(prompt.prompt_ids)).long(),
            mm_token_type_ids=torch.tensor([prompt.kinds]).int(),
            **prompt.images,
            do_sample=False,
            max_new_tokens=params.max_new_tokens,
            eos_token_id=list(params.stop_ids),
            pad_token_id=0,
            suppress_tokens=list(params.banned_ids),
        )[0, len(prompt.prompt_ids) :]
        assert ours.token_ids == tuple(theirs.tolist())


def test_greedy_in_one_batch_equals_greedy_one_by_one(engine, prompts, params):
    greedy = replace(params, temperature=0.0)
    together = engine.generate([SamplingRequest(p, 2, 0) for p in prompts], greedy)
    for prompt, samples in zip(prompts, together, strict=True):
        alone = engine.generate([SamplingRequest(prompt, 1, 0)], greedy)[0][0]
        assert samples[0].token_ids == samples[1].token_ids == alone.token_ids


def test_greedy_log_probs_are_those_at_temperature_one(engine, frozen_tiny_model, prompts, params, tiny_banned):
    sample = engine.generate([SamplingRequest(prompts[1], 1, 0)], replace(params, temperature=0.0))[0][0]
    plain = Policy(frozen_tiny_model, banned_ids=tiny_banned)
    with torch.no_grad():
        item = TrainItem(prompt_tokens(prompts[1]), 0, (Segment("a", sample.token_ids, True),), 0)
        expected = plain(make_row([item])).logp
    assert torch.allclose(torch.tensor(sample.sampler_logp), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("top_p", "top_k"), [(1.0, 0), (1.0, 5), (0.3, 0), (0.9, 0), (0.6, 20), (1e-6, 0), (1.0, 1), (1.0, 999)]
)
def test_filters_equal_transformers_logits_warpers(top_p, top_k):
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(50, 60, generator=torch.Generator().manual_seed(3)) * 3
    logits[:, 7] = -math.inf
    expected = logits
    if top_k:
        expected = TopKLogitsWarper(min(top_k, 60))(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    found = _filtered(logits.log_softmax(-1), top_p, top_k)
    assert torch.equal(found == -math.inf, expected == -math.inf)
    assert torch.allclose(found.exp(), expected.softmax(-1), atol=1e-6)


def test_filtered_sampling_stays_inside_the_filter_and_says_its_log_prob(engine, prompts, params):
    samples = engine.generate(
        [SamplingRequest(prompts[1], 200, 5)], replace(params, temperature=4.0, top_k=3, max_new_tokens=1)
    )[0]
    tokens = Counter(s.token_ids[0] for s in samples)
    assert len(tokens) == 3
    p = {s.token_ids[0]: math.exp(s.sampler_logp[0]) for s in samples}
    assert sum(p.values()) == pytest.approx(1.0, abs=1e-5)


def test_a_response_that_ends_exactly_at_the_limit_has_stopped(engine, prompts, params):
    free = replace(params, stop_ids=())
    tokens = engine.generate([SamplingRequest(prompts[0], 1, 3)], free)[0][0].token_ids
    last = next(i for i in range(5, 20) if tokens[i] not in tokens[:i])
    at_limit = replace(params, stop_ids=(tokens[last],), max_new_tokens=last + 1)
    sample = engine.generate([SamplingRequest(prompts[0], 1, 3)], at_limit)[0][0]
    assert (sample.finish, sample.token_ids) == ("stop", tokens[: last + 1])
    before = engine.generate([SamplingRequest(prompts[0], 1, 3)], replace(at_limit, max_new_tokens=last))[0][0]
    assert (before.finish, before.token_ids) == ("length", tokens[:last])


def test_a_stop_string_ends_the_response_at_the_token_that_completes_it(engine, prompts, params, tiny_processor):
    free = replace(params, stop_ids=())
    whole = engine.generate([SamplingRequest(prompts[0], 1, 3)], free)[0][0]
    decode = lambda ids: tiny_processor.tokenizer.decode(list(ids), skip_special_tokens=True)  # noqa: E731
    # A string that spans a token border, and is nowhere before.
    for at in range(3, 20):
        wanted = decode(whole.token_ids[: at + 1])[-3:]
        if len(wanted) == 3 and "\ufffd" not in wanted and wanted not in decode(whole.token_ids[:at]):
            break
    else:
        raise AssertionError("the response has no text to stop at")
    stopped = engine.generate([SamplingRequest(prompts[0], 1, 3)], replace(free, stop=("no such text", wanted)))[0][0]
    assert stopped.finish == "stop"
    assert wanted in stopped.text and wanted not in decode(stopped.token_ids[:-1])
    assert stopped.token_ids == whole.token_ids[: at + 1]


def test_a_prompt_stored_once_gives_the_samples_of_a_prompt_copied_to_each(policy, tiny_processor, prompts, params):
    """The same tokens, and the log-probs but for rounding."""
    shared, copying = (TorchEngine(policy, tiny_processor.tokenizer) for _ in range(2))
    copying.shares_prompts = False
    assert shared.shares_prompts
    for a, b in zip(*(e.generate(requests_of(prompts), params) for e in (shared, copying)), strict=True):
        assert [s.token_ids for s in a] == [s.token_ids for s in b]
        for x, y in zip(a, b, strict=True):
            assert x.sampler_logp == pytest.approx(y.sampler_logp, rel=1e-4, abs=1e-5)


def test_the_cache_at_32_samples_is_one_prompt_and_32_responses(engine, prompts, params, monkeypatch):
    held: list[int] = []
    step = engine._step
    monkeypatch.setattr(engine, "_step", lambda *a: (step(*a), held.append(a[2].nbytes))[0])
    engine.generate([SamplingRequest(prompts[4], 32, 5)], replace(params, stop_ids=()))
    text = engine.policy.model.config.get_text_config()
    width = text.hidden_size // text.num_attention_heads
    token = text.num_hidden_layers * 2 * text.num_key_value_heads * width * 4
    assert max(held) <= 1.1 * token * (len(prompts[4].prompt_ids) + 32 * params.max_new_tokens)


def test_finished_rows_stop_costing_forward_passes(engine, prompts, params, monkeypatch):
    """One row ends late, all others early: their rows leave the cache."""
    widths: list[int] = []
    step = engine._step
    monkeypatch.setattr(engine, "_step", lambda tokens, *a: widths.append(len(tokens)) or step(tokens, *a))
    samples = [s for g in engine.generate(requests_of(prompts, 20), params) for s in g]
    lengths = [len(s.token_ids) for s in samples]
    assert len(widths) == max(lengths) - 1
    for at, width in enumerate(widths, start=1):
        running = sum(n > at for n in lengths)
        assert running <= width <= max(running / 0.75 + 1, 1)


def test_generation_leaves_no_trace_in_training(engine, policy, prompts, params):
    """Positions cached while sampling are used in the backward pass."""
    policy._positions.clear()
    samples = engine.generate([SamplingRequest(prompts[1], 2, 3)], params)[0]
    items = [
        TrainItem(prompt_tokens(prompts[1]), 0, (Segment("a", s.token_ids, True),), k) for k, s in enumerate(samples)
    ]
    policy(make_row(items)).logp.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in policy.model.parameters() if p.grad is not None)
    policy.model.zero_grad(set_to_none=True)
    assert not policy.model.training


def test_no_requests_give_no_samples(engine, params):
    assert engine.generate([], params) == []


def test_one_token_is_enough(engine, prompts, params):
    samples = engine.generate(requests_of(prompts), replace(params, max_new_tokens=1))
    assert {len(s.token_ids) for g in samples for s in g} == {1}


def test_a_stop_string_ends_a_response_at_the_first_token_with_it(engine, prompts, params, tiny_processor):
    """The slow rule on the responses without it: the same tokens up to there. The prompt's text does not count."""
    params = replace(params, max_new_tokens=40, temperature=1.5)
    requests, decode = requests_of(prompts), tiny_processor.tokenizer.decode
    plain = [s for samples in engine.generate(requests, params) for s in samples]
    cut_out = [s.text[len(s.text) // 2 :][:4] for s in plain]
    stops = (*filter(None, cut_out[::2]), prompts[0].text[-3:])
    found = [s for samples in engine.generate(requests, replace(params, stop=stops)) for s in samples]
    for before, after in zip(plain, found, strict=True):
        texts = [decode(before.token_ids[: n + 1], skip_special_tokens=True) for n in range(len(before.token_ids))]
        count = next((n for n, text in enumerate(texts, 1) if any(s in text for s in stops)), len(texts))
        assert (after.token_ids, after.text) == (before.token_ids[:count], texts[count - 1])
        assert after.finish == ("stop" if any(s in after.text for s in stops) else before.finish)
    assert any(len(after.token_ids) < len(before.token_ids) for before, after in zip(plain, found, strict=True))


def test_a_request_comes_back_before_the_others_are_complete(policy, tiny_processor, engine, prompts, params):
    requests = requests_of(prompts)
    expected = engine.generate(requests, params)
    small = TorchEngine(policy, tiny_processor.tokenizer, batch_tokens=1_000)
    with small.round():
        numbers = {small.submit(request, params): index for index, request in enumerate(requests)}
        polls = []
        while sum(map(len, polls)) < len(requests):
            polls.append(small.poll())
        assert small.poll() == []
    assert len(polls) > 1 and all(polls)
    found = {numbers[number]: samples for poll in polls for number, samples in poll}
    assert [[s.token_ids for s in found[i]] for i in range(len(requests))] == [
        [s.token_ids for s in g] for g in expected
    ]


def test_a_poll_of_no_time_generates_one_token_and_the_samples_are_bitwise_the_same(engine, prompts, params):
    requests, polls = requests_of(prompts), 0
    expected = engine.generate(requests, params)
    with engine.round():
        numbers = {engine.submit(request, params): index for index, request in enumerate(requests)}
        found = {}
        while len(found) < len(requests):
            found |= {numbers[number]: samples for number, samples in engine.poll(0.0)}
            polls += 1
    assert [found[i] for i in range(len(requests))] == expected
    assert polls >= max(len(s.token_ids) for g in expected for s in g)


def test_requests_of_other_parameters_and_later_ones_are_batches_of_their_own(engine, prompts, params):
    greedy = replace(params, temperature=0.0)
    one, two, three = requests_of(prompts[:3], 2)
    expected = [engine.generate([one], params), engine.generate([two], greedy), engine.generate([three], params)]
    with engine.round():
        first, second = engine.submit(one, params), engine.submit(two, greedy)
        found = dict(engine.poll(0.0))
        third = engine.submit(three, params)
        while len(found) < 3:
            found |= dict(engine.poll())
    assert [[found[first]], [found[second]], [found[third]]] == expected


def test_what_is_left_of_a_round_is_dropped(engine, prompts, params):
    requests = requests_of(prompts)
    expected = engine.generate(requests, params)
    with pytest.raises(KeyboardInterrupt), engine.round():
        for request in requests:
            engine.submit(request, params)
        engine.poll(0.0)
        raise KeyboardInterrupt
    with engine.round():
        assert engine.poll() == []
    assert engine.generate(requests, params) == expected
