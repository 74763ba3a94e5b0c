"""One process of a count of reflection: each rank counts its responses, and the sum is that of one process."""

from __future__ import annotations

from vlmrl.dist.world import join_world
from vlmrl.tasks.reflection import PROFILES, ReflectionCounts, count_reflection

BATCH = [("wait", 1.0, 3), ("so", 0.0, 2), ("I verify", 0.0, 5), ("so", 1.0, 7), ("so", None, 1)]
"""(text, accuracy, tokens): rank 0 of 2 has three of them, rank 1 two, of which none reflects."""


def counts(rows: list[tuple[str, float | None, int]], profile: str) -> ReflectionCounts:
    return count_reflection([r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows], profile)


def main() -> None:
    with join_world("cpu", timeout_seconds=60) as world:
        for profile in PROFILES:
            own = counts(BATCH[world.rank :: world.size], profile)
            pooled = sum(world.gather(own))
            assert isinstance(pooled, ReflectionCounts) and pooled == counts(BATCH, profile)
            # Pooled: of the two that reflect one is right. The mean of both ranks' ratios, with 0 for none, is 1/4.
            assert pooled.ratios()["correct_ratio_in_reflection_texts"] == 0.5


if __name__ == "__main__":
    main()
