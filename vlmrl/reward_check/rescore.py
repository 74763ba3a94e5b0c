"""Choice of the reward that scores saved responses (the run's own, another, a profile), and its effect.

The effect is that on the scores, the order within groups, the advantages, and the dead groups.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vlmrl.algo.algorithms import ALGORITHMS, Algorithm, algorithm_of, stand_in, without_model
from vlmrl.algo.credit import RewardWeights, Weights, scored_group, step_advantages, untrained_values
from vlmrl.errors import RewardError, StoreError
from vlmrl.redaction.redact import hidden_keys
from vlmrl.reward_check.responses import ResponseColumns
from vlmrl.reward_check.scores import Flags, Floats, Scores, same_part
from vlmrl.reward_check.scoring import ChosenReward, SavedResponses, SavedSample, ScoredResponses, ScoringPlan, scan
from vlmrl.reward_check.statistics import correlation, mean, ranks, row_of, score_json
from vlmrl.rewards import reward_record
from vlmrl.rewards.base import GATE_PART, VALUE_PART, RewardSpec
from vlmrl.rewards.identity import changed_files, identity_of, single_records
from vlmrl.rewards.scoring import Scorer
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
    fresh = reward_record(spec, {})
    then, now = identity_of(record).without_args(), identity_of(fresh).without_args()
    if then == now:
        words = changed_files(record, fresh)
        return f"{', '.join(words)} {'have' if len(words) > 1 else 'has'} changed since the run" if words else ""
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
    """Return the reward `name` for every source: a built-in, `file.py:function`, or `profile:name` of each task.

    The arguments of a built-in reward come from the rows (`RowKind`). If the run itself used `name`, its arguments and
    weights are used unless `args` and `weights` replace them.
    """
    if name.startswith(PROFILE):
        return profile_rewards(saved, name.removeprefix(PROFILE), args=args, weights=weights)
    chosen: dict[str, ChosenReward] = {}
    for source in saved.sources:
        records = single_records(saved.records.get(source, {}))
        record = next((single for single in records if single.get("name") == name), {})
        bound = {**_taken(name, saved.arguments(source)), **record.get("args", {}), **args}
        if takes_judge(name) and saved.recipe is not None:
            bound["judge"] = saved.recipe.judge.changed_by(bound.get("judge") or {})
        spec = load_reward(name, args=bound, style=style)
        kept = _kept_weights(saved, record, spec) if record else spec.weights
        chosen[source] = ChosenReward(spec, dict(weights or kept))
    return chosen


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
) -> ScoredResponses:
    """Score the saved responses with each of `sides` in one pass; see `scan`."""
    tasks = {source: ref for source in saved.sources if (ref := saved.task_ref(source)) is not None}
    plan = ScoringPlan(saved.reader, sides, tasks, keep_going, saved.limits(), image_reader(saved))
    return scan(saved.reader, plan, jobs=jobs, note=saved.notes.append)


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
            seen = [read([*samples[r].media, *samples[r].input.tool_media], samples[r].where) for r in rows]
            inputs = [replace(x, images=images) for x, images in zip(inputs, seen, strict=True)]
        with Scorer(choice.spec, choice.weights, **saved.limits()) as scorer:
            scores = scorer.score(inputs, rows=[samples[row].where for row in rows])
        scores_by_row |= {row: s for row, s in zip(rows, scores, strict=True) if s.detail is not None or s.artifacts}
    return scores_by_row


@dataclass(frozen=True)
class Estimate:
    """Advantage estimator of the run: its row of the algorithm table, and the token limit of a response.

    Args:
        stand_in: sentence about the values that replace those that only training has, such as a critic's; "" if no
            value is replaced.
    """

    algorithm: Algorithm
    max_tokens: int
    stand_in: str = ""

    @property
    def advantage(self) -> str:
        return self.algorithm.advantage


def estimate_of(saved: SavedResponses) -> Estimate:
    """Return the run's own estimator; GRPO's if the rollouts belong to no run.

    Some inputs of an estimator are not saved with the rollouts. The group mean replaces the score of a greedy answer
    (ReMax), and 0 replaces the values of a critic (PPO). A KL term in the reward is left out.
    """
    if saved.recipe is None:
        return Estimate(ALGORITHMS["grpo"], 0)
    own_algorithm = algorithm_of(saved.recipe.algo)
    return Estimate(without_model(own_algorithm), saved.recipe.longest_response, stand_in(own_algorithm))


def advantages_of(saved: SavedResponses, facts: ResponseColumns, scores: Scores, estimate: Estimate) -> Floats:
    """Return the advantage of every sample for `scores`, computed as in training.

    Each step is a batch of its own. Samples whose reward failed are left out. Truncated responses are left out if the
    recipe drops them.
    """
    advantages = np.zeros(len(scores))
    steps: dict[int, list[list[int]]] = {}
    for group in groups_of(facts):
        steps.setdefault(int(facts.steps_N[group[0]]), []).append(group)
    needs_critic = estimate.algorithm.needs_critic
    for groups in steps.values():
        inputs = []
        for group in groups:
            lengths = facts.tokens_N[group].tolist()
            record = saved.records.get(facts.sources[group[0]] or "", {})
            finishes = ["length" if cut else "stop" for cut in facts.cut_N[group].tolist()]
            inputs.append(
                scored_group(
                    [scores[i] for i in group],
                    finishes,
                    lengths,
                    estimate.algorithm,
                    max_tokens=estimate.max_tokens,
                    weights=_weights(record),
                    values=untrained_values(lengths) if needs_critic else (),
                )
            )
        for group, values in zip(groups, step_advantages(inputs, estimate.algorithm), strict=True):
            advantages[group] = [float(value.mean()) for value in values]
    return advantages


def _weights(record: Mapping[str, Any]) -> Weights:
    """Return the weights of a recorded reward's parts; of several rewards, those of each.

    A reward of several has one part that is called like its label, if it returns a plain number or a single part.
    """
    singles = single_records(record)
    if singles == [record]:
        return record.get("weights") or {}
    rewards = []
    for single in singles:
        label, weights = str(single.get("label")), dict(single.get("weights") or {})
        parts = {f"{label}.{part}": weight for part, weight in weights.items()}
        for part, weight in weights.items():
            if len(weights) == 1 or part in VALUE_PART.values():
                parts[label] = weight
        gate = f"{label}.{GATE_PART}" if single.get("gate") else ""
        rewards.append(RewardWeights(label, float(single.get("weight", 1.0)), parts, gate))
    return rewards


def groups_of(facts: ResponseColumns) -> list[list[int]]:
    """Return the sample indices of each group. Groups are ordered by their first sample."""
    order, starts = facts.group_bounds()
    groups = [g.tolist() for g in np.split(order, starts[1:])]
    return sorted(groups, key=lambda g: g[0]) if len(order) else []


def diff_rewards(
    saved: SavedResponses, facts: ResponseColumns, first: Scores, second: Scores, most: int = 5
) -> dict[str, Any]:
    """Compare two scorings of the same responses: `first`, the old one, and `second`, the new one.

    Returns a mapping with:
        value: mean score in each scoring, mean absolute difference, number (changed) and share (changed_share) of rows
            whose score changes, correlation over all samples, rank correlation (Spearman's).
        parts: part -> its mean in each scoring (None if a scoring lacks the part), and the share of samples in which
            the part changes.
        groups: number of groups; number of dead groups in each scoring; died and revived = groups that are dead only in
            the second or only in the first scoring; same_order = mean rank correlation (Spearman's) within groups that
            are dead in neither; best_changes = number of such groups in which no sample is best in both scorings.
        advantages: correlation over samples; flipped = share of samples whose advantage changes its sign; moved = mean
            absolute difference; estimator; stand_in = see `Estimate`.
        changed: of the rows whose score changes, those whose advantage (then score) changes most; see `row_of`.
        `groups` and `advantages` are None if the input does not tell which rows belong to one prompt.
    """
    estimate = estimate_of(saved)
    both = ~(first.failed_N | second.failed_N)
    a, b = first.values_N[both], second.values_N[both]
    old = advantages_of(saved, facts, first, estimate) if saved.grouped else np.zeros(len(first))
    new = advantages_of(saved, facts, second, estimate) if saved.grouped else np.zeros(len(first))
    moved = np.abs(new - old)
    delta = np.where(both, np.abs(second.values_N - first.values_N), 0.0)
    order = np.lexsort((np.arange(len(first)), -delta, -moved))
    order = order[(delta > 0)[order]][:most].tolist()
    return {
        "samples": len(first),
        "compared": int(both.sum()),
        "failed": {"first": int(first.failed_N.sum()), "second": int(second.failed_N.sum())},
        "value": {
            "first": mean(a),
            "second": mean(b),
            "moved": mean(np.abs(b - a)),
            "changed": int(np.sum(a != b)),
            "changed_share": mean(a != b),
            "correlation": correlation(a, b),
            "rank_correlation": correlation(ranks(a), ranks(b)),
        },
        "parts": _parts(first, second, both),
        "groups": _groups(facts, first, second, old, new) if saved.grouped else None,
        "advantages": {
            "estimator": estimate.advantage,
            "stand_in": estimate.stand_in,
            "correlation": correlation(old, new),
            "flipped_share": mean(old * new < 0),
            "moved": mean(moved),
        }
        if saved.grouped
        else None,
        "changed": [
            row_of(facts, i, second, old=score_json(first[i]), advantage=[float(old[i]), float(new[i])]) for i in order
        ],
    }


def _groups(facts: ResponseColumns, first: Scores, second: Scores, old: Floats, new: Floats) -> dict[str, Any]:
    dead_first = dead_second = died = revived = best_changes = alive = 0
    rank_correlations: list[float] = []
    failed = first.failed_N | second.failed_N
    groups = groups_of(facts)
    for group in groups:
        was, would = not np.any(old[group]), not np.any(new[group])
        dead_first, dead_second = dead_first + was, dead_second + would
        died, revived = died + (would and not was), revived + (was and not would)
        kept = np.asarray(group)[~failed[group]]
        if was or would or len(kept) < 2:
            continue
        alive += 1
        a, b = first.values_N[kept], second.values_N[kept]
        best_changes += not np.any((a == a.max()) & (b == b.max()))
        rank = correlation(ranks(a), ranks(b))
        if rank is not None:
            rank_correlations.append(rank)
    return {
        "number": len(groups),
        "dead_first": dead_first,
        "dead_second": dead_second,
        "died": died,
        "revived": revived,
        "alive_in_both": alive,
        "best_changes": best_changes,
        "same_order": math.fsum(rank_correlations) / len(rank_correlations) if rank_correlations else None,
    }


def _parts(first: Scores, second: Scores, both: Flags) -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys([*first.parts, *second.parts]):
        columns = [side.parts[name][both] if name in side.parts else None for side in (first, second)]
        a, b = (None if c is None else mean(c) for c in columns)
        same = same_part(columns[0], columns[1], int(both.sum()))
        table[name] = {"first": a, "second": b, "changed_share": mean(~same)}
    return table
