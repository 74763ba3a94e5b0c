"""Behaviour of a reward besides its values: repeatability, independence of rows, time and memory."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlmrl.rewards.scorer import Scorer
from vlmrl.types import RewardInput, Score

STEADY = {
    "deterministic": ("the same call twice", "no random numbers, no clock, no network, and nothing kept between calls"),
    "order_free": ("the rows in reverse", "nothing kept from one row for the next"),
    "alone": ("a row in a call of its own", "score each row by itself: the algorithm compares the samples of a group"),
}
"""Kind of repeated call -> (the call in words, what to do if its scores differ). A sound reward gives equal scores."""
TO_KEEP_MEMORY = "keep nothing of a response in a global, a default argument or a cache without a limit"
ROUNDS = 6
ROUND_SECONDS = 2.0
"""Time limit in seconds: a round that takes longer is the last."""
ALONE = 12
GROWTH_MIB = 32.0
"""Growth of memory in MiB over all rounds that any process may show."""


def behaviour(scorer: Scorer, inputs: Sequence[RewardInput]) -> dict[str, Any]:
    """Score the same inputs again and again, in another order, and one by one.

    Returns: `deterministic`, `order_free` (the same in reverse), `alone` (the same in a call of its own): each True, or
        the first row that differs as {"row", "first", "then"}; `memory_mib`: growth over the rounds, None where it
        cannot be read; `leaks`: whether that growth continues and is more than GROWTH_MIB; `rounds`.
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
    """Return what is wrong with a behaviour, in words, and what to do about it.

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


def resident_mib(scorer: Scorer) -> float | None:
    """Return the resident memory in MiB of the processes that run the reward; None where it cannot be read."""
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
