"""How often the intervals of an evaluation contain the true value, by simulation.

    python scripts/bench/intervals.py [--worlds 4000] [--cases TEXT] [--json] [--smoke]

Each case is a world whose true value is known exactly: prompts of different difficulty, several samples per prompt,
images that rows share, or two models that answer the same rows. It is drawn again and again, and each time the interval
of `vlmrl eval` or `vlmrl compare` is computed by the functions that these commands use. Coverage is the share of draws
whose 95% interval contains the true value.

`holds`: with 100 prompts and more, coverage is between 93% and 97% where the true value is in 0.2 to 0.8, and at least
93% nearer to 0 or 1. The exit code is 1 if it does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from vlmrl.evaluate.estimates import Interval, RowKeys, difference_interval, mean_interval
from vlmrl.evaluate.repeated import SampleTable

CENTRE, EDGE = (0.93, 0.97), 0.93
MIDDLE = (0.2, 0.8)
SHARES = (0.2, 0.35, 0.5, 0.65, 0.8)
EDGES = (0.01, 0.02, 0.05, 0.1, 0.9, 0.95, 0.98, 0.99)
SAMPLES = 8
ANSWERS = 4
"""Different answers that a prompt may get: one right, the others wrong and equally likely."""


@dataclass(frozen=True)
class Case:
    """One world: `draw(rng)` is an interval, and `truth` the value that it is about, in the range `bounds`."""

    name: str
    truth: float
    prompts: int
    draw: Callable[[np.random.Generator], Interval]
    bounds: tuple[float, float] = (0.0, 1.0)

    @property
    def is_edge(self) -> bool:
        place = (self.truth - self.bounds[0]) / (self.bounds[1] - self.bounds[0])
        return not MIDDLE[0] - 1e-9 <= place <= MIDDLE[1] + 1e-9


def greedy(share: float, prompts: int, rng: np.random.Generator) -> Interval:
    """One response per prompt, right with the same chance."""
    return mean_interval((rng.random(prompts) < share).astype(float), None, (0.0, 1.0))


def shared_images(share: float, images: int, alike: float, rng: np.random.Generator) -> Interval:
    """Three rows per image, right with the image's own chance: correlation `alike` within an image (beta-binomial)."""
    total = 1 / alike - 1
    chance = np.repeat(rng.beta(share * total, (1 - share) * total, images), 3)
    ids = [(i // 3,) for i in range(3 * images)]
    return mean_interval((rng.random(3 * images) < chance).astype(float), ids, (0.0, 1.0))


def chances(spread: tuple[float, ...], prompts: int, rng: np.random.Generator) -> np.ndarray:
    """The chance of a right sample for each prompt, drawn from equally likely ones. [prompts]"""
    return rng.choice(np.array(spread), prompts)


def several(metric: str, k: int, spread: tuple[float, ...], prompts: int, rng: np.random.Generator) -> Interval:
    """`SAMPLES` samples per prompt, each right with the prompt's chance, else one of the wrong answers."""
    chance = chances(spread, prompts, rng)[:, None]
    right = rng.random((prompts, SAMPLES)) < chance
    answers = np.where(right, 0, rng.integers(1, ANSWERS, (prompts, SAMPLES)))
    prompt = np.repeat(np.arange(prompts), SAMPLES)
    table = SampleTable(prompt, right.astype(float).ravel(), answers.ravel(), RowKeys.of([()] * len(prompt)))
    return table.interval(metric, k)


def true_value(metric: str, k: int, chance: float) -> float:
    """The value of k fresh samples of a prompt, in closed form: by enumeration of the votes for a majority."""
    if metric == "mean":
        return chance
    if metric == "pass":
        return 1 - (1 - chance) ** k
    wrong = (1 - chance) / (ANSWERS - 1)
    return math.fsum(weight * chance**own * wrong ** (k - own) for own, weight in winning_votes(k))


@cache
def winning_votes(k: int) -> list[tuple[int, float]]:
    """Votes of the right answer where no other has more, and the number of orders, shared by the answers that tie."""
    weights = []
    for votes in itertools.product(range(k + 1), repeat=ANSWERS):
        if sum(votes) == k and votes[0] == max(votes):
            orders = math.factorial(k) / math.prod(map(math.factorial, votes))
            weights.append((votes[0], orders / votes.count(votes[0])))
    return weights


def difference(share: float, gain: float, prompts: int, alike: float, rng: np.random.Generator) -> Interval:
    """B minus A on the same rows; with chance `alike` both answer a row by the same draw, else each by its own."""
    shared, own_a, own_b = rng.random((3, prompts))
    same = rng.random(prompts) < alike
    a = np.where(same, shared, own_a) < share
    b = np.where(same, shared, own_b) < share + gain
    return difference_interval(b.astype(float), a.astype(float), None, (0.0, 1.0))


def spread_for(metric: str, k: int, target: float) -> tuple[float, ...]:
    """Three difficulties of prompts whose mean value of the metric is `target`: found by bisection on the odds."""

    def of(shift: float) -> tuple[float, ...]:
        return tuple(1 / (1 + math.exp(-(shift + step))) for step in (-1.5, 0.0, 1.5))

    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        value = sum(true_value(metric, k, c) for c in of(middle)) / 3
        low, high = (middle, high) if value < target else (low, middle)
    return of(low)


def cases(sizes: tuple[int, ...]) -> Iterator[Case]:
    for n, share in itertools.product(sizes, (*SHARES, *EDGES)):
        yield Case(f"accuracy {share:g}, {n} prompts, one response each", share, n, partial(greedy, share, n))
    for n, share in itertools.product(sizes[:1], SHARES):
        name = f"accuracy {share:g}, {n} images with three rows each, correlation 0.3"
        yield Case(name, share, n, partial(shared_images, share, n, 0.3))
    estimates = [("pass", 4), ("pass", 8), ("maj", 8), ("mean", 8)]
    for (metric, k), n, target in itertools.product(estimates, sizes[:1], (0.05, *SHARES[::2], 0.95)):
        spread = spread_for(metric, k, target)
        truth = sum(true_value(metric, k, c) for c in spread) / len(spread)
        name = f"{metric}@{k} {target:g}, {n} prompts, {SAMPLES} samples each"
        yield Case(name, truth, n, partial(several, metric, k, spread, n))
    for n, (share, gain) in itertools.product(sizes, ((0.5, 0.0), (0.3, 0.1), (0.6, 0.2))):
        name = f"difference {gain:g} from {share:g}, {n} prompts, half of the answers in common"
        yield Case(name, gain, n, partial(difference, share, gain, n, 0.5), (-1.0, 1.0))


def coverage(case: Case, worlds: int, seed: int) -> dict[str, Any]:
    """Draw a case again and again."""
    rng = np.random.default_rng([seed, case.prompts, int(1e6 * case.truth)])
    intervals = [case.draw(rng) for _ in range(worlds)]
    held = sum(i.low <= case.truth <= i.high for i in intervals)
    share = held / worlds
    return {
        "case": case.name,
        "truth": round(case.truth, 6),
        "coverage": share,
        "standard_error": math.sqrt(share * (1 - share) / worlds),
        "mean_width": float(np.mean([i.high - i.low for i in intervals])),
        "edge": case.is_edge,
        "holds": share >= EDGE if case.is_edge else CENTRE[0] <= share <= CENTRE[1],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worlds", type=int, default=4000, help="draws per case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", default="", help="only cases whose name contains this text")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--smoke", action="store_true", help="a toy size in seconds, to see that it runs; its figures mean nothing"
    )
    options = parser.parse_args()
    sizes = (100, 300)
    worlds = 3 if options.smoke else options.worlds
    chosen = [case for case in cases(sizes) if options.cases in case.name]
    work = partial(coverage, worlds=worlds, seed=options.seed)
    if options.smoke or options.processes == 1:
        results = list(map(work, chosen))
    else:
        with ProcessPoolExecutor(options.processes) as pool:
            results = list(pool.map(work, chosen))
    holds = bool(results) and all(r["holds"] for r in results)
    if options.json:
        print(json.dumps({"worlds": worlds, "seed": options.seed, "holds": holds, "cases": results}))
    else:
        for r in results:
            mark = " " if r["holds"] else "!"
            print(f"{mark} {r['coverage']:.3f} (+-{r['standard_error']:.3f})  width {r['mean_width']:.3f}  {r['case']}")
        print(f"holds: {'yes' if holds else 'no'} ({len(results)} cases, {worlds:,} draws each)")
    return 0 if holds or options.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
