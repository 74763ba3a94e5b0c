"""Datasets that tests make with the command of a task, and small tables for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

from vlmrl.data.images import encode_png
from vlmrl.data.open_dataset import open_dataset
from vlmrl.recipe.schema import Data
from vlmrl.tasks import TASKS
from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.types import Row


def prepare(
    task: str, tmp_path: Path, source: Path | str | None = None, force: bool = False, **options: Any
) -> Prepared:
    """Make a dataset of a task in the folder `out`, unless the options name another one."""
    command = TASKS[task].prep
    assert command is not None
    limits = Limits(workers=1, force=force)
    return command.run(str(source) if source else None, **{"out": tmp_path / "out", **options}, limits=limits)


def rows_of(made: Prepared, split: str | None = None) -> list[Row]:
    """Return the rows of a split; None = of the first one."""
    return list(open_dataset(Data(path=str(made.path))).rows(split or next(iter(made.info["splits"]))))


def sizes_of(info: Any) -> dict[str, int]:
    """Return split -> number of rows; `info`: dataset.json."""
    return {split: facts["rows"] for split, facts in info["splits"].items()}


def checks_of(info: Any) -> dict[str, tuple[str, str]]:
    """Return check of the data doctor -> (verdict, finding); `info`: dataset.json."""
    return {one["check"]: (one["verdict"], one["finding"]) for one in info["doctor"]["checks"]}


def picture_table(tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a table as RefCOCO's annotations are published: a JSON list with paths of images of 640 x 480 pixels."""
    for number, row in enumerate(rows):
        (tmp_path / f"{number}.png").write_bytes(encode_png(Image.new("RGB", (640, 480), (number * 9, 99, 99))))
        row.setdefault("image", f"{number}.png")
    (tmp_path / "rows.json").write_text(json.dumps(rows), "utf-8")
    return tmp_path / "rows.json"
