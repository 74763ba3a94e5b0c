"""Rehearsal before the first step: the largest packed row of the data runs forward and backward, and changes nothing.

A run that cannot fit then ends in its first minute, with the key to change, and not in its third hour.

Exact: the packed row is built and run as an update does it. Every response is as long as it may be (in
`sft`: as the dataset row's own). The reference, old log-probs and values are computed if the objective has them. All
gradients and optimizer state are in memory.

Estimated: the heaviest prompts. The dataset rows that the run will draw are scanned for at most `SCAN_SECONDS`, and
ranked by the size of their images and the length of their text; the first few are encoded and measured.

Not covered: packed rows of much shorter responses, which hold more prompts, and so more images, in as many tokens; and
the built-in engine's cache (`rollout.batch_tokens`).
"""

from __future__ import annotations

import copy
import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlmrl.algo.algorithms import algorithm_of
from vlmrl.data.measurements import CHARACTERS_PER_TOKEN, estimate_image_tokens
from vlmrl.dist import world
from vlmrl.errors import Load, OutOfMemoryError, gib
from vlmrl.model.device_memory import memory_use
from vlmrl.model.packing import TokenStats, TrainItem, row_load
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Recipe
from vlmrl.store.runs import Run
from vlmrl.tasks.source import Source
from vlmrl.train.collect import Drawn, PromptFeed
from vlmrl.train.learner import ROWS, Learner
from vlmrl.train.step_batch import StepBatch
from vlmrl.train.update import (
    Objective,
    PolicyGradient,
    TokenData,
    add_gradients,
    fill_logps,
    fill_reference,
    fill_stats,
)
from vlmrl.types import Row, Segment, name_row

SCAN_SECONDS = 10.0
"""Time limit in seconds for the scan of the dataset rows."""
ENCODED_ROWS = 4
"""Number of dataset rows that are encoded of each kind: the longest ones, and those with the most image tokens."""

MakeItems = Callable[[Sequence[Drawn]], Sequence[TrainItem]]
"""Drawn rows -> the longest trajectory that training may make of each."""
ResponseText = Callable[[Source, Row], str]
"""Text of the response that a dataset row brings along; "" if it has none."""


@dataclass(frozen=True)
class ComingRow:
    """Dataset row that the run will draw, with an estimate of its tokens.

    Args:
        source: index of its source.
        row: index within the source.
        occurrence: how often it had been drawn before.
        text_tokens: estimated number of text tokens.
        image_tokens: estimated number of image tokens.
    """

    source: int
    row: int
    occurrence: int
    text_tokens: int
    image_tokens: int

    @property
    def tokens(self) -> int:
        """Estimated number of all tokens."""
        return self.text_tokens + self.image_tokens


@dataclass(frozen=True)
class ComingRows:
    """Dataset rows that the run will draw, as far as they were scanned.

    Args:
        complete: whether the run draws no other rows.
    """

    rows: tuple[ComingRow, ...]
    complete: bool

    def __str__(self) -> str:
        return f"{'all' if self.complete else 'the first'} {len(self.rows):,} rows to come were scanned"


@dataclass(frozen=True)
class HeaviestRows:
    """Candidates for the largest packed row.

    Args:
        scan: the rows from which they were chosen.
        items: the trajectory of each candidate.
        names: its name in an error.
    """

    scan: ComingRows
    items: Sequence[TrainItem]
    names: Sequence[str]


@dataclass(frozen=True)
class _Finite:
    """Objective whose loss is always finite, even where the model finds a made-up response impossible."""

    objective: Objective

    @property
    def aggregation(self) -> str:
        return self.objective.aggregation

    @property
    def one_mean(self) -> bool:
        return self.objective.one_mean

    def prepared(self, policy: Policy, batch: StepBatch, tokens_per_row: int) -> Objective:
        return self

    def loss_beside(self, stats: TokenStats) -> Tensor | None:
        return self.objective.loss_beside(stats)

    def select(self, policy: Policy, batch: StepBatch, tokens_per_row: int) -> dict[int, Tensor]:
        return self.objective.select(policy, batch, tokens_per_row)

    def loss(self, stats: TokenStats, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = self.objective.loss(stats, data)
        return torch.nan_to_num(loss, 0.0, 0.0, 0.0), metrics

    def masked_loss(self, stats: TokenStats, data: TokenData) -> Tensor:
        return torch.nan_to_num(self.objective.masked_loss(stats, data), 0.0, 0.0, 0.0)


def rehearse(
    learner: Learner,
    objective: Objective,
    scan: Callable[[], HeaviestRows],
    step: int,
    run: Run,
    say: Callable[[str], None],
) -> None:
    """Run the largest packed row, and report its size, memory and time in one line.

    No weight, moment, random state or data position changes. A packed row that does not fit is tried once more with
    half the budget; the run then keeps the half.

    Args:
        scan: scans the dataset rows to come, see `heaviest_rows`; called before anything runs.
        step: the step that the run begins with.
        run: the run that gets the event.
    Raises: OutOfMemoryError when half the budget does not fit either; smaller budgets are tried first, so that the
        error can name one that fits. DataError when a dataset row to come cannot be encoded (its step would raise the
        same), or has an image of a size that the model does not take.
    """
    if learner.policy.compiled:
        say("layers are compiled when they first run: up to some minutes, once")
    if not learner.recipe.train.rehearsal:
        run.write_log("the largest packed row is not rehearsed: train.rehearsal = false")
        return
    world.phase("rehearsal", step)
    start = time.perf_counter()
    heaviest = scan()
    if not heaviest.items:
        return
    device = learner.policy.device
    largest = _find_room(learner, objective, heaviest.items, heaviest.names)
    peak, limit = memory_use(device)
    seconds = time.perf_counter() - start
    say(
        f"the largest packed row fits: {largest}, {largest.rows[0]}; peak {gib(peak)} of {gib(limit)}; {seconds:.1f} s"
        f" ({heaviest.scan})"
    )
    run.event(
        step,
        "largest row rehearsed",
        tokens=largest.tokens,
        image_tokens=largest.image_tokens,
        responses=largest.responses,
        rows=list(largest.rows),
        peak_bytes=peak,
        limit_bytes=limit,
        seconds=seconds,
        rows_looked_at=len(heaviest.scan.rows),
        complete=heaviest.scan.complete,
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def heaviest_rows(
    feed: PromptFeed, step: int, make_items: MakeItems, response_text: ResponseText = lambda source, row: ""
) -> HeaviestRows:
    """Scan the dataset rows to come, and encode those that may be the heaviest. All ranks get the same rows.

    Args:
        feed: the source of the rows; its stream does not move.
        step: the step that the run begins with.
        make_items: makes the longest trajectories of rows.
        response_text: returns the response that a row brings along.
    """
    scan = feed.world.gather(coming_rows(feed, step, response_text))[0]  # rank 0's: each scans as far as it has time
    drawn = [(feed.sources[d.source], feed.sources[d.source].rows[d.row], d.occurrence) for d in heaviest(scan)]
    return HeaviestRows(scan, make_items(drawn), [name_row(source.name, row.prompt_id) for source, row, _ in drawn])


def coming_rows(feed: PromptFeed, step: int, response_text: ResponseText, seconds: float = SCAN_SECONDS) -> ComingRows:
    """Return the distinct rows that the run will draw from `step` on (with a filter: may draw), in that order."""
    recipe, start = feed.recipe, time.perf_counter()
    stream, rows = copy.deepcopy(feed.stream), {}
    per_step = recipe.rollout.prompts_per_step if recipe.kind == "rl" else recipe.train.rows_per_step
    for _ in range((recipe.train.steps - step) * _draws_per_step(recipe)):
        for draw in stream.next(per_step):
            if draw[:2] not in rows:
                rows[draw[:2]] = _estimate(feed, *draw, response_text)
        if len(rows) == sum(len(source.rows) for source in feed.sources):
            break
        if time.perf_counter() - start > seconds:
            return ComingRows(tuple(rows.values()), False)
    return ComingRows(tuple(rows.values()), True)


def _draws_per_step(recipe: Recipe) -> int:
    """Return the maximum number of draws per step: 1 without a filter."""
    algorithm = algorithm_of(recipe.algo) if recipe.kind == "rl" else None
    return algorithm.filter_tries if algorithm is not None and algorithm.filter != "none" else 1


def _estimate(feed: PromptFeed, source: int, row: int, occurrence: int, response_text: ResponseText) -> ComingRow:
    data_source, model = feed.sources[source], feed.recipe.model
    example = data_source.rows[row]
    feed.encoder.require_sizes(example)
    characters = sum(len(m.content) for m in data_source.messages(example)) + len(response_text(data_source, example))
    image_tokens = sum(estimate_image_tokens(media, model.min_pixels, model.max_pixels) for media in example.media)
    return ComingRow(source, row, occurrence, characters // CHARACTERS_PER_TOKEN, image_tokens)


def heaviest(scan: ComingRows) -> list[ComingRow]:
    """Return the longest rows and those with the most image tokens, by estimate: at most twice `ENCODED_ROWS`."""
    longest = heapq.nlargest(ENCODED_ROWS, scan.rows, key=lambda d: d.tokens)
    most_images = heapq.nlargest(ENCODED_ROWS, scan.rows, key=lambda d: d.image_tokens)
    return list(dict.fromkeys([*longest, *most_images]))


def full_row(item: TrainItem, *, responses: int, groups: int, tokens_per_row: int) -> list[TrainItem]:
    """Return a packed row of copies of a trajectory, as full as `pack` fills packed rows with its prompt.

    The last response is cut to fill the packed row: in training, responses have all lengths.

    Args:
        item: the longest trajectory of its prompt.
        responses: number of responses per prompt.
        groups: number of prompts per step.
    """
    full: list[TrainItem] = []
    size = 0
    for group in range(groups):
        size += len(item.prompt.ids)
        for _ in range(responses):
            room = item.num_tokens if not full else min(item.num_tokens, tokens_per_row - size)
            if room < 1:
                return full
            one = replace(item, group=group, trajectory=len(full))
            if room < item.num_tokens:  # what is cut ends before its first image
                room = min(room, (*item.kinds, 1).index(1)) if item.kinds else room
                if room < 1:
                    return full
                ids = tuple(i for segment in item.segments for i in segment.ids)[:room]
                one = TrainItem(item.prompt, group, (Segment("assistant", ids, True),), len(full))
            full.append(one)
            size += room
    return full


def _find_room(learner: Learner, objective: Objective, items: Sequence[TrainItem], names: Sequence[str]) -> Load:
    """Return the largest packed row under the run's budget. If it does not fit, halve the budget once and try again.

    Raises: OutOfMemoryError as `rehearse`.
    """
    budgets, budget = learner.budgets, learner.budgets.of(ROWS)
    largest, unfit = _try(learner, objective, items, names, budget)
    if unfit is None:
        return largest
    divisible = unfit.responses > 1 and budgets.may_halve(ROWS)
    if not learner.may_repeat:  # one rank cannot try again alone: the launcher starts all again with half the budget
        error = _too_large(unfit)
        error.halved = {ROWS: [budget, unfit.half(budget)]} if divisible else {}
        raise error
    # Halve until it fits. The run may use the first half; a smaller budget that fits is only named in the error.
    smaller, still_unfit = budget, unfit
    while still_unfit is not None and still_unfit.responses > 1:
        smaller = still_unfit.half(smaller)
        largest, still_unfit = _try(learner, objective, items, names, smaller)
    if still_unfit is None and divisible and smaller == unfit.half(budget):
        budgets.halve(unfit)
        return largest
    error = _too_large(unfit if still_unfit is None else still_unfit)
    error.fits = smaller if still_unfit is None else None
    raise error


def _too_large(load: Load) -> OutOfMemoryError:
    return OutOfMemoryError(f"out of memory with {load} at once", where="; ".join(dict.fromkeys(load.rows)), load=load)


def _try(
    learner: Learner, objective: Objective, items: Sequence[TrainItem], names: Sequence[str], budget: int
) -> tuple[Load, Load | None]:
    """Return (the largest packed row under this budget, the packed row that did not fit or None).

    Two packed rows run: the one with the most tokens, and the one with the most image tokens if it is another.
    """
    recipe, rollout = learner.recipe, learner.recipe.rollout
    is_rl = recipe.kind == "rl"
    responses = rollout.samples_per_prompt if is_rl else 1
    groups = rollout.prompts_per_step if is_rl else recipe.train.rows_per_step
    rows: list[tuple[Load, StepBatch]] = []
    for item, name in zip(items, names, strict=True):
        full = full_row(item, responses=responses, groups=groups, tokens_per_row=budget)
        batch = StepBatch(full, [1.0] * len(full), [name] * len(full), world=learner.world)
        rows.append((row_load(full, batch.names_S), batch))
    longest = max(rows, key=lambda row: (row[0].tokens, row[0].image_tokens))
    most_images = max(rows, key=lambda row: (row[0].image_tokens, row[0].tokens))
    for _, batch in [longest] if most_images[0] == longest[0] else [most_images, longest]:
        try:
            _run(learner, objective, batch, budget)
        except OutOfMemoryError as error:
            if error.load is None:
                raise
            unfit = error.load
        else:
            unfit = None
        learner.start_over()
        if unfit is not None:
            return longest[0], unfit
    return longest[0], None


def _run(learner: Learner, objective: Objective, batch: StepBatch, budget: int) -> None:
    """Do everything that training does with a packed row, except for the optimizer step."""
    policy, reference, optimizer, device = learner.policy, learner.reference, learner.optimizer, learner.policy.device
    algorithm = objective.algorithm if isinstance(objective, PolicyGradient) else None
    # Afterwards the random state is as before (dropout draws from it), and no gradient is left.
    with torch.random.fork_rng([device] if device.type == "cuda" else []), optimizer.reserved():
        into = {"logp": batch.old_logp}
        if reference is not None and algorithm is not None and algorithm.kl == "full":
            fill_reference(reference, batch, budget)
            into["kl"] = {}
        elif reference is not None:
            fill_logps(reference, batch, batch.ref_logp, budget)
        if algorithm is not None and algorithm.teacher == "loss" and learner.teacher is not None:
            learner.teacher.rehearse(batch, budget)
        if algorithm is not None and algorithm.needs_critic:
            into["value"] = batch.old_value
        if algorithm is not None and algorithm.needs_energy:
            into["energy"] = {}
        masks = algorithm is not None and algorithm.masks
        if len(into) > 1 or learner.recipe.train.updates_per_step > 1 or masks:
            fill_stats(policy, batch, into, budget)
        batch.value_target = batch.old_value  # any target will do: the gradients are not used
        if algorithm is not None and masks:  # masked images take as much memory
            batch.masked_logp = batch.old_logp
            prompts = {item.group: item.prompt for item in batch.items}
            batch.masked_prompt = prompts.__getitem__ if algorithm.masks_both else None
        max_tokens = learner.longest_response
        add_gradients(policy, optimizer, batch, _Finite(objective), tokens_per_row=budget, max_tokens=max_tokens)
        optimizer.clip()
