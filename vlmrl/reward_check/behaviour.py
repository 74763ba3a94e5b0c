"""Tests of a reward that do not judge its values: same scores when repeated, rows independent, time and memory."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlmrl.rewards.several_scorer import RewardScorer
from vlmrl.types import RewardInput, Score

STEADY = {
    "deterministic": (
        "the same call twice",
        "use no random numbers, no clock and no network, and keep nothing between calls",
    ),
    "order_free": ("the rows in reverse", "keep nothing from one row for the next"),
    "alone": ("a row in a call of its own", "score each row by itself: the algorithm compares the samples of a group"),
}
"""Kind of repeated call -> (description of the call, advice if its scores differ from those of the first call)."""
TO_KEEP_MEMORY = "keep nothing of a response in a global, a default argument or a cache without a limit"
ROUNDS = 6
ROUND_SECONDS = 2.0
"""Time limit of a round, in seconds. After a round that takes longer, no further round is run."""
ALONE = 12
GROWTH_MIB = 32.0
"""Growth of memory over all rounds that is still considered normal, in MiB."""


def behaviour(scorer: RewardScorer, inputs: Sequence[RewardInput]) -> dict[str, Any]:
    """Score the same inputs several times, in reverse order, and some of them in a call of their own.

    Returns: `deterministic` (equal scores in a second call), `order_free` (equal scores in reverse order) and `alone`
        (equal scores in a call of their own): each is True, or the first row whose score differs, as {"row", "first",
        "then"}; `memory_mib`: growth of memory over the rounds, None if memory cannot be read; `leaks`: whether the
        growth is more than GROWTH_MIB and continues in the second half of the rounds; `rounds`: number of rounds.
    """
    first = scorer.score(inputs)
    again = scorer.score(inputs)
    turned = scorer.score(inputs[::-1])[::-1]
    some = range(0, len(inputs), max(1, len(inputs) // ALONE))
    alone = [scorer.score([inputs[i]])[0] for i in some]
    sizes: list[float] = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        scorer.score(inputs)
        size = resident_mib(scorer)
        if size is not None:
            sizes.append(size)
        if time.perf_counter() - start > ROUND_SECONDS:
            break
    growth = sizes[-1] - sizes[0] if len(sizes) > 1 else None
    return {
        "deterministic": _same(first, again, range(len(inputs))),
        "order_free": _same(first, turned, range(len(inputs))),
        "alone": _same([first[i] for i in some], alone, some),
        "memory_mib": growth,
        "leaks": growth is not None and growth > GROWTH_MIB and sizes[-1] > sizes[len(sizes) // 2],
        "rounds": len(sizes),
    }


def troubles(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the problems of a reward's behaviour as (problem, advice).

    Args:
        report: result of `behaviour`.
    """
    problems = []
    for key, (words, to_do) in STEADY.items():
        if report[key] is not True:
            pair = (report[key]["first"], report[key]["then"])
            before, after = (x if isinstance(x, str) else f"{x:.10g}" for x in pair)
            problems.append((f"{words} gives another score: {before} -> {after}", to_do))
    if report["leaks"]:
        grown = f"memory grows by {report['memory_mib']:.0f} MiB over {report['rounds']} rounds"
        problems.append((grown, TO_KEEP_MEMORY))
    return problems


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles of the time of one row, in milliseconds."""
    array = np.asarray([s for s in seconds if s > 0] or [0.0]) * 1000
    return {name: float(np.percentile(array, q)) for name, q in (("p50", 50), ("p95", 95), ("p99", 99), ("max", 100))}


def resident_mib(scorer: RewardScorer) -> float | None:
    """Return the resident memory in MiB of the processes that run the reward; None if it cannot be read."""
    total = 0
    for pid in scorer.pids():
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError, ValueError):
            return None
    return total * 4096 / (1 << 20)


def _same(first: Sequence[Score], then: Sequence[Score], rows: Sequence[int] | range) -> bool | dict[str, Any]:
    for row, a, b in zip(rows, first, then, strict=True):
        failed = a.error is not None or b.error is not None
        equal = (
            (a.error is None) == (b.error is None) if failed else (a.value, dict(a.parts)) == (b.value, dict(b.parts))
        )
        if not equal:
            return {"row": row, "first": _value(a), "then": _value(b)}
    return True


def _value(score: Score) -> float | str:
    return score.error or "failed" if math.isnan(score.value) else score.value
