from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.scoring import Scorer
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import RewardInput

Open = Callable[..., Scorer]


@pytest.fixture
def reward_file(tmp_path: Path) -> Callable[..., RewardSpec]:
    """Write a reward file and load a function of it."""

    def load(source: str, function: str = "reward", style: str = "auto", **args: Any) -> RewardSpec:
        (tmp_path / "mine.py").write_text(textwrap.dedent(source))
        return load_reward(f"mine.py:{function}", args=args, style=style, base_dir=tmp_path)

    return load


@pytest.fixture
def scorer(reward_file: Callable[..., RewardSpec]) -> Iterator[Open]:
    """Write a reward file and open a scorer on it; its workers end with the test."""
    opened: list[Scorer] = []

    def open_scorer(source: str, *, weights: Any = None, options: Any = None, **load: Any) -> Scorer:
        opened.append(Scorer(reward_file(source, **load), weights, **(options or {})))
        return opened[-1]

    yield open_scorer
    for one in opened:
        one.close()


@pytest.fixture
def inputs() -> list[RewardInput]:
    return [RewardInput(response=text, truth={"answer": "a"}, num_tokens=3) for text in ("a", "b", "a")]
