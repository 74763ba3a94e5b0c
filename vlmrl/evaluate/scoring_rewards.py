"""Rewards that scored evaluations: in words, and compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmrl.rewards.identity import RewardIdentity, identity_of, shown_weights

Meta = Mapping[str, Any]
"""`meta` of an evaluation's summary. Most have `reward` (name, version or sha256, weights) and `reward_args`."""


def scored_alike(one: Meta, other: Meta) -> bool | None:
    """Return whether one reward with the same arguments and weights scored both; None if one does not record it."""
    if not (_says(one) and _says(other)):
        return None
    same_weights = one["reward"].get("weights") == other["reward"].get("weights")
    return same_weights and _identity(one, other) == _identity(other, one)


def scored_by(meta: Meta) -> str:
    """Return the reward in words, with its weights; "" if the evaluation does not record it."""
    return reward_words({**meta["reward"], "args": meta.get("reward_args")}) if _says(meta) else ""


def reward_words(record: Mapping[str, Any]) -> str:
    """Return a reward's record in words: name, version, arguments, weights."""
    return f"{identity_of(record).words}, {shown_weights(record.get('weights'))}"


def _says(meta: Meta) -> bool:
    return isinstance(meta.get("reward"), Mapping)


def _identity(meta: Meta, beside: Meta) -> RewardIdentity:
    """Return the reward of an evaluation; without arguments if one of the two does not record them."""
    has_args = "reward_args" in meta and "reward_args" in beside
    return identity_of({**meta["reward"], "args": meta["reward_args"] if has_args else {}})
