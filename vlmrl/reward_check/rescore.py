"""Choice of the reward that scores saved responses: the run's own in its present version, another, or a profile."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vlmrl.errors import RewardError, StoreError
from vlmrl.redaction.redact import hidden_keys
from vlmrl.reward_check.saved_responses import SavedResponses, SavedSample
from vlmrl.reward_check.scoring import ChosenReward, ScoredResponses, ScoringPlan, scan
from vlmrl.rewards import reward_record
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.identity import identity_of, single_records
from vlmrl.rewards.several_scorer import open_scorer
from vlmrl.tasks.builtin_rewards import PROFILE, REWARDS, load_recorded, load_reward, takes_judge
from vlmrl.types import Media, Score


def own_rewards(saved: SavedResponses) -> dict[str, ChosenReward]:
    """Return source -> the reward that scored its rollouts, in its present version.

    Raises: RewardError if the manifest names no reward, or a reward can no longer be loaded.
    """
    chosen: dict[str, ChosenReward] = {}
    for source in saved.sources:
        record = saved.records.get(source)
        if record is None or saved.run is None:
            raise RewardError(
                f"it is not recorded which reward scored the rollouts of source `{source}`",
                where=str(saved.path),
                hint="name it: --reward NAME (`vlmrl recipe list --rewards`), or --reward path/to/file.py:function",
            )
        for single in single_records(record):
            if hidden := hidden_keys(single.get("args")):
                raise RewardError(
                    f"the argument `{hidden[0]}` of the reward held a secret, which is not in the run's record",
                    where=str(saved.run.dir),
                    hint=f"name the reward with it: --reward {single.get('name')} --set {hidden[0]}=...",
                )
        spec = load_recorded(record, base_dir=saved.run.manifest.cwd or None)
        chosen[source] = ChosenReward(spec, dict(record.get("weights") or spec.weights), _changed(record, spec))
    return chosen


def _changed(record: Mapping[str, Any], spec: RewardSpec) -> str:
    """Describe what has changed in a reward since it scored the run; "" if nothing has changed."""
    then, now = identity_of(record).without_args(), identity_of(reward_record(spec, {})).without_args()
    if then == now:
        return ""
    if spec.members:
        return f"the rewards have changed since the run: {now.beside(then)}; the run has {then.beside(now)}"
    if spec.user is not None:
        return f"{record['name'].partition(':')[0]} has changed since the run"
    return f"the built-in `{spec.name}` has changed since the run: it is {now.code}, and the run has {then.code}"


def named_rewards(
    saved: SavedResponses,
    name: str,
    *,
    args: Mapping[str, Any],
    weights: Mapping[str, float] | None,
    style: str = "auto",
) -> dict[str, ChosenReward]:
    """Return the reward `name` for every source: a built-in, `file.py:function`, or `profile:name` of each task."""
    if name.startswith(PROFILE):
        return profile_rewards(saved, name.removeprefix(PROFILE), args=args, weights=weights)
    return other_rewards(saved, name, args=args, weights=weights, style=style)


def profile_rewards(
    saved: SavedResponses, profile: str, *, args: Mapping[str, Any], weights: Mapping[str, float] | None
) -> dict[str, ChosenReward]:
    """Return the reward profile `profile` of each source's task. `args` are added to the arguments that the task sets.

    Raises: RewardError if a source's task is not known or has no reward of its own; RecipeError for an unknown
        profile.
    """
    chosen: dict[str, ChosenReward] = {}
    for source in saved.sources:
        ref = saved.task_ref(source)
        task = ref.make() if ref is not None else None
        name, bound = task.profile(profile) if task is not None else (None, {})
        if name is None:
            raise RewardError(
                f"the rows of `{source}` have no task with a reward of its own",
                where=str(saved.path),
                hint="name the task: --task NAME; or the reward: --reward path/to/file.py:function",
            )
        spec = load_reward(name, args={**bound, **args})
        chosen[source] = ChosenReward(spec, dict(weights or spec.weights))
    return chosen


def other_rewards(
    saved: SavedResponses,
    name: str,
    *,
    args: Mapping[str, Any],
    weights: Mapping[str, float] | None,
    style: str = "auto",
) -> dict[str, ChosenReward]:
    """Return the reward `name` for every source. The arguments of a built-in reward come from the rows (`RowKind`).

    If the run itself used `name`, its arguments and weights are used unless `args` and `weights` replace them.
    """
    chosen: dict[str, ChosenReward] = {}
    for source in saved.sources:
        records = single_records(saved.records.get(source, {}))
        record = next((single for single in records if single.get("name") == name), {})
        own = bool(record)
        bound = {**(record.get("args", {}) if own else {}), **args}
        bound = {**_taken(name, saved.arguments(source)), **bound}
        if takes_judge(name) and saved.recipe is not None:
            bound["judge"] = saved.recipe.judge.changed_by(bound.get("judge") or {})
        spec = load_reward(name, args=bound, style=style)
        chosen[source] = ChosenReward(
            spec, dict(weights or (_kept_weights(saved, record, spec) if own else spec.weights))
        )
    return chosen


def _kept_weights(saved: SavedResponses, record: Mapping[str, Any], spec: RewardSpec) -> Mapping[str, float]:
    """Return the run's weights if its recipe sets them; else the defaults of the reward, which depend on its args."""
    kept = dict(record.get("weights") or {})
    base_dir = saved.run.manifest.cwd if saved.run is not None else None
    try:
        chosen = kept != dict(load_recorded(record, base_dir=base_dir or None).weights)
    except RewardError:
        chosen = True
    usable = {k: v for k, v in kept.items() if spec.user is not None or k in spec.ranges}
    return usable if chosen and usable else spec.weights


def parse_weights(text: str) -> dict[str, float]:
    """Parse weights such as `a=1,b=0.5`. Raises: RewardError if the text does not have this form."""
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


def scan_saved(
    saved: SavedResponses,
    sides: Sequence[Mapping[str, ChosenReward]],
    *,
    jobs: int = 1,
    keep_going: bool = False,
    progress: Callable[[int], None] | None = None,
) -> ScoredResponses:
    """Score the saved responses with each of `sides` in one pass; see `scan`."""
    tasks = {source: ref for source in saved.sources if (ref := saved.task_ref(source)) is not None}
    plan = ScoringPlan(saved.reader.decoder, sides, tasks, keep_going, saved.limits(), image_reader(saved))
    return scan(saved.reader, plan, jobs=jobs, progress=progress, note=saved.notes.append)


def image_reader(saved: SavedResponses) -> Callable[[Sequence[Media], str], list[Any]]:
    """Return a function that reads the images of a row as PIL RGB. Its arguments: their references, and the row's name.

    The function raises StoreError if the rollouts belong to no run, or if the image no longer exists.
    """
    cache: dict[str, Any] = {}

    def read(media: Sequence[Media], where: str) -> list[Any]:
        from PIL import Image

        from vlmrl.data.run_images import run_images

        if saved.run is None:
            raise StoreError(
                "the reward looks at images (NEEDS_IMAGES), which only the rollouts of a run have",
                where=where,
                hint="score a run; the images of a table are shown by --html, and no reward gets them",
            )
        if "store" not in cache:
            cache["store"] = run_images(saved.run.dir)
        return [Image.open(io.BytesIO(cache["store"].read(m))).convert("RGB") for m in media]

    return read


def _taken(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the arguments that the built-in reward `name` accepts."""
    import inspect

    taken = inspect.signature(REWARDS[name].build).parameters if name in REWARDS else {}
    return {key: value for key, value in arguments.items() if key in taken}


def findings(
    saved: SavedResponses, chosen: Mapping[str, ChosenReward], samples: Mapping[int, SavedSample]
) -> dict[int, Score]:
    """Score the rows again, and return row -> score for the rows for which the reward returns details or images.

    Args:
        chosen: source -> its reward; rows of other sources are left out.
    """
    read, scores_by_row = image_reader(saved), {}
    for source, choice in chosen.items():
        rows = [row for row, sample in samples.items() if sample.source == source]
        inputs = [samples[row].input for row in rows]
        if choice.spec.needs_images:
            seen = [read(samples[row].media, samples[row].where) for row in rows]
            inputs = [replace(x, images=images) for x, images in zip(inputs, seen, strict=True)]
        with open_scorer(choice.spec, choice.weights, **saved.limits()) as scorer:
            scores = scorer.score(inputs, rows=[samples[row].where for row in rows])
        scores_by_row |= {row: s for row, s in zip(rows, scores, strict=True) if s.detail is not None or s.artifacts}
    return scores_by_row
