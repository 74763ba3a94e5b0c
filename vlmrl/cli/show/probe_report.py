"""Screen of `vlmrl reward-check --probe`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vlmrl.cli.output import draw_quote, line_of_code, number, share, shorten
from vlmrl.untrusted import one_line

if TYPE_CHECKING:
    from rich.console import Console

TEXT_CHARS = 160
"""Maximum number of characters that are shown of an example."""


def show_probes(source: str, probes: Mapping[str, Any], out: Console) -> None:
    """Print the findings, then facts about the reward's behaviour.

    The findings are ranked: first tricks that earn a score without merit, last right answers that lose score.
    """
    from vlmrl.reward_check.trick_results import ADVICE, TO_PROBE, WORDS

    honest, tricks = probes["honest"], probes["probes"]
    out.print(f"\n{len(tricks)} tricks against {source}, on {probes['rows']} truths", style="bold")
    if probes["not_probed"]:
        out.print(f"  not probed: {one_line(probes['not_probed'])}", style="bold red")
        out.print(f"    to do: {TO_PROBE}")
    out.print(
        f"  honest play: informed {number(honest['informed'])}, without knowledge {number(honest['uninformed'])} "
        f"({one_line(honest['answer'])}), wrong {number(honest['wrong'])}"
    )
    place = 0
    for verdict, words in WORDS.items():
        findings_here = [p for p in tricks if p["verdict"] == verdict]
        if findings_here:
            out.print(f"  {verdict}: {words}", style=f"bold {_colour(verdict)}")
            out.print(f"    to do: {ADVICE[verdict]}")
        for p in findings_here:
            place += 1
            line = one_line(f"{p['name']} ({p['idea']}): {_earned(p)}")
            out.print(f"    {place}. {line}", style=_colour(verdict))
            draw_quote(shorten(one_line(p["example"]), TEXT_CHARS), out, 8)
    quiet = [f"{p['name']} {number(p['mean'])}" for p in tricks if not p["verdict"] and p["mean"] is not None]
    out.print(f"  nothing found: {one_line(', '.join(quiet)) or 'none'}", style="dim")
    if probes["skipped"]:
        line = (
            f"  {probes['skipped']} tricks were not tried: the reward hangs, and each would take the whole time limit"
        )
        out.print(line, style="bold red")
    _show_behaviour(probes["behaviour"], out)
    if probes["flagged"]:
        findings = "1 finding" if probes["flagged"] == 1 else f"{probes['flagged']} findings"
        out.print(f"{findings}: a model will find these tricks", style="bold red")
    elif not probes["not_probed"]:
        out.print("no trick pays, and the reward is deterministic", style="green")


def _colour(verdict: str) -> str:
    from vlmrl.reward_check.trick_results import WARNINGS

    return "yellow" if verdict in WARNINGS else "red"


def _earned(p: Mapping[str, Any]) -> str:
    if p["kind"] == "belief":
        return p["verdict"]
    if p["errors"] and p["kind"] != "truth":
        return f"fails on {p['errors']} rows: {line_of_code(p['error'])}"
    of = f", on {share(p['paid'])} of rows" if p["paid"] is not None and p["paid"] < 1 else ""
    return f"earns {number(p['mean'])}{of}"


def _show_behaviour(behaviour: Mapping[str, Any], out: Console) -> None:
    from vlmrl.reward_check.behaviour import troubles

    for trouble, to_do in troubles(behaviour):
        out.print(f"  {one_line(trouble)}", style="bold red")
        out.print(f"    to do: {to_do}")
    ms = behaviour["milliseconds"]
    out.print(
        f"  one response takes {ms['p50']:.3g} ms (p95 {ms['p95']:.3g}, p99 {ms['p99']:.3g}, at most {ms['max']:.3g}), "
        f"over {behaviour['calls']:,} calls"
    )
