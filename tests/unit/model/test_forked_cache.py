"""The forked cache as each supported version of transformers reads it."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from vlmrl.model.caches import CACHE_NAMES, ContinuedCache, RecordedPrompt, checkpoint_layer, run_with_cache


def test_a_layers_state_is_where_old_and_new_versions_look():
    """transformers 5.16 and 5.17 read `layers[i].recurrent_states[0]`, later ones call `get_recurrent_state(i)`."""
    prompt = RecordedPrompt(2)
    prompt.update_recurrent_state(torch.randn(1, 3, 4), 1)
    cache = ContinuedCache(prompt, 5)
    old, new = cache.layers[1].recurrent_states[0], cache.get_recurrent_state(1)
    assert new is not None and old.shape == (5, 3, 4) and torch.equal(old, new)
    assert cache.layers[0].recurrent_states == [None] and cache.get_recurrent_state(0) is None


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_checkpointed_layer_gets_the_cache_under_the_name_that_it_has(name):
    cache = RecordedPrompt(1)
    seen = []

    def layer(x, **given):
        seen.append(given)
        return x * x

    class Model(torch.nn.Module):
        def forward(self, x, use_cache, **_):
            return checkpoint_layer(partial(layer, **{name: None, "other": 1}), x)

    run_with_cache(Model(), cache, x=torch.ones(2, requires_grad=True)).sum().backward()

    assert seen == [{name: cache, "other": 1}] * 2  # forward, and again in backward


def test_the_cache_is_given_under_the_name_that_the_forward_takes():
    class New(torch.nn.Module):
        def forward(self, x, cache=None, use_cache=False):
            return cache

    class Old(torch.nn.Module):
        def forward(self, x, past_key_values=None, use_cache=False):
            return past_key_values

    cache = RecordedPrompt(1)
    assert run_with_cache(New(), cache, x=0) is cache
    assert run_with_cache(Old(), cache, x=0) is cache
