"""Trial of a recipe (`vlmrl try`): sample some prompts as training would, score the responses, change no weight.

It shows the solve rate of each prompt, how well boxes fit in each of the coordinates, and images as the model sees
them. With `--filter`, rows worth training on are written as a dataset of the same kind: a prepared folder, whose split
has only these rows, or a Parquet table with the same columns. To train on either, name it in `data.path`.
"""

from __future__ import annotations

import io
import json
import math
import operator
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlmrl.algo.algorithms import algorithm_of, stand_in, without_model
from vlmrl.algo.credit import add_advantages, untrained_values
from vlmrl.data.dataset import INFO_FILE
from vlmrl.data.dataset_writer import building
from vlmrl.data.encode import EncodedPrompt
from vlmrl.data.images import encode_png
from vlmrl.errors import DataError, Interruption, RewardError
from vlmrl.evaluate.run import counted
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.schema import Recipe
from vlmrl.rewards.base import RIGHT, ServicePlace, is_binary, value_bounds
from vlmrl.rollout.episodes import episode_metrics
from vlmrl.rollout.sample import Prompt, encode_prompt, sample_rollouts, score_rollouts
from vlmrl.setup.model import load_origin, make_encoder, make_generator, make_policy, sampling_params
from vlmrl.setup.model_origin import find_model
from vlmrl.setup.run_records import Labels, start_run
from vlmrl.setup.sources import make_scorer, open_sources
from vlmrl.store.files import remove_tree, write_atomic
from vlmrl.store.layout import MEDIA
from vlmrl.store.rollouts import count_rows
from vlmrl.store.runs import Run
from vlmrl.tasks.positions import Fit, Mark, caption_of, save_overlays
from vlmrl.tasks.source import PromptStream, Source, accuracies, response_input
from vlmrl.types import Group, Row, ScoredSample, is_cut

MOST_DRAWN = 8
"""Number of prompts of a trial that are drawn."""


def fits_of(groups: Sequence[Group], sources: Sequence[Source]) -> dict[str, Fit]:
    """Return source name -> fit of its responses, for the sources whose answers are positions."""
    fits = {}
    for source in sources:
        own = [group for group in groups if group.row.source == source.name]
        if source.task.positions is not None and own:
            positions = source.task.positions(source.reward)
            fits[source.name] = positions.fit([response_input(group, s) for group in own for s in group.samples])
    return fits


def draw_groups(groups: Sequence[Group], sources: Sequence[Source], run_dir: Path) -> dict[int, list[Path]]:
    """Draw the truth and all answers of the first prompts, in the declared coordinates, to `media/boxes-<number>.png`.

    Returns: number of a group -> its pictures.
    Raises: as `save_overlays`.
    """
    by_name = {source.name: source for source in sources}
    drawn: dict[int, list[Path]] = {}
    for number, group in enumerate(groups):
        source = by_name[group.row.source]
        if source.task.positions is None or len(drawn) == MOST_DRAWN:
            continue
        positions = source.task.positions(source.reward)
        sets = [positions.marks(response_input(group, s), positions.declared) for s in group.samples]
        marks: dict[Mark, None] = dict.fromkeys(mark for marks in sets for mark in marks)
        folder, name, caption = run_dir / MEDIA, f"boxes-{number}", caption_of(group.row.columns)
        drawn[number] = save_overlays(folder, name, group.row.media, list(marks), source.dataset.image, caption)
    return drawn


def seen_images(prompt: EncodedPrompt, image_processor: Any) -> list[np.ndarray]:
    """Return the images of a prompt after resizing and normalising, converted back to pixels.

    Grid families (`image_grid_thw`): the flat patches are put back on their grid; the others have [N, 3, H, W].

    Returns: one uint8 array [H, W, 3] for each image, or for each tile of an image that is cut into tiles; none if the
        tensors are patches in a layout of the family's own (Gemma 4, MiniCPM-V).
    """
    if not prompt.images or {"image_position_ids", "target_sizes"} & prompt.images.keys():
        return []
    if "image_grid_thw" in prompt.images:
        tensors = _from_grid(prompt.images, image_processor)
    else:
        pixels = prompt.images["pixel_values"]
        tensors = list(pixels.reshape(-1, *pixels.shape[-3:]))  # [.., 3, H, W] -> N times [3, H, W]
    scale = np.asarray(getattr(image_processor, "image_std", None) or (1.0, 1.0, 1.0))
    shift = np.asarray(getattr(image_processor, "image_mean", None) or (0.0, 0.0, 0.0))
    factor = 1.0 / float(getattr(image_processor, "rescale_factor", None) or 1 / 255)
    # [3, H, W] -> [H, W, 3]
    pictures = [np.moveaxis(t.float().cpu().numpy(), 0, -1) * scale + shift for t in tensors]
    return [np.clip(np.rint(picture * factor), 0, 255).astype(np.uint8) for picture in pictures]


def _from_grid(images: Mapping[str, Tensor], image_processor: Any) -> list[Tensor]:
    """Rearrange patches from the processor's order (cells of merge x merge patches) to one [3, H, W] per image."""
    patch, merge = image_processor.patch_size, image_processor.merge_size
    pictures, start = [], 0
    for grid in images["image_grid_thw"]:
        frames, rows, columns = (int(n) for n in grid)
        count = frames * rows * columns
        # [patches, 3 * frames of a patch * patch * patch]
        flat = images["pixel_values"][start : start + count]
        start += count
        shape = (frames, rows // merge, columns // merge, merge, merge, 3, -1, patch, patch)
        grid_patches = flat.reshape(shape)[0, :, :, :, :, :, 0]  # all frames of a still image are copies
        # [R / merge, C / merge, merge, merge, 3, patch, patch] -> [3, R * patch, C * patch]; R, C: the grid in patches
        pictures.append(grid_patches.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch))
    return pictures


SIGNS = {">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt}
CONDITION = re.compile(r"\s*(?P<part>[^\s<>=](?:[^<>=]*[^\s<>=])?)\s*(?P<sign>>=|<=|==|>|<)\s*(?P<bound>\S+)\s*")
SCORE = "reward"
"""Name that stands for the score itself in a condition."""


@dataclass(frozen=True)
class Solved:
    """The user's condition for a solved response: `part sign bound`. `part` is a part of the reward, or SCORE."""

    part: str
    sign: str
    bound: float

    def __str__(self) -> str:
        return f"{self.part} {self.sign} {self.bound:g}"

    def of(self, sample: ScoredSample) -> float | None:
        """Return 1 for a solved response, 0 for another, None if the part does not apply."""
        value = sample.score.value if self.part == SCORE else sample.score.parts.get(self.part)
        return None if value is None or math.isnan(value) else float(SIGNS[self.sign](value, self.bound))


def parse_solved(text: str) -> Solved:
    """Read a condition such as `acc>=1`. Raises: RewardError when the text is no condition."""
    match = CONDITION.fullmatch(text)
    try:
        bound = float(match["bound"]) if match else math.nan
    except ValueError:
        bound = math.nan
    if match is None or not math.isfinite(bound):
        hint = "write --solved 'acc>=1': a part, or `reward` for the score; one of >=, >, <=, <, ==; a number"
        raise RewardError(f"--solved {text!r} is not a condition", hint=hint)
    return Solved(match["part"], match["sign"], bound)


@dataclass(frozen=True)
class Rate:
    """Solve rates of a source's groups, and their measure.

    Args:
        words: the measure, in words.
        by_group: one rate per group of the source, in order; in [0, 1], None if no response of the group is measured.
    """

    words: str
    by_group: tuple[float | None, ...]


def measure_rate(source: Source, groups: Sequence[Group], solved: Solved | None = None) -> Rate | None:
    """Return the solve rate of a source's groups; None if nothing says what a solved response is.

    The measure is the first of these that exists: the user's condition; the accuracy (rewards/base.py), as the
    share of right responses or, if it is not only right or wrong, as the mean; the reward, scaled from 0 at the
    smallest value that it declares to 1 at the largest.
    """
    if solved is not None:
        if solved.part != SCORE and not any(solved.part in s.score.parts for g in groups for s in g.samples):
            return None
        return Rate(f"share of responses with {solved}", _means([[solved.of(s) for s in g.samples] for g in groups]))
    by_group = accuracies(groups, [source])
    values = [a for group_accuracies in by_group for a in group_accuracies if a is not None]
    if values and is_binary(values):
        rights = [[None if a is None else float(a == RIGHT) for a in group_accuracies] for group_accuracies in by_group]
        return Rate(f"share of responses with accuracy >= {RIGHT:g}", _means(rights))
    if values and all(0 <= a <= 1 for a in values):
        return Rate("mean of accuracy", _means(by_group))
    low, high = value_bounds(source.reward, source.weights)
    if not values and math.isfinite(low) and math.isfinite(high) and high > low:
        scaled = [
            [(s.score.value - low) / (high - low) if s.score.error is None else None for s in g.samples] for g in groups
        ]
        scale = "" if (low, high) == (0, 1) else f", of {low:g} to {high:g}"
        return Rate(f"the mean reward{scale}", _means(scaled))
    return None


def _means(values: Sequence[Sequence[float | None]]) -> tuple[float | None, ...]:
    present = [[v for v in numbers if v is not None] for numbers in values]
    return tuple(fmean(numbers) if numbers else None for numbers in present)


FORMAL = re.compile("form|length|len|tag|token|short|long|penalty")
"""Pattern of the names of parts that measure no answer."""


def why_none(source: Source, groups: Sequence[Group]) -> str:
    """Return why a source has no solve rate, and the option that would define one."""
    parts = list(dict.fromkeys(name for g in groups for s in g.samples for name in s.score.parts))
    known = list(dict.fromkeys([*parts, SCORE]))
    example = min(known, key=lambda name: (name == SCORE, bool(FORMAL.search(name.lower()))))
    return (
        f"it is not known which part of `{source.name}` means right. Name it, such as --solved '{example}>=1' "
        f"(parts: {', '.join(known)})"
    )


def spread(group: Group) -> Mapping[str, float] | None:
    """Return mean, min, max and std (of the population) of a group's scores; None if it has no score."""
    values = [s.score.value for s in group.samples if s.score.error is None]
    if not values:
        return None
    return {"mean": fmean(values), "min": min(values), "max": max(values), "std": pstdev(values)}


IMAGES = "images"
NOT_COPIED = ("schema", "splits", "files", "fingerprint")


def check_target(sources: Sequence[Source], out: Path) -> dict[str, Path]:
    """Return where the kept rows of each source will be written: source name -> path.

    The path is `out` for one source, `out/<name>` for several.

    Raises: DataError when the path exists, or when it is a file and the source is a prepared dataset.
    """
    targets = {}
    for source in sources:
        target = out if len(sources) == 1 else out / source.name
        if is_prepared(source):
            if target.suffix:
                hint = f"give a folder: --out {target.with_suffix('')}"
                raise DataError(
                    f"`{source.name}` is a prepared dataset, so its rows become a folder, not {target}", hint=hint
                )
        elif target.suffix != ".parquet":
            target = target.with_name(target.name + ".parquet")
        if target.exists():
            raise DataError(f"{target} exists; nothing was sampled or written", hint="give another --out, or remove it")
        targets[source.name] = target
    return targets


def is_prepared(source: Source) -> bool:
    """Return whether a source is a folder made by `vlmrl prep`."""
    return (Path(source.dataset.path) / INFO_FILE).is_file()


def write_rows(source: Source, rows: Sequence[Row], target: Path, *, args: Mapping[str, Any]) -> Path:
    """Write some of a source's rows as a dataset, and return `target`. It appears complete or not at all.

    Args:
        args: how the rows were chosen; kept in dataset.json.
    Raises: DataError when an image cannot be read, or when `target` exists by now.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_prepared(source):
        dataset = source.dataset
        info = {name: value for name, value in dataset.info.items() if name not in NOT_COPIED}
        original = {"fingerprint": dataset.fingerprint, "args": info.get("args", {})}
        info["args"] = {"kept_from": original, "kept_split": source.split, **args}
        info = {k: v for k, v in info.items() if k not in ("counts", "histograms", "dropped", "doctor")}
        with building(target) as build:
            for split in dataset.splits:
                chosen = rows if split == source.split else dataset.rows(split)
                fields = []
                for row in chosen:
                    for media in row.media:
                        if media.sha256 not in build.images:
                            build.images.add(media.sha256, dataset.image_bytes(media))
                    fields.append(
                        {"prompt_id": row.prompt_id, "truth": dict(row.truth), IMAGES: list(row.media), **row.columns}
                    )
                if fields:
                    build.write_rows(split, fields)
            build.finish(info)
    else:
        write_atomic(target, _table_bytes(source, rows))
    return target


def _table_bytes(source: Source, rows: Sequence[Row]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    column_names = source.dataset.info.get("columns") or {}
    image_column = column_names.get(IMAGES) or IMAGES
    names = list(dict.fromkeys(name for row in rows for name in row.columns))
    columns: dict[str, Any] = {name: _column([row.columns.get(name) for row in rows]) for name in names}
    if any(row.media for row in rows):
        image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        files = [[{"bytes": source.dataset.image_bytes(m), "path": None} for m in row.media] for row in rows]
        columns[image_column] = pa.array(files, pa.list_(image))
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, compression="zstd")
    return sink.getvalue()


def _column(values: list[Any]) -> Any:
    """Return an Arrow column. Values of mixed kinds become JSON text."""
    import pyarrow as pa

    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([None if v is None else json.dumps(v, ensure_ascii=False) for v in values])


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
    engine = make_generator(recipe, policy, encoder, sources=sources, engine="torch")
    chosen_algorithm = algorithm_of(recipe.algo)
    algorithm = without_model(chosen_algorithm)
    chosen = choose_rows(sources, recipe.train.seed, prompts)
    trial, size = Trial(stand_in=stand_in(chosen_algorithm)), max(1, recipe.rollout.prompts_per_step)
    count = counted(progress, len(chosen) * samples)
    with ExitStack() as stack:
        stack.callback(engine.close)
        scorers = {s.name: stack.enter_context(make_scorer(s, recipe, ServicePlace(str(run.dir)))) for s in sources}
        for step, start in enumerate(range(0, len(chosen), size)):
            batch: list[Prompt] = [
                encode_prompt(source, source.rows[i], 0, encoder, recipe.rollout.max_prompt_tokens)
                for source, i in chosen[start : start + size]
            ]
            if trial.first is None:
                trial.first = batch[0].encoded
                trial.pictures = save_pictures(batch[0].encoded, processor.image_processor, run.dir)
            begin = time.perf_counter()
            rollouts = sample_rollouts(
                engine, batch, params, num_samples=samples, run_seed=recipe.train.seed, version=0, progress=count
            )
            trial.seconds += time.perf_counter() - begin
            scored = score_rollouts(rollouts, scorers, strict=True)
            values = [untrained_values([s.trajectory.num_trained_tokens for s in g.samples]) for g in scored]
            groups = add_advantages(
                scored,
                algorithm,
                max_tokens=recipe.longest_response,
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
    scores = lambda group: [s.score.value for s in group.samples if s.score.error is None]  # noqa: E731
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
        "rollout/dead_group_share": fmean(g.is_dead and len(set(scores(g))) <= 1 for g in trial.groups),
        "rollout/truncated_share": fmean(is_cut(s.trajectory.finish, s.ending) for s in samples),
        "rollout/prompt_tokens_mean": fmean(prompts),
        "rollout/prompt_tokens_max": max(prompts),
        "rollout/response_tokens_mean": fmean(tokens),
        "rollout/response_tokens_max": max(tokens),
        "rollout/tokens_per_second": sum(tokens) / max(trial.seconds, 1e-9),
    }
    metrics |= episode_metrics(samples)
    if rates:
        metrics |= {"solve_rate/mean": fmean(rates), "solve_rate/histogram": rate_histogram(rates)}
    return metrics


def rate_histogram(rates: Sequence[float]) -> list[int]:
    """Count the groups by solve rate in ten equal bins; 1.0 is in the last."""
    # 1e-9: rounding must not move a rate at the edge of a bin to the bin below.
    bins = np.clip(np.asarray(rates) * HISTOGRAM_BINS + 1e-9, 0, HISTOGRAM_BINS - 1).astype(int)
    return np.bincount(bins, minlength=HISTOGRAM_BINS).tolist()


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
