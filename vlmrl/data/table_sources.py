"""Search for the tables of a path: a file, a folder of files by split, a saved dataset, or a dataset of the hub.

The `datasets` library opens datasets of the hub and of `save_to_disk`; it runs no code from these datasets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from vlmrl.data.table_files import SUFFIXES
from vlmrl.errors import DataError, nearest

SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}

Table = TypeVar("Table")


def find_tables(path: str) -> dict[str, Any]:
    """Find the tables of a path, without reading their rows.

    Args:
        path: a file, a folder of files (their names contain the split as a word: `train-00000.parquet`; files with
            other names are train), a folder written by `Dataset.save_to_disk`, or `hub:name[#config]`.
    Returns: split -> its files (a list of paths), or a dataset of the `datasets` library, train first (`in_order`). A
        single file is the split `train`, whatever its name.
    Raises: DataError when nothing is at the path, or it cannot be opened.
    """
    if path.startswith("hub:"):
        return in_order(_splits_of(_load_hub(path.removeprefix("hub:")), path))
    place = Path(path)
    if not place.exists():
        hint = "name a table file, a folder of them, or hub:name; `vlmrl prep` makes datasets"
        raise DataError(f"no dataset at {path}", hint=_near_files(place) or hint)
    if not place.is_dir():
        return {"train": [place]}
    return in_order(_splits_of(_load_saved(place), path) if is_saved(place) else _folder_files(place))


def in_order(splits: Mapping[str, Table]) -> dict[str, Table]:
    """Return splits in their usual order: train, validation, test, then the others in the given order.

    The order is used by the search for copies: it reports images of a split that are also in an earlier split.
    """
    usual = [name for name in ("train", "validation", "test") if name in splits]
    return {name: splits[name] for name in dict.fromkeys((*usual, *splits))}


def is_saved(place: Path) -> bool:
    """Return whether a folder was written by `Dataset.save_to_disk`."""
    return (place / "dataset_info.json").is_file() or (place / "dataset_dict.json").is_file()


def _folder_files(place: Path) -> dict[str, list[Path]]:
    """Return split -> the table files of a folder, sorted. Raises: DataError when there are none."""
    by_split: dict[str, list[Path]] = {}
    for file in sorted(file for pattern in SUFFIXES for file in place.rglob(f"*{pattern}")):
        if not any(part.startswith(".") for part in file.relative_to(place).parts):
            by_split.setdefault(_split_of(file, place), []).append(file)
    if not by_split:
        raise DataError(
            f"the folder {place} holds no dataset",
            hint=f"expected dataset.json, or files ending in {', '.join(SUFFIXES)}",
        )
    return by_split


def _split_of(file: Path, root: Path) -> str:
    """Return the split that is named in a file's name or folders; train if none is.

    `train-00000-of-00003.parquet`, `train/0.parquet` and `DF20-train_metadata.csv` are train.
    """
    for part in (file.name, *reversed(file.relative_to(root).parts[:-1])):
        for word in re.findall(r"[A-Za-z]+", part):
            if word.lower() in SPLIT_NAMES:
                return SPLIT_NAMES[word.lower()]
    return "train"


def _load_hub(spec: str) -> Any:
    """Open a hub dataset, which the `datasets` library downloads, or a local folder that `load_dataset` can read."""
    name, _, config = spec.partition("#")
    if not name.strip("/"):
        raise DataError("`hub:` without a dataset name", hint='path = "hub:org/name", or "hub:org/name#config"')
    import datasets

    try:
        return datasets.load_dataset(name, config or None)
    except Exception as error:  # `datasets` raises many types: its own, and those of the network libraries
        text = str(error).strip().split("\n")[0]
        raise DataError(
            f"the hub dataset `{name}` cannot be loaded: {type(error).__name__}: {text}",
            hint="check the name, the config (`hub:name#config`) and the network, or name a copy on this machine; gated"
            " datasets need `hf auth login`",
        ) from error


def _load_saved(place: Path) -> Any:
    import datasets

    try:
        return datasets.load_from_disk(str(place))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the saved dataset cannot be read: {error}", where=str(place)) from error


def _splits_of(loaded: Any, label: str) -> dict[str, Any]:
    """Return the splits that have rows, of a dataset of the `datasets` library.

    If a split selects or reorders the rows of its files (`_indices`), it is written again with its rows in order.
    """
    splits = {str(name): part for name, part in loaded.items()} if hasattr(loaded, "items") else {"train": loaded}
    with_rows = {
        split: part if part._indices is None else part.flatten_indices()
        for split, part in splits.items()
        if part.num_rows
    }
    if not with_rows:
        raise DataError("the dataset has no rows", where=label)
    return with_rows


def _near_files(place: Path) -> str | None:
    if not place.parent.is_dir():
        return None
    names = [
        path.name
        for path in place.parent.iterdir()
        if path.is_dir() or (path.is_file() and path.suffix.lower() in SUFFIXES)
    ]
    near = nearest(place.name, names)
    return f"did you mean {place.parent / near}?" if near else None
