"""Rows and small prepared datasets of the domains, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pair_tables import add_square

from vlmrl.data.dataset_writer import building

FUNGI = {
    "same": False,
    "distance": 2,
    "order": ["Boletales", "Boletales"],
    "family": ["Boletaceae", "Boletaceae"],
    "genus": ["Boletus", "Suillus"],
    "species": ["Boletus edulis", "Suillus luteus"],
}
BIRD = {
    "same": False,
    "distance": 4,
    "order": ["Passeriformes", "Piciformes"],
    "family": ["Corvidae", "Picidae"],
    "genus": ["Pica", "Picus"],
}
TRUTHS: dict[str, dict[str, Any]] = {
    "fungi": FUNGI,
    "bird": BIRD,
    "sea_star": {"same": True, "distance": None, "species": ["Asterias rubens", "Asterias rubens"]},
    "chimp": {"same": False, "distance": None, "age_group": ["SubAdult", "Infant"], "gender": [None, "Male"]},
    "gorilla": {"same": True, "distance": None, "type": ["Blackback", "Silverback"]},
    "human": {"same": True, "distance": None},
    "whale": {"same": False, "distance": None},
}
"""A sound truth of each domain."""


def write_dataset(
    out: Path, task: str, truths: Sequence[Mapping[str, Any]], *, columns: Mapping[str, Any] | None = None, **info: Any
) -> Path:
    """A prepared dataset of one split, `train`: a row a truth, two coloured squares each."""
    with building(out) as build:
        rows = []
        for number, truth in enumerate(truths):
            media = [add_square(build, (number % 256, side * 200, number // 256)) for side in (0, 1)]
            rows.append(
                {"prompt_id": f"{task}-{number:016x}", "truth": dict(truth), "images": media, **(columns or {})}
            )
        build.write_rows("train", rows)
        build.finish({"name": task, "task": task, "splits": {"train": {}}, "args": {}, **info})
    return out
