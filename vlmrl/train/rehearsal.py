"""Before the first step: the largest packed row that the data can make runs forward and backward, and changes nothing.

A run that cannot fit then ends in its first minute, with the key to change, and not in its third hour.

What is exact: the row is built and run as an update would, every response as long as `rollout.max_new_tokens` (in
`sft`: as the row's own), with the reference, old log-probs and values where the objective has them, and with all
gradients and optimizer state in memory. What is estimated: which prompts are the heaviest. The rows that the run will
draw are looked at for at most `SCAN_SECONDS`, ranked by the size of their images and the length of their text; the
first few are encoded and measured. What is not covered: rows of much shorter responses hold more prompts, and so more
images, in as many tokens; and the built-in engine's cache (`rollout.batch_tokens`).
"""

from __future__ import annotations

import copy
import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmrl.algo.family import algorithm_of
from vlmrl.data.measurements import CHARACTERS_PER_TOKEN, estimate_image_tokens
from vlmrl.data.packing import TrainItem, row_load
from vlmrl.dist import rank_process
from vlmrl.errors import Load, OutOfMemoryError, gib
from vlmrl.model.device_memory import give_back, memory_use
from vlmrl.model.policy import Policy
from vlmrl.packed import TokenStats
from vlmrl.recipe.schema import Recipe
from vlmrl.store.runs import Run
from vlmrl.tasks.source import Source
from vlmrl.train.forward_passes import fill_logps, fill_reference, fill_stats
from vlmrl.train.learner import Learner
from vlmrl.train.objectives import Objective, PolicyGradient, TokenData
from vlmrl.train.out_of_memory import ROWS
from vlmrl.train.prompt_feed import PromptFeed
from vlmrl.train.step_batch import StepBatch
from vlmrl.train.update import add_gradients
from vlmrl.types import Row, Segment, name_row

SCAN_SECONDS = 10.0
"""Seconds for which rows are looked at."""
ENCODED_ROWS = 4
"""Number of the longest rows, and of those with most image tokens, are encoded."""

MakeItem = Callable[[Source, Row, int, int], TrainItem]
"""(source, row, occurrence, index) -> the longest trajectory that training may make of the row."""
ResponseText = Callable[[Source, Row], str]
"""The response that a row brings along."""


@dataclass(frozen=True)
class ComingRow:
    """Dataset row that the run will draw, by its place, with an estimate of its tokens.

    Args:
        source: index of its source.
        row: index within the source.
        occurrence: how often it was drawn before.
        text_tokens: the tokens of its text, estimated.
        image_tokens: the tokens of its images, estimated.
    """

    source: int
    row: int
    occurrence: int
    text_tokens: int
    image_tokens: int

    @property
    def tokens(self) -> int:
        """All tokens, estimated."""
        return self.text_tokens + self.image_tokens


@dataclass(frozen=True)
class ComingRows:
    """Dataset rows to come, as far as they were looked at. `complete`: whether the run draws no others."""

    rows: tuple[ComingRow, ...]
    complete: bool

    def __str__(self) -> str:
        return f"{'all' if self.complete else 'the first'} {len(self.rows):,} rows to come were looked at"


@dataclass(frozen=True)
class HeaviestRows:
    """Candidates for the largest packed row: the trajectory of each row, and its name in an error."""

    scan: ComingRows
    items: Sequence[TrainItem]
    names: Sequence[str]


@dataclass(frozen=True)
class _Finite:
    """An objective whose loss is finite whatever the model says of responses that nobody sampled."""

    objective: Objective

    @property
    def aggregation(self) -> str:
        return self.objective.aggregation

    def select(self, policy: Policy, batch: StepBatch, tokens_per_row: int) -> dict[int, Tensor]:
        return self.objective.select(policy, batch, tokens_per_row)

    def loss(self, stats: TokenStats, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
        loss, shown = self.objective.loss(stats, data)
        return torch.nan_to_num(loss, 0.0, 0.0, 0.0), shown


def rehearse(
    learner: Learner, objective: Objective, scan: Callable[[], HeaviestRows], step: int, run: Run,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Run the largest packed row and say in one line what it took.

    No weight, moment, random state or data position changes. A row that does not fit is tried once more with half the
    budget, which is the run's from then on.

    Args:
        learner: runs the row.
        objective: what the run minimises.
        scan: looks at the rows to come, see `heaviest_rows`; called first.
        step: the step that the run begins with.
        run: where the event is written.
        say: tells the user.

    Raises: OutOfMemoryError when half the budget does not fit either; smaller budgets are tried first, to say which
        one would. DataError when a row to come cannot be encoded, as the step that draws it would, or has an image of
        a size that the model does not take.
    """
    if not learner.recipe.train.rehearsal:
        run.write_log("the largest row is not rehearsed: train.rehearsal = false")
        return
    rank_process.phase("rehearsal", step)
    start = time.perf_counter()
    heaviest = scan()
    if not heaviest.items:
        return
    device = learner.policy.device
    largest = _find_room(learner, objective, heaviest.items, heaviest.names)
    peak, limit = memory_use(device)
    seconds = time.perf_counter() - start
    say(
        f"the largest row fits: {largest}, {largest.rows[0]}; peak {gib(peak)} of {gib(limit)}; {seconds:.1f} s"
        f" ({heaviest.scan})"
    )
    run.event(
        step, "largest row rehearsed", tokens=largest.tokens, image_tokens=largest.image_tokens,
        responses=largest.responses, rows=list(largest.rows), peak_bytes=peak, limit_bytes=limit, seconds=seconds,
        rows_looked_at=len(heaviest.scan.rows), complete=heaviest.scan.complete,
    )  # fmt: skip
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def heaviest_rows(
    feed: PromptFeed, step: int, make_item: MakeItem, response_text: ResponseText = lambda source, row: ""
) -> HeaviestRows:
    """Look at the rows to come and encode those that may be the heaviest. All processes get the same rows.

    Args:
        feed: where the rows come from; its stream does not move.
        step: the step that the run begins with.
        make_item: makes the longest trajectory of a row.
        response_text: gives the response that a row brings along.
    """
    scan = feed.world.gather(coming_rows(feed, step, response_text))[0]  # what rank 0 had time to look at
    drawn = [(feed.sources[d.source], feed.sources[d.source].rows[d.row], d.occurrence) for d in heaviest(scan)]
    items = [make_item(*place, 0) for place in drawn]
    return HeaviestRows(scan, items, [name_row(source.name, row.prompt_id) for source, row, _ in drawn])


def coming_rows(feed: PromptFeed, step: int, response_text: ResponseText, seconds: float = SCAN_SECONDS) -> ComingRows:
    """Return the different rows that the run will draw from `step` on (under a filter: may draw), in that order."""
    recipe, start = feed.recipe, time.perf_counter()
    stream, rows = copy.deepcopy(feed.stream), {}
    per_step = recipe.rollout.prompts_per_step if recipe.kind == "rl" else recipe.train.rows_per_step
    for _ in range((recipe.train.steps - step) * _draws_a_step(recipe)):
        for draw in stream.next(per_step):
            if draw[:2] not in rows:
                rows[draw[:2]] = _estimate(feed, *draw, response_text)
        if len(rows) == sum(len(source.rows) for source in feed.sources):
            break
        if time.perf_counter() - start > seconds:
            return ComingRows(tuple(rows.values()), False)
    return ComingRows(tuple(rows.values()), True)


def _draws_a_step(recipe: Recipe) -> int:
    """Return how often a step may draw its prompts anew."""
    algorithm = algorithm_of(recipe.algo) if recipe.kind == "rl" else None
    return algorithm.filter_tries if algorithm is not None and algorithm.filter != "none" else 1


def _estimate(feed: PromptFeed, source: int, row: int, occurrence: int, response_text: ResponseText) -> ComingRow:
    owner, model = feed.sources[source], feed.recipe.model
    content = owner.rows[row]
    feed.encoder.require_sizes(content)
    characters = sum(len(m.content) for m in owner.messages(content)) + len(response_text(owner, content))
    images = sum(estimate_image_tokens(media, model.min_pixels, model.max_pixels) for media in content.media)
    return ComingRow(source, row, occurrence, characters // CHARACTERS_PER_TOKEN, images)


def heaviest(scan: ComingRows) -> list[ComingRow]:
    """Return the longest rows and those with most image tokens, by estimate: at most twice `ENCODED_ROWS`."""
    longest = heapq.nlargest(ENCODED_ROWS, scan.rows, key=lambda d: d.tokens)
    pictured = heapq.nlargest(ENCODED_ROWS, scan.rows, key=lambda d: d.image_tokens)
    return list(dict.fromkeys([*longest, *pictured]))


def full_row(item: TrainItem, *, responses: int, groups: int, tokens_per_row: int) -> list[TrainItem]:
    """Return a packed row of copies of this trajectory, as full as `pack` makes packed rows of its prompt.

    The last response is shorter where that fills the row: responses are of all lengths.

    Args:
        item: its prompt's longest trajectory, of text.
        responses: the responses of each prompt.
        groups: the prompts of a step.
        tokens_per_row: the budget, in tokens.
    """
    full: list[TrainItem] = []
    size = 0
    for group in range(groups):
        size += len(item.prompt.ids)
        for _ in range(responses):
            room = item.num_tokens if not full else min(item.num_tokens, tokens_per_row - size)
            if room < 1:
                return full
            ids = tuple(i for segment in item.segments for i in segment.ids)[:room]
            full.append(TrainItem(item.prompt, group, (Segment("assistant", ids, True),), len(full)))
            size += room
    return full


def _find_room(learner: Learner, objective: Objective, items: Sequence[TrainItem], names: Sequence[str]) -> Load:
    """Return the largest packed row under the run's budget, which has room, or has room after the budget was halved."""
    budgets, budget = learner.budgets, learner.budgets.of(ROWS)
    largest, first = _try(learner, objective, items, names, budget)
    if first is None:
        return largest
    divisible = first.responses > 1 and budgets.may_halve(ROWS)
    if learner.world.size > 1:
        error = _too_large(first)
        error.halved = {ROWS: [budget, first.half(budget)]} if divisible else {}
        raise error
    smaller, left = budget, first
    while left is not None and left.responses > 1:
        smaller = left.half(smaller)
        largest, left = _try(learner, objective, items, names, smaller)
    if left is None and divisible and smaller == first.half(budget):
        budgets.halve(first)
        return largest
    error = _too_large(first if left is None else left)
    error.fits = smaller if left is None else None
    raise error


def _too_large(load: Load) -> OutOfMemoryError:
    return OutOfMemoryError(f"out of memory with {load} at once", where="; ".join(dict.fromkeys(load.rows)), load=load)


def _try(
    learner: Learner, objective: Objective, items: Sequence[TrainItem], names: Sequence[str], budget: int
) -> tuple[Load, Load | None]:
    """Return (the largest packed row under this budget, the packed row that did not fit or None).

    Two packed rows run: that with most tokens, and that with most image tokens, where it is another one.
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
    pictured = max(rows, key=lambda row: (row[0].image_tokens, row[0].tokens))
    for _, batch in [longest] if pictured[0] == longest[0] else [pictured, longest]:
        try:
            _run(learner, objective, batch, budget)
        except OutOfMemoryError as error:
            if error.load is None:
                raise
            missing = error.load
        else:
            missing = None
        learner.optimizer.clear()
        give_back(learner.policy.device)
        if missing is not None:
            return longest[0], missing
    return longest[0], None


def _run(learner: Learner, objective: Objective, batch: StepBatch, budget: int) -> None:
    """Do everything that training does with a packed row, except for the step of the optimizer."""
    policy, reference, optimizer, device = learner.policy, learner.reference, learner.optimizer, learner.policy.device
    algorithm = objective.algorithm if isinstance(objective, PolicyGradient) else None
    with torch.random.fork_rng([device] if device.type == "cuda" else []), optimizer.reserved():
        into = {"logp": batch.old_logp}
        if reference is not None and algorithm is not None and algorithm.kl == "full":
            fill_reference(reference, batch, budget)
            into["kl"] = {}
        elif reference is not None:
            fill_logps(reference, batch, batch.ref_logp, budget)
        if algorithm is not None and algorithm.needs_critic:
            into["value"] = batch.old_value
        if len(into) > 1 or learner.recipe.train.updates_per_step > 1:
            fill_stats(policy, batch, into, budget)
        batch.value_target = batch.old_value
        most = learner.recipe.rollout.max_new_tokens
        add_gradients(policy, optimizer, batch, _Finite(objective), tokens_per_row=budget, max_tokens=most)
        optimizer.clip()
