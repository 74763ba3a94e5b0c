"""Sizes of caches, by hand."""

from __future__ import annotations

import pytest

from vlmrl.model.memory import Demand, cache_shape, size_cache

SEVEN_B = {"num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
HYBRID = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "linear_key_head_dim": 128,
}
SLIDING = {
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "sliding_window": 1024,
}
GIB = 1 << 30


def test_keys_and_values_of_a_token():
    # 28 layers x 2 x 4 heads x 128 x 2 bytes
    shape = cache_shape(SEVEN_B, 2)
    assert (shape.token_bytes, shape.state_bytes) == (57_344, 0)
    assert shape.sequence_bytes(100) == 57_344 * 112  # seven blocks of 16
    # a prompt of 160 shared by 3 responses of 32
    assert shape.group_bytes(160, 32, 3) == 57_344 * (160 + 3 * 32)


def test_states_of_linear_attention_are_25_to_50_mib_a_sequence():
    shape = cache_shape(HYBRID, 2)
    assert shape.token_bytes == 8 * 2 * 4 * 256 * 2
    # 24 layers x (32 heads x 128 x 128 x 4 bytes + 3 columns x (2 x 2048 + 4096) channels x 2 bytes)
    assert shape.state_bytes == 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert 25 << 20 < shape.state_bytes < 50 << 20


def test_a_sliding_window_holds_no_more_than_it_sees():
    shape = cache_shape(SLIDING, 2)
    token = 2 * 1 * 64 * 2
    assert (shape.token_bytes, shape.window_bytes) == (token, 5 * token)
    assert shape.sequence_bytes(8192) == token * 8192 + 5 * token * (1024 + 16)
    assert shape.sequence_bytes(512) == 6 * token * 512


@pytest.mark.parametrize(
    ("free", "chosen"),
    [
        (None, "needed"),
        (100 * GIB, "needed"),
        (6 * GIB, 6 * GIB),
        (0, "least"),
        (-5 * GIB, "least"),
    ],
)
def test_a_cache_takes_what_is_needed_as_far_as_memory_is_free(free, chosen):
    demand = Demand(groups=8, samples=16, prompt=2000, response=2048, longest=6144)
    size = size_cache(cache_shape(SEVEN_B, 2), demand, free, "cuda")
    assert size.needed == 57_344 * 8 * (2000 + 16 * 2048)
    assert size.least == int(1.1 * 57_344 * 6144)
    assert size.chosen == (getattr(size, chosen) if isinstance(chosen, str) else chosen)


def test_no_more_sequences_are_counted_than_run_at_once():
    many = Demand(groups=1000, samples=8, prompt=100, response=100, longest=200)
    size = size_cache(cache_shape(SEVEN_B, 2), many, None, "cuda")
    assert size.needed == 57_344 * 32 * (112 + 8 * 112)  # 256 responses: 32 prompts


def test_on_a_cpu_a_cache_is_small():
    demand = Demand(groups=64, samples=8, prompt=2000, response=2048, longest=4096)
    shape = cache_shape(SEVEN_B, 4)
    assert size_cache(shape, demand, 64 * GIB, "cpu").chosen == 4 * GIB
    assert size_cache(shape, demand, 8 * GIB, "cpu").chosen == 2 * GIB
    tiny = Demand(groups=2, samples=2, prompt=10, response=10, longest=20)
    assert size_cache(cache_shape(SLIDING, 4), tiny, 8 * GIB, "cpu").chosen == 1 << 28


def test_parts_share_it():
    demand = Demand(groups=8, samples=16, prompt=2000, response=2048, longest=6144)
    whole, half = (size_cache(cache_shape(SEVEN_B, 2), demand, None, "cuda", parts) for parts in (1, 2))
    assert half.needed * 2 == whole.needed and abs(half.least * 2 - whole.least) <= 1
