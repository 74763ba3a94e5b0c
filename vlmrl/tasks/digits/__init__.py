"""Pairs of the 1,797 handwritten digit scans in scikit-learn (UCI Optical Recognition of Handwritten Digits).

The hierarchy has two levels: `loop` (does the digit contain a closed loop when written?) and `digit`. 0, 6, 8 and 9 are
`closed`; 1, 2, 3, 4, 5 and 7 are `open`. 4 is `open` because its top is usually left open when it is written by hand.
The level is a property of the digit, not of a single scan. A closed loop is an enclosed background region: 70% to 90%
of the scans of 0, 6, 8 and 9 have one, at most half of the scans of 4 (where two strokes touch at 8 x 8 pixels), and
10% to 30% of the scans of the other digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from vlmrl.data.dataset_writer import building, refuse_other
from vlmrl.data.images import encode_png, probe_image
from vlmrl.data.splits import LabelledImage
from vlmrl.errors import DataError
from vlmrl.tasks.base import Task
from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.pairs.prep import PairPlan, fill_pairs
from vlmrl.tasks.pairs.task import pair_task
from vlmrl.tasks.prep_options import Option, PrepCommand

SUMMARY = "pairs of handwritten digits: closed loop or not, which digit, the same or not (made by `vlmrl prep digits`)"
LEVELS = ["loop", "digit"]
CLOSED = frozenset({0, 6, 8, 9})
SCALE = 7
"""Factor by which scans are enlarged: 8 x 8 scans become images of 56 x 56 pixels, which are four image tokens."""
SPLIT_SHARES = {"train": 0.66, "start": 0.04, "validation": 0.1, "test": 0.2}
"""Share of the scans in each split.

`start` is the split for supervised training before reinforcement learning. It has few scans, because it teaches only
the format and how the answer follows from the names. The model learns to read most scans in reinforcement learning.
"""
NUM_PAIRS = {"train": 6000, "start": 400, "validation": 300, "test": 1200}


def digits_task(info: Mapping[str, Any]) -> Task:
    """Return the task bound to the dataset: a pair task with a short prompt of its own."""
    return pair_task(info, name="digits", summary=SUMMARY)


def read_scans() -> tuple[Any, list[int]]:
    """Return the scans of scikit-learn's `load_digits`: (ink, array [1797, 8, 8] from 0 to 16; digits).

    The data file is read directly, because importing scikit-learn takes seconds. If the file is not at its usual path,
    `load_digits` is called.
    """
    from importlib.util import find_spec

    import numpy as np

    spec = find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("scikit-learn, which contains the scans, is not installed", hint="pip install scikit-learn")
    file = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        table = np.loadtxt(file, delimiter=",")
        return table[:, :-1].reshape(-1, 8, 8), [int(digit) for digit in table[:, -1]]
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    return bunch.images, [int(digit) for digit in bunch.target]


def render_scan(scan: Any) -> bytes:
    """Return a scan as PNG: ink 0..16 becomes grey 255..0 (dark on white), bicubic to 56 x 56, RGB.

    Args:
        scan: array [8, 8] of ink from 0 to 16.
    """
    import numpy as np
    from PIL import Image

    grey = np.rint(255 - np.asarray(scan, dtype=np.float64) * (255 / 16)).astype(np.uint8)
    side = grey.shape[0] * SCALE
    return encode_png(Image.fromarray(grey).resize((side, side), Image.Resampling.BICUBIC).convert("RGB"))


def prepare_digits(
    out: Annotated[Path, Option("Dataset folder to make.")] = Path("data/digits"),
    *,
    seed: Annotated[int, Option("Seed of splits and pairs.")] = 0,
    num_pairs: Annotated[
        int, Option("Training pairs (start has up to 400, validation 300, test 1,200).", flag="--pairs", min=2)
    ] = NUM_PAIRS["train"],
    force: bool = False,
) -> Prepared:
    """Make the dataset; no scan is in two splits.

    Args:
        num_pairs: number of training pairs. `start` has the same number, but at most 400; validation has 300 pairs, and
            test has 1,200.
    """
    args = {"seed": seed, "pairs": num_pairs}
    refuse_other(out, args, force=force)
    images, files = [], {}
    for index, (scan, digit) in enumerate(zip(*read_scans(), strict=True)):
        data = render_scan(scan)
        media, _ = probe_image(data)
        files[f"scan {index}"] = data
        images.append(
            LabelledImage(media, ("closed" if int(digit) in CLOSED else "open", str(int(digit))), f"scan {index}")
        )
    plan = PairPlan(
        name="digits",
        levels=LEVELS,
        num_pairs={**NUM_PAIRS, "train": num_pairs, "start": min(num_pairs, NUM_PAIRS["start"])},
        seed=seed,
        split_shares=SPLIT_SHARES,
        args=args,
        source={
            "name": "scikit-learn load_digits (UCI Optical Recognition of Handwritten Digits)",
            "images": len(images),
        },
    )
    task = digits_task({"name": "digits", "levels": LEVELS})
    with building(out) as build:
        return fill_pairs(build, plan, task, images, files.__getitem__, limits=Limits(workers=1, force=force))


PREP = PrepCommand(
    prepare_digits,
    "Pairs of real handwritten digits: same digit or not. Needs no download.\n\n"
    "Example: vlmrl prep digits --out data/digits --seed 0",
)
