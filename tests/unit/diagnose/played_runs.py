"""Train lines of runs that are played by hand: at every step a policy writes texts, and a reward scores them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from vlmrl.diagnose.signs import Sampled, Sign, find_signs, measure_health

Reward = Callable[[str, str], Mapping[str, float]]
"""(text, truth) -> `score`; `accuracy` and `format` where the reward has them."""


@dataclass(frozen=True)
class Play:
    """A run to be played.

    Args:
        respond: (progress from 0 to 1, truth, rng) -> text.      reward: see Reward.      truth: rng -> truth of a row.
        cut: text -> whether the token limit ended it.
    """

    respond: Callable[[float, str, random.Random], str]
    reward: Reward
    truth: Callable[[random.Random], str] = lambda rng: rng.choice(["yes", "no"])
    cut: Callable[[str], bool] = lambda text: False
    steps: int = 60
    prompts: int = 6
    samples: int = 6
    parts: Sequence[str] = field(default=("format",))


def lines_of(play: Play, seed: int = 0) -> list[dict[str, Any]]:
    """Play the run. Returns its train lines, as training would write them."""
    rng, lines = random.Random(seed), []
    for step in range(play.steps):
        sampled, scores, groups = [], [], []
        for group in range(play.prompts):
            truth, of_group = play.truth(rng), []
            for _ in range(play.samples):
                text = play.respond(step / (play.steps - 1), truth, rng)
                one = play.reward(text, truth)
                formed = one.get("format", 1) > 0
                sampled.append(
                    Sampled(
                        group, f"{step}-{group}", truth, text, len(text) // 3 + 1, play.cut(text), one["score"], formed
                    )
                )
                scores.append(one)
                of_group.append(one["score"])
            groups.append(max(of_group) == min(of_group))
        line: dict[str, Any] = {
            "step": step,
            "reward/mean": fmean(s["score"] for s in scores),
            "rollout/dead_group_share": fmean(groups),
            "rollout/truncated_share": fmean(s.cut for s in sampled),
            "rollout/response_tokens_mean": fmean(s.tokens for s in sampled),
        }
        if "accuracy" in scores[0]:
            line["reward/accuracy"] = fmean(s["accuracy"] for s in scores)
        line |= {f"reward/part/{p}": fmean(s[p] for s in scores) for p in play.parts if p in scores[0]}
        lines.append(line | measure_health(sampled))
    return lines


def live_signs(lines: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, Sign]]:
    """Every sign that training would have warned by: name -> (lines that were there at its first warning, it)."""
    seen: dict[str, tuple[int, Sign]] = {}
    for number in range(1, len(lines) + 1):
        for sign in find_signs(lines[:number]):
            seen.setdefault(sign.name, (number, sign))
    return seen
