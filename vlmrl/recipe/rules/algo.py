"""Rules about `[algo]`: cells of the family table that contradict each other, or that another one leaves idle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vlmrl.errors import Problem
from vlmrl.recipe.load import LoadedRecipe

Rows = Mapping[str, Mapping[str, Any]]
"""Algorithm -> its cells."""

COV_KEYS = {"cov_share": ("clip_cov", "kl_cov"), "cov_low": ("clip_cov",), "cov_high": ("clip_cov",),
            "cov_kl_coef": ("kl_cov",), "tau_positive": ("sapo",), "tau_negative": ("sapo",)}  # fmt: skip
"""Cell -> the surrogates that read it."""
CRITIC_SCALES = ("none", "tokens", "tokens_keep_mean")
"""As algo/advantages.py has it, which a package of the same level may not import; a test compares them."""


def limits_ratio(cells: Mapping[str, Any]) -> bool:
    """As `Algorithm.limits_ratio` of algo/family.py, not to be imported here; a test compares."""
    bounded = cells["surrogate"] in ("clip", "clip_cov", "cispo", "gmpo") and cells["clip_high"] is not None
    return bounded or cells["surrogate"] == "sapo"


def _cells(loaded: LoadedRecipe, rows: Rows) -> dict[str, Any] | None:
    """The row with the recipe's overrides; None when there is no such row, or nothing is trained by reinforcement."""
    algo = loaded.recipe.algo
    if algo.name not in rows or loaded.recipe.kind != "rl":
        return None
    return {k: v if (own := getattr(algo, k, None)) is None else own for k, v in rows[algo.name].items()}


def _unread(loaded: LoadedRecipe, rows: Rows) -> Iterator[Problem]:
    """Keys that the chosen surrogate does not read."""
    cells, algo = _cells(loaded, rows), loaded.recipe.algo
    if cells is None:
        return
    surrogate = cells["surrogate"]
    readers = dict(COV_KEYS)
    for key in ("clip_low", "clip_high"):
        readers[key] = ("clip", "cispo", "gmpo", "clip_cov")
    readers["dual_clip"] = ("clip", "clip_cov")
    for key, known in readers.items():
        if getattr(algo, key) is not None and surrogate not in known:
            message = f"`algo.{key}` does nothing: the surrogate of `{algo.name}` is `{surrogate}`"
            hint = f"remove it, or set algo.surrogate to {' or '.join(known)}"
            yield Problem(message, loaded.where(("algo", key)), hint, "warning")
    if algo.ratio is not None and surrogate in ("reinforce", "gmpo"):
        message = f"`algo.ratio` does nothing: the surrogate `{surrogate}` has no ratio to choose"
        yield Problem(message, loaded.where(("algo", "ratio")), "remove it", "warning")


def _kl(loaded: LoadedRecipe, rows: Rows) -> Iterator[Problem]:
    cells, algo = _cells(loaded, rows), loaded.recipe.algo
    if cells is None:
        return
    if not cells["kl_coef"]:
        for key in ("kl", "kl_in", "kl_target", "kl_horizon"):
            if getattr(algo, key) is not None:
                message = f"`algo.{key}` does nothing: `algo.kl_coef` is 0"
                yield Problem(message, loaded.where(("algo", key)), "set algo.kl_coef, such as 0.001", "warning")
        return
    if cells["kl"] == "k1" and cells["kl_in"] == "loss":
        message = "`algo.kl` k1 in the loss: its expected gradient is zero, so it pulls nowhere"
        hint = 'set algo.kl = "k2" or "k3", or algo.kl_in = "reward"'
        yield Problem(message, loaded.where(("algo", "kl"), ("algo", "kl_in")), hint)
    if cells["kl_in"] == "reward" and cells["advantage"] == "part_by_part":
        message = "the KL cannot go into the reward where each part of it is normalised on its own (part_by_part)"
        yield Problem(message, loaded.where(("algo", "kl_in"), ("algo", "kl_coef")), 'set algo.kl_in = "loss"')
    if algo.kl_horizon is not None and cells["kl_target"] is None:
        message = "`algo.kl_horizon` does nothing: without `algo.kl_target` the coefficient is fixed"
        yield Problem(message, loaded.where(("algo", "kl_horizon")), "set algo.kl_target, or remove it", "warning")


def _parts(loaded: LoadedRecipe, rows: Rows) -> Iterator[Problem]:
    """Rules on the score have no place where the advantage is made from the parts."""
    cells, algo = _cells(loaded, rows), loaded.recipe.algo
    if cells is None or cells["advantage"] != "part_by_part":
        return
    for key in ("overlong_tokens", "truncated_score"):
        if cells[key]:
            message = f"`algo.{key}` changes the score, but part_by_part looks at the reward's parts"
            hint = "let the reward return it as a part of its own, or use another algo.advantage"
            yield Problem(message, loaded.where(("algo", key), ("algo", "name")), hint)
    if algo.filter == "spread" and cells["min_spread"]:
        message = "`algo.min_spread` compares whole scores, but part_by_part looks at the reward's parts"
        yield Problem(message, loaded.where(("algo", "min_spread")), "leave min_spread at 0", "warning")


def _lengths(loaded: LoadedRecipe, rows: Rows) -> Iterator[Problem]:
    cells, algo, limit = _cells(loaded, rows), loaded.recipe.algo, loaded.recipe.rollout.max_new_tokens
    if cells is None:
        return
    if cells["overlong_tokens"] > limit:
        message = (
            f"`algo.overlong_tokens` ({cells['overlong_tokens']}) is more than `rollout.max_new_tokens` ({limit}): "
            "even an empty response would lose score"
        )
        where = loaded.where(("algo", "overlong_tokens"), ("rollout", "max_new_tokens"))
        yield Problem(message, where, "a fifth of max_new_tokens is usual")
    if algo.overlong_penalty is not None and not cells["overlong_tokens"]:
        message = "`algo.overlong_penalty` does nothing: `algo.overlong_tokens` is 0"
        where = loaded.where(("algo", "overlong_penalty"))
        yield Problem(message, where, "set algo.overlong_tokens, or remove it", "warning")
    if cells["truncated_score"] is not None and algo.truncated != "keep":
        message = (
            f'`algo.truncated` = "{algo.truncated}" takes out the responses that '
            f"`algo.truncated_score` ({cells['truncated_score']}) gives a score to"
        )
        yield Problem(
            message, loaded.where(("algo", "truncated"), ("algo", "truncated_score")), 'use "keep"', "warning"
        )


def _filter(loaded: LoadedRecipe, rows: Rows) -> Iterator[Problem]:
    cells, algo = _cells(loaded, rows), loaded.recipe.algo
    if cells is None:
        return
    if cells["filter"] == "none":
        for key in ("min_spread", "filter_tries"):
            if getattr(algo, key) is not None:
                message = f'`algo.{key}` does nothing: `algo.filter` is "none"'
                yield Problem(message, loaded.where(("algo", key)), 'set algo.filter = "spread"', "warning")
    elif algo.filter is not None and loaded.recipe.rollout.samples_per_prompt == 1:
        message = "`algo.filter` spread refuses every prompt: with one sample there is no spread"
        where = loaded.where(("algo", "filter"), ("rollout", "samples_per_prompt"))
        yield Problem(message, where, 'set algo.filter = "none", or more samples_per_prompt')


def _importance(loaded: LoadedRecipe, rows: Rows) -> Iterator[Problem]:
    cells, algo, rollout = _cells(loaded, rows), loaded.recipe.algo, loaded.recipe.rollout
    if cells is None:
        return
    if cells["importance"] in ("truncate", "mask", "ratio") and (rollout.top_p < 1 or rollout.top_k > 0):
        message = (
            f'`algo.importance` = "{cells["importance"]}" cannot hold with top_p < 1 or top_k: the engine\'s log-probs '
            "are then not those of the policy"
        )
        where = loaded.where(("algo", "importance"), ("rollout", "top_p"), ("rollout", "top_k"))
        yield Problem(message, where, "leave top_p and top_k out, or algo.importance")
    idle = {"none": ("importance_level", "importance_cap"), "ratio": ("importance_level",)}
    for key in idle.get(cells["importance"], ()):
        if getattr(algo, key) is not None:
            message = f'`algo.{key}` does nothing: `algo.importance` is "{cells["importance"]}"'
            yield Problem(message, loaded.where(("algo", key)), "remove it", "warning")
    if cells["importance"] == "ratio" and not limits_ratio(cells):
        message = '`algo.importance` = "ratio" needs a ratio that is clipped: nothing limits that of this row'
        where = loaded.where(("algo", "importance"), ("algo", "name"))
        yield Problem(message, where, 'set algo.clip_low and algo.clip_high, or algo.importance = "mask"')


def _advantage(loaded: LoadedRecipe, rows: Rows) -> Iterator[Problem]:
    cells, algo = _cells(loaded, rows), loaded.recipe.algo
    if cells is None:
        return
    if algo.advantage == "group_mean_std" and algo.scale not in (None, "group"):
        message = f"`algo.advantage` group_mean_std divides by the group's std, `algo.scale` says {algo.scale}"
        yield Problem(message, loaded.where(("algo", "scale"), ("algo", "advantage")), "use advantage = group_mean")
    if algo.gamma is not None and algo.gamma < 1 and cells["advantage"] not in ("none", "greedy", "gae"):
        message = f"`algo.gamma` does nothing: the advantage `{cells['advantage']}` compares whole scores"
        yield Problem(
            message, loaded.where(("algo", "gamma")), "remove it, or use reinforce++, remax or ppo", "warning"
        )
    if cells["surrogate"] == "clip_cov" and cells["cov_low"] >= cells["cov_high"]:
        message = f"`algo.cov_low` ({cells['cov_low']}) is not below `algo.cov_high` ({cells['cov_high']})"
        where = loaded.where(("algo", "cov_low"), ("algo", "cov_high"))
        yield Problem(message, where, "1 and 5 are the published pair")
    updates = loaded.recipe.train.updates_per_step
    if cells["surrogate"] == "reinforce" and updates > 1:
        message = f"`train.updates_per_step` is {updates}, but `{algo.name}` has no ratio: only the first is on-policy"
        where = loaded.where(("train", "updates_per_step"), ("algo", "name"))
        yield Problem(message, where, 'set train.updates_per_step = 1, or algo.surrogate = "clip"', "warning")


def _critic(loaded: LoadedRecipe, rows: Rows) -> Iterator[Problem]:
    cells, algo = _cells(loaded, rows), loaded.recipe.algo
    if cells is None:
        return
    if cells["advantage"] != "gae":
        for key in ("gae_lambda", "value_coef", "value_clip"):
            if getattr(algo, key) is not None:
                message = f"`algo.{key}` does nothing: the advantage `{cells['advantage']}` has no critic"
                yield Problem(message, loaded.where(("algo", key)), 'remove it, or set algo.name = "ppo"', "warning")
    elif cells["scale"] not in (None, *CRITIC_SCALES):
        message = f"`algo.scale` {cells['scale']} divides by a spread of scores, but gae judges each token by a critic"
        where = loaded.where(("algo", "scale"), ("algo", "advantage"))
        yield Problem(message, where, f"use {', '.join(CRITIC_SCALES[:-1])} or {CRITIC_SCALES[-1]}")


def _overlap(loaded: LoadedRecipe, rows: Rows) -> Iterator[Problem]:
    """Rollouts of older weights want their correction, and are drawn before it is known which prompts were refused."""
    cells, where = _cells(loaded, rows), loaded.where(("rollout", "overlap"))
    if cells is None or not loaded.recipe.rollout.overlap:
        return
    if cells["importance"] == "none":
        message = (
            "`rollout.overlap` samples with older weights, and `algo.importance` is none: nothing corrects for that"
        )
        yield Problem(message, where, "leave algo.importance out")
    if cells["filter"] != "none":
        message = "`rollout.overlap` draws a step's prompts at once, and `algo.filter` draws until enough have passed"
        yield Problem(message, where, "leave one of them out")


ALGO_RULES: tuple[Callable[[LoadedRecipe, Rows], Iterator[Problem]], ...] = (
    _unread, _kl, _parts, _lengths, _filter, _importance, _advantage, _critic, _overlap,
)  # fmt: skip
