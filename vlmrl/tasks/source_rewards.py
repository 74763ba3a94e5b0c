"""Reward of a `[[data]]` entry: a single one, or several; and the task's measures, which read its score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vlmrl.errors import RecipeError, listed
from vlmrl.recipe.reward_list import OF_TASK, ListedReward
from vlmrl.recipe.schema import Data, Reward
from vlmrl.tasks.base import Measure, Task

if TYPE_CHECKING:
    from vlmrl.rewards.base import RewardSpec
    from vlmrl.rewards.several import Member

Chosen = tuple["RewardSpec", dict[str, float]]
"""Reward, and the weights of its parts; of several rewards, the weights of the rewards by their labels."""


def reward_of(data: Data, reward: Reward, task: Task, scored: bool = True) -> Chosen:
    """Return the reward of an entry: its list of rewards, or a single one.

    A single one is the entry's own, else that of `[reward] name`, else that of the task's profile `[reward] profile`.
    `[reward] args` and `[reward] weights` belong to the reward that `[reward]` selects. They apply to the entry's own
    reward only if `[reward] name` is the same reward or is not set. The arguments replace those that the task binds,
    key by key, also within a table (such as `aliases`).

    Args:
        scored: whether responses will be scored. If not, a missing reward is no error, and NO_REWARD takes its place.
    Raises: RecipeError or RewardError for a reward that is missing or cannot be loaded.
    """
    from vlmrl.rewards import name_accuracy
    from vlmrl.rewards.base import NO_REWARD
    from vlmrl.rewards.several import compose

    if data.all_rewards:
        several = compose([_member(listed_reward, data, task) for listed_reward in data.all_rewards])
        return name_accuracy(several, reward.accuracy), dict(several.weights)
    is_named = bool(data.reward or reward.name)
    own, own_args = (None, {}) if is_named and not task.has_profile(reward.profile) else task.profile(reward.profile)
    name = data.reward or reward.name or own
    if name is None and not scored:
        return NO_REWARD, {}
    if name is None:
        raise _no_reward(task, data)
    meant = data.reward is None or reward.name in (None, data.reward)
    settings = reward if meant else Reward(style=reward.style)
    settings._judge = reward._judge
    spec, weights = _load(name, settings, own_args if name == own else {})
    return name_accuracy(spec, settings.accuracy), weights


def _member(listed_reward: ListedReward, data: Data, task: Task) -> Member:
    """Return one of the several rewards of an entry."""
    from vlmrl.rewards.several import Member, label_from

    one = listed_reward
    has_profile = one.name == OF_TASK or task.has_profile(one.profile)
    own, own_args = task.profile(one.profile) if has_profile else (None, {})
    name = own if one.name == OF_TASK else one.name
    if name is None:
        raise _no_reward(task, data)
    spec, weights = _load(name, one, own_args if name == own else {})
    return Member(
        one.label or label_from(one.name),
        spec,
        weights,
        one.weight,
        one.gate,
        one.timeout_seconds,
        of_task=name in {profile_name for profile_name, _ in task.profiles.values()},
    )


def _no_reward(task: Task, data: Data) -> RecipeError:
    return RecipeError(
        f"task `{task.name}` has no reward of its own",
        where=data.path,
        hint="name one, `path/to/file.py:function` or a built-in (`vlmrl recipe list --rewards`): [reward] name, or "
        "--set reward.name=NAME; "
        "a supervised start needs none where eval.metric is left out or is loss",
    )


def _load(name: str, settings: Reward | ListedReward, own_args: Mapping[str, Any]) -> Chosen:
    """Return a reward with a recipe's settings. `own_args`: the arguments that the task binds."""
    from vlmrl.rewards import earn_on_timeout
    from vlmrl.rewards.base import check_weight_sizes
    from vlmrl.tasks.builtin_rewards import load_reward, takes_judge

    args = dict(own_args) | {key: _over(own_args.get(key), value) for key, value in settings.args.items()}
    if takes_judge(name):
        args["judge"] = settings._judge.changed_by(args.get("judge", {}))
    spec = earn_on_timeout(load_reward(name, args=args, style=settings.style), settings.on_timeout)
    weights = dict(settings.weights or spec.weights)
    check_weight_sizes(weights, f"reward `{name}`")
    unknown = [part for part in weights if part not in spec.ranges] if spec.is_builtin else []
    if unknown:
        raise RecipeError(
            f"reward `{name}` has no part `{unknown[0]}`",
            where="[reward] weights" if isinstance(settings, Reward) else "weights of [[rewards]]",
            hint=listed(unknown[0], spec.ranges, "its parts"),
        )
    return spec, weights


def _over(own: Any, given: Any) -> Any:
    """Return the recipe's value of an argument. Two tables are merged; the recipe's keys replace the task's."""
    return {**own, **given} if isinstance(own, Mapping) and isinstance(given, Mapping) else given


def outcome_with(task: Task, spec: RewardSpec) -> Measure:
    """Return the task's measure of a response that this reward scores.

    Of several rewards, the measure reads the score of the task's own one, as if it were the only one; without one, it
    reads the whole score.
    """
    from vlmrl.rewards.several import score_of, task_member

    if not spec.members:
        return task.outcome if task.outcome_as is None else task.outcome_as(spec)
    member = task_member(spec)
    read_as = member.spec if member is not None else None
    measure = task.outcome if task.outcome_as is None else task.outcome_as(read_as)
    return measure if member is None else lambda x, score: measure(x, score_of(score, member))


def accuracy_notes(spec: RewardSpec) -> Sequence[str]:
    """Return a note if several rewards have an accuracy, as far as this is known before they have run."""
    from vlmrl.rewards.accuracy_part import other_choices
    from vlmrl.rewards.several import declared_parts

    return [note] if spec.members and (note := other_choices(declared_parts(spec, {}), spec)) else []
