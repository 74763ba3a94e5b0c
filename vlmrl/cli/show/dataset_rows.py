"""Screen of `vlmrl data show`: facts about a dataset and some of its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vlmrl.cli.output import shorten, tell

MOST_CHARS = 600
"""Maximum number of characters that are shown of a row's truth, and of its columns."""


def show_rows(opened: Any, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Print facts about a dataset, and some of its rows."""
    tell(f"{opened.path}: task {facts['task']}, fingerprint {opened.fingerprint[:16]}")
    tell("splits: " + ", ".join(f"{name} {count}" for name, count in opened.splits.items()))
    if opened.info.get("description"):
        tell(str(opened.info["description"]))
    for note in opened.notes:
        tell(note)
    dropped = opened.info.get("dropped") or ()
    if count := (opened.info.get("counts") or {}).get("dropped", len(dropped)):
        tell(f"rows left out when the dataset was made: {count:,} (dropped.jsonl)")
    for row in rows:
        sizes = ", ".join(f"{image['width']}x{image['height']} {image['sha256'][:8]}" for image in row["images"])
        tell(f"\n{row['prompt_id']}  images: {sizes or 'none'}\n  truth: {_short_json(row['truth'])}")
        tell(f"  prompt: {row['prompt']}")
        others = {k: v for k, v in row["columns"].items() if k not in row["truth"] and str(v) not in row["prompt"]}
        if others:
            tell(f"  columns: {_short_json(others)}")
        for problem in row["problems"]:
            tell(f"  problem: {problem}")


def _short_json(value: Any) -> str:
    """Return a value as JSON in one line, cut at MOST_CHARS."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MOST_CHARS else f"{shorten(text, MOST_CHARS)} ... ({len(text):,} characters)"


def row_fields(opened: Any, row: Any, task: Any, save: Path | None) -> dict[str, Any]:
    """Return a dataset row for `--json`. `save`: folder for its images; None = they are not written."""
    from vlmrl.tasks.dataset_assembly import row_messages

    turns = row_messages(task, row)
    images = []
    for media in row.media:
        image = opened.image(media)
        if save is not None:
            save.mkdir(parents=True, exist_ok=True)
            image.save(save / f"{media.sha256[:16]}.png")
        images.append(media.fields())
    prompt = "\n".join(f"[{turn.role}] {turn.content}" for turn in turns)
    return {
        "prompt_id": row.prompt_id,
        "truth": dict(row.truth),
        "images": images,
        "prompt": prompt,
        "columns": dict(row.columns),
        "problems": task.validate(row.truth),
    }
