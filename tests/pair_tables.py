"""Rows in TaxonRL's published format, made up: small photographs and the `;` ground truth of each domain's layout."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlmrl.data.dataset_writer import Build
from vlmrl.data.images import encode_png, probe_image
from vlmrl.types import Media

PROBLEM = "<image><image> Is this the same?"


def photo(seed: int, width: int = 40, height: int = 30) -> bytes:
    cells = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(cells).resize((width, height), Image.Resampling.BICUBIC).save(buffer, "JPEG")
    return buffer.getvalue()


def add_square(build: Build, colour: tuple[int, int, int]) -> Media:
    """A coloured square among the images of a dataset that is being built."""
    data = encode_png(Image.new("RGB", (28, 28), colour))
    found, _ = probe_image(data)
    if found.sha256 not in build.images:
        build.images.add(found.sha256, data)
    return found


def composite(domain: str, same: bool, kinds: tuple[int, int]) -> str | None:
    """`answer_im` of a pair; `kinds` are numbers of species, or of individuals."""
    answer, (a, b) = str(int(same)), kinds
    names = [(f"O{k // 8}", f"F{k // 4}", f"G{k // 2}", f"G{k // 2} s{k}") for k in kinds]
    distance = next((4 - i for i in range(4) if names[0][i] != names[1][i]), 0)
    if domain == "fungi":
        return ";".join([answer, *(f"{f};{g};{o};{s}" for o, f, g, s in names)])
    if domain == "bird":
        word = ("sameSpecies", "sameGenus", "sameFamily", "sameOrder", "sameClass")[distance]
        return ";".join([answer, word, *(f"{g};{f};{o}" for o, f, g, _ in names)])
    if domain == "sea_star":
        return f"{answer};{'Asru' if a % 2 else 'Anau'};{'Asru' if b % 2 else 'Anau'}"
    if domain == "chimp":
        ages = ("Adult", "Infant", "SubAdult")
        return f"{answer};{ages[a % 3]};{'Male' if a % 2 else 'Female'};{ages[b % 3]};{'Male' if b % 2 else 'Female'}"
    if domain == "gorilla":
        kinds_of = ("Silverback", "Adult female", "Infant")
        return f"{answer};{kinds_of[a % 3]};{kinds_of[b % 3]}"
    return None


def table_rows(domain: str, count: int, *, seed: int = 0, first_photo: int = 0) -> list[dict[str, Any]]:
    """Rows: half of them the same, every photograph in one row only."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        a = rng.randrange(16)
        b = a if i % 2 == 0 else (a + rng.randrange(1, 16)) % 16
        images = [{"bytes": photo(first_photo + 2 * i + side), "path": None} for side in (0, 1)]
        row = {"problem": PROBLEM, "images": images, "answer": str(int(a == b))}
        text = composite(domain, a == b, (a, b))
        rows.append(row if text is None else {**row, "answer_im": text})
    return rows


def write_parquet(path: Path, rows: list[dict[str, Any]], group: int = 16) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path
