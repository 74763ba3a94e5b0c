"""Responses that supervised learning is given: as trajectories to train on, and the loss of the policy on them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from vlmrl.errors import DataError
from vlmrl.model.packing import PromptTokens, TrainItem
from vlmrl.recipe.schema import Recipe
from vlmrl.tasks.source import Source
from vlmrl.train.collect import PromptFeed
from vlmrl.train.learner import Learner
from vlmrl.train.step_batch import StepBatch
from vlmrl.train.update import fill_logps
from vlmrl.types import Row, Segment, Size, hash64, name_row

RESPONSE_COLUMN = "response"
MOST_PERPLEXITY = 700.0
"""Loss in nats above which the perplexity is that of this loss: a larger one is no float."""


def target_item(feed: PromptFeed, source: Source, row: Row, occurrence: int, index: int) -> TrainItem:
    """Return a dataset row's prompt with the response to learn."""
    prompt = feed.encode(source, row, occurrence)
    rng = random.Random(hash64(feed.recipe.train.seed, row.prompt_id, occurrence))
    text = target_text(source, row, rng, prompt.encoded.seen_sizes)
    return TrainItem(
        PromptTokens.of(prompt.encoded), index, (Segment("assistant", response_ids(feed, text), True),), index
    )


def trace_text(source: Source, row: Row) -> str:
    """Return one of the responses that a row may be trained on, to estimate its length."""
    return target_text(source, row, random.Random(0))


def target_text(source: Source, row: Row, rng: random.Random, seen_sizes: Sequence[Size] = ()) -> str:
    """Return the response to learn: the row's `response` column if it has one, else a templated trace of the task.

    Args:
        rng: chooses among the task's templates.
        seen_sizes: (width, height) of each image as the model sees it; () = unknown, for an estimate of the length.
    Raises: DataError when there is neither.
    """
    response = row.columns.get(RESPONSE_COLUMN)
    if isinstance(response, str) and response:
        return response
    if source.task.trace is None:
        raise DataError(
            f"task `{source.task.name}` has no templated traces and the row has no `{RESPONSE_COLUMN}` column",
            where=row.place,
            hint=f'add a column `{RESPONSE_COLUMN}`, or name yours: columns = {{ response = "..." }} in [[data]]',
        )
    return source.task.correct_response(row, rng, seen_sizes)


def response_ids(feed: PromptFeed, text: str) -> tuple[int, ...]:
    """Return the token ids of a response, with its end token as the last trained token.

    Control tokens that are typed in the text are encoded as plain letters.
    """
    end_id = feed.encoder.tokenizer.eos_token_id
    return (*feed.encoder.encode_text(text), end_id if end_id is not None else feed.sampling.stop_ids[0])


def loss_sum(
    learner: Learner, recipe: Recipe, source: Source, item_of: Callable[[Row, int, int], TrainItem]
) -> tuple[float, int]:
    """Return (sum of the loss of a source's target tokens in nats, their number), of the rows of all ranks.

    The first `eval.max_rows` rows count. The loss of a token is its negative log-prob, without dropout. All ranks call
    this together. `item_of`: `target_item` of the source.
    """
    world = learner.world
    count = min(len(source.rows), recipe.eval.max_rows or len(source.rows))
    nats, tokens = 0.0, 0
    for start in range(0, count, recipe.train.rows_per_step):
        rows = source.rows[start : min(start + recipe.train.rows_per_step, count)]
        items = [item_of(rows[index], 0, index) for index in world.mine(len(rows))]
        names = [name_row(source.name, row.prompt_id) for row in rows]
        batch = StepBatch(items, [0.0] * len(rows), names, world=world, filler=learner.filler)
        logps: dict[int, Tensor] = {}
        learner.in_rows(partial(fill_logps, learner.policy, batch, logps))
        of_rank = [(-float(logp.double().sum()), len(logp)) for logp in logps.values()]
        for part_nats, part_tokens in (part for parts in world.gather(of_rank) for part in parts):
            nats, tokens = nats + part_nats, tokens + part_tokens
    return nats, tokens


def loss_metrics(prefix: str, nats: float, tokens: int) -> dict[str, float]:
    """Return the mean loss per target token, in nats, and the perplexity, its exponential. `tokens` is at least 1."""
    loss = nats / tokens
    return {f"{prefix}/loss": loss, f"{prefix}/perplexity": math.exp(min(loss, MOST_PERPLEXITY))}
