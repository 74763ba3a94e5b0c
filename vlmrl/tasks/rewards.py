"""Every built-in reward by name: those of no task (vlmrl/rewards) and those that the shipped tasks bring."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from vlmrl import rewards
from vlmrl.rewards import GENERAL, Builtin
from vlmrl.tasks.pairs.rewards import REWARDS as PAIR_REWARDS
from vlmrl.tasks.taxonrl.rewards import REWARDS as TAXONRL_REWARDS

REWARDS: Mapping[str, Builtin] = {**PAIR_REWARDS, **TAXONRL_REWARDS, **GENERAL}

load_reward = partial(rewards.load_reward, builtins=REWARDS)
"""`vlmrl.rewards.load_reward` over all of them."""
load_recorded = partial(rewards.load_recorded, builtins=REWARDS)
"""`vlmrl.rewards.load_recorded` over all of them."""
