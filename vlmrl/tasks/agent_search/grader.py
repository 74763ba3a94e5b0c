"""Grader of queries by sentence embeddings, for the rewards of agent_search. It runs in workers."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import excerpt, quoted
from vlmrl.tasks.agent_search.rewards import MODEL_HINT, NAME, Similarity, score, score_step_as_published
from vlmrl.types import RewardInput

MOST_TOKENS, MOST_CHARS = 256, 4000
"""Length of a text that the model reads; in tokens, as published for MiniLM."""
KEPT = 4096  # embeddings: all responses to a prompt need that of the true query


def make_grader(*, name: str, model: str, **args: Any) -> Callable[[RewardInput], dict[str, Any]]:
    """Return the grader of a reward with this model. Raises: RewardError if the model cannot be loaded."""
    return partial(score if name == NAME else score_step_as_published, similarity=load_similarity(model), **args)


def load_similarity(model: str) -> Similarity:
    """Return the cosine of two texts' embeddings, the means of the model's last states over a text's tokens.

    Raises: RewardError for a folder that has no such model.
    """
    from transformers import AutoModel, AutoTokenizer

    facts: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model, **facts)
        network: Any = AutoModel.from_pretrained(model, use_safetensors=True, **facts)
    except Exception as error:  # the tokenizer's and the weights' own errors are of no other type
        message = f"the sentence embeddings in {quoted(model, 200)} cannot be loaded: {excerpt(str(error), 300)}"
        raise RewardError(message, hint=MODEL_HINT) from error
    network.eval().requires_grad_(False)

    @lru_cache(maxsize=KEPT)
    def embed(text: str) -> np.ndarray[Any, Any]:
        tokens = tokenizer(text, truncation=True, max_length=MOST_TOKENS, return_tensors="pt")
        mean = network(**tokens).last_hidden_state[0].mean(dim=0).double().numpy()
        return mean / max(float(np.linalg.norm(mean)), 1e-12)

    return lambda text, truth: float(embed(text[:MOST_CHARS]) @ embed(truth[:MOST_CHARS]))
