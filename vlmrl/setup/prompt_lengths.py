"""Lengths of prompts in tokens and sizes of processed images: measured on some rows, or estimated for a memory plan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vlmrl.environments.calls import needs_tools, turn_text
from vlmrl.errors import Problem, VlmrlError
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.redaction.redact import excerpt
from vlmrl.setup.memory_sizes import PromptLengths
from vlmrl.setup.prompts import examples, named
from vlmrl.setup.rows import sample_rows

if TYPE_CHECKING:
    from vlmrl.data.encode import Encoder
    from vlmrl.tasks.source import Source


TOKEN_ROWS = 64
PIXEL_KEYS = ("min_pixels", "max_pixels")
SAME_AREA = 1.1
"""Factor on an image's area below which a change counts as none, because sizes are rounded to whole patches."""


@dataclass
class TokenFacts:
    """Counts over the sampled rows of one source.

    Args:
        prompt_tokens: length of each prompt, including image tokens.
        image_tokens: number of image tokens of each prompt.
        trace_tokens: length of each correct response, and of its longest turn; empty if the task cannot write them.
        images: (stored size, size after processing) of each image, in pixels.
        problems: prompts and correct responses that are longer than the recipe's limits.
        failures: rows that could not be encoded. If the source has an error already, they need no report.
    """

    prompt_tokens: list[int] = field(default_factory=list)
    image_tokens: list[int] = field(default_factory=list)
    trace_tokens: list[tuple[int, int]] = field(default_factory=list)
    images: list[tuple[tuple[int, int], tuple[int, int]]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    failures: list[Problem] = field(default_factory=list)

    @property
    def enlarged(self) -> int:
        return sum(_area(seen) > _area(stored) * SAME_AREA for stored, seen in self.images)

    @property
    def shrunk(self) -> int:
        return sum(_area(seen) * SAME_AREA < _area(stored) for stored, seen in self.images)


def make_encoder(loaded: LoadedRecipe, model_files: str | None) -> Encoder:
    """Return the encoder of the recipe's model, or of `model_files`, after a trial of its chat template.

    Raises: CheckpointError or DataError if no processor can be loaded, or if the chat template cannot be used.
    """
    from vlmrl.data.encode import Encoder
    from vlmrl.model.load import load_processor

    model = loaded.recipe.model
    processor = load_processor(model, path=model_files)
    pixels = {"min_pixels": model.min_pixels, "max_pixels": model.max_pixels}
    encoder = Encoder(processor, **pixels, thinking=model.thinking)
    encoder.require_template()
    return encoder


def check_embeddings(loaded: LoadedRecipe, encoder: Encoder, model_files: str | None) -> list[Problem]:
    """Return an error about tokens of the tokenizer that the model has no embedding for."""
    from vlmrl.model.load import refuse_unknown_ids
    from vlmrl.model.model_facts import model_facts

    try:
        facts = model_facts(loaded.recipe.model, path=model_files)
        if size := int(facts.text.get("vocab_size") or 0):
            refuse_unknown_ids(encoder.tokenizer, size, loaded.recipe.model.path)
    except VlmrlError as error:
        return [Problem(error.message, loaded.where(("model", "path")), error.hint)]
    return []


def check_pixels(loaded: LoadedRecipe, encoder: Encoder) -> list[Problem]:
    """Return warnings about limits of the image area in the recipe that this model's processor ignores."""
    if encoder.takes_pixel_bounds:
        return []
    size = dict(getattr(encoder.processor.image_processor, "size", None) or {})
    own = ", ".join(f"{name} {value}" for name, value in size.items() if value is not None)
    hint = f"leave it out: its own configuration decides{f' (size: {own})' if own else ''}"
    return [
        Problem(
            f"`model.{key}` does nothing: the image processor of `{loaded.recipe.model.path}` has no bounds in pixels",
            loaded.where(("model", key)),
            hint,
            "warning",
        )
        for key in PIXEL_KEYS
        if loaded.is_set(("model", key))
    ]


def measure_tokens(loaded: LoadedRecipe, source: Source, encoder: Encoder, where: str) -> TokenFacts:
    """Encode a sample of rows and compare their lengths with the recipe's limits."""
    facts = TokenFacts()
    failed: list[tuple[str, str]] = []
    rows, acts = sample_rows(source, TOKEN_ROWS), False
    for row in rows:
        try:
            encoder.require_sizes(row)
            image_tokens = encoder.count_image_tokens(row)
            if (
                image_tokens is not None and image_tokens > loaded.recipe.rollout.max_prompt_tokens
            ):  # the images alone are too long
                facts.prompt_tokens.append(source.encoder(encoder, row).count_prompt_tokens(row, source.messages(row)))
                facts.image_tokens.append(image_tokens)
                continue
            images = [source.dataset.image(media) for media in row.media]
            prompt = source.encoder(encoder, row).encode(row, source.messages(row), images)
            sizes = prompt.seen_sizes
            turns = source.task.correct_turns(row, random.Random(0), sizes) if source.task.trace else ()
        except VlmrlError as error:
            failed.append(named(row, error))
            continue
        facts.prompt_tokens.append(len(prompt.prompt_ids))
        facts.image_tokens.append(prompt.num_image_tokens)
        facts.images += [(image.size, seen_size) for image, seen_size in zip(images, prompt.image_sizes, strict=True)]
        if turns:  # + 1: the end token
            lengths = [len(encoder.encode_text(turn_text(turn, "hermes"))) + 1 for turn in turns]
            shown = encoder.count_image_tokens(replace(row, media=row.response_media)) or 0
            said = [size for size, turn in zip(lengths, turns, strict=True) if isinstance(turn, tuple)]
            facts.trace_tokens.append((sum(lengths) + shown, max(said)))
            acts |= source.environment is None and needs_tools(turns)
    if acts:
        message = f"a correct response to rows of `{source.name}` calls tools, and there are none"
        facts.problems.append(Problem(message, where, '[environment] name = "..."'))
    if failed:
        message = f"{len(failed)} of {len(rows)} sampled rows of `{source.name}` cannot be encoded"
        facts.failures.append(Problem(message, where, examples(failed)))
    if facts.prompt_tokens:
        facts.problems += _length_problems(loaded, source, facts, where)
    return facts


def check_room(loaded: LoadedRecipe, source: Source, encoder: Encoder, response: str) -> list[Problem]:
    """Return a warning if a right answer to the first row has more tokens than a response may have."""
    needed, most = len(encoder.encode_text(response)) + 1, loaded.recipe.rollout.max_new_tokens  # + 1: the end token
    if needed <= most:
        return []
    message = (
        f"the right answer {excerpt(response, 60)!r} to the first row of `{source.name}` has {needed} tokens, and "
        f"rollout.max_new_tokens is {most}: it would be cut"
    )
    hint = f"set rollout.max_new_tokens = {needed} or more; reasoning before the answer needs more"
    return [Problem(message, loaded.where(("rollout", "max_new_tokens")), hint, "warning")]


def histogram(values: list[int], bins: int = 6) -> list[tuple[int, int, int]]:
    """Return (lowest, highest, count) of each bin of whole numbers; a single bin if all are equal."""
    low, high = min(values), max(values)
    width = max(1, -(-(high - low + 1) // bins))
    edges = range(low, high + 1, width)
    return [(edge, min(edge + width - 1, high), sum(edge <= v < edge + width for v in values)) for edge in edges]


def _length_problems(loaded: LoadedRecipe, source: Source, facts: TokenFacts, where: str) -> list[Problem]:
    rollout, train = loaded.recipe.rollout, loaded.recipe.train
    problems = []
    longest, n = max(facts.prompt_tokens), len(facts.prompt_tokens)
    over = sum(length > rollout.max_prompt_tokens for length in facts.prompt_tokens)
    if over:
        message = (
            f"{over} of {n} sampled prompts of `{source.name}` are longer than rollout.max_prompt_tokens "
            f"({rollout.max_prompt_tokens}); the longest has {longest} tokens"
        )
        place = loaded.where(("rollout", "max_prompt_tokens"), ("model", "max_pixels"))
        hint = f"set rollout.max_prompt_tokens = {longest} or more, or lower model.max_pixels; prompts are never cut"
        problems.append(Problem(message, place, hint))
    if loaded.recipe.kind == "rl" and longest + loaded.recipe.longest_response > train.tokens_per_row:
        message = (
            f"the longest prompt ({longest} tokens) and a full response ({loaded.recipe.longest_response}) do not fit "
            f"into train.tokens_per_row ({train.tokens_per_row}): such a response gets a packed row of its own"
        )
        hint = f"train.tokens_per_row = {longest + loaded.recipe.longest_response} would hold it"
        problems.append(Problem(message, loaded.where(("train", "tokens_per_row")), hint, "warning"))
    turns = [length for _, length in facts.trace_tokens]
    if long_traces := sum(length > rollout.max_new_tokens for length in turns):
        message = (
            f"{long_traces} of {n} correct responses of `{source.name}` are longer than rollout.max_new_tokens "
            f"({rollout.max_new_tokens}); the longest has {max(turns)} tokens"
        )
        hint = f"set rollout.max_new_tokens = {max(turns)} or more: a correct answer would be cut"
        level = "error" if long_traces == n else "warning"
        problems.append(Problem(message, loaded.where(("rollout", "max_new_tokens")), hint, level))
    return problems


def _area(size: tuple[int, int]) -> int:
    return size[0] * size[1]


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
    return PromptLengths(longest, images, loaded.recipe.longest_response) if longest else longest_allowed(loaded)


def longest_allowed(loaded: LoadedRecipe) -> PromptLengths:
    """Return the longest prompt that the recipe allows. All but TEXT_TOKENS of its tokens are image tokens."""
    r = loaded.recipe.rollout
    return PromptLengths(r.max_prompt_tokens, max(0, r.max_prompt_tokens - TEXT_TOKENS), loaded.recipe.longest_response)
