"""Rules about numbers whose combination makes no sense, although each is allowed by itself."""

from __future__ import annotations

from collections.abc import Iterator

from vlmrl.errors import Problem
from vlmrl.recipe.load import LoadedRecipe

MAX_STEP_RESPONSES = 10_000_000
"""Maximum number of responses in one step. All are in memory at once, some kilobytes each."""
MAX_STEP_TOKENS = 10**11
"""Maximum number of response tokens in one step: 100 times what a large cluster samples in an hour."""


def _step_size(loaded: LoadedRecipe) -> Iterator[Problem]:
    rollout = loaded.recipe.rollout
    if loaded.recipe.kind != "rl":
        return
    responses = rollout.prompts_per_step * rollout.samples_per_prompt
    tokens = responses * rollout.max_new_tokens
    where = loaded.where(("rollout", "prompts_per_step"), ("rollout", "samples_per_prompt"))
    product = f"{rollout.prompts_per_step:,} prompts x {rollout.samples_per_prompt:,} samples = {responses:,} responses"
    if responses > MAX_STEP_RESPONSES:
        hint = f"at most {MAX_STEP_RESPONSES:,}: lower rollout.prompts_per_step or rollout.samples_per_prompt"
        yield Problem(f"one step is {product}", where, hint)
    elif tokens > MAX_STEP_TOKENS:
        message = f"one step is {product} of up to {rollout.max_new_tokens:,} tokens = {tokens:,} tokens"
        place = loaded.where(("rollout", "max_new_tokens"), ("rollout", "prompts_per_step"))
        yield Problem(message, place, f"at most {MAX_STEP_TOKENS:,}: lower rollout.max_new_tokens")


def _length(loaded: LoadedRecipe) -> Iterator[Problem]:
    train = loaded.recipe.train
    if train.steps == 0 and train.epochs is None:
        hint = "train.steps = 100, or train.epochs = 1 for one pass over the data"
        yield Problem("`train.steps` is 0: nothing would be trained", loaded.where(("train", "steps")), hint)


def _decay(loaded: LoadedRecipe) -> Iterator[Problem]:
    optim = loaded.recipe.optim
    share = optim.lr * optim.weight_decay
    if share >= 1:
        message = f"`optim.lr` x `optim.weight_decay` is {share:g}: every update would remove the weights entirely"
        where = loaded.where(("optim", "weight_decay"), ("optim", "lr"))
        yield Problem(message, where, "0.01 to 0.1 is usual for optim.weight_decay")


NUMBER_RULES = (_step_size, _length, _decay)
