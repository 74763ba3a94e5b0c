"""Memory plan as a table with a line per phase and its largest parts, and changes that make the run fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmrl.cli.output import console
from vlmrl.errors import gib

SHOWN_PARTS = 5
"""Number of parts that are listed per phase, the largest first."""


def show_memory(plan: Mapping[str, Any]) -> None:
    """Print a plan of `preflight/memory_plan.py`, given as JSON values."""
    from rich.table import Table
    from rich.text import Text

    out = console(stderr=False)
    out.print(Text(f"\nmemory  {_title(plan)}", style="bold"))
    table = Table("phase", "needs", "share", "largest parts", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for phase in plan["phases"]:
        where = " (engine GPUs)" if phase["on"] == "engine" else ""
        full = phase["bytes"] > plan["bytes_each"]
        share = Text(f"{phase['bytes'] / max(1, plan['bytes_each']):.0%}", style="bold red" if full else "")
        table.add_row(Text(phase["phase"] + where), Text(gib(phase["bytes"])), share, Text(_parts(phase["parts"])))
    out.print(table)
    if plan["device"] != "this machine":
        for phase in plan["host"]:
            have = "" if plan["host_bytes"] is None else f" of {gib(plan['host_bytes'])}"
            out.print(Text(f"main memory, {phase['phase']}: {gib(phase['bytes'])}{have}: {_parts(phase['parts'])}"))
    if plan["kv_cache"]:
        needed = f"; all responses of a step at once need {gib(plan['kv_cache_needed'])}"
        out.print(Text(f"vLLM's cache: {gib(plan['kv_cache'])} per GPU{needed}"))
    for note in plan["notes"]:
        out.print(Text(note))
    if not plan["measured_prompts"]:
        out.print(Text("prompts were not measured: planned for the longest that rollout.max_prompt_tokens allows"))
    for number, change in enumerate(plan["changes"]):
        text = Text("fits with  " if number == 0 else "or         ", style="bold")
        out.print(text + Text(f"{change['words']}   ({change['costs']}; then at most {gib(change['peak'])})"))


def _title(plan: Mapping[str, Any]) -> str:
    count = plan["processes"]
    if plan["device"] == "this machine":
        each = "" if count == 1 else f", shared by {count} processes"
        whole = plan["bytes_each"] * count
        need = f"needs {gib(plan['peak'] * count)} of {gib(whole)} of main memory{each}"
        need += " (estimated, without Python and its libraries)"
        return f"{'fits' if plan['fits'] else 'does not fit'}: {need}"
    train = f"{plan['trainers']} train, {plan['engines']} generate" if plan["engines"] else "each trains and generates"
    fits = "does not fit" if not plan["fits"] else "fits, barely" if plan["tight"] else "fits"
    return f"{fits}: {count} x {plan['device']} with {gib(plan['bytes_each'])}; {train} (per GPU, estimated)"


def _parts(parts: Mapping[str, int]) -> str:
    largest = sorted(parts.items(), key=lambda item: -item[1])
    named = [f"{name} {gib(size)}" for name, size in largest[:SHOWN_PARTS]]
    rest = sum(size for _, size in largest[SHOWN_PARTS:])
    return ", ".join([*named, f"others {gib(rest)}"] if rest else named)
