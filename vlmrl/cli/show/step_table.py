"""Columns of `vlmrl runs watch`: one line per step, and the table on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vlmrl.cli.show.progress import by_cell

if TYPE_CHECKING:
    from vlmrl.store.summary import Followed


MOST_PHASES = 3
"""Maximum number of phases of a step that are shown with their times, the slowest first."""
SHORTEST_TABLE = 5
"""Minimum number of rows of the table, even if the terminal is lower."""
LINES_AROUND_TABLE = 8
"""Number of terminal lines that are reserved for output other than the table."""


def step_table(followed: Followed, height: int) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from vlmrl.store.metrics import counted

    train = followed.lines()
    shown = train[-max(SHORTEST_TABLE, height - LINES_AROUND_TABLE) :]
    rows = [{"step": str(counted(line["step"])), **columns(line)} for line in shown]
    names = [n for n in (rows[-1] if rows else {}) if any(row.get(n) for row in rows)]
    table = Table(*names, box=None, padding=(0, 1), header_style="bold")
    for row in rows:
        table.add_row(*(row.get(name, "") for name in names))
    return Group(Text(_headline(followed)), Text(_validation(followed)), table if rows else Text("no step yet"))


def _headline(followed: Followed) -> str:
    from vlmrl.store.layout import span
    from vlmrl.store.metrics import counted

    run, train = followed.run, followed.lines()
    name = f" ({run.manifest.name})" if run.manifest.name else ""
    left = followed.seconds_left
    parts = [
        f"{run.id}{name}",
        run.status,
        f"step {step_of(counted(train[-1]['step']) if train else 0, followed.steps)}",
    ]
    if left is not None and run.status == "running":
        parts.append(f"{span(left)} left")
    if run.attempt > 1:
        parts.append(f"attempt {run.attempt}")
    if waiting := waiting_text(followed):
        parts.append(waiting)
    return "  ".join(parts)


def waiting_text(followed: Followed) -> str:
    """Return what the run waits for, and how long; "" if it does not wait."""
    from vlmrl.store.layout import ago

    wait = followed.waits_for if followed.run.status == "running" else None
    return "" if wait is None else f"{wait['event']} for {ago(wait['time'])}: {wait['reason']}"


def _validation(followed: Followed) -> str:
    lines, best = followed.lines("validation"), followed.run.manifest.best
    if not lines:
        return "no validation yet"
    line = f"validation at step {lines[-1]['step']}: {_number(lines[-1].get('eval/metric'), '.4f')}"
    line += f"; best {best.metric} {best.value:.4f} at step {best.step}" if best else ""
    return "\n".join([line, *(f"  {cell}: {'  '.join(numbers)}" for cell, numbers in by_cell(lines[-1]).items())])


def columns(line: Mapping[str, Any]) -> dict[str, str]:
    """Return column -> text for a step of reinforcement or supervised learning; "" if the step lacks the metric."""
    from vlmrl.store.summary import phase_seconds

    memory = line.get("memory/peak_bytes")
    phases = list(phase_seconds([dict(line)]).items())[:MOST_PHASES]
    lengths = [_number(line.get(f"rollout/response_tokens_{which}"), ".0f") for which in ("mean", "max")]
    return {
        "reward": _number(line.get("reward/mean"), ".3f"),
        "accuracy": _number(line.get("reward/accuracy"), ".3f"),
        "loss": _number(line.get("loss/cross_entropy"), ".4f"),
        "length": "/".join(filter(None, lengths)),
        "cut": _number(line.get("rollout/truncated_share"), ".0%"),
        "dead": _number(line.get("rollout/dead_group_share"), ".0%"),
        "gap": _number(line.get("policy/sampler_gap_max"), ".1e"),
        "entropy": _number(line.get("policy/entropy"), ".2f"),
        "tok/s": _number(line.get("rollout/tokens_per_second"), ",.0f"),
        "memory": "" if memory is None else f"{memory / 2**30:.1f} GiB",
        "seconds": _number(line.get("time/step_seconds"), ".1f"),
        "phases": " ".join(f"{name} {seconds:.1f}" for name, seconds in phases),
        "!": str(line.get("health/warning") or ""),
    }


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, (int, float)) else ""


def step_of(step: int, steps: int | None) -> str:
    return f"{step}/{steps}" if steps is not None else str(step)
