"""Estimates of prompt lengths for a memory plan, before any prompt is encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vlmrl.preflight.memory_sizes import PromptLengths
from vlmrl.preflight.rows import sample_rows
from vlmrl.recipe.load import LoadedRecipe

if TYPE_CHECKING:
    from vlmrl.tasks.source import Source

ESTIMATED_ROWS = 64
TEXT_TOKENS = 256
"""Assumed number of text tokens of a prompt if only the limit of its length is known; the rest are image tokens."""


def estimate_prompts(loaded: LoadedRecipe, sources: Sequence[Source]) -> PromptLengths:
    """Estimate the longest prompt from some rows of each source: the size of their images, the length of their text."""
    from vlmrl.data.measurements import estimate_image_tokens, estimate_text_tokens

    model, longest, images = loaded.recipe.model, 0, 0
    for source in sources:
        for row in sample_rows(source, ESTIMATED_ROWS):
            characters = sum(len(message.content) for message in source.messages(row))
            seen = sum(estimate_image_tokens(media, model.min_pixels, model.max_pixels) for media in row.media)
            longest, images = max(longest, estimate_text_tokens(characters) + seen), max(images, seen)
    return PromptLengths(longest, images, loaded.recipe.rollout.max_new_tokens) if longest else longest_allowed(loaded)


def longest_allowed(loaded: LoadedRecipe) -> PromptLengths:
    """Return the longest prompt that the recipe allows. All but TEXT_TOKENS of its tokens are image tokens."""
    r = loaded.recipe.rollout
    return PromptLengths(r.max_prompt_tokens, max(0, r.max_prompt_tokens - TEXT_TOKENS), r.max_new_tokens)
