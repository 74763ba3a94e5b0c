"""Score saved rollouts again, on the CPU and without torch: does the reward still say what it said, and what pays?"""

from __future__ import annotations

import io
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vlmrl.check.saved import Saved, SavedSample
from vlmrl.errors import RewardError, StoreError, VlmrlError
from vlmrl.rewards import REWARDS, load_recorded, load_reward
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.scorer import Scorer
from vlmrl.types import RewardInput, Score

MAX_TEXT_CHARS = 2000
MOST_REASONS = 10


@dataclass(frozen=True)
class Chosen:
    """The reward of one source. `changed`: how it differs from the one that scored the rollouts, or ""."""

    spec: RewardSpec
    weights: Mapping[str, float]
    changed: str = ""


def own_rewards(saved: Saved) -> dict[str, Chosen]:
    """The rewards that scored the rollouts, by source, as they are today.

    Raises: RewardError when the manifest does not name them, or they cannot be loaded any more.
    """
    chosen: dict[str, Chosen] = {}
    for source in saved.sources:
        record = saved.records.get(source)
        if record is None or saved.run is None:
            raise RewardError(
                f"nothing says which reward scored the rollouts of source `{source}`",
                where=str(saved.path),
                hint="name one: --reward taxonomy, or --reward path/to/file.py:function",
            )
        spec = load_recorded(record, base_dir=saved.run.manifest.cwd or None)
        changed = ""
        if record.get("sha256") != spec.source_sha256:
            what = f"the built-in `{spec.name}` has" if spec.user is None else f"{record['name'].partition(':')[0]} has"
            changed = f"{what} changed since the run"
        chosen[source] = Chosen(spec, dict(record.get("weights") or spec.weights), changed)
    return chosen


def other_rewards(
    saved: Saved, name: str, *, args: Mapping[str, Any], weights: Mapping[str, float] | None, style: str = "auto"
) -> dict[str, Chosen]:
    """The reward `name` for every source. A built-in that needs `levels` gets those of the source's task.

    Where the run itself used `name`, its own arguments and weights hold as far as `args` and `weights` do not say more.
    """
    chosen: dict[str, Chosen] = {}
    for source in saved.sources:
        record = saved.records.get(source, {})
        own = record.get("name") == name
        bound = {**(record.get("args", {}) if own else {}), **args}
        if name in REWARDS and "levels" not in bound and _takes_levels(name) and source in saved.levels:
            bound["levels"] = saved.levels[source]
        spec = load_reward(name, args=bound, style=style)
        chosen[source] = Chosen(spec, dict(weights or (_kept_weights(saved, record, spec) if own else spec.weights)))
    return chosen


def _kept_weights(saved: Saved, record: Mapping[str, Any], spec: RewardSpec) -> Mapping[str, float]:
    """The run's weights if its recipe chose them; else the reward's defaults, which depend on its arguments."""
    kept = dict(record.get("weights") or {})
    base_dir = saved.run.manifest.cwd if saved.run is not None else None
    try:
        chosen = kept != dict(load_recorded(record, base_dir=base_dir or None).weights)
    except RewardError:
        chosen = True
    usable = {k: v for k, v in kept.items() if spec.user is not None or k in spec.ranges}
    return usable if chosen and usable else spec.weights


def parse_weights(text: str) -> dict[str, float]:
    """`a=1,b=0.5` as a mapping. Raises: RewardError when it is not of that form."""
    weights: dict[str, float] = {}
    for item in text.split(","):
        name, sign, number = item.partition("=")
        try:
            weights[name.strip()] = float(number)
        except ValueError:
            sign = ""
        if not sign or not name.strip() or not math.isfinite(weights.get(name.strip(), math.nan)):
            raise RewardError(f"--weights {text!r} is not of the form part=number,part=number")
    return weights


def score_saved(saved: Saved, chosen: Mapping[str, Chosen]) -> list[Score]:
    """Every sample scored again, in the calls in which training made them: one list a step and source.

    Raises: RewardError, with the row and the user's traceback, for a failure that the saved score does not have too.
    """
    limits: dict[str, Any] = {}
    if saved.recipe is not None:
        reward = saved.recipe.reward
        limits = {k: getattr(reward, k) for k in ("timeout_seconds", "memory_mb", "workers")}
    calls: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index, sample in enumerate(saved.samples):
        calls[sample.source, sample.step].append(index)
    scores: list[Score | None] = [None] * len(saved.samples)
    image_of = image_reader(saved)
    for source, choice in chosen.items():
        with Scorer(choice.spec, choice.weights, **limits) as scorer:
            for (of, _), indices in calls.items():
                if of != source:
                    continue
                samples = [saved.samples[i] for i in indices]
                inputs = [_with_images(s, image_of) if choice.spec.needs_images else s.input for s in samples]
                failed_then = any(sample.score.error is not None for sample in samples)
                found = scorer.score(inputs, strict=not failed_then, rows=[sample.where for sample in samples])
                if failed_then:
                    _stop_at_new_failure(scorer, samples, inputs, found)
                for index, score in zip(indices, found, strict=True):
                    scores[index] = score
    return [score for score in scores if score is not None]


def image_reader(saved: Saved) -> Callable[[SavedSample], list[Any]]:
    """A function that gives a sample's images as PIL RGB.

    It raises: StoreError when the rollouts belong to no run, or the image is nowhere any more.
    """
    cache: dict[str, Any] = {}

    def read(sample: SavedSample) -> list[Any]:
        from PIL import Image

        from vlmrl.data.run_images import run_images

        if saved.run is None:
            raise StoreError("the reward looks at images, and loose rollout files do not have them", where=sample.where)
        if "store" not in cache:
            cache["store"] = run_images(saved.run.dir)
        return [Image.open(io.BytesIO(cache["store"].read(media))).convert("RGB") for media in sample.media]

    return read


def compare_stored(saved: Saved, scores: Sequence[Score], most: int = 5) -> dict[str, Any]:
    """Whether the new scores are the stored ones, to the digit: value, every part, and which rows failed.

    Returns: equal, different (rows), largest_difference (of values), failed_then, failed_now, and the worst rows.
    """
    rows: list[tuple[float, int]] = []
    for index, (sample, new) in enumerate(zip(saved.samples, scores, strict=True)):
        old = sample.score
        if (old.error is None) != (new.error is None):
            rows.append((math.inf, index))
        elif old.error is None and (old.value != new.value or dict(old.parts) != dict(new.parts)):
            rows.append((abs(old.value - new.value), index))
    rows.sort(key=lambda row: (-row[0], row[1]))
    largest = max((gap for gap, _ in rows if math.isfinite(gap)), default=0.0)
    return {
        "equal": not rows,
        "different": len(rows),
        "largest_difference": largest,
        "failed_then": sum(s.score.error is not None for s in saved.samples),
        "failed_now": sum(s.error is not None for s in scores),
        "worst": [describe_row(saved.samples[i], new=scores[i]) for _, i in rows[:most]],
    }


def part_table(scores: Sequence[Score]) -> dict[str, dict[str, Any]]:
    """Part (and `value`) -> mean, min, max, share at min and at max, how often None, correlation with the value.

    Correlation is Pearson's over the samples where the part applies; None when either side is constant.
    """
    scored = [s for s in scores if s.error is None]
    names = list(dict.fromkeys(name for s in scored for name in s.parts))
    table = {"value": _summary([s.value for s in scored], None)}
    for name in names:
        applies = [(part, s.value) for s in scored if (part := s.parts.get(name)) is not None]
        summary = _summary([part for part, _ in applies], [value for _, value in applies])
        table[name] = {**summary, "none": len(scored) - len(applies)}
    return table


def reasons(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Notes and errors by how often they occur, quoted texts and numbers aside; `example` is the first of each kind."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for score in scores:
        text = f"failed: {score.error}" if score.error is not None else score.note
        if text:
            kind = re.sub(r"'[^']*'|(?<![A-Za-z])-?\d[\d.]*", "...", text)
            counts[kind] += 1
            examples.setdefault(kind, text)
    return [{"count": n, "share": n / len(scores), "example": examples[k]} for k, n in counts.most_common(MOST_REASONS)]


def disagreements(saved: Saved, scores: Sequence[Score], most: int = 5) -> dict[str, Any] | None:
    """Where the reward and the task's own measure of right and wrong part ways; None for tasks without one.

    Returns: accuracy; agreement = share of (right, wrong) pairs of one group in which the right one has the higher
    value (ties count half, None without such pairs); wrong_but_paid and right_but_unpaid, the worst rows of both kinds.
    """
    right = _accuracies(saved)
    rows = [i for i, a in enumerate(right) if a is not None and scores[i].error is None]
    if not rows:
        return None
    won, pairs = 0.0, 0
    for group in saved.groups:
        ups = [scores[i].value for i in group if right[i] == 1 and scores[i].error is None]
        downs = [scores[i].value for i in group if right[i] == 0 and scores[i].error is None]
        won += sum(1.0 if u > d else 0.5 if u == d else 0.0 for u in ups for d in downs)
        pairs += len(ups) * len(downs)
    wrong = sorted((i for i in rows if right[i] == 0), key=lambda i: -scores[i].value)
    correct = sorted((i for i in rows if right[i] == 1), key=lambda i: scores[i].value)
    return {
        "accuracy": math.fsum(right[i] or 0.0 for i in rows) / len(rows),
        "agreement": won / pairs if pairs else None,
        "wrong_but_paid": [describe_row(saved.samples[i], new=scores[i]) for i in wrong[:most]],
        "right_but_unpaid": [describe_row(saved.samples[i], new=scores[i]) for i in correct[:most]],
    }


def describe_row(sample: SavedSample, *, new: Score, **more: Any) -> dict[str, Any]:
    """One sample for people and JSON: where, text, truth, the stored and the new score."""
    return {
        "where": sample.where,
        "text": sample.input.response[:MAX_TEXT_CHARS],
        "truth": dict(sample.input.truth),
        "stored": _score(sample.score),
        "new": _score(new),
        **more,
    }


def _score(score: Score) -> dict[str, Any]:
    value = score.value if math.isfinite(score.value) else None
    return {"value": value, "parts": dict(score.parts), "note": score.note, "error": score.error}


def _accuracies(saved: Saved) -> list[float | None]:
    """The tasks' own `accuracy` of every sample; None where a task has none or cannot be made."""
    from vlmrl.tasks import make_task

    outcomes: dict[str, Any] = {}
    found: list[float | None] = []
    for sample in saved.samples:
        if sample.source not in outcomes:
            info = {"name": sample.source, "levels": saved.levels.get(sample.source)}
            try:
                outcomes[sample.source] = make_task(sample.task, info).outcome
            except VlmrlError:
                outcomes[sample.source] = None
        outcome = outcomes[sample.source]
        numbers = outcome(sample.input.truth, sample.input.response) if outcome is not None else {}
        found.append(numbers.get("accuracy"))
    return found


def _stop_at_new_failure(
    scorer: Scorer, samples: Sequence[SavedSample], inputs: Sequence[RewardInput], scores: Sequence[Score]
) -> None:
    new = [i for i, s in enumerate(scores) if s.error is not None and samples[i].score.error is None]
    if not new:
        return
    first = new[0]
    names = [s.where for s in samples]
    batched = scorer.spec.user is not None and scorer.spec.user.batched
    chosen = list(range(len(inputs))) if batched else [first]
    scorer.score(
        [inputs[i] for i in chosen], strict=True, rows=[names[i] for i in chosen]
    )  # raises, with the traceback
    raise RewardError(
        f"reward `{scorer.spec.name}` failed once and then did not: {scores[first].error}", where=names[first]
    )


def _with_images(sample: SavedSample, image_of: Callable[[SavedSample], list[Any]]) -> RewardInput:
    return replace(sample.input, images=image_of(sample))


def _summary(values: Sequence[float], beside: Sequence[float] | None) -> dict[str, Any]:
    if not values:
        return dict.fromkeys(("mean", "min", "max", "share_at_min", "share_at_max", "correlation"))
    array = np.asarray(values, dtype=np.float64)
    low, high = float(array.min()), float(array.max())
    return {
        "mean": math.fsum(values) / len(values),
        "min": low,
        "max": high,
        "share_at_min": float(np.mean(array == low)),
        "share_at_max": float(np.mean(array == high)),
        "correlation": correlation(array, np.asarray(beside)) if beside is not None else None,
    }


def correlation(a: Any, b: Any) -> float | None:
    """Pearson's correlation of two arrays; None when either is constant or shorter than two."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _takes_levels(name: str) -> bool:
    import inspect

    return "levels" in inspect.signature(REWARDS[name].build).parameters
