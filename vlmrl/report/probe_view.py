"""Findings of `reward-check --probe`, prepared for the page of a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlmrl.report.texts import marked_text
from vlmrl.reward_check.behaviour import troubles
from vlmrl.reward_check.trick_results import ADVICE, WARNINGS, WORDS

if TYPE_CHECKING:
    from markupsafe import Markup


@dataclass(frozen=True)
class Finding:
    """Trick with a finding (see trick_results.py). `earned`: its mean score; None if the reward failed on it."""

    name: str
    idea: str
    earned: float | None
    paid: float | None
    error: str
    example: Markup


@dataclass(frozen=True)
class ProbeVerdict:
    """Findings of one verdict, its meaning and advice. `mild`: a policy cannot earn undeserved scores by them."""

    name: str
    words: str
    to_do: str
    mild: bool
    findings: Sequence[Finding]


@dataclass(frozen=True)
class ProbeView:
    """Tricks against the reward of one source. `report`: see `probe_reward`; `quiet`: tricks without a finding."""

    source: str
    report: Mapping[str, Any]
    verdicts: Sequence[ProbeVerdict]
    quiet: Sequence[Mapping[str, Any]]
    troubles: Sequence[tuple[str, str]]


def probe_views(probes: Mapping[str, Mapping[str, Any]] | None) -> list[ProbeView]:
    """Return one view per source, in order; none if no trick was tried."""
    return [_view(source, report) for source, report in (probes or {}).items()]


def _view(source: str, report: Mapping[str, Any]) -> ProbeView:
    tricks = report["probes"]
    verdicts = []
    for verdict, words in WORDS.items():
        findings = [_finding(p) for p in tricks if p["verdict"] == verdict]
        if findings:
            verdicts.append(ProbeVerdict(verdict, words, ADVICE[verdict], verdict in WARNINGS, findings))
    quiet = [p for p in tricks if not p["verdict"] and p["mean"] is not None]
    return ProbeView(source, report, verdicts, quiet, troubles(report["behaviour"]))


def _finding(p: Mapping[str, Any]) -> Finding:
    failed = p["errors"] and p["kind"] != "truth"
    error = f"fails on {p['errors']} rows: {p['error']}" if failed else ""
    return Finding(p["name"], p["idea"], p["mean"], p["paid"], error, marked_text(p["example"]))
