"""Tests of the differences that a comparison shows: p-values, paired bootstrap, rows needed, Holm's correction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vlmrl.evaluate.paired import PairedColumn
from vlmrl.evaluate.paired_tests import bootstrap_interval, holm, paired_test, power_of
from vlmrl.evaluate.repeated import BEGINNINGS

LEADING = ("accuracy", "reward")
"""Metrics for which the number of rows needed is shown: the first that there is."""
TEST_METHODS = (
    "p-values, two-sided: McNemar's exact test for rows that are right or wrong and share nothing, else a sign-flip "
    "permutation test of rows that share images together; p (Holm) is corrected for all comparisons of the same metric "
    "on rows of the same role (test, held out, validation, training)"
)


def is_tested(metric: str) -> bool:
    """Return whether a metric is tested: the reward, the accuracy, and pass@k, maj@k and mean@k."""
    return metric in LEADING or metric.startswith(BEGINNINGS)


def tests_of(columns: Mapping[str, PairedColumn]) -> dict[str, dict[str, Any]]:
    """Return metric -> {"method", "p", "only_a", "only_b", "groups", "bootstrap": [low, high] or None}."""
    tests = {}
    for name, (before, after, clusters, _) in columns.items():
        if is_tested(name):
            result = paired_test(before, after, clusters)
            ends = bootstrap_interval(before, after, clusters)
            tests[name] = {
                "method": result.method,
                "p": result.p,
                "only_a": result.only_a,
                "only_b": result.only_b,
                "groups": result.groups,
                "bootstrap": None if ends is None else list(ends),
            }
    return tests


def rows_needed_of(columns: Mapping[str, PairedColumn]) -> dict[str, Any] | None:
    """Return the power of the accuracy, else of the reward, with its "metric"; None if its range is not known."""
    for name in LEADING:
        if name in columns:
            before, after, clusters, declared = columns[name]
            power = power_of(before, after, clusters, declared[1] - declared[0]) if declared else None
            return None if power is None else {"metric": name, **power}
    return None


def correct_for_many(tests: Iterable[tuple[str, str, dict[str, Any]]]) -> None:
    """Write "p_holm" and "comparisons" into each test: Holm's correction over tests of the same metric and role.

    Args:
        tests: (role of the rows, metric, test) of every evaluation and every pair that one command compares.
    """
    families: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for role, metric, test in tests:
        families.setdefault((role, metric), []).append(test)
    for family in families.values():
        for test, p in zip(family, holm([t["p"] for t in family]), strict=True):
            test |= {"p_holm": p, "comparisons": len(family)}


def words_of_test(metric: str, test: Mapping[str, Any]) -> str:
    """Return a test in words: `accuracy: exact McNemar p = 0.0119 (only A right on 41 rows, only B on 65); ...`."""
    alone = (
        "" if test["only_a"] is None else f" (only A right on {test['only_a']:,} rows, only B on {test['only_b']:,})"
    )
    text = f"{metric}: {test['method']} p = {test['p']:.3g}{alone}"
    if test.get("comparisons", 1) > 1:
        text += f", {test['p_holm']:.3g} with Holm's correction for {test['comparisons']} comparisons"
    if test["bootstrap"] is not None:
        low, high = test["bootstrap"]
        text += f"; paired bootstrap [{low:+.4f}, {high:+.4f}]"
    return text


def words_of_power(power: Mapping[str, Any]) -> str:
    """Return the number of rows needed in words."""
    begin = f"to see {100 * power['points']:g} points of {power['metric']} with {power['power']:.0%} chance"
    if power["rows"] is None:
        return f"{begin}: not known from rows that all differ by the same amount"
    apart = "" if power["discordant"] is None else f"; A and B disagree on {power['discordant']:.1%}"
    return f"{begin}: {power['rows']:,} rows like these ({power['method']}{apart})"
