"""Small evaluations for tests: rows of a pair task, written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np


def row(
    prompt_id: str = "p0",
    *,
    sample: int = 0,
    score: float | None = 0.5,
    label: float = 1.0,
    confidence: float | None = 0.9,
    images: tuple[str, ...] = ("a", "b"),
    distance: int = 0,
    level: float | None = 1.0,
    **changes: Any,
) -> dict[str, Any]:
    accuracy = 0.0 if confidence is None else float((confidence > 0.5) == bool(label) and confidence != 0.5)
    outcome = {
        "accuracy": accuracy,
        "brier": 1.0 if confidence is None else (confidence - label) ** 2,
        "confidence": confidence,
        "label": label,
        "parse_failure": float(confidence is None),
        "accuracy/digit": level,
    }
    fields = {
        "prompt_id": prompt_id,
        "sample": sample,
        "seed": 7,
        "source": "digits",
        "task": "digits",
        "truth": {"same": bool(label), "distance": distance},
        "columns": {"question": "the same?"},
        "prompt_text": "Are they the same?",
        "text": "<answer>0.9</answer>",
        "finish": "stop",
        "num_tokens": 5,
        "score": score,
        "parts": {"format": 1.0, "digit": None},
        "note": "",
        "error": None,
        "status": "ok",
        "images": [
            {"sha256": i, "width": 8, "height": 6, "kind": "image", "seen_width": 8, "seen_height": None}
            for i in images
        ],
        "detail": None,
        "artifacts": [],
        **dict.fromkeys(("turns", "ending", "measured")),
        "outcome": outcome,
    }
    return {**fields, **outcome, **changes}


def random_pairs(rng: np.random.Generator, images: int, rows: int) -> list[tuple[int, int]]:
    """Rows of two images each, of so many."""
    return [tuple(int(i) for i in rng.choice(images, 2, replace=False)) for _ in range(rows)]  # type: ignore[misc]
