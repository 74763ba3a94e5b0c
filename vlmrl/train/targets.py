"""Responses that supervised learning is given: as trajectories to train on, and the loss of the policy on them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor

from vlmrl.data.chat_template import IMAGE_SLOT
from vlmrl.data.encode import Encoder
from vlmrl.data.images import decode_image
from vlmrl.data.turns import TurnEncoder, without_first
from vlmrl.environments.base import ERROR
from vlmrl.environments.calls import end_of_thought, needs_tools, turn_text
from vlmrl.errors import DataError
from vlmrl.model.packing import PromptTokens, TrainItem
from vlmrl.recipe.schema import Recipe
from vlmrl.redaction.redact import excerpt
from vlmrl.rollout.engine import Generator, SamplingRequest
from vlmrl.rollout.episodes import EpisodeEngine
from vlmrl.rollout.sample import Prompt
from vlmrl.setup.demonstrations import RESPONSE_COLUMN
from vlmrl.tasks.source import Source
from vlmrl.train.collect import Drawn, PromptFeed
from vlmrl.train.learner import Learner
from vlmrl.train.step_batch import StepBatch
from vlmrl.train.update import fill_logps
from vlmrl.types import Message, Row, Sample, SamplingParams, Segment, Size, TracePart, TraceTurn, hash64, name_row

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
    prompts: list[Prompt] = []
    given: list[tuple[list[Segment], list[Any]]] = []
    episodes: dict[int, SamplingRequest] = {}
    for source, row, occurrence in drawn:
        seed = hash64(feed.recipe.train.seed, row.prompt_id, occurrence)
        prompt, kind = feed.encode(source, row, occurrence), engine and engine.kinds.get(row.source)
        turns = target_turns(source, row, random.Random(seed), prompt.encoded.seen_sizes)
        said = [turn for turn in turns if not isinstance(turn, Message)]
        if kind is not None and turns == tuple(said) and (len(said) > 1 or kind.turns(row).is_open):
            before = [*[kind.turns(row)] * (len(said) - 1), None]
            script = [turn_ids(feed.encoder, feed.sampling, prompt, *turn) for turn in zip(said, before, strict=True)]
            episodes[len(prompts)] = SamplingRequest(prompt.encoded, 1, seed >> 1, script)
        given.append(_given(feed, prompt, () if len(prompts) in episodes else turns))
        prompts.append(prompt)
    samples = engine.follow(list(episodes.values()), feed.sampling) if engine else []
    for number, sample in zip(episodes, samples, strict=True):
        given[number] = _ran(sample, len(episodes[number].script), prompts[number].row.place)
    items = []
    for prompt, (segments, images), index in zip(prompts, given, indices, strict=True):
        ids, media = [i for s in segments for i in s.ids], [m for s in segments for m in s.media]
        tail = feed.encoder.encode_tail(ids, media, images, prompt.row.place)
        items.append(TrainItem(PromptTokens.of(prompt.encoded), index, tuple(segments), index, *tail))
    return items


TRACE_ENDS = {
    "answer": ("holds no call that can be read", "call a tool in each turn but the last: vlmrl.Call(NAME, {...})"),
    "done": ("makes the environment end the episode", "end the trace with this turn"),
    "turn cut": ("is longer than rollout.max_new_tokens", "make the turn shorter, or raise rollout.max_new_tokens"),
}
"""Ending of the episode of a trace before its last turn -> (what the turn does, what to do)."""


def _ran(sample: Sample, num_turns: int, place: str) -> tuple[list[Segment], list[Any]]:
    """Return the segments of the episode of a trace up to its last turn, and the images in them.

    Raises: DataError unless it went through all its turns without an error of a tool.
    """
    number = 0
    if sample.fault:
        raise DataError(f"the environment failed on the trace: {sample.fault}", where=place)
    for turn in sample.turns:
        number += turn.role == "assistant"
        if turn.errors and number < num_turns:
            message = f"a call in turn {number} of the trace fails: {excerpt(turn.text.removeprefix(ERROR), 300)}"
            raise DataError(message, where=place, hint="only the last turn of a trace may hold a call that fails")
    policy = [i for i, segment in enumerate(sample.segments) if segment.author == "policy" and segment.ids]
    if len(policy) < num_turns or (sample.ending == "turn cut" and sample.segments[-1].ids):
        limit = f"meets a limit of [environment] ({sample.ending})", "make the trace shorter, or raise the limit"
        why, hint = TRACE_ENDS.get(str(sample.ending), limit)
        message = f"turn {len(policy)} of the {num_turns} turns of the trace {why}: a rollout would end there"
        raise DataError(message, where=place, hint=hint)
    segments = [replace(s, sampler_logp=None, version=None) for s in sample.segments[: policy[-1] + 1]]
    return segments, [decode_image(sample.files[m.sha256]) for segment in segments for m in segment.media]


def _given(feed: PromptFeed, prompt: Prompt, turns: Sequence[TraceTurn]) -> tuple[list[Segment], list[Any]]:
    """Return the segments of turns that no environment has to answer, and the images in them.

    The turns of the assistant behind the last message of a user are trained.
    """
    row, segments, images = prompt.row, list[Segment](), list[Any]()
    begin = max((i for i, turn in enumerate(turns) if isinstance(turn, Message) and turn.role == "user"), default=-1)
    media = iter(row.response_media)
    for number, turn in enumerate(turns):
        if not isinstance(turn, Message):
            follows = next(iter(turns[number + 1 :]), None)
            before = feed.turn_encoder(prompt, follows.role) if isinstance(follows, Message) else None
            segments.append(
                Segment("assistant", turn_ids(feed.encoder, feed.sampling, prompt, turn, before), number > begin)
            )
            continue
        pieces = turn.content.split(IMAGE_SLOT)
        own = tuple(islice(media, len(pieces) - 1))
        if len(own) < len(pieces) - 1:
            raise DataError(f"the results of tools have more {IMAGE_SLOT} marks than images", where=row.place)
        shown = [prompt.source.dataset.image(m) for m in own]
        parts = [part for pair in zip(pieces, [*shown, ""], strict=True) for part in pair]
        places = {"place": row.place, "images_before": len(row.media) + len(images)}
        more = without_first(feed.turn_encoder(prompt, turn.role).encode(parts, own, **places), segments[-1].ids[-1])
        tokens = Segment(turn.role, more.prompt_ids, False, author="environment", media=own, seen_sizes=more.seen_sizes)
        segments.append(tokens)
        images += shown
    return segments, images


def turn_ids(
    encoder: Encoder,
    sampling: SamplingParams,
    prompt: Prompt,
    parts: Sequence[TracePart],
    before: TurnEncoder | None = None,
) -> tuple[int, ...]:
    """Return the token ids of a turn, with its end token as the last one.

    Control tokens that are typed in a text are encoded as plain letters. In front of a message, the end token is the
    one that the chat template writes there, if it ends a response.

    Args:
        before: encoder of the message that follows; None = the response ends.
    Raises: DataError for a call that cannot be written.
    """
    control, stop_ids, own = encoder.control, sampling.stop_ids, encoder.tokenizer.eos_token_id
    mark = end_of_thought(prompt.encoded.text)
    try:
        text = turn_text(parts, prompt.source.encoder(encoder, prompt.row).form, control.guard_values)
        if mark and before is not None and mark not in text:
            raise ValueError(f'{mark} is missing, as the prompt begins a thought; try model.thinking = "off"')
    except ValueError as error:
        raise DataError(f"a turn of the response cannot be written: {error}", where=prompt.row.place) from error
    last = before.end_id if before is not None and before.end_id in stop_ids else own
    return (*control.encode(text), last if last is not None else stop_ids[0])


def trace_text(source: Source, row: Row) -> str:
    """Return one of the responses that a row may be trained on, to estimate its length."""
    return "\n".join(turn_text(turn, "hermes") for turn in target_turns(source, row, random.Random(0)))


def target_turns(
    source: Source, row: Row, rng: random.Random, seen_sizes: Sequence[Size] = ()
) -> tuple[TraceTurn, ...]:
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
    if source.environment is None and needs_tools(turns):
        message = f"the trace has {len(turns)} turns, and nothing answers the first one"
        raise DataError(message, where=row.place, hint="name the environment: [environment] name")
    return turns


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
