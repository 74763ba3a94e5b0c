"""A trial: sample some prompts as training would, score them, change nothing. What `vlmrl try` shows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from vlmrl.algo.family import algorithm_of, stand_in, without_greedy
from vlmrl.algo.inputs import untrained_values
from vlmrl.data.encode import EncodedPrompt
from vlmrl.data.images import encode_png
from vlmrl.data.sampler import PromptStream
from vlmrl.errors import DataError
from vlmrl.recipe.schema import Recipe
from vlmrl.rollout.sample import (
    Prompt,
    add_advantages,
    encode_prompt,
    is_dead_group,
    sample_rollouts,
    score_rollouts,
)
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.store.files import write_atomic
from vlmrl.store.layout import MEDIA
from vlmrl.store.runs import Run
from vlmrl.tasks.source import Source
from vlmrl.train.keep import write_rows
from vlmrl.train.origin import find_model
from vlmrl.train.seen import seen_images
from vlmrl.train.state import (
    load_origin,
    make_encoder,
    make_policy,
    make_scorer,
    open_sources,
    sampling_params,
)
from vlmrl.types import Group, Row

HISTOGRAM_BINS = 10


@dataclass(frozen=True)
class Keep:
    """Which rows to write: solve rate in [low, high], to `targets` (source name -> path)."""

    low: float
    high: float
    targets: dict[str, Path]


@dataclass
class Trial:
    """What came out.

    Args:
        groups: scored, with the advantages training would use (see stand_in).    solve_rates: of each group, in [0, 1].
        seconds: spent generating.    first: the first prompt, encoded.    pictures: its images as the model sees them.
        kept: source name -> (path or None when no row qualified, number of rows kept).
        stand_in: what the advantages take in place of what only training has, in words; "" = nothing.
    """

    groups: list[Group] = field(default_factory=list)
    solve_rates: list[float] = field(default_factory=list)
    seconds: float = 0.0
    first: EncodedPrompt | None = None
    pictures: list[Path] = field(default_factory=list)
    kept: dict[str, tuple[Path | None, int]] = field(default_factory=dict)
    stand_in: str = ""


def choose_rows(sources: Sequence[Source], seed: int, prompts: int | None) -> list[tuple[Source, int]]:
    """(source, row number) of the rows to try: those that training would draw first, or every row (prompts None)."""
    if prompts is None:
        return [(source, i) for source in sources for i in range(len(source.rows))]
    stream = PromptStream([len(s.rows) for s in sources], [s.share for s in sources], seed)
    seen: dict[tuple[int, int], None] = {}
    for source, row, _ in stream.next(prompts):
        seen.setdefault((source, row))
    return [(sources[source], row) for source, row in seen]


def run_trial(
    recipe: Recipe, run: Run, runs_root: Path, *, prompts: int | None, samples: int, keep: Keep | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Trial:  # fmt: skip
    """Sample and score; rollouts are saved as the run's steps, a batch a step. No weight is changed.

    Args:
        prompts: how many rows; None = every row of every source.    samples: responses for each.
        progress: called with (responses finished, all responses).
    Raises: the errors of data, model and reward; a bug in the reward stops with its row.
    """
    torch.manual_seed(recipe.train.seed)
    sources, _ = open_sources(recipe)
    origin = find_model(recipe.model.path, runs_root)
    model, processor = load_origin(recipe.model, origin)
    policy = make_policy(recipe.model, model, processor, recipe.rollout.temperature)
    encoder = make_encoder(recipe.model, processor)
    params = sampling_params(recipe, policy, processor.tokenizer)
    engine = TorchEngine(policy, processor.tokenizer, batch_tokens=recipe.rollout.batch_tokens)
    asked = algorithm_of(recipe.algo)
    algorithm = without_greedy(asked)
    chosen = choose_rows(sources, recipe.train.seed, prompts)
    trial, done, size = Trial(stand_in=stand_in(asked)), 0, max(1, recipe.rollout.prompts_per_step)
    with ExitStack() as stack:
        scorers = {s.name: stack.enter_context(make_scorer(s, recipe)) for s in sources}
        for step, start in enumerate(range(0, len(chosen), size)):
            batch: list[Prompt] = [
                encode_prompt(source, source.rows[i], 0, encoder, recipe.rollout.max_prompt_tokens)
                for source, i in chosen[start : start + size]
            ]
            if trial.first is None:
                trial.first = batch[0].encoded
                trial.pictures = save_pictures(batch[0].encoded, processor.image_processor, run.dir)
            told = _counter(progress, done, len(chosen) * samples)
            begin = time.perf_counter()
            rollouts = sample_rollouts(
                engine, batch, params, num_samples=samples, run_seed=recipe.train.seed, version=0, progress=told
            )
            trial.seconds += time.perf_counter() - begin
            done += len(batch) * samples
            scored = score_rollouts(rollouts, scorers, strict=True)
            values = [untrained_values([s.trajectory.num_trained_tokens for s in g.samples]) for g in scored]
            groups = add_advantages(
                scored, algorithm, max_tokens=recipe.rollout.max_new_tokens,
                weights={s.name: s.weights for s in sources}, values=values if algorithm.needs_critic else None,
            )  # fmt: skip
            run.write_rollouts(step, groups)
            trial.groups += groups
    by_name = {source.name: source for source in sources}
    trial.solve_rates = solve_rates(trial.groups, {name: value_bounds(s) for name, s in by_name.items()})
    if keep:
        trial.kept = _keep(trial, by_name, keep)
    run.log(0, "event", {"event": "tried", **summary(trial)})
    return trial


def value_bounds(source: Source) -> tuple[float, float]:
    """Least and largest value that a source's reward can have: the sum of weight times range; may be infinite."""
    if not source.weights:
        return -math.inf, math.inf
    low = high = 0.0
    for part, weight in source.weights.items():
        if weight:
            ends = [weight * end for end in source.reward.ranges.get(part, (-math.inf, math.inf))]
            low, high = low + min(ends), high + max(ends)
    return low, high


def solve_rates(groups: Sequence[Group], bounds: dict[str, tuple[float, float]]) -> list[float]:
    """Mean reward of each group on a scale from the least to the largest value the reward can have.

    0 = every sample got the least, 1 = every sample got the most. Where a part has no declared range, the least and the
    largest value seen from that source stand in for it. Failed samples do not count; a group of them alone is 0.
    """
    found = {name: (low, high) for name, (low, high) in bounds.items() if math.isfinite(low) and math.isfinite(high)}
    for group in groups:
        if group.row.source not in found:
            values = [s.score.value for g in groups if g.row.source == group.row.source for s in g.samples]
            finite = [v for v in values if math.isfinite(v)] or [0.0]
            found[group.row.source] = (min(0.0, *finite), max(finite))
    rates = []
    for group in groups:
        low, high = found[group.row.source]
        values = [s.score.value for s in group.samples if s.score.error is None]
        rates.append((fmean(values) - low) / (high - low) if values and high > low else 0.0)
    return rates


def summary(trial: Trial) -> dict[str, Any]:
    """The numbers of a trial, as JSON values."""
    samples = [s for group in trial.groups for s in group.samples]
    tokens = [s.trajectory.num_trained_tokens for s in samples]
    prompts = [len(group.samples[0].trajectory.prompt_ids) for group in trial.groups]
    parts = sorted({name for s in samples for name in s.score.parts})
    means = {p: [v for s in samples if (v := s.score.parts.get(p)) is not None] for p in parts}
    return {
        "prompts": len(trial.groups),
        "responses": len(samples),
        "reward/mean": fmean(s.score.value for s in samples),
        **{f"reward/part/{part}": fmean(values) for part, values in means.items() if values},
        "solve_rate/mean": fmean(trial.solve_rates),
        "solve_rate/histogram": rate_histogram(trial.solve_rates),
        "rollout/dead_group_share": fmean(is_dead_group(group) for group in trial.groups),
        "rollout/truncated_share": fmean(s.trajectory.finish == "length" for s in samples),
        "rollout/prompt_tokens_mean": fmean(prompts),
        "rollout/prompt_tokens_max": max(prompts),
        "rollout/response_tokens_mean": fmean(tokens),
        "rollout/response_tokens_max": max(tokens),
        "rollout/tokens_per_second": sum(tokens) / max(trial.seconds, 1e-9),
    }


def rate_histogram(rates: Sequence[float]) -> list[int]:
    """Groups by solve rate in ten equal bins; 1.0 is in the last."""
    counts = [0] * HISTOGRAM_BINS
    for rate in rates:
        counts[min(HISTOGRAM_BINS - 1, max(0, int(rate * HISTOGRAM_BINS + 1e-9)))] += 1
    return counts


def save_pictures(prompt: EncodedPrompt, image_processor: Any, run_dir: Path) -> list[Path]:
    """Write a prompt's images as the model sees them to `media/seen-<k>.png` of the run. Returns the paths."""
    from PIL import Image

    folder = run_dir / MEDIA
    paths = []
    for i, pixels in enumerate(seen_images(prompt, image_processor)):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"seen-{i}.png"
        write_atomic(path, encode_png(Image.fromarray(pixels)))
        paths.append(path)
    return paths


def parse_filter(text: str) -> tuple[float, float]:
    """`0.1:0.9` as numbers. Raises: DataError unless 0 <= low <= high <= 1."""
    low, colon, high = text.partition(":")
    try:
        bounds = float(low), float(high)
    except ValueError:
        bounds = math.nan, math.nan
    if not colon or not 0 <= bounds[0] <= bounds[1] <= 1:
        hint = "write --filter 0.1:0.9: keep rows whose mean reward is between 10% and 90% of the largest possible"
        raise DataError(f"--filter {text} is not two numbers from 0 to 1, the smaller first", hint=hint)
    return bounds


def _keep(trial: Trial, sources: dict[str, Source], keep: Keep) -> dict[str, tuple[Path | None, int]]:
    kept: dict[str, tuple[Path | None, int]] = {}
    for name, target in keep.targets.items():
        rows: list[Row] = [
            group.row
            for group, rate in zip(trial.groups, trial.solve_rates, strict=True)
            if group.row.source == name and keep.low <= rate <= keep.high
        ]
        args = {"filter": [keep.low, keep.high]}
        kept[name] = (write_rows(sources[name], rows, target, args=args) if rows else None, len(rows))
    return kept


def _counter(progress: Callable[[int, int], None], before: int, total: int) -> Callable[[int], None]:
    done = before

    def tell(newly: int) -> None:
        nonlocal done
        done += newly
        progress(done, total)

    return tell
