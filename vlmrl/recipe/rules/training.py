"""Rules about training: cells of `[algo]`, numbers, and the trained weights.

Cells may contradict each other, or do nothing because of another cell. Numbers may be allowed alone and make no sense
together. Adapters, frozen parts and quantized weights have rules of their own, and so have the optimizers for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import get_args

from vlmrl.algo.algo_keys import CELLS, Algorithm
from vlmrl.algo.algorithms import ALGORITHMS
from vlmrl.algo.choices import CRITIC_SCALES, ESTIMATORS
from vlmrl.errors import Problem
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.schema import Model
from vlmrl.recipe.tables import AUTO
from vlmrl.recipe.validation_messages import literal_choices

IMAGE_MARK = "<image>"


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


def _unfit(message: str, unfit: Mapping[str, bool], where: str) -> Iterator[Problem]:
    """Yield a problem for each name in `unfit` with the value true."""
    for what in (what for what, is_so in unfit.items() if is_so):
        yield Problem(f"{message} {what}", where, "change one of the two")


def _demonstrations(loaded: LoadedRecipe, row: Algorithm) -> Iterator[Problem]:
    """Refuse what has no meaning with demonstrations among the responses of a step."""
    if row.demonstrations == "none":
        return
    where = loaded.where(("algo", "demonstrations"), ("algo", "name"))
    unfit = {
        "several turns of an environment": loaded.recipe.has_episodes,
        "a critic": row.needs_critic,
        "the KL in the reward": row.kl_coef > 0 and row.kl_in == "reward",
        f"the surrogate {row.surrogate}, which picks or joins tokens": row.selects or row.joins_tokens,
        "a ratio of whole responses": row.ratio != "token",
        "a greedy baseline": row.advantage == "greedy",
        "a baseline for each token": row.needs_energy,
        "a filter of prompts": row.filter != "none",
    }
    if row.demonstrations == "mixed":
        unfit["an advantage part by part"] = row.advantage == "part_by_part"
    elif row.one_mean:
        unfit[f"`algo.demonstration_loss` {row.demonstration_loss} unless they are mixed"] = True
    yield from _unfit(f"demonstrations (`algo.demonstrations` = {row.demonstrations}) do not go with", unfit, where)
    if all(data.demonstrations == "none" for data in loaded.recipe.data):
        message = f"{loaded.recipe.algo.name} learns from demonstrations, and no source has any"
        yield Problem(message, where, 'take `demonstrations = "none"` out of a [[data]]')


def _perception(loaded: LoadedRecipe, row: Algorithm) -> Iterator[Problem]:
    """Refuse what has no meaning with a second pass behind masked images."""
    if not row.masks:
        return
    where = loaded.where(("algo", "perception"), ("algo", "name"))
    selects = row.perception == "select"
    unfit = {
        "an environment, whose images would not be masked": loaded.recipe.has_episodes,
        "demonstrations": row.demonstrations != "none",
        f"the surrogate {row.surrogate}, which picks or joins tokens itself": selects
        and (row.selects or row.surrogate == "gmpo"),
    }
    masks = f"`algo.perception` = {row.perception} masks the images of the prompt and does not go with"
    yield from _unfit(masks, unfit, where)
    if row.mask_share == 0:
        message = "`algo.mask_share` is 0: no patch is black, so no token depends on the images"
        yield Problem(message, loaded.where(("algo", "mask_share")), "0.6 is usual", "warning")


def _teacher(loaded: LoadedRecipe, row: Algorithm) -> Iterator[Problem]:
    """Refuse a teacher without a use, a use without a teacher, and what has no meaning with one."""
    settings, where = loaded.recipe.teacher, loaded.where(("algo", "teacher"), ("algo", "name"))
    if row.teacher == "none":
        if settings is not None:
            hint = 'set algo.teacher = "loss" or "reward", or algo.name = "opd"; or remove the table'
            message = f"[teacher] does nothing: {loaded.recipe.algo.name} learns from no teacher"
            yield Problem(message, loaded.where(("teacher", "path")), hint, "warning")
        return
    if settings is None:
        message = f"{loaded.recipe.algo.name} learns from a teacher, and the recipe has none"
        yield Problem(message, where, 'add a table: [teacher], path = "..."')
        return
    if settings.checkpoint != AUTO and loaded.is_set(("teacher", "checkpoint")):
        message = "`teacher.checkpoint` is chosen when a run begins"
        hint = 'name the checkpoint in teacher.path: "RUN@best", "RUN@last" or "RUN@40"'
        yield Problem(message, loaded.where(("teacher", "checkpoint")), hint)
    in_reward = row.teacher == "reward"
    unfit = {
        "several turns of an environment": loaded.recipe.has_episodes,
        "a critic": in_reward and row.needs_critic,
        f"the surrogate {row.surrogate}, which joins tokens": in_reward and row.surrogate == "gmpo",
        "a ratio of whole responses": in_reward and row.ratio == "sequence",
        "demonstrations": row.demonstrations != "none" and (in_reward or row.teacher_weights == "visual"),
        "a teacher.temperature of its own, if it is the start of the run and its log-probs are the reward": in_reward
        and settings.is_start
        and settings.temperature not in (None, loaded.recipe.rollout.temperature),
    }
    yield from _unfit(f"learning from a teacher (`algo.teacher` = {row.teacher}) does not go with", unfit, where)
    at = loaded.where(("teacher", "reveal"), ("teacher", "path"))
    if settings.is_start and settings.reveal is None:
        message = "the teacher is the policy as the run began, and reads the same prompt: it has nothing to teach"
        yield Problem(message, at, "give `teacher.reveal`, the text that it alone reads; or name another model")
    if settings.reveal is not None and IMAGE_MARK in settings.reveal:
        message = f"`teacher.reveal` has the mark {IMAGE_MARK}, but it shows no image"
        yield Problem(message, at, "take it out")
    if settings.control and settings.reveal is None:
        message = "`teacher.control` does nothing: there is no `teacher.reveal` whose values it would hide"
        yield Problem(message, loaded.where(("teacher", "control")), "remove it", "warning")


def length_key(loaded: LoadedRecipe) -> str:
    """Return the key that limits a whole response."""
    return "environment.tokens" if loaded.recipe.has_episodes else "rollout.max_new_tokens"


def _lengths(loaded: LoadedRecipe, row: Algorithm) -> Iterator[Problem]:
    algo, limit = loaded.recipe.algo, loaded.recipe.longest_response
    if row.overlong_tokens > limit:
        message = (
            f"`algo.overlong_tokens` ({row.overlong_tokens}) is more than `{length_key(loaded)}` ({limit}): "
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


def _sampling(loaded: LoadedRecipe, row: Algorithm) -> Iterator[Problem]:
    algo, rollout = loaded.recipe.algo, loaded.recipe.rollout
    if algo.filter is not None and row.filter != "none" and rollout.samples_per_prompt == 1:
        message = "`algo.filter` spread refuses every prompt: with one sample there is no spread"
        where = loaded.where(("algo", "filter"), ("rollout", "samples_per_prompt"))
        yield Problem(message, where, 'set algo.filter = "none", or more samples_per_prompt')

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
    _demonstrations,
    _perception,
    _teacher,
    _lengths,
    _sampling,
    _advantage,
    _overlap,
)


def check_algo(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Yield the problems of `[algo]`, if its row exists."""
    row = overridden_row(loaded)
    if row is not None:
        for rule in RULES:
            yield from rule(loaded, row)


MAX_STEP_RESPONSES = 10_000_000
"""Maximum number of responses in one step. All are in memory at once, some kilobytes each."""
MAX_STEP_TOKENS = 10**11
"""Maximum number of response tokens in one step: 100 times what a large cluster samples in an hour."""


def _step_size(loaded: LoadedRecipe) -> Iterator[Problem]:
    rollout = loaded.recipe.rollout
    if loaded.recipe.kind != "rl":
        return
    responses = rollout.prompts_per_step * rollout.samples_per_prompt
    tokens = responses * (longest := loaded.recipe.longest_response)
    where = loaded.where(("rollout", "prompts_per_step"), ("rollout", "samples_per_prompt"))
    product = f"{rollout.prompts_per_step:,} prompts x {rollout.samples_per_prompt:,} samples = {responses:,} responses"
    if responses > MAX_STEP_RESPONSES:
        hint = f"at most {MAX_STEP_RESPONSES:,}: lower rollout.prompts_per_step or rollout.samples_per_prompt"
        yield Problem(f"one step is {product}", where, hint)
    elif tokens > MAX_STEP_TOKENS:
        message = f"one step is {product} of up to {longest:,} tokens = {tokens:,} tokens"
        place = loaded.where(("rollout", "max_new_tokens"), ("rollout", "prompts_per_step"))
        yield Problem(message, place, f"at most {MAX_STEP_TOKENS:,}: lower {length_key(loaded)}")


def _training(loaded: LoadedRecipe) -> Iterator[Problem]:
    train, optim = loaded.recipe.train, loaded.recipe.optim
    if train.steps == 0 and train.epochs is None:
        hint = "train.steps = 100, or train.epochs = 1 for one pass over the data"
        yield Problem("`train.steps` is 0: nothing would be trained", loaded.where(("train", "steps")), hint)

    share = optim.lr * optim.weight_decay
    if share >= 1:
        message = f"`optim.lr` x `optim.weight_decay` is {share:g}: every update would remove the weights entirely"
        where = loaded.where(("optim", "weight_decay"), ("optim", "lr"))
        yield Problem(message, where, "0.01 to 0.1 is usual for optim.weight_decay")


NUMBER_RULES = (_step_size, _training)


PARTS = tuple(literal_choices(get_args(Model.model_fields["freeze"].annotation)[0]))


def _frozen(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Find a `model.freeze` that leaves nothing to train, or contradicts `[lora]`.

    With an adapter, all weights are frozen anyway, and `model.freeze` means that a part gets no adapter.
    """
    lora, freeze = loaded.recipe.lora, loaded.recipe.model.freeze
    where = loaded.where(("model", "freeze"))
    if set(PARTS) <= set(freeze):
        message = "`model.freeze` names every part: nothing is left to train"
        yield Problem(message, where, f"leave out at least one of {', '.join(PARTS)}")
    if lora is None or set(PARTS) <= set(freeze):
        return
    adapted = {"language", "vision", "connector"} if lora.vision else {"language"}
    if adapted <= set(freeze):
        message = f"`model.freeze` names every part that would get an adapter ({', '.join(sorted(adapted))})"
        hint = "leave language out" if not lora.vision else "leave one of them out"
        yield Problem(f"{message}: nothing is left to train", where, hint)
    elif lora.vision and {"vision", "connector"} <= set(freeze):
        message = "`lora.vision` adds adapters to the vision tower and the connector, but `model.freeze` excludes both"
        yield Problem(message, loaded.where(("lora", "vision"), ("model", "freeze")), "remove one of the two")
    else:
        idle = [part for part in freeze if part not in adapted]
        if idle:
            message = f"`model.freeze` of {', '.join(idle)} changes nothing: with [lora] no weight there is trained"
            yield Problem(message, where, "remove it", "warning")


def _adapter(loaded: LoadedRecipe) -> Iterator[Problem]:
    lora = loaded.recipe.lora
    if lora is None:
        return
    if lora.dropout > 0 and loaded.recipe.kind == "rl":
        message = f"`lora.dropout` is {lora.dropout}: the policy that is trained would not be the one that sampled"
        yield Problem(message, loaded.where(("lora", "dropout")), "leave dropout out (= 0) in reinforcement learning")

    names = {"exclude": lora.exclude, "targets": [] if isinstance(lora.targets, str) else lora.targets}
    for key, values in names.items():
        if any(not value.strip() for value in values):
            yield Problem(f"`lora.{key}` holds an empty name", loaded.where(("lora", key)), "remove it")
    if "all-linear" in names["targets"]:
        message = '`lora.targets` lists "all-linear", which is not the name of a layer'
        yield Problem(message, loaded.where(("lora", "targets")), 'write targets = "all-linear"')
    if "*" in lora.exclude:
        message = '`lora.exclude` has "*", which leaves no layer: nothing is left to train'
        yield Problem(message, loaded.where(("lora", "exclude")), "remove it")


def _trained_weights(loaded: LoadedRecipe) -> Iterator[Problem]:
    optim, model, lora = loaded.recipe.optim, loaded.recipe.model, loaded.recipe.lora
    if model.quantize is not None and lora is None:
        message = f'`model.quantize` is "{model.quantize}", but quantized weights cannot be trained themselves'
        yield Problem(message, loaded.where(("model", "quantize")), "add a [lora] table, or remove model.quantize")
    where = loaded.where(("optim", "name"))
    if optim.name == "adamw_bf16_kahan" and model.dtype == "float32":
        message = f"`optim.name` is {optim.name}, which holds bfloat16 weights, but `model.dtype` is {model.dtype}"
        yield Problem(message, where, 'set model.dtype = "bfloat16", or optim.name = "adamw"')

    if lora is not None and optim.lr < 3e-6:
        message = f"`optim.lr` is {optim.lr}, a rate for training all weights; an adapter hardly changes with it"
        yield Problem(message, loaded.where(("optim", "lr")), "leave it out: with [lora] it is then 1e-5", "warning")


LORA_RULES = (_frozen, _adapter, _trained_weights)
