"""Lines and table cells of `vlmrl runs`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.cli.output import say, tell

if TYPE_CHECKING:
    from vlmrl.store.listing import ListedRun


def show_pruned(run_dir: Path, names: list[str], freed: int, really: bool) -> None:
    from vlmrl.store.layout import complete_checkpoints

    kept = ", ".join(p.name for p in complete_checkpoints(run_dir) if p.name not in names) or "none"
    checkpoints = [name for name in names if "/" not in name]
    counts = {"rollout file": "rollouts/", "image shard": "media/"}
    numbers = {what: sum(n.startswith(prefix) for n in names) for what, prefix in counts.items()}
    parts = checkpoints + [f"{n} {what}{'s' if n > 1 else ''}" for what, n in numbers.items() if n]
    verb = "deleted" if really else "would delete"
    tell(
        f"{verb} {', '.join(parts)} ({size_text(freed)}); kept: {kept}" if parts else f"nothing to delete; kept: {kept}"
    )
    if parts and not really:
        say("add --yes to delete them")


def run_line(run: ListedRun) -> dict[str, Any]:
    from vlmrl.store.layout import ago
    from vlmrl.store.metrics import counted, read_tail

    raw = run.raw
    tail = read_tail(run.dir) if raw else None
    best = raw.get("best")
    return {
        "id": run.id,
        "name": raw.get("name"),
        "kind": raw.get("kind", ""),
        "status": run.status,
        "step": counted(tail["step"]) if tail else None,
        "best": best if isinstance(best, dict) else None,
        "start": raw.get("start"),
        "end": raw.get("end"),
        "age": ago(raw.get("start")),
        "tags": list(raw.get("tags", ())),
        "labels": list(raw.get("labels", ())),
        "note": raw.get("note", ""),
        "parent": raw.get("parent"),
        "problem": run.problem,
        "error": raw.get("error"),
        "path": str(run.dir),
    }


def about_cell(line: dict[str, Any]) -> str:
    """Return problem, error, tags, labels, note and parent of a run in one cell."""
    parts = [line["problem"], line["error"], *(f"#{t}" for t in line["tags"]), *line["labels"], line["note"]]
    parent = line["parent"] or {}
    parts += [f"fork of {parent['run']}@{parent['step']}"] if "step" in parent else []
    return " ".join(part for part in parts if part)


def best_cell(best: dict[str, Any] | None) -> str:
    return f"{best['metric']} {best['value']:.4g} @{best['step']}" if best else ""


def or_empty(value: Any) -> str:
    return "" if value is None else str(value)


def size_text(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 100 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
