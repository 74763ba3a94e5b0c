"""Write what pycocotools makes of drawn detections: `uv run --with pycocotools==2.0.11 tests/golden/coco/record.py`.

Each set of average_precision.json.gz has `rows`: [category, true boxes, stated boxes, confidences], boxes as corners;
`counts`: how often each row is taken; and what COCOeval computes for all rows once (`once`) and for the rows as often
as `counts` says (`resampled`): [mAP, AP50, AP75, category -> mAP], where -1 stands for "no object". Each taken row is
an image of its own, with the row's category as the only one that it is asked for.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

NUM_SETS = 40
FILE = Path(__file__).with_name("average_precision.json.gz")


def drawn_box(rng: random.Random) -> list[int]:
    x, y = rng.randint(0, 800), rng.randint(0, 800)
    return [x, y, x + rng.randint(20, 200), y + rng.randint(20, 200)]


def near(box: list[int], rng: random.Random) -> list[int]:
    """Return a box that overlaps another one more or less, or exactly."""
    reach = rng.choice((0, 2, 8, 20, 40))
    x1, y1, x2, y2 = (number + rng.randint(-reach, reach) for number in box)
    return [x1, y1, max(x1 + 1, x2), max(y1 + 1, y2)]


def drawn_set(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    categories = ["cat", "dog", "traffic light"][: rng.randint(1, 3)]
    most_truths, most_stated = rng.choice(((3, 4), (8, 12), (2, 130)))
    rows = []
    for _ in range(rng.randint(1, 25)):
        truths = [drawn_box(rng) for _ in range(rng.choice((0, rng.randint(1, most_truths))))]
        if truths and rng.random() < 0.3:
            truths.append(list(truths[0]))  # two objects with one box: equal IoUs
        stated = [
            near(rng.choice(truths), rng) if truths and rng.random() < 0.7 else drawn_box(rng)
            for _ in range(rng.randint(0, most_stated))
        ]
        decimals = 9  # no two are equal: for equal ones the numbers of pycocotools depend on the order of the rows
        rows.append([rng.choice(categories), truths, stated, [round(rng.random(), decimals) for _ in stated]])
    counts = [rng.choice((0, 1, 1, 2, 3)) for _ in rows]
    if not any(counts):
        counts[0] = 1
    return {"rows": rows, "counts": counts}


def measured(rows: list[Any]) -> list[Any]:
    """Return what COCOeval computes for these rows."""
    import contextlib
    import io

    import numpy as np
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    categories = sorted({row[0] for row in rows})
    truths, stated = [], []
    for image, (category, true_boxes, boxes, confidences) in enumerate(rows, start=1):
        place = {"image_id": image, "category_id": 1 + categories.index(category)}
        for x1, y1, x2, y2 in true_boxes:
            box = {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1), "iscrowd": 0}
            truths.append({**place, **box, "id": len(truths) + 1})
        for (x1, y1, x2, y2), confidence in zip(boxes, confidences, strict=True):
            box = {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1), "score": confidence}
            stated.append({**place, **box, "id": len(stated) + 1})
    tables = []
    for boxes_of_images in (truths, stated):
        table = COCO()
        table.dataset = {
            "images": [{"id": image} for image in range(1, len(rows) + 1)],
            "categories": [{"id": k, "name": name} for k, name in enumerate(categories, start=1)],
            "annotations": boxes_of_images,
        }
        with contextlib.redirect_stdout(io.StringIO()):
            table.createIndex()
        tables.append(table)
    evaluation = COCOeval(*tables, iouType="bbox")
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.evaluate()
        evaluation.accumulate()
    precision_TRK = evaluation.eval["precision"][:, :, :, 0, 2]  # [T, recalls, K], all sizes, at most 100 boxes

    def mean(values: Any) -> float:
        there = values[values > -1]
        return float(np.mean(there)) if there.size else -1.0

    own = {name: mean(precision_TRK[:, :, k]) for k, name in enumerate(categories)}
    return [mean(precision_TRK), mean(precision_TRK[0]), mean(precision_TRK[5]), own]


def main() -> None:
    sets = []
    for seed in range(NUM_SETS):
        one = drawn_set(seed)
        taken = [row for row, count in zip(one["rows"], one["counts"], strict=True) for _ in range(count)]
        sets.append({**one, "once": measured(one["rows"]), "resampled": measured(taken)})
    text = "[\n" + ",\n".join(json.dumps(one, separators=(",", ":")) for one in sets) + "\n]\n"
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
