"""Responses that supervised learning is given: as trajectories to train on, and the loss of the policy on them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from vlmrl.data.images import decode_image
from vlmrl.environments.calls import turn_text
from vlmrl.errors import DataError
from vlmrl.model.packing import PromptTokens, TrainItem
from vlmrl.recipe.schema import Recipe
from vlmrl.redaction.redact import excerpt
from vlmrl.rollout.engine import Generator, SamplingRequest
from vlmrl.rollout.episodes import EpisodeEngine, EpisodeKind
from vlmrl.rollout.sample import Prompt
from vlmrl.tasks.source import Source
from vlmrl.train.collect import Drawn, PromptFeed
from vlmrl.train.learner import Learner
from vlmrl.train.step_batch import StepBatch
from vlmrl.train.update import fill_logps
from vlmrl.types import Row, Sample, Segment, Size, TracePart, hash64, name_row

RESPONSE_COLUMN = "response"
MOST_PERPLEXITY = 700.0
"""Loss in nats above which the perplexity is that of this loss: a larger one is no float."""


def target_items(
    feed: PromptFeed, generator: Generator, drawn: Sequence[Drawn], indices: Iterable[int]
) -> list[TrainItem]:
    """Return the prompts of dataset rows with the responses to learn.

    If a source has an environment, it runs on the turns of the response, as it does for those of a policy: what it
    answers stands between them. All rows' tools run at the same time.

    Args:
        generator: with the environments; it generates nothing.
        indices: the index of each trajectory in the step.
    Raises: DataError when a row cannot be encoded, has no response, or has one that no rollout could be.
    """
    engine = generator if isinstance(generator, EpisodeEngine) else None
    targets: list[_Target] = []
    for (source, row, occurrence), index in zip(drawn, indices, strict=True):
        seed = hash64(feed.recipe.train.seed, row.prompt_id, occurrence)
        prompt, kind = feed.encode(source, row, occurrence), engine.kind_of(row) if engine else None
        turns = target_turns(source, row, random.Random(seed), prompt.encoded.seen_sizes)
        targets.append(_Target(prompt, _turn_ids(feed, row, turns, kind), index, seed >> 1, kind is not None))
    episodes = [target for target in targets if target.is_episode]
    requests = [SamplingRequest(target.prompt.encoded, 1, target.seed) for target in episodes]
    turns = [target.turns for target in episodes]
    samples = iter(engine.follow(requests, turns, feed.sampling) if engine and episodes else ())
    return [_item(feed, target, next(samples) if target.is_episode else None) for target in targets]


@dataclass(frozen=True)
class _Target:
    """Response to learn: the tokens of its turns, each with its end token."""

    prompt: Prompt
    turns: Sequence[tuple[int, ...]]
    index: int
    seed: int
    is_episode: bool


def _item(feed: PromptFeed, target: _Target, sample: Sample | None) -> TrainItem:
    """Return a response as a trajectory to train on. `sample`: its episode; None = it is one turn."""
    prompt, index = PromptTokens.of(target.prompt.encoded), target.index
    if sample is None:
        return TrainItem(prompt, index, (Segment("assistant", target.turns[0], True),), index)
    _require_whole(sample, target)
    last = max(i for i, s in enumerate(sample.segments) if s.author == "policy" and s.ids)
    segments = tuple(replace(s, sampler_logp=None, version=None) for s in sample.segments[: last + 1])
    media = [m for segment in segments for m in segment.media]
    images = [decode_image(sample.files[m.sha256]) for m in media]
    ids, place = [i for segment in segments for i in segment.ids], target.prompt.row.place
    return TrainItem(prompt, index, segments, index, *feed.encoder.encode_tail(ids, media, images, place))


def _require_whole(sample: Sample, target: _Target) -> None:
    """Raise a DataError unless the episode of a response went through all its turns without an error of a tool."""
    place, number, most = target.prompt.row.place, 0, len(target.turns)
    if sample.fault:
        raise DataError(f"the environment failed on the trace: {sample.fault}", where=place)
    for turn in sample.turns:
        if turn.role == "assistant":
            number += 1
        elif turn.errors and number < most:
            message = f"a call in turn {number} of the trace fails: {excerpt(turn.text, 300)}"
            raise DataError(message, where=place, hint="only the last turn of a trace may hold a call that fails")
    taken = sum(segment.author == "policy" and bool(segment.ids) for segment in sample.segments)
    if taken < most:
        ends = {"answer": "holds no call that can be read", "done": "makes the environment end the episode"}
        why = ends.get(str(sample.ending), f"meets a limit of [environment] ({sample.ending})")
        message = f"turn {taken} of the {most} turns of the trace {why}, so none may follow it"
        raise DataError(message, where=place, hint="make the trace shorter, or raise the limit")


def trace_text(source: Source, row: Row) -> str:
    """Return one of the responses that a row may be trained on, to estimate its length."""
    return "\n".join(turn_text(parts, "hermes") for parts in target_turns(source, row, random.Random(0)))


def target_turns(
    source: Source, row: Row, rng: random.Random, seen_sizes: Sequence[Size] = ()
) -> tuple[tuple[TracePart, ...], ...]:
    """Return the turns to learn: the row's `response` column if it has one, else a templated trace of the task.

    Args:
        rng: chooses among the task's templates.
        seen_sizes: (width, height) of each image as the model sees it; () = unknown, for an estimate of the length.
    Raises: DataError when there is neither, or there are several turns and no environment.
    """
    response = row.columns.get(RESPONSE_COLUMN)
    if isinstance(response, str) and response:
        return ((response,),)
    if source.task.trace is None:
        raise DataError(
            f"task `{source.task.name}` has no templated traces and the row has no `{RESPONSE_COLUMN}` column",
            where=row.place,
            hint=f'add a column `{RESPONSE_COLUMN}`, or name yours: columns = {{ response = "..." }} in [[data]]',
        )
    turns = source.task.correct_turns(row, rng, seen_sizes)
    if len(turns) > 1 and source.environment is None:
        message = f"the trace has {len(turns)} turns, and nothing answers the first one"
        raise DataError(message, where=row.place, hint="name the environment: [environment] name")
    return turns


def _turn_ids(
    feed: PromptFeed, row: Row, turns: Sequence[Sequence[TracePart]], kind: EpisodeKind | None
) -> list[tuple[int, ...]]:
    """Return the token ids of each turn, with its end token as the last one.

    Control tokens that are typed in a text are encoded as plain letters. In front of an observation, the end token is
    the one that the chat template writes there, if it ends a response.
    """
    control, stop_ids, own = feed.encoder.control, feed.sampling.stop_ids, feed.encoder.tokenizer.eos_token_id
    last = own if own is not None else stop_ids[0]
    before = kind.turns(row).end_id if kind else last
    form, most = (kind.pool.form, feed.sampling.max_new_tokens) if kind else ("hermes", None)
    written: list[tuple[int, ...]] = []
    for number, parts in enumerate(turns, start=1):
        try:
            text = turn_text(parts, form, control.guard_values)
        except ValueError as error:
            raise DataError(f"turn {number} of the trace: {error}", where=row.place) from error
        end = before if number < len(turns) and before in stop_ids else last
        written.append((*control.encode(text), end))
        if most is not None and len(written[-1]) > most:
            message = (
                f"turn {number} of the trace has {len(written[-1])} tokens, more than rollout.max_new_tokens = {most}"
            )
            raise DataError(message, where=row.place, hint="raise rollout.max_new_tokens and environment.tokens")
    return written


def loss_sum(
    learner: Learner,
    recipe: Recipe,
    source: Source,
    items_of: Callable[[Sequence[Drawn], Iterable[int]], list[TrainItem]],
) -> tuple[float, int]:
    """Return (sum of the loss of a source's target tokens in nats, their number), of the rows of all ranks.

    The first `eval.max_rows` rows count. The loss of a token is its negative log-prob, without dropout. All ranks call
    this together. `items_of`: `target_items` of the run.
    """
    world = learner.world
    count = min(len(source.rows), recipe.eval.max_rows or len(source.rows))
    nats, tokens = 0.0, 0
    for start in range(0, count, recipe.train.rows_per_step):
        rows = source.rows[start : min(start + recipe.train.rows_per_step, count)]
        mine = world.mine(len(rows))
        items = items_of([(source, rows[index], 0) for index in mine], mine)
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
