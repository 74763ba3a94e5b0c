"""What `vlmrl reward-check --probe` prints for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vlmrl.cli.output import clean, number

if TYPE_CHECKING:
    from rich.console import Console

TEXT_CHARS = 240


def show_probes(source: str, probes: Mapping[str, Any], out: Console) -> None:
    base, tried = probes["baseline"], probes["probes"]
    out.print(
        f"\n{len(tried)} tricks against {source}, on {probes['rows']} truths; "
        f"an honest answer without a clue earns {base['value']:.4g} ({clean(base['answer'])})",
        style="bold",
        markup=False,
    )
    quiet = ", ".join(f"{p['name']} {number(p['mean'])}" for p in tried if not p["flagged"])
    out.print(f"  no more than that: {quiet or 'none'}", markup=False)
    loud = [p for p in tried if p["flagged"]]
    for p in loud:
        earned = f"fails on {p['errors']} rows: {clean(p['error'])}" if p["errors"] else f"earns {number(p['mean'])}"
        out.print(f"  {p['name']} ({p['idea']}): {earned}", style="red", markup=False)
        out.print(f"      {clean(p['example'])[:TEXT_CHARS]}", style="dim", markup=False)
    if loud:
        out.print(f"{len(loud)} trick(s) pay or break the reward: a model will find them", style="bold red")
    else:
        out.print("no trick earns more than the honest answer", style="green")
