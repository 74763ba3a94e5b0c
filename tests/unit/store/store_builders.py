"""Small runs and groups for the tests of the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmrl.store import layout
from vlmrl.store.runs import Run, create_run
from vlmrl.types import Group, Media, Row, Score, ScoredSample, Segment, Trajectory

IMAGE = Media("a" * 64, 8, 6)


def make_run(root: Path, **changes: Any) -> Run:
    settings: dict[str, Any] = {"kind": "rl", "recipe_name": "digits", "argv": ["vlmrl", "train"], "seeds": {"run": 1}}
    return create_run(root, **{**settings, **changes})


def make_group(version: int = 0, prompt_id: str = "p0", samples: int = 2, media: tuple[Media, ...] = (IMAGE,)) -> Group:
    row = Row(prompt_id, "digits", "pairs", {"same": True, "distance": 0}, media, {"extra": 1.5})
    scored = []
    for k in range(samples):
        segments = (Segment("assistant", (5, 6, 7), True, (-0.5, -0.25, -1.0)),)
        t = Trajectory("pairs", prompt_id, 0, k, version, 100 + k, (1, 2, 3), segments, media, "stop")
        scored.append(ScoredSample(t, f"answer {k}", Score(0.1 * k, {"format": 1.0, "level": None}), 0.5 - k))
    return Group(row, "<prompt>", tuple(scored))


META = {"schema": 1, "dtype": "float32", "policy": {"temperature": 1.0, "banned_ids": []}}
"""Keys of every meta.json, besides its step and its files."""


def make_checkpoint(run_dir: Path, step: int, *, complete: bool = True, files: dict[str, bytes] | None = None) -> Path:
    import hashlib
    import json

    folder = layout.checkpoint_dir(run_dir, step)
    (folder / "model").mkdir(parents=True)
    files = files or {"model/a.safetensors": b"weights %d" % step}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    table = {n: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in files.items()}
    (folder / layout.META).write_text(json.dumps(META | {"step": step, "files": table}))
    if complete:
        (folder / layout.COMPLETE).write_text("")
    return folder
