"""Responses of an engine to many prompts, each as soon as it is complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from vlmrl.rollout.engine import Generator
from vlmrl.rollout.sample import Prompt, Rollout, requests_for, rollouts_of
from vlmrl.rollout.scoring import LISTEN_SECONDS
from vlmrl.types import SamplingParams

ENOUGH_RESPONSES = 256
"""Responses in flight that keep an engine busy; with fewer, one that admits requests at any time gets more prompts."""
MOST_AHEAD = 1024
"""Maximum number of prompts that are submitted after the oldest one in flight: the others wait for its grade."""
Answered = tuple[int, Rollout]
"""(number of a prompt, its responses)."""


def answer_pieces(
    engine: Generator,
    pieces: Iterator[Sequence[tuple[int, Prompt]]],
    params: SamplingParams,
    *,
    num_samples: int,
    run_seed: int,
    progress: Callable[[int], Any] | None = None,
) -> Iterator[Answered | None]:
    """Yield the responses to prompts as they are complete; None about every LISTEN_SECONDS if none is.

    All samples of a prompt are one request. A piece is submitted when all prompts of the piece before are complete: so
    the batches of the built-in engine depend on the pieces alone, not on the time. An engine that admits requests at
    any time (`Generator.admits`) gets the next piece before it runs dry.

    Args:
        pieces: (number, prompt) of each prompt. Pieces are taken when there is room for them; one may be empty.
    Raises: EngineError when a response is from another version of the policy.
    """
    version, pieces_left, submitted = engine.version, True, 0
    waiting: dict[int, tuple[int, int, Prompt, float]] = {}  # id -> place, number, prompt, begin; the oldest first

    def has_room() -> bool:
        if not waiting:
            return True
        oldest = next(iter(waiting.values()))[0]
        return engine.admits and len(waiting) * num_samples < ENOUGH_RESPONSES and submitted - oldest < MOST_AHEAD

    with engine.round(progress):
        while True:
            while pieces_left and has_room():
                piece = next(pieces, None)
                if piece is None:
                    pieces_left = False
                    break
                if not piece:  # nothing to submit, but the caller has something to do
                    yield None
                requests = requests_for([prompt for _, prompt in piece], num_samples, run_seed, version)
                for (number, prompt), request in zip(piece, requests, strict=True):
                    waiting[engine.submit(request, params)] = (submitted, number, prompt, time.perf_counter())
                    submitted += 1
            if not waiting:
                break
            complete = engine.poll(LISTEN_SECONDS)
            for request_id, samples in complete:
                _, number, prompt, begin = waiting.pop(request_id)
                seconds = time.perf_counter() - begin
                (rollout,) = rollouts_of([without_pixels(prompt)], [samples], seconds, version)
                yield number, rollout
            if not complete:
                yield None


def without_pixels(prompt: Prompt) -> Prompt:
    """Return a prompt without the tensors of its images, which only an engine reads; they are most of its memory."""
    return replace(prompt, encoded=replace(prompt.encoded, images={}, pictures=()))
