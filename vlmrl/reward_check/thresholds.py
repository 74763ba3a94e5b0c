"""Conditions of `vlmrl reward-check --fail-on`: if one of them holds for the report, the command fails.

    CONDITIONS := CONDITION {"," CONDITION}        CONDITION := NAME [OP NUMBER]        OP := > | >= | < | <=

A name alone means `> 0`. The command also fails if the number of a condition cannot be measured on this input.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmrl.errors import RewardError, did_you_mean

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
CONDITION = re.compile(r"\s*([a-z_0-9]+)(?:\(([^()\s]+)\))?\s*(?:(>=|<=|>|<)\s*([-+.\dA-Za-z]+)%?)?\s*")
Report = Mapping[str, Any]


@dataclass(frozen=True)
class Measure:
    """Number of a report that a condition can use.

    Args:
        words: description for the user.
        read: report -> the number, or None if it cannot be measured.
        of: kind of the name that is written in brackets, such as "PART"; "" = no brackets.
        needs: option that the number requires: "diff", "probe" or "" (none).
    """

    words: str
    read: Callable[..., float | None]
    of: str = ""
    needs: str = ""


def _sum_probes(report: Report, key: str) -> float | None:
    return None if report["probes"] is None else float(sum(p[key] for p in report["probes"].values()))


def _slowest(report: Report, key: str) -> float | None:
    times = [p["behaviour"]["milliseconds"][key] for p in (report["probes"] or {}).values()]
    return max(times, default=None)


def _go(report: Any, *path: str) -> float | None:
    for key in path:
        if report is None:
            return None
        report = report[key]
    return None if report is None else float(report)


def _correlation(report: Report, of: str) -> float | None:
    if of in ("length", "tokens", "step"):
        return _go(report["correlations"][of], "spearman")
    return _go(_part(report, of), "correlation")


def _part(report: Report, of: str) -> Mapping[str, Any]:
    if of not in report["parts"]:
        raise RewardError(
            f"--fail-on names the part `{of}`, which the reward does not have",
            hint=f"its parts: {', '.join(report['parts'])}",
        )
    return report["parts"][of]


MEASURES: dict[str, Measure] = {
    "errors": Measure("rows on which the reward failed", lambda r: _go(r, "errors", "number")),
    "broken": Measure("rows that could not be read", lambda r: _go(r, "broken", "number")),
    "different": Measure("rows whose score is not the stored one", lambda r: _go(r, "stored", "different")),
    "dead_groups": Measure("share of groups without a signal", lambda r: _go(r, "dead_groups", "dead_share")),
    "mean": Measure("mean of a part, or of `value`", lambda r, of: _go(_part(r, of), "mean"), of="PART"),
    "corr": Measure(
        "correlation of the score with `length`, `tokens`, `step` (by ranks) or a part", _correlation, of="NAME"
    ),
    "ngrams": Measure(
        "n-grams that became frequent and earn more", lambda r: float(len(r["correlations"]["ngrams"]["found"]))
    ),
    "accuracy": Measure("the task's accuracy", lambda r: _go(r, "disagreements", "accuracy")),
    "agreement": Measure(
        "share of (right, wrong) pairs in the right order", lambda r: _go(r, "disagreements", "agreement")
    ),
    "changed": Measure(
        "share of rows that the other reward changes", lambda r: _go(r, "diff", "value", "changed_share"), needs="diff"
    ),
    "flipped": Measure(
        "share of advantages whose sign changes", lambda r: _go(r, "diff", "advantages", "flipped_share"), needs="diff"
    ),
    "rank": Measure(
        "rank correlation of both rewards", lambda r: _go(r, "diff", "value", "rank_correlation"), needs="diff"
    ),
    "probe": Measure("tricks that pay or break the reward", lambda r: _sum_probes(r, "flagged"), needs="probe"),
    "warnings": Measure(
        "honest spellings that lose, broken truths that are scored", lambda r: _sum_probes(r, "warnings"), needs="probe"
    ),
    "unsteady": Measure(
        "1 = repeated calls differ, or rows depend on each other",
        lambda r: _sum_probes(r, "unsteady"),
        needs="probe",
    ),
    "p99_ms": Measure("slowest percent of calls, in milliseconds", lambda r: _slowest(r, "p99"), needs="probe"),
}


@dataclass(frozen=True)
class GateLimit:
    """One condition of --fail-on, such as `corr(length)>0.6`. `of` is the name in brackets, None if there is none."""

    name: str
    of: str | None
    op: str
    bound: float

    @property
    def measure(self) -> Measure:
        return MEASURES[self.name]

    @property
    def needs_errors(self) -> bool:
        """Return whether the check must count rows on which the reward fails, instead of ending at the first."""
        return self.name in ("errors", "broken")

    def __str__(self) -> str:
        return f"{self.name}{f'({self.of})' if self.of else ''} {self.op} {self.bound:g}"

    def value(self, report: Report) -> float | None:
        return self.measure.read(report, self.of) if self.of is not None else self.measure.read(report)

    def holds(self, report: Report) -> bool:
        """Return whether the condition holds, so that the command fails. Raises: RewardError for an unknown part."""
        value = self.value(report)
        return value is None or OPERATORS[self.op](value, self.bound)

    def told(self, report: Report) -> str:
        value = self.value(report)
        if value is None:
            return f"{self}: {self.measure.words}: cannot be measured here"
        return f"{self}: {self.measure.words}: {value:.4g}"


def parse_limits(text: str, *, diff: bool) -> list[GateLimit]:
    """Return the conditions of --fail-on.

    Args:
        diff: whether a second reward is compared (--diff).
    Raises: RewardError for a text that is not a condition, an unknown name, or a name that needs --diff if it is
        missing.
    Example: `probe,dead_groups>0.5,corr(length)>0.6` -> three limits.
    """
    return [_parse(item, diff) for item in text.split(",")]


def _parse(item: str, diff: bool) -> GateLimit:
    match = CONDITION.fullmatch(item)
    if match is None:
        raise RewardError(f"--fail-on {item.strip()!r} is not a condition", hint="write NAME, or NAME>0.5; " + known())
    name, of, op, number = match.groups()
    if name not in MEASURES:
        raise RewardError(f"--fail-on knows no `{name}`", hint=did_you_mean(name, MEASURES, known()))
    measure = MEASURES[name]
    if bool(of) != bool(measure.of):
        form = f"{name}({measure.of})" if measure.of else name
        raise RewardError(f"--fail-on {item.strip()!r}: `{name}` is written {form}")
    if measure.needs == "diff" and not diff:
        raise RewardError(f"--fail-on {name} compares two rewards", hint="add --diff REWARD")
    try:
        bound = float(number) if number is not None else 0.0
    except ValueError:
        bound = float("nan")
    if bound != bound or abs(bound) == float("inf"):
        raise RewardError(f"--fail-on {item.strip()!r}: {number!r} is not a number")
    if "%" in item:
        bound /= 100
    return GateLimit(name, of, op or ">", bound)


def known() -> str:
    return "known: " + ", ".join(f"{n}({m.of})" if m.of else n for n, m in MEASURES.items())


def needs_probe(limits: Sequence[GateLimit]) -> bool:
    return any(limit.measure.needs == "probe" for limit in limits)
