"""Rules about lists of rewards: `[[rewards]]`, and `[[data.rewards]]` of one source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vlmrl.errors import Problem
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.reward_list import OF_ONE_REWARD, OF_TASK, ListedReward
from vlmrl.recipe.rules.files import is_file_reward
from vlmrl.recipe.schema import Reward
from vlmrl.recipe.toml_lines import Key, dotted
from vlmrl.rewards.several import faults, label_from, label_of

Lists = list[tuple[Key, Sequence[ListedReward]]]


def reward_lists(loaded: LoadedRecipe) -> Lists:
    """Return (key, rewards) of every list of rewards in a recipe."""
    recipe = loaded.recipe
    own: Lists = [(("data", i, "rewards"), data.rewards) for i, data in enumerate(recipe.data)]
    return [(key, rewards) for key, rewards in [(("rewards",), recipe.rewards), *own] if rewards]


def _one_spelling(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Find sources that name a reward in both ways, and settings of a single reward that no source reads."""
    recipe = loaded.recipe
    for i, data in enumerate(recipe.data):
        if data.rewards and data.reward:
            message = f"source {i} has both `data.reward` ({data.reward}) and a list `[[data.rewards]]`"
            yield Problem(message, loaded.where(("data", i, "reward")), "move it into the list, as one more table")
    if recipe.rewards and recipe.reward.name:
        message = f"the recipe has both `reward.name` ({recipe.reward.name}) and a list `[[rewards]]`"
        yield Problem(message, loaded.where(("reward", "name")), "move it into the list, as one more table")
    if recipe.rewards and all(data.rewards or data.reward for data in recipe.data):
        message = "`[[rewards]]` is never used: every [[data]] names rewards of its own"
        yield Problem(message, loaded.where(("rewards",)), "remove one of the two", "warning")
    if not all(data.all_rewards for data in recipe.data):
        return
    defaults = Reward()
    for key in OF_ONE_REWARD[1:]:
        if getattr(recipe.reward, key) != getattr(defaults, key):
            message = f"`reward.{key}` belongs to a single reward, and every source has a list of rewards"
            yield Problem(
                message, loaded.where(("reward", key)), f"set `{key}` in the table of the reward that it is for"
            )


def _wiring(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Find labels that two rewards have, and gates that name no reward or go round in a circle."""
    for key, rewards in reward_lists(loaded):
        labels = [one.label if one.label is not None else label_from(one.name) for one in rewards]
        for fault in faults(labels, [one.gate for one in rewards]):
            place: Key = (*key, fault.index)
            yield Problem(fault.message, loaded.where((*place, fault.key), (*place, "name")), fault.hint)


def _accuracy(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Find an accuracy that names no reward of the only list of rewards."""
    part, lists = loaded.recipe.reward.accuracy, reward_lists(loaded)
    if part is None or len(lists) != 1 or not all(data.all_rewards for data in loaded.recipe.data):
        return
    labels = [one.label or label_from(one.name) for one in lists[0][1]]
    if label_of(part) not in labels:
        hint = f'accuracy = "LABEL.PART"; the rewards: {", ".join(labels)}'
        message = f"`reward.accuracy` is `{part}`, and no reward is called `{label_of(part)}`"
        yield Problem(message, loaded.where(("reward", "accuracy")), hint)


def _weights(loaded: LoadedRecipe) -> Iterator[Problem]:
    for key, rewards in reward_lists(loaded):
        if not any(one.weight for one in rewards):
            message = f"every weight in `{dotted(key)}` is 0: all scores are equal"
            yield Problem(message, loaded.where((*key, 0, "weight"), key))
        for i, one in enumerate(rewards):
            if one.weights and not any(one.weights.values()):
                message = f"every weight in `{dotted((*key, i))}.weights` is 0: this reward is 0 for every response"
                yield Problem(message, loaded.where((*key, i, "weights")), "set `weight = 0.0` to report it only")


def _unused(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Find settings that the reward of a table does not read."""
    for key, rewards in reward_lists(loaded):
        for i, one in enumerate(rewards):
            if one.style != "auto" and not is_file_reward(one.name):
                message = f"`{dotted((*key, i))}.style` does nothing: `{one.name}` is a built-in reward"
                yield Problem(message, loaded.where((*key, i, "style")), None, "warning")
            if one.profile != "default" and one.name != OF_TASK:
                message = f"`{dotted((*key, i))}.profile` is for the task's own reward, and this one is `{one.name}`"
                yield Problem(message, loaded.where((*key, i, "profile")), f'name = "{OF_TASK}"')


REWARD_LIST_RULES = (_one_spelling, _wiring, _accuracy, _weights, _unused)
