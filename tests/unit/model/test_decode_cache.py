"""The cache that stores a prompt once: exact attention over prompt and own response, whatever rows are left."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from vlmrl.model import caches
from vlmrl.model.caches import GROWTH_TOKENS, DecodeCache, key_layers, rows_of

LAYERS, KEY_HEADS, REPEAT, WIDTH = 2, 2, 3, 4


def make_cache(
    copies: list[int], lengths: list[int], longest: int = 8, window: int | None = None
) -> tuple[DecodeCache, list[torch.Tensor]]:
    """A cache over random prompts, left padded; and the padded keys, values of each layer [P, K, T, D].

    Args: window: of the second layer.
    """
    longest_prompt = max(lengths)
    prefilled = DynamicCache()
    prefilled.layers = [DynamicLayer(), DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)]
    shape = (len(copies), KEY_HEADS, longest_prompt, WIDTH)
    kept = []
    for layer in range(LAYERS):
        keys, values = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
        prefilled.update(keys, values, layer)
        kept += [keys, values]
    mask = torch.tensor([[0] * (longest_prompt - n) + [1] * n for n in lengths])
    return DecodeCache(prefilled, mask, rows_of(copies, mask.device), longest, range(LAYERS)), kept


def slow_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One row: query [H, D], keys and values [K, L, D] -> [H, D], head by head."""
    out = []
    for head in range(len(query)):
        k, v = keys[head // REPEAT], values[head // REPEAT]
        out.append(torch.softmax(k @ query[head] * 0.5, 0) @ v)
    return torch.stack(out)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 7)), min_size=1, max_size=4),
    st.integers(1, 12),
    st.sampled_from([None, 2, 3, 5, 8, 40]),
    st.sampled_from([1, 3, 64]),
    st.randoms(use_true_random=False),
)
def test_a_step_equals_attention_over_prompt_and_own_response_row_by_row(prompts, steps, window, growth, rng):
    """Ragged copies, padded prompts, grouped heads, a window in the second layer, and rows that leave half-way."""
    torch.manual_seed(rng.randrange(1000))
    copies, lengths = [c for c, _ in prompts], [n for _, n in prompts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caches, "GROWTH_TOKENS", growth)
        check_steps(*make_cache(copies, lengths, steps, window), copies, lengths, steps, window, rng)


def check_steps(cache, kept, copies, lengths, steps, window, rng) -> None:
    prompt_of = rows_of(copies, torch.device("cpu")).tolist()
    said: dict[int, list[list[torch.Tensor]]] = {row: [[], []] for row in range(len(prompt_of))}
    alive = list(range(len(prompt_of)))
    for step in range(steps):
        if step == steps // 2 and len(alive) > 1:
            left = sorted(rng.sample(range(len(alive)), rng.randrange(1, len(alive))))
            cache.select(torch.tensor(left))
            alive = [alive[i] for i in left]
        query = torch.randn(len(alive), KEY_HEADS * REPEAT, 1, WIDTH, dtype=torch.float64)
        new = [torch.randn(len(alive), KEY_HEADS, 1, WIDTH, dtype=torch.float64) for _ in range(2)]
        for layer in range(LAYERS):
            keys, values = cache.update(new[0] + layer, new[1] - layer, layer)
            found = cache.attend(layer, query, keys, values, 0.5)
            for i, row in enumerate(alive):
                if layer == 0:
                    for part in (0, 1):
                        said[row][part].append(new[part][i])
                own = [torch.cat(said[row][0], 1) + layer, torch.cat(said[row][1], 1) - layer]
                p = prompt_of[row]
                real = slice(max(lengths) - lengths[p], None)
                seen = slice(None if window is None or layer == 0 else -window, None)
                whole = [torch.cat([kept[2 * layer + j][p, :, real], own[j]], 1)[:, seen] for j in (0, 1)]
                expected = slow_attention(query[i, :, 0], *whole)
                assert torch.allclose(found[i, 0], expected, atol=1e-6, rtol=1e-6)


def test_a_prompt_is_stored_once_and_leaves_with_its_last_row():
    """By bytes: 2 layers x (keys, values) x 2 heads x 4 wide x 8 bytes a token; prompts of 6, 32 samples of up to 8."""
    token = LAYERS * 2 * KEY_HEADS * WIDTH * 8
    cache, _ = make_cache([32, 32], [6, 6])
    assert cache.nbytes == 2 * 6 * token
    step = torch.zeros(64, KEY_HEADS, 1, WIDTH, dtype=torch.float64)
    for _ in range(8):
        for layer in range(LAYERS):
            cache.update(step, step, layer)
    assert cache.nbytes == (2 * 6 + 64 * 8) * token
    cache.select(torch.arange(32, 40))
    assert cache.nbytes == (6 + 8 * 8) * token


@pytest.mark.parametrize("longest", [GROWTH_TOKENS // 2, 2 * GROWTH_TOKENS + 5])
def test_room_grows_in_steps_and_never_above_the_longest_response(longest):
    cache, _ = make_cache([1], [1], longest)
    for at in range(1, longest + 1):
        keys, _ = cache.update(torch.full((1, KEY_HEADS, 1, WIDTH), float(at)), torch.zeros(1, KEY_HEADS, 1, WIDTH), 0)
        assert keys.shape[-2] == at == cache.get_seq_length()
        assert cache.attention[0].keys.shape[-2] <= min(longest, at + GROWTH_TOKENS)
    assert keys[0, 0, :, 0].tolist() == [float(i) for i in range(1, longest + 1)]


def test_a_windows_layer_keeps_the_end_of_prompt_and_response_alone():
    """Window 5 over a prompt of 9: its last 4 tokens; of a response of 200 at most 4 tokens and room for 64 more."""
    cache, _ = make_cache([3], [9], 200, window=5)
    sliding = cache.attention[1]
    assert sliding.prompt_keys.shape[-2] == 4 and sliding.prompt_keys.untyped_storage().nbytes() == 2 * 4 * 4 * 8
    seen = []
    for at in range(1, 201):
        keys, _ = sliding.update(torch.full((3, KEY_HEADS, 1, WIDTH), float(at)), torch.zeros(3, KEY_HEADS, 1, WIDTH))
        assert keys[0, 0, :, 0].tolist() == [float(i) for i in range(max(1, at - 4), at + 1)]
        assert sliding.keys.shape[-2] <= 4 + GROWTH_TOKENS and sliding.length == at
        seen.append(sliding.prompt_seen)
    assert seen[:5] == [4, 3, 2, 1, 0] and not any(seen[5:])


def test_linear_attention_states_are_each_rows_own():
    """Two prompts, three rows; the second leaves. Convolution state [., 2, 3], recurrent [., 1, 2, 2], float32."""
    prefilled = DynamicCache()
    prefilled.layers = [LinearAttentionLayer(), DynamicLayer()]
    prefilled.layers[0].update_conv_state(torch.arange(2.0)[:, None, None].expand(2, 2, 3))
    prefilled.layers[0].update_recurrent_state(torch.arange(2.0)[:, None, None, None].expand(2, 1, 2, 2))
    prefilled.update(torch.zeros(2, 1, 5, 4), torch.zeros(2, 1, 5, 4), 1)
    cache = DecodeCache(prefilled, torch.ones(2, 5), torch.tensor([0, 0, 1]), 8, range(2))
    assert cache.get_conv_state(0)[:, 0, 0].tolist() == [0.0, 0.0, 1.0]
    cache.get_recurrent_state(0)[0] += 5  # as a step does, in place
    prompts = 2 * 2 * 5 * 4 * 4
    assert cache.nbytes == prompts + 3 * (2 * 3 + 2 * 2) * 4
    cache.select(torch.tensor([0, 2]))
    assert cache.get_recurrent_state(0)[:, 0, 0, 0].tolist() == [5.0, 1.0]
    assert cache.nbytes == prompts + 2 * (2 * 3 + 2 * 2) * 4


def test_layers_without_keys_of_their_own_use_the_last_of_their_kind():
    kinds = ["s", "s", "f", "s", "f", "s"]
    assert key_layers(SimpleNamespace(num_hidden_layers=6, num_kv_shared_layers=2, layer_types=kinds)) == [
        0,
        1,
        2,
        3,
        2,
        3,
    ]
    assert key_layers(SimpleNamespace(num_hidden_layers=6, num_kv_shared_layers=0, layer_types=kinds)) == [*range(6)]
    assert key_layers(SimpleNamespace(num_hidden_layers=2)) == [0, 1]
