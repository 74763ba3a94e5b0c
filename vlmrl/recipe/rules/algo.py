"""Rules about `[algo]`: cells that contradict each other, and cells that do nothing because of another cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from vlmrl.algo.algo_keys import CELLS, CRITIC_SCALES, ESTIMATORS, Algorithm
from vlmrl.algo.algorithms import ALGORITHMS
from vlmrl.errors import Problem
from vlmrl.recipe.load import LoadedRecipe


def overridden_row(loaded: LoadedRecipe) -> Algorithm | None:
    """Return the row of the algorithm table with the recipe's overrides, whose values are not checked.

    Returns: None if there is no such row, or the recipe is not for reinforcement learning.
    """
    algo = loaded.recipe.algo
    if algo.name not in ALGORITHMS or loaded.recipe.kind != "rl":
        return None
    values = {name: getattr(algo, name) for name in CELLS}
    return replace(ALGORITHMS[algo.name], **{name: value for name, value in values.items() if value is not None})


def _unread(loaded: LoadedRecipe, row: Algorithm) -> Iterator[Problem]:
    """Find keys that are set but not read, because of the values of other cells."""
    algo = loaded.recipe.algo
    for cell in CELLS.values():
        value = getattr(algo, cell.name)
        if value is None or (cell.neutral is not None and value == cell.neutral):
            continue
        unmet = next((when for when in cell.used_when if not when.holds(getattr(row, when.cell))), None)
        if unmet is None:
            continue
        other_value, names = getattr(row, unmet.cell), CELLS[unmet.cell].choices
        if other_value in names or not names:  # a misspelt value is reported by another rule
            message = f"`algo.{cell.name}` does nothing: {unmet.unread(algo.name, other_value)}"
            yield Problem(message, loaded.where(("algo", cell.name)), unmet.remedy, "warning")


def _kl(loaded: LoadedRecipe, row: Algorithm) -> Iterator[Problem]:
    if not row.kl_coef:
        return
    if row.kl == "k1" and row.kl_in == "loss":
        message = "`algo.kl` k1 in the loss: its expected gradient is zero, so it does not pull to the reference"
        hint = 'set algo.kl = "k2" or "k3", or algo.kl_in = "reward"'
        yield Problem(message, loaded.where(("algo", "kl"), ("algo", "kl_in")), hint)
    if row.kl_in == "reward" and row.advantage == "part_by_part":
        message = "the KL cannot be part of the reward if each part is normalised alone (part_by_part)"
        yield Problem(message, loaded.where(("algo", "kl_in"), ("algo", "kl_coef")), 'set algo.kl_in = "loss"')


def _parts(loaded: LoadedRecipe, row: Algorithm) -> Iterator[Problem]:
    """Refuse rules about the whole score if the advantage is computed from the parts of the reward."""
    algo = loaded.recipe.algo
    if row.advantage != "part_by_part":
        return
    for key in ("overlong_tokens", "truncated_score"):
        if getattr(row, key):
            message = f"`algo.{key}` changes the score, but part_by_part uses the reward's parts"
            hint = "let the reward return it as a part of its own, or use another algo.advantage"
            yield Problem(message, loaded.where(("algo", key), ("algo", "name")), hint)
    if algo.filter == "spread" and row.min_spread:
        message = "`algo.min_spread` compares whole scores, but part_by_part uses the reward's parts"
        yield Problem(message, loaded.where(("algo", "min_spread")), "leave min_spread at 0", "warning")


def _lengths(loaded: LoadedRecipe, row: Algorithm) -> Iterator[Problem]:
    algo, limit = loaded.recipe.algo, loaded.recipe.rollout.max_new_tokens
    if row.overlong_tokens > limit:
        message = (
            f"`algo.overlong_tokens` ({row.overlong_tokens}) is more than `rollout.max_new_tokens` ({limit}): "
            "even an empty response would lose score"
        )
        where = loaded.where(("algo", "overlong_tokens"), ("rollout", "max_new_tokens"))
        yield Problem(message, where, "a fifth of max_new_tokens is usual")
    if row.truncated_score is not None and algo.truncated != "keep":
        message = (
            f'`algo.truncated` = "{algo.truncated}" leaves out the responses that '
            f"`algo.truncated_score` ({row.truncated_score}) gives a score to"
        )
        yield Problem(
            message, loaded.where(("algo", "truncated"), ("algo", "truncated_score")), 'use "keep"', "warning"
        )


def _filter(loaded: LoadedRecipe, row: Algorithm) -> Iterator[Problem]:
    algo = loaded.recipe.algo
    if algo.filter is not None and row.filter != "none" and loaded.recipe.rollout.samples_per_prompt == 1:
        message = "`algo.filter` spread refuses every prompt: with one sample there is no spread"
        where = loaded.where(("algo", "filter"), ("rollout", "samples_per_prompt"))
        yield Problem(message, where, 'set algo.filter = "none", or more samples_per_prompt')


def _importance(loaded: LoadedRecipe, row: Algorithm) -> Iterator[Problem]:
    rollout = loaded.recipe.rollout
    if row.importance in ("truncate", "mask", "ratio") and (rollout.top_p < 1 or rollout.top_k > 0):
        message = (
            f'`algo.importance` = "{row.importance}" is not valid with top_p < 1 or top_k: the engine\'s log-probs '
            "are then not those of the policy"
        )
        where = loaded.where(("algo", "importance"), ("rollout", "top_p"), ("rollout", "top_k"))
        yield Problem(message, where, "leave top_p and top_k out, or algo.importance")
    if row.importance == "ratio" and not row.limits_ratio:
        message = '`algo.importance` = "ratio" needs a ratio that is clipped, but nothing limits the ratio of this row'
        where = loaded.where(("algo", "importance"), ("algo", "name"))
        yield Problem(message, where, 'set algo.clip_low and algo.clip_high, or algo.importance = "mask"')


def _advantage(loaded: LoadedRecipe, row: Algorithm) -> Iterator[Problem]:
    algo = loaded.recipe.algo
    if algo.advantage == "group_mean_std" and algo.scale not in (None, "group"):
        message = f"`algo.advantage` group_mean_std divides by the group's std, but `algo.scale` is {algo.scale}"
        yield Problem(message, loaded.where(("algo", "scale"), ("algo", "advantage")), "use advantage = group_mean")
    if row.surrogate == "clip_cov" and row.cov_low >= row.cov_high:
        message = f"`algo.cov_low` ({row.cov_low}) is not below `algo.cov_high` ({row.cov_high})"
        where = loaded.where(("algo", "cov_low"), ("algo", "cov_high"))
        yield Problem(message, where, "1 and 5 are the published pair")
    updates = loaded.recipe.train.updates_per_step
    if row.surrogate == "reinforce" and updates > 1:
        message = f"`train.updates_per_step` is {updates}, but `{algo.name}` has no ratio: only the first is on-policy"
        where = loaded.where(("train", "updates_per_step"), ("algo", "name"))
        yield Problem(message, where, 'set train.updates_per_step = 1, or algo.surrogate = "clip"', "warning")


def _critic(loaded: LoadedRecipe, row: Algorithm) -> Iterator[Problem]:
    estimator = ESTIMATORS.get(row.advantage)
    if estimator is not None and estimator.critic and row.scale not in (None, *CRITIC_SCALES):
        message = (
            f"`algo.scale` {row.scale} divides by a spread of scores, but {row.advantage} uses a critic for each token"
        )
        where = loaded.where(("algo", "scale"), ("algo", "advantage"))
        yield Problem(message, where, f"use {', '.join(CRITIC_SCALES[:-1])} or {CRITIC_SCALES[-1]}")


def _overlap(loaded: LoadedRecipe, row: Algorithm) -> Iterator[Problem]:
    """Refuse settings that do not work with overlap: older weights sample, and prompts are drawn before the filter."""
    where = loaded.where(("rollout", "overlap"))
    if not loaded.recipe.rollout.overlap:
        return
    if row.importance == "none":
        message = (
            "`rollout.overlap` samples with older weights, and `algo.importance` is none: nothing corrects for that"
        )
        yield Problem(message, where, "leave algo.importance out")
    if row.filter != "none":
        message = "`rollout.overlap` draws a step's prompts at once, but `algo.filter` draws until enough have passed"
        yield Problem(message, where, "leave one of them out")


RULES: tuple[Callable[[LoadedRecipe, Algorithm], Iterator[Problem]], ...] = (
    _unread,
    _kl,
    _parts,
    _lengths,
    _filter,
    _importance,
    _advantage,
    _critic,
    _overlap,
)


def check_algo(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Yield the problems of `[algo]`, if its row exists."""
    row = overridden_row(loaded)
    if row is not None:
        for rule in RULES:
            yield from rule(loaded, row)
