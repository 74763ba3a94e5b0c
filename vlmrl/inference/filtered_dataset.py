"""Rows worth training on, written as a dataset of the same kind: `vlmrl try --filter`.

Rows of a prepared folder become a prepared folder: their split has only these rows, and the other splits and the images
are copied. Rows of a table become a Parquet table with the same columns. To train on either, name it in `data.path`;
the task stays the same.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrl.data.dataset import INFO_FILE
from vlmrl.data.dataset_writer import building
from vlmrl.errors import DataError
from vlmrl.store.files import write_atomic
from vlmrl.tasks.source import Source
from vlmrl.types import Row

IMAGES = "images"
NOT_COPIED = ("schema", "splits", "files", "fingerprint")


def check_target(sources: Sequence[Source], out: Path) -> dict[str, Path]:
    """Return where the kept rows of each source will be written: source name -> path.

    The path is `out` for one source, `out/<name>` for several.

    Raises: DataError when the path exists, or when it is a file and the source is a prepared dataset.
    """
    targets = {}
    for source in sources:
        target = out if len(sources) == 1 else out / source.name
        if is_prepared(source):
            if target.suffix:
                hint = f"give a folder: --out {target.with_suffix('')}"
                raise DataError(
                    f"`{source.name}` is a prepared dataset, so its rows become a folder, not {target}", hint=hint
                )
        elif target.suffix != ".parquet":
            target = target.with_name(target.name + ".parquet")
        if target.exists():
            raise DataError(f"{target} exists; nothing was sampled or written", hint="give another --out, or remove it")
        targets[source.name] = target
    return targets


def is_prepared(source: Source) -> bool:
    """Return whether a source is a folder made by `vlmrl prep`."""
    return (Path(source.dataset.path) / INFO_FILE).is_file()


def write_rows(source: Source, rows: Sequence[Row], target: Path, *, args: Mapping[str, Any]) -> Path:
    """Write some of a source's rows as a dataset, and return `target`. It appears complete or not at all.

    Args:
        args: how the rows were chosen; kept in dataset.json.
    Raises: DataError when an image cannot be read, or when `target` exists by now.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_prepared(source):
        _write_folder(source, rows, target, args)
    else:
        write_atomic(target, _table_bytes(source, rows))
    return target


def _write_folder(source: Source, rows: Sequence[Row], target: Path, args: Mapping[str, Any]) -> None:
    dataset = source.dataset
    info = {name: value for name, value in dataset.info.items() if name not in NOT_COPIED}
    original = {"fingerprint": dataset.fingerprint, "args": info.get("args", {})}
    info["args"] = {"kept_from": original, "kept_split": source.split, **args}
    info = {k: v for k, v in info.items() if k not in ("counts", "histograms", "dropped", "doctor")}
    with building(target) as build:
        for split in dataset.splits:
            chosen = rows if split == source.split else dataset.rows(split)
            fields = []
            for row in chosen:
                for media in row.media:
                    if media.sha256 not in build.images:
                        build.images.add(media.sha256, dataset.image_bytes(media))
                fields.append(
                    {"prompt_id": row.prompt_id, "truth": dict(row.truth), IMAGES: list(row.media), **row.columns}
                )
            if fields:
                build.write_rows(split, fields)
        build.finish(info)


def _table_bytes(source: Source, rows: Sequence[Row]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    column_names = source.dataset.info.get("columns") or {}
    image_column = column_names.get(IMAGES) or IMAGES
    names = list(dict.fromkeys(name for row in rows for name in row.columns))
    columns: dict[str, Any] = {name: _column([row.columns.get(name) for row in rows]) for name in names}
    if any(row.media for row in rows):
        image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        files = [[{"bytes": source.dataset.image_bytes(m), "path": None} for m in row.media] for row in rows]
        columns[image_column] = pa.array(files, pa.list_(image))
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, compression="zstd")
    return sink.getvalue()


def _column(values: list[Any]) -> Any:
    """Return an Arrow column. Values of mixed kinds become JSON text."""
    import pyarrow as pa

    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([None if v is None else json.dumps(v, ensure_ascii=False) for v in values])
