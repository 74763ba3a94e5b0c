"""The cache that stores a prompt once: exact attention over prompt and own response, whatever rows are left."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from vlmrl.model.prompt_cache import GROWTH_TOKENS, PromptCache, rows_of

LAYERS, KEY_HEADS, REPEAT, WIDTH = 2, 2, 3, 4


def make_cache(copies: list[int], lengths: list[int], longest: int = 8) -> tuple[PromptCache, list[torch.Tensor]]:
    """A cache over random prompts, left padded; and the padded keys, values of each layer [P, K, T, D]."""
    longest_prompt = max(lengths)
    prefilled = DynamicCache()
    shape = (len(copies), KEY_HEADS, longest_prompt, WIDTH)
    kept = []
    for layer in range(LAYERS):
        keys, values = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
        prefilled.update(keys, values, layer)
        kept += [keys, values]
    mask = torch.tensor([[0] * (longest_prompt - n) + [1] * n for n in lengths])
    return PromptCache(prefilled, mask, rows_of(copies, mask.device), longest), kept


def slow_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One row: query [H, D], keys and values [K, L, D] -> [H, D], head by head."""
    out = []
    for head in range(len(query)):
        k, v = keys[head // REPEAT], values[head // REPEAT]
        out.append(torch.softmax(k @ query[head] * 0.5, 0) @ v)
    return torch.stack(out)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 7)), min_size=1, max_size=4), st.integers(1, 5),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_a_step_equals_attention_over_prompt_and_own_response_row_by_row(prompts, steps, rng):
    """Ragged copies, padded prompts, grouped heads, and rows that leave half-way."""
    torch.manual_seed(rng.randrange(1000))
    copies, lengths = [c for c, _ in prompts], [n for _, n in prompts]
    cache, kept = make_cache(copies, lengths)
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
                whole = [torch.cat([kept[2 * layer + j][p, :, real], own[j]], 1) for j in (0, 1)]
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
        assert cache.responses[0].keys.shape[-2] <= min(longest, at + GROWTH_TOKENS)
    assert keys[0, 0, :, 0].tolist() == [float(i) for i in range(1, longest + 1)]
