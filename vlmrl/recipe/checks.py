"""Rules about several keys of a recipe: combinations of values that make no sense, and names that must exist.

Each rule is a small function that yields problems, and `check_recipe` runs them all. They open only small text files
(prompt templates, reward sources) and import no reward. Rules about rows, tokens and memory are in setup/check.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from vlmrl.algo.algo_keys import CELLS
from vlmrl.algo.algorithms import ALGORITHMS
from vlmrl.algo.choices import ESTIMATORS
from vlmrl.errors import Problem, did_you_mean, listed
from vlmrl.recipe.key_fields import field_at, mark_of
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.rules.engine import check_engine
from vlmrl.recipe.rules.eval import EVAL_RULES
from vlmrl.recipe.rules.files import FILE_RULES, MADE_ELSEWHERE_RULES, REWARD_LIST_RULES, is_file_reward, named_rewards
from vlmrl.recipe.rules.training import LORA_RULES, NUMBER_RULES, check_algo, length_key, overridden_row
from vlmrl.recipe.schema import Data, Recipe
from vlmrl.recipe.tables import OF_TASK, ReadBy
from vlmrl.recipe.toml_lines import Key, dotted
from vlmrl.untrusted import parse_json

SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Pattern of the names that a data source may have."""


@dataclass(frozen=True)
class Catalogs:
    """Names that a recipe may use and that are defined in packages of a higher level. An empty catalog is not checked.

    Args:
        tasks, rewards: name -> one-line summary.
        variants, profiles: task -> names that `data.variant` and `reward.profile` may have for it.
        column_roles: keys of `data.columns`.
    """

    tasks: Mapping[str, str] = field(default_factory=dict)
    rewards: Mapping[str, str] = field(default_factory=dict)
    tasks_without_reward: tuple[str, ...] = ("table",)
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    profiles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    column_roles: tuple[str, ...] = ()


Rule = Callable[[LoadedRecipe, Catalogs], Iterator[Problem]]


def check_recipe(loaded: LoadedRecipe, catalogs: Catalogs) -> list[Problem]:
    """Return the warnings of loading the recipe, then the problems of all rules, in the order of the rules."""
    return [*loaded.warnings, *(problem for rule in RULES for problem in rule(loaded, catalogs))]


def check_unprepared(loaded: LoadedRecipe, catalogs: Catalogs) -> list[Problem]:
    """Check a recipe like `check_recipe`, but report missing data or a missing model as a warning only."""
    missing = {(p.message, p.where) for rule in MADE_ELSEWHERE_RULES for p in rule(loaded)}
    problems = check_recipe(loaded, catalogs)
    return [replace(p, level="warning") if (p.message, p.where) in missing else p for p in problems]


def _filtered_sampling(loaded: LoadedRecipe, catalogs: Catalogs) -> Iterator[Problem]:
    rollout = loaded.recipe.rollout
    if rollout.allow_filtered_sampling or loaded.recipe.kind != "rl":
        return
    for name, value, off in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, 0)):
        if value != off:
            yield Problem(
                f"`rollout.{name}` is {value}: tokens are then not sampled from the policy that is trained",
                loaded.where(("rollout", name)),
                f"leave {name} out (= {off}), or set rollout.allow_filtered_sampling = true and train without "
                "importance correction",
            )


def _bounds(loaded: LoadedRecipe, catalogs: Catalogs) -> Iterator[Problem]:
    """Find bounds in the wrong order, and numbers of `[optim]` that do not go together."""
    low, high = loaded.recipe.algo.clip_low, loaded.recipe.algo.clip_high
    if low is not None and high is not None and high < low:
        message = (
            f"`algo.clip_high` ({high}) is below `algo.clip_low` ({low}): good tokens are limited more than bad ones"
        )
        hint = "clip_low = 0.2 and clip_high = 0.28 are usual; swap yours if you meant that"
        yield Problem(message, loaded.where(("algo", "clip_high"), ("algo", "clip_low")), hint, "warning")

    model, optim, steps = loaded.recipe.model, loaded.recipe.optim, loaded.recipe.train.steps
    if model.min_pixels > model.max_pixels:
        message = f"`model.min_pixels` ({model.min_pixels}) is above `model.max_pixels` ({model.max_pixels})"
        where = loaded.where(("model", "min_pixels"), ("model", "max_pixels"))
        yield Problem(message, where, "images are enlarged to min_pixels and shrunk to max_pixels; set min <= max")

    if optim.warmup_steps >= steps > 0:
        message = (
            f"`optim.warmup_steps` ({optim.warmup_steps}) leaves no step of `train.steps` ({steps}) at the full rate"
        )
        where = loaded.where(("optim", "warmup_steps"), ("train", "steps"))
        yield Problem(message, where, "set optim.warmup_steps below train.steps")
    if optim.schedule == "constant" and optim.min_lr_ratio > 0:
        message = f"`optim.min_lr_ratio` ({optim.min_lr_ratio}) does nothing with a constant schedule"
        yield Problem(message, loaded.where(("optim", "min_lr_ratio")), 'set optim.schedule = "cosine"', "warning")
    if optim.lr > 0.05:
        message = f"`optim.lr` is {optim.lr}; AdamW on a transformer diverges with it"
        yield Problem(message, loaded.where(("optim", "lr")), "1e-6 is usual if all weights are trained", "warning")


def _group_size(loaded: LoadedRecipe, catalogs: Catalogs) -> Iterator[Problem]:
    recipe, row = loaded.recipe, overridden_row(loaded)
    estimator = ESTIMATORS.get(row.advantage) if row else None
    if estimator is None or not estimator.needs_group or recipe.rollout.samples_per_prompt > 1:
        return
    yield Problem(
        f"`rollout.samples_per_prompt` is 1, but `{recipe.algo.name}` compares the samples of one prompt: "
        "every advantage is 0",
        loaded.where(("rollout", "samples_per_prompt")),
        "set rollout.samples_per_prompt to 2 or more; 8 is the default",
    )


def _sizes(loaded: LoadedRecipe, catalogs: Catalogs) -> Iterator[Problem]:
    """Find updates, rows, batches and episodes that are too small for what they hold."""
    recipe, rollout, train = loaded.recipe, loaded.recipe.rollout, loaded.recipe.train
    updates, prompts, turn = train.updates_per_step, rollout.prompts_per_step, rollout.max_new_tokens
    if recipe.kind == "rl" and updates > prompts:
        message = (
            f"`train.updates_per_step` ({updates}) is more than `rollout.prompts_per_step` ({prompts}): "
            "an update needs at least one prompt"
        )
        where = loaded.where(("train", "updates_per_step"), ("rollout", "prompts_per_step"))
        yield Problem(message, where, f"set train.updates_per_step to at most {prompts}")

    if recipe.kind == "rl" and recipe.longest_response > train.tokens_per_row:
        message = (
            f"a response may have {recipe.longest_response} tokens (`{length_key(loaded)}`), more than "
            f"`train.tokens_per_row` ({train.tokens_per_row}): such a response gets a packed row of its own"
        )
        where = loaded.where(("train", "tokens_per_row"), ("rollout", "max_new_tokens"))
        yield Problem(message, where, "the longest response then decides the memory, not this budget", "warning")
    if turn >= rollout.batch_tokens:
        message = (
            f"`rollout.batch_tokens` ({rollout.batch_tokens}) cannot hold one prompt and a response of "
            f"`rollout.max_new_tokens` ({turn})"
        )
        where = loaded.where(("rollout", "batch_tokens"), ("rollout", "max_new_tokens"))
        yield Problem(message, where, "raise batch_tokens or lower max_new_tokens")

    if recipe.has_episodes and turn > (whole := recipe.environment.tokens):
        message = f"one turn (`rollout.max_new_tokens` = {turn}) may be longer than the whole episode ({whole} tokens)"
        where = loaded.where(("environment", "tokens"), ("rollout", "max_new_tokens"), ("environment", "name"))
        yield Problem(message, where, "raise environment.tokens: it counts all turns, and what the tools return")

    if any(not text for text in rollout.stop):
        message = "`rollout.stop` holds an empty string, which would end every response at once"
        yield Problem(message, loaded.where(("rollout", "stop")), "remove it")


def _data_names(loaded: LoadedRecipe, catalogs: Catalogs) -> Iterator[Problem]:
    """Find names of data sources that are used twice or contain a character that is not allowed.

    Names that are stored in the datasets are compared later, when the datasets are opened (setup/rows.py).
    """
    sources = [data.name or f"{data.path} ({data.split})" for data in loaded.recipe.data]
    for name, count in Counter(sources).items():
        if count > 1:
            last = max(i for i, n in enumerate(sources) if n == name)
            hint = "metrics and rollouts are kept apart by name: give each [[data]] a `name` of its own"
            where = loaded.where(("data", last, "name"), ("data", last, "path"))
            yield Problem(f"{count} data sources are called `{name}`", where, hint)
    for i, data in enumerate(loaded.recipe.data):
        if data.name is not None and not SOURCE_NAME.fullmatch(data.name):
            where = loaded.where(("data", i, "name"))
            yield Problem(f"`{data.name}` cannot name a data source", where, "letters, digits, - _ and . only")


def _shares(loaded: LoadedRecipe, catalogs: Catalogs) -> Iterator[Problem]:
    recipe = loaded.recipe
    rows = recipe.rollout.prompts_per_step if recipe.kind == "rl" else recipe.train.rows_per_step
    total = sum(data.share for data in recipe.data)
    for i, data in enumerate(recipe.data):
        if len(recipe.data) > 1 and rows * data.share / total < 0.5:
            name, part = data.name or data.path, data.share / total
            message = f"`{name}` gets {part:.1%} of {rows} prompts: less than one in two steps"
            yield Problem(
                message, loaded.where(("data", i, "share")), "raise its share or the prompts per step", "warning"
            )


def _columns_and_weights(loaded: LoadedRecipe, catalogs: Catalogs) -> Iterator[Problem]:
    roles = catalogs.column_roles
    for i, data in enumerate(loaded.recipe.data):
        for role in data.columns:
            if roles and role not in roles:
                where = loaded.where(("data", i, "columns", role))
                yield Problem(f"unknown key `data.{i}.columns.{role}`", where, listed(role, roles))

    weights = loaded.recipe.reward.weights
    if weights and not any(weights.values()):
        yield Problem(
            "every weight in `reward.weights` is 0: all scores are equal", loaded.where(("reward", "weights"))
        )


def _reward_used(loaded: LoadedRecipe, catalogs: Catalogs) -> Iterator[Problem]:
    recipe = loaded.recipe
    if recipe.reward.name and all(data.reward or data.rewards for data in recipe.data):
        message = f"`reward.name` ({recipe.reward.name}) is never used: every [[data]] names a reward of its own"
        yield Problem(message, loaded.where(("reward", "name")), "remove one of the two", "warning")
    for i, data in enumerate(recipe.data):
        own = any(one.name == OF_TASK for one in data.all_rewards)
        name = None if own else data.reward or recipe.reward.name or next((one.name for one in data.all_rewards), None)
        prepared = (Path(data.path) / "dataset.json").is_file()  # its task has a reward
        if name is None and not prepared and data.task in catalogs.tasks_without_reward and recipe.kind == "rl":
            hint = 'set [reward] name = "path/to/file.py:function", or a built-in (`vlmrl recipe list --rewards`)'
            message = f"the task `{data.task}` has no reward of its own and the recipe names none"
            yield Problem(message, loaded.where(("data", i, "task"), ("data", i)), hint)
        if name and recipe.reward.style != "auto" and not is_file_reward(name) and not data.all_rewards:
            message = f"`reward.style` does nothing: `{name}` is a built-in reward"
            yield Problem(message, loaded.where(("reward", "style")), None, "warning")


def _variants(loaded: LoadedRecipe, catalogs: Catalogs) -> Iterator[Problem]:
    """Find variants and reward profiles that the task of a `[[data]]` entry does not have, and unused profiles."""
    profile, where = loaded.recipe.reward.profile, loaded.where(("reward", "profile"))
    tasks = [(data, _task_of(data)) for data in loaded.recipe.data]
    for i, (data, task) in enumerate(tasks):
        known = catalogs.variants.get(task)
        if data.variant is not None and known is not None and data.variant not in known:
            message = f"the task `{task}` has no variant `{data.variant}`"
            yield Problem(message, loaded.where(("data", i, "variant")), listed(data.variant, known))
        known = catalogs.profiles.get(task)
        own = not (data.reward or loaded.recipe.reward.name or data.all_rewards)
        place: Key = ("data", i, "rewards") if data.rewards else ("rewards",)
        profiles = [((*place, k, "profile"), one) for k, one in enumerate(data.all_rewards) if one.name == OF_TASK]
        named: list[tuple[Key, str]] = [(key, one.profile) for key, one in profiles]
        for key, name in [*named, *([(("reward", "profile"), profile)] if own else [])]:
            if known is not None and name not in known:
                message = f"the task `{task}` has no reward profile `{name}`"
                yield Problem(message, loaded.where(key), listed(name, known))
    if profile != "default" and all(data.reward or loaded.recipe.reward.name for data in loaded.recipe.data):
        message = f"`reward.profile` ({profile}) is never used: the recipe names another reward"
        yield Problem(message, where, "leave `name` out to get the task's own reward, or remove the profile")


def _task_of(data: Data) -> str:
    """Return the task of a `[[data]]` entry: as set in the recipe, else the task stored in the prepared folder."""
    file = Path(data.path) / "dataset.json"
    if data.task != "table" or not file.is_file():
        return data.task
    try:
        return str(parse_json(file.read_text(encoding="utf-8"))["task"])
    except (OSError, ValueError, KeyError, TypeError):
        return data.task  # the error in the folder is reported when the dataset is opened


def _names(loaded: LoadedRecipe, catalogs: Catalogs) -> Iterator[Problem]:
    recipe = loaded.recipe
    names_to_check: list[tuple[str, Key, str | None, tuple[str, ...] | Mapping[str, str], str]] = [
        ("algorithm", ("algo", "name"), recipe.algo.name, tuple(ALGORITHMS), "vlmrl recipe list --algos"),
        *(
            (cell.name, ("algo", cell.name), getattr(recipe.algo, cell.name), tuple(cell.choices), "")
            for cell in CELLS.values()
            if cell.open_list
        ),
    ]
    for i, data in enumerate(recipe.data):
        if not is_file_reward(data.task):
            names_to_check.append(("task", ("data", i, "task"), data.task, catalogs.tasks, "vlmrl recipe list --tasks"))
    for key, name in named_rewards(loaded):
        if not is_file_reward(name):
            names_to_check.append(("reward", key, name, catalogs.rewards, "vlmrl recipe list --rewards"))
    for what, key, name, known, command in names_to_check:
        if name is None or not known or name in known:
            continue
        also = f"; a {what} of your own is path/to/file.py:function" if what in ("reward", "task") else ""
        listing = f"known: {', '.join(known)}" + (f" (`{command}`)" if command else "") + also
        message = f"unknown {what} `{name}` in `{dotted(key)}`"
        yield Problem(message, loaded.where(key), did_you_mean(name, known, listing))


def _other_kind(loaded: LoadedRecipe, catalogs: Catalogs) -> Iterator[Problem]:
    """Find keys that this kind of run does not read and that the recipe itself (not its parent) or `--set` sets."""
    for name, origin in loaded.origins.items():
        own = origin == "--set" or origin.rpartition(":")[0] == str(loaded.path)
        key = tuple(int(part) if part.isdigit() else part for part in name.split("."))
        reader = mark_of(field_at(Recipe, key), ReadBy) if own else None
        if reader is not None and reader.kind != loaded.recipe.kind:
            command = "sft" if loaded.recipe.kind == "sft" else "train"
            yield Problem(f"`{name}` does nothing in `vlmrl {command}`", loaded.where(key), "remove it", "warning")


def _odd_numbers(loaded: LoadedRecipe, catalogs: Catalogs) -> Iterator[Problem]:
    algo = loaded.recipe.algo
    if algo.kl_coef is not None and algo.kl_coef > 1:
        message = f"`algo.kl_coef` is {algo.kl_coef}: the KL term outweighs the reward"
        yield Problem(message, loaded.where(("algo", "kl_coef")), "0 to 0.04 is usual", "warning")
    if algo.entropy_coef < 0:
        message = f"`algo.entropy_coef` is {algo.entropy_coef}: a negative bonus makes the policy collapse"
        yield Problem(message, loaded.where(("algo", "entropy_coef")), "0 is the default", "warning")

    if loaded.recipe.has_episodes and loaded.recipe.environment.turns == 1:
        message = (
            "`environment.turns` is 1: the model never sees what a tool returns, as its first call ends the episode"
        )
        hint = "2 turns are a call and an answer; 1 is for tools that end the episode themselves (Observation.done)"
        yield Problem(message, loaded.where(("environment", "turns")), hint, "warning")
    if loaded.recipe.paper.get("numbers") and not loaded.recipe.paper.get("source"):
        message = "`[paper.numbers]` has numbers, but `paper.source` does not name their source"
        yield Problem(message, loaded.where(("paper", "numbers")), 'source = "arXiv:..., Table 2"', "warning")


PLAIN_RULES = (*NUMBER_RULES, *EVAL_RULES, *LORA_RULES, check_engine, *FILE_RULES, *REWARD_LIST_RULES, check_algo)
"""Rules that need no `Catalogs`."""
RULES: tuple[Rule, ...] = (
    _filtered_sampling,
    _bounds,
    _group_size,
    _sizes,
    _data_names,
    _shares,
    _columns_and_weights,
    _reward_used,
    _variants,
    _names,
    _other_kind,
    _odd_numbers,
    *(lambda loaded, catalogs, rule=rule: rule(loaded) for rule in PLAIN_RULES),
)
