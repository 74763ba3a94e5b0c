"""The forked cache as each supported version of transformers reads it."""

from __future__ import annotations

import torch

from vlmrl.model.forked_cache import ContinuedCache, RecordedPrompt


def test_a_layers_state_is_where_old_and_new_versions_look():
    """transformers 5.16 and 5.17 read `layers[i].recurrent_states[0]`, later ones call `get_recurrent_state(i)`."""
    prompt = RecordedPrompt(2)
    prompt.update_recurrent_state(torch.randn(1, 3, 4), 1)
    cache = ContinuedCache(prompt, 5)
    old, new = cache.layers[1].recurrent_states[0], cache.get_recurrent_state(1)
    assert new is not None and old.shape == (5, 3, 4) and torch.equal(old, new)
    assert cache.layers[0].recurrent_states == [None] and cache.get_recurrent_state(0) is None
