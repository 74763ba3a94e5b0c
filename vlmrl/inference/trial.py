"""Trial of a recipe (`vlmrl try`): sample some prompts as training would, score the responses, change no weight."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from vlmrl.algo.algorithms import algorithm_of, stand_in, without_greedy
from vlmrl.algo.credit import untrained_values
from vlmrl.data.encode import EncodedPrompt
from vlmrl.data.images import encode_png
from vlmrl.data.sampler import PromptStream
from vlmrl.errors import DataError, Interruption, RewardError
from vlmrl.inference.filtered_dataset import write_rows
from vlmrl.inference.model_view import seen_images
from vlmrl.inference.solve_rate import Rate, Solved, measure_rate, spread, why_none
from vlmrl.inference.trial_boxes import draw_groups, fits_of
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.schema import Recipe
from vlmrl.rewards.worker_code import ServicePlace
from vlmrl.rollout.sample import (
    Prompt,
    add_advantages,
    encode_prompt,
    is_dead_group,
    sample_rollouts,
)
from vlmrl.rollout.scoring import score_rollouts
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.setup.model import load_origin, make_encoder, make_policy, sampling_params
from vlmrl.setup.model_origin import find_model
from vlmrl.setup.new_run import Labels, start_run
from vlmrl.setup.sources import make_scorer, open_sources
from vlmrl.store.files import remove_tree, write_atomic
from vlmrl.store.layout import MEDIA
from vlmrl.store.rollouts import count_rows
from vlmrl.store.runs import Run
from vlmrl.tasks.positions import Fit
from vlmrl.tasks.source import Source
from vlmrl.types import Group, Row

HISTOGRAM_BINS = 10


@dataclass(frozen=True)
class Keep:
    """Choice of the rows to write: solve rate in [low, high]. `targets`: source name -> path to write to."""

    low: float
    high: float
    targets: dict[str, Path]


@dataclass
class Trial:
    """Result of a trial.

    Args:
        groups: scored groups, with the advantages that training would use (see `stand_in`).
        rates: source name -> its solve rates and their measure; None if it has none.
        solve_rates: one per group, in [0, 1]; None if it has none.
        no_rate: reasons why a source has none, one line per source.
        seconds: time spent on generating.
        first: the first prompt, encoded.
        pictures: files of its images as the model sees them.
        kept: source name -> (path, or None if no row qualified; number of rows kept).
        fits: source name -> fit of its answers in each coordinate space, for sources whose answers are positions.
        drawn: number of a group -> pictures with its truth and answers.
        stand_in: replacement, in the advantages, of values that only training has, in words; "" = none.
    """

    groups: list[Group] = field(default_factory=list)
    rates: dict[str, Rate | None] = field(default_factory=dict)
    solve_rates: list[float | None] = field(default_factory=list)
    no_rate: list[str] = field(default_factory=list)
    seconds: float = 0.0
    first: EncodedPrompt | None = None
    pictures: list[Path] = field(default_factory=list)
    kept: dict[str, tuple[Path | None, int]] = field(default_factory=dict)
    fits: dict[str, Fit] = field(default_factory=dict)
    drawn: dict[int, list[Path]] = field(default_factory=dict)
    stand_in: str = ""


@contextmanager
def trial_run(loaded: LoadedRecipe, root: Path, argv: Sequence[str]) -> Iterator[Run]:
    """Create the run of a trial. A failed trial leaves no run; an interrupted one leaves its scored responses."""
    run = start_run(loaded, root, argv, Labels(), kind="try")
    try:
        with run:
            yield run
    except KeyboardInterrupt:
        done = sum(count_rows(path) for path in run.rollout_files().values())
        outcome = f"{done:,} scored responses are kept in {run.dir}"
        if not done:
            remove_tree(run.dir)
            outcome = "no response had been scored, nothing is kept"
        raise Interruption("try", outcome) from None
    except BaseException:
        remove_tree(run.dir)
        raise


def choose_rows(sources: Sequence[Source], seed: int, prompts: int | None) -> list[tuple[Source, int]]:
    """Return (source, row number) of the rows to try: the first that training would draw, or all (`prompts` None)."""
    if prompts is None:
        return [(source, i) for source in sources for i in range(len(source.rows))]
    stream = PromptStream([len(s.rows) for s in sources], [s.share for s in sources], seed)
    seen: dict[tuple[int, int], None] = {}
    for source, row, _ in stream.next(prompts):
        seen.setdefault((source, row))
    return [(sources[source], row) for source, row in seen]


def run_trial(
    recipe: Recipe,
    run: Run,
    runs_root: Path,
    *,
    prompts: int | None,
    samples: int,
    keep: Keep | None = None,
    solved: Solved | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Trial:
    """Sample and score prompts. Rollouts are saved as the run's steps, one batch per step. No weight is changed.

    Args:
        prompts: number of rows; None = every row of every source.
        samples: responses per prompt.
        keep: rows to write; None = none.
        solved: condition for a solved response; None = that of the task or the reward.
        progress: called with (finished responses, all responses).
    Raises: the errors of data, model and reward; a bug in the reward stops the trial and names the row. RewardError,
        after the first responses, when `keep` is given and a source has no solve rate, or no reward has the part of
        `solved`.
    """
    torch.manual_seed(recipe.train.seed)
    sources, _ = open_sources(recipe)
    origin = find_model(recipe.model.path, runs_root)
    model, processor = load_origin(recipe.model, origin)
    policy = make_policy(recipe.model, model, processor, recipe.rollout.temperature)
    encoder = make_encoder(recipe.model, processor)
    params = sampling_params(recipe, policy, processor.tokenizer)
    engine = TorchEngine(policy, processor.tokenizer, batch_tokens=recipe.rollout.batch_tokens)
    chosen_algorithm = algorithm_of(recipe.algo)
    algorithm = without_greedy(chosen_algorithm)
    chosen = choose_rows(sources, recipe.train.seed, prompts)
    trial, done, size = Trial(stand_in=stand_in(chosen_algorithm)), 0, max(1, recipe.rollout.prompts_per_step)
    with ExitStack() as stack:
        scorers = {s.name: stack.enter_context(make_scorer(s, recipe, ServicePlace(str(run.dir)))) for s in sources}
        for step, start in enumerate(range(0, len(chosen), size)):
            batch: list[Prompt] = [
                encode_prompt(source, source.rows[i], 0, encoder, recipe.rollout.max_prompt_tokens)
                for source, i in chosen[start : start + size]
            ]
            if trial.first is None:
                trial.first = batch[0].encoded
                trial.pictures = save_pictures(batch[0].encoded, processor.image_processor, run.dir)
            count = _counter(progress, done, len(chosen) * samples)
            begin = time.perf_counter()
            rollouts = sample_rollouts(
                engine, batch, params, num_samples=samples, run_seed=recipe.train.seed, version=0, progress=count
            )
            trial.seconds += time.perf_counter() - begin
            done += len(batch) * samples
            scored = score_rollouts(rollouts, scorers, strict=True)
            values = [untrained_values([s.trajectory.num_trained_tokens for s in g.samples]) for g in scored]
            groups = add_advantages(
                scored,
                algorithm,
                max_tokens=recipe.rollout.max_new_tokens,
                weights={s.name: s.part_weights for s in sources},
                values=values if algorithm.needs_critic else None,
            )
            run.write_rollouts(step, groups)
            trial.groups += groups
            if not {group.row.source for group in groups} <= trial.rates.keys():
                rate_groups(trial, sources, solved, must=keep is not None)
    rate_groups(trial, sources, solved, must=keep is not None)
    trial.fits, trial.drawn = fits_of(trial.groups, sources), draw_groups(trial.groups, sources, run.dir)
    if keep:
        trial.kept = _keep(trial, {source.name: source for source in sources}, keep)
    run.log(0, "event", {"event": "tried", **summary(trial)})
    return trial


def rate_groups(trial: Trial, sources: Sequence[Source], solved: Solved | None, *, must: bool) -> None:
    """Measure the solve rates of a trial's groups, source by source.

    Args:
        must: rows are chosen by the solve rate.
    Raises: RewardError when `must` is set and a source has no solve rate, or when no reward has the part of `solved`.
    """
    trial.solve_rates, trial.no_rate = [None] * len(trial.groups), []
    for source in sources:
        places = [i for i, group in enumerate(trial.groups) if group.row.source == source.name]
        groups = [trial.groups[i] for i in places]
        if not groups:
            continue
        rate = trial.rates[source.name] = measure_rate(source, groups, solved)
        if rate is None:
            trial.no_rate.append(why_none(source, groups))
            continue
        for place, value in zip(places, rate.by_group, strict=True):
            trial.solve_rates[place] = value
    if solved is not None and len(trial.rates) == len(sources) and not any(trial.rates.values()):
        raise RewardError(f"no reward returns the part `{solved.part}` of --solved '{solved}'", hint=trial.no_rate[0])
    if must and trial.no_rate:
        raise RewardError(
            "--filter needs a solve rate, and a source has none; nothing was written", hint=trial.no_rate[0]
        )


def summary(trial: Trial) -> dict[str, Any]:
    """Return the numbers of a trial as JSON values. Those of the solve rate exist only if a source has one."""
    samples = [s for group in trial.groups for s in group.samples]
    values = [s.score.value for s in samples if s.score.error is None]
    tokens = [s.trajectory.num_trained_tokens for s in samples]
    prompts = [len(group.samples[0].trajectory.prompt_ids) for group in trial.groups]
    parts = sorted({name for s in samples for name in s.score.parts})
    means = {p: [v for s in samples if (v := s.score.parts.get(p)) is not None] for p in parts}
    spreads = [numbers for group in trial.groups if (numbers := spread(group)) is not None]
    rates = [rate for rate in trial.solve_rates if rate is not None]
    metrics: dict[str, Any] = {
        "prompts": len(trial.groups),
        "responses": len(samples),
        "reward/mean": fmean(values),
        "reward/min": min(values),
        "reward/max": max(values),
        "reward/std_within_groups": fmean(each["std"] for each in spreads),
        **{f"reward/part/{part}": fmean(values) for part, values in means.items() if values},
        "rollout/dead_group_share": fmean(is_dead_group(group) for group in trial.groups),
        "rollout/truncated_share": fmean(s.trajectory.finish == "length" for s in samples),
        "rollout/prompt_tokens_mean": fmean(prompts),
        "rollout/prompt_tokens_max": max(prompts),
        "rollout/response_tokens_mean": fmean(tokens),
        "rollout/response_tokens_max": max(tokens),
        "rollout/tokens_per_second": sum(tokens) / max(trial.seconds, 1e-9),
    }
    if rates:
        metrics |= {"solve_rate/mean": fmean(rates), "solve_rate/histogram": rate_histogram(rates)}
    return metrics


def rate_histogram(rates: Sequence[float]) -> list[int]:
    """Count the groups by solve rate in ten equal bins; 1.0 is in the last."""
    counts = [0] * HISTOGRAM_BINS
    for rate in rates:
        # 1e-9: rounding must not move a rate at the edge of a bin to the bin below.
        counts[min(HISTOGRAM_BINS - 1, max(0, int(rate * HISTOGRAM_BINS + 1e-9)))] += 1
    return counts


def save_pictures(prompt: EncodedPrompt, image_processor: Any, run_dir: Path) -> list[Path]:
    """Write a prompt's images as the model sees them to `media/seen-<k>.png` of the run. Return the paths."""
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
    """Read `0.1:0.9` as two numbers. Raises: DataError unless 0 <= low <= high <= 1."""
    low, colon, high = text.partition(":")
    try:
        bounds = float(low), float(high)
    except ValueError:
        bounds = math.nan, math.nan
    if not colon or not 0 <= bounds[0] <= bounds[1] <= 1:
        hint = "write --filter 0.1:0.9: it keeps the rows with 10% to 90% of the responses solved"
        raise DataError(f"--filter {text} is not two numbers from 0 to 1, the smaller first", hint=hint)
    return bounds


def _keep(trial: Trial, sources: dict[str, Source], keep: Keep) -> dict[str, tuple[Path | None, int]]:
    kept: dict[str, tuple[Path | None, int]] = {}
    for name, target in keep.targets.items():
        rows: list[Row] = [
            group.row
            for group, rate in zip(trial.groups, trial.solve_rates, strict=True)
            if group.row.source == name and rate is not None and keep.low <= rate <= keep.high
        ]
        rate = trial.rates.get(name)
        args = {"filter": [keep.low, keep.high], "solve_rate": rate.words if rate else None}
        kept[name] = (write_rows(sources[name], rows, target, args=args) if rows else None, len(rows))
    return kept


def _counter(progress: Callable[[int, int], None], before: int, total: int) -> Callable[[int], None]:
    done = before

    def tell(newly: int) -> None:
        nonlocal done
        done += newly
        progress(done, total)

    return tell
