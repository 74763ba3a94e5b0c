"""One process of a count of reflection: each rank counts its responses, and the sum is that of one process."""

from __future__ import annotations

from collections import Counter

from vlmrl.dist.world import join_world
from vlmrl.rewards.base import UNSCORED
from vlmrl.tasks.reflection import PROFILES, REFLECTION, ReflectionCounts
from vlmrl.types import RewardInput

BATCH = [("wait", 1.0, 3), ("so", 0.0, 2), ("I verify", 0.0, 5), ("so", 1.0, 7), ("so", None, 1)]
"""(text, accuracy, tokens): rank 0 of 2 has three of them, rank 1 two, of which none reflects."""


def sums(rows: list[tuple[str, float | None, int]]) -> Counter[str]:
    return Counter(REFLECTION.sums((RewardInput(t, {}, num_tokens=n), UNSCORED, {"accuracy": a}) for t, a, n in rows))


def main() -> None:
    with join_world("cpu", timeout_seconds=60) as world:
        gathered = sum(world.gather(sums(BATCH[world.rank :: world.size])), Counter[str]())
        for profile in PROFILES:
            pooled = ReflectionCounts.from_flat(gathered, profile)
            assert pooled == ReflectionCounts.from_flat(sums(BATCH), profile)
            # Pooled: of the two that reflect one is right. The mean of both ranks' ratios, with 0 for none, is 1/4.
            assert pooled.ratios()["correct_ratio_in_reflection_texts"] == 0.5


if __name__ == "__main__":
    main()
