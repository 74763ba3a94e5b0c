"""Atomic writer of dataset folders.

The folder is written under a hidden name beside its target, synced to disk, and renamed at the end. So a reader sees
either the complete old folder or the complete new one. A writer holds a lock on its hidden folder. The system releases
the lock when the process ends; a hidden folder without a lock was therefore left by an interrupted writer. Leftovers of
the same work are reused, others are removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from vlmrl.data.dataset import INFO_FILE, SCHEMA, canonical_json
from vlmrl.data.images import ShardWriter
from vlmrl.data.parallel_parts import LostWorkerError
from vlmrl.errors import FULL, DataError
from vlmrl.store.checkpoints import file_facts
from vlmrl.store.files import sync_file, sync_folder, write_atomic
from vlmrl.store.lock import is_current, try_flock
from vlmrl.untrusted import parse_json

Outcome = Literal["created", "replaced", "up to date"]
DROPPED_FILE = "dropped.jsonl"
"""File that lists the source rows and files that were left out: a JSON object per line, with place and reason."""
WORK, KEY_FILE = "work", "key"
WORK_VERSION = 1
"""Version of the format of intermediate results. Results of another version are not reused."""
ROW_GROUP = 10_000
INDEX = re.compile(r"\.(fts5|tantivy)(\.lock|\.new)?$")  # of passages, which the tool `search` makes beside them


class Build:
    """Dataset folder that is being written. Create it with `building`.

    Args:
        target: final path of the folder.
        leftovers: notes on the hidden folders of earlier, interrupted writers.

    Attributes:
        images: writer of single images. For many images, `write_shards` (data/image_scan.py) fills `folder` instead.
        work: folder for intermediate results (data/parallel_parts.py); it is removed at the end.
    """

    def __init__(self, target: Path, folder: Path, leftovers: Sequence[str]) -> None:
        self.target, self.folder, self.leftovers = target, folder, tuple(leftovers)
        self.images = ShardWriter(folder)
        self.work = folder / WORK
        self.work.mkdir(exist_ok=True)
        self._counts: dict[str, int] = {}
        self._texts: dict[str, str] = {}

    def write_text(self, name: str, text: str) -> None:
        """Write a further file of the dataset, such as passages that its rows ask about; its text is part of it."""
        (self.folder / name).write_text(text, encoding="utf-8")
        sync_file(self.folder / name)
        self._texts[name] = text

    def write_rows(self, split: str, rows: Iterable[Mapping[str, Any]], schema: Any = None) -> int:
        """Write a split and return its number of rows. The rows are read one by one.

        Args:
            rows: each has prompt_id, truth (mapping), images (Media), and further columns, the same in all rows.
            schema: Arrow schema; None = the schema of the first 10,000 rows.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        path, writer, count = self.folder / f"{split}.parquet", None, 0
        with (self.work / f"{split}.rows").open("wb") as canonical:
            for group in _groups(rows, ROW_GROUP):
                plain = [{**row, "images": [media.fields() for media in row["images"]]} for row in group]
                canonical.writelines(canonical_json(row) for row in plain)
                table = pa.Table.from_pylist(plain, schema=schema)
                schema = schema or table.schema
                writer = writer or pq.ParquetWriter(path, schema, compression="zstd")
                writer.write_table(table, row_group_size=ROW_GROUP)
                count += len(plain)
        if writer is None:
            pq.write_table(schema.empty_table() if schema else pa.table({}), path, compression="zstd")
        else:
            writer.close()
        sync_file(path)
        self._counts[split] = count
        return count

    def finish(self, info: Mapping[str, Any], *, force: bool = False) -> Outcome:
        """Write dataset.json as the last file, and rename the folder to its target.

        Args:
            info: all fields of dataset.json except schema, splits, files and fingerprint, which are added here. They
                must not contain a time, host or path.
            force: whether a dataset that differs is replaced.
        Returns: "created", "replaced" or "up to date" (the target is the same dataset already; nothing was written).
        Raises: DataError when the target is another dataset and `force` is not set; that dataset is left unchanged.
        """
        if len(self.images) or not any(self.folder.glob("media-*.arrow")):
            self.images.close()
        splits = {split: {"rows": count} for split, count in self._counts.items()}
        for split, extra in (info.get("splits") or {}).items():
            splits[split].update(extra)
        fingerprint = self._fingerprint(info)
        shutil.rmtree(self.work)
        files = {path.name: file_facts(path) for path in sorted(self.folder.iterdir())}
        full = {"schema": SCHEMA, **info, "splits": splits, "files": files, "fingerprint": fingerprint}
        text = json.dumps(full, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        # A file name that is not UTF-8 stands in it as escapes.
        (self.folder / INFO_FILE).write_bytes(text.encode("utf-8", "backslashreplace"))
        sync_file(self.folder / INFO_FILE)
        sync_folder(self.folder)
        return self._publish(text, force)

    def _fingerprint(self, info: Mapping[str, Any]) -> str:
        """Return a hash of names, rows and images.

        The bytes of the files do not count, because they depend on the version of the library that wrote them.
        """
        digest = hashlib.sha256()
        for part in (info.get("name"), info.get("task"), info.get("levels")):
            digest.update(canonical_json(part))
        for split in sorted(self._counts):
            digest.update(canonical_json(split))
            with (self.work / f"{split}.rows").open("rb") as canonical:
                while block := canonical.read(1 << 20):
                    digest.update(block)
        for text in sorted(self._texts.items()):
            digest.update(canonical_json(text))
        return digest.hexdigest()

    def _publish(self, text: str, force: bool) -> Outcome:
        target = self.target
        if not target.exists() or (target.is_dir() and not target.is_symlink() and not any(target.iterdir())):
            os.rename(self.folder, target)
            sync_folder(target.parent)
            return "created"
        if damage_of(target) is None and _facts(_stored(target)) == _facts(parse_json(text)):
            return "up to date"
        if not force:
            raise _other_dataset(target, _difference(target, text))
        _refuse_foreign(target, replace=True)
        old = old_folder(target)
        os.rename(target, old)
        os.rename(self.folder, target)
        sync_folder(target.parent)
        shutil.rmtree(old)
        return "replaced"


def _groups(rows: Iterable[Mapping[str, Any]], size: int) -> Iterator[list[Mapping[str, Any]]]:
    rows = iter(rows)
    while group := list(islice(rows, size)):
        yield group


@contextmanager
def building(target: Path | str, key: Any = None) -> Iterator[Build]:
    """Yield a `Build` for this target; remove its hidden folder at the end.

    Args:
        key: JSON value with everything that the work depends on. A killed or interrupted run leaves its finished parts
            (in `work`, and image shards), and a run with the same key reuses them. None = no parts are kept.
    Raises: DataError when another process is writing the same dataset, when the target exists and is no dataset, or
        when the folder cannot be written.
    """
    target = Path(target).absolute()
    _refuse_foreign(target)
    folder = target.parent / f".{target.name}.building"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        left_over = folder.exists()
        lock = _lock_folder(folder, target)
    except OSError as error:
        raise DataError(f"{target} cannot be made: {error.strerror}", hint="give another --out") from error
    keep = False
    try:
        notes = _clear_leftovers(folder, target, left_over, key)
        yield Build(target, folder, notes)
    except (KeyboardInterrupt, OSError, LostWorkerError) as error:
        keep = key is not None
        if isinstance(error, OSError) and error.errno in FULL:
            again = f", then run the same command again: finished parts are kept in {folder}" if keep else ""
            raise DataError(f"no room for {target}: {error.strerror}", hint=f"free disk space{again}") from error
        raise
    finally:
        if not keep and is_current(lock, folder):
            shutil.rmtree(folder)
        os.close(lock)


def _lock_folder(folder: Path, target: Path) -> int:
    for _ in range(5):
        folder.mkdir(exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        if not try_flock(lock):
            os.close(lock)
            raise DataError(f"another process is making {target} right now", hint="wait for it, or give another --out")
        if is_current(lock, folder):
            return lock
        os.close(lock)  # the previous owner renamed or removed the folder between mkdir and flock
    raise DataError(f"other processes make {target} again and again", hint="give another --out")


def _clear_leftovers(folder: Path, target: Path, left_over: bool, key: Any) -> list[str]:
    notes = []
    leftovers = sorted(folder.iterdir())
    token = canonical_json([WORK_VERSION, key])
    key_file = folder / WORK / KEY_FILE
    same = key is not None and key_file.is_file() and key_file.read_bytes() == token
    num_parts = sum(1 for path in (folder / WORK).glob("*.jsonl")) + sum(1 for path in folder.glob("media-*.arrow"))
    for path in leftovers:
        if same and (path.name == WORK or (path.suffix == ".arrow" and not path.name.startswith("."))):
            continue
        path.unlink() if path.is_file() or path.is_symlink() else shutil.rmtree(path)
    if same and num_parts:
        notes.append(f"an interrupted run had made {num_parts} parts of this dataset; they were not made again")
    elif left_over or leftovers:
        notes.append(f"an interrupted run had left {folder.name} with {len(leftovers)} files; removed")
    if key is not None:
        (folder / WORK).mkdir(exist_ok=True)
        write_atomic(key_file, token)
    old = old_folder(target)
    if old.exists() and not target.exists():
        os.rename(old, target)
        notes.append(f"put back {target.name}, which an interrupted --force had moved away")
    elif old.exists():
        shutil.rmtree(old)
        notes.append(f"removed the replaced copy that an interrupted --force had left ({old.name})")
    return notes


def old_folder(target: Path) -> Path:
    """Return the hidden path to which an old dataset is moved until the new one has its name."""
    return target.parent / f".{target.name}.replaced"


def damage_of(target: Path) -> str | None:
    """Describe the damage of a dataset folder; None = every file has the size and hash that dataset.json lists."""
    try:
        files = parse_json((target / INFO_FILE).read_text(encoding="utf-8"))["files"]
        for name, fields in files.items():
            if file_facts(target / name) != fields:
                return f"{name} has other bytes than dataset.json states"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"dataset.json or a file it names cannot be read ({error})"
    return None


def _stored(target: Path) -> Mapping[str, Any]:
    """Return dataset.json of a folder; {} if it cannot be read, or is no object."""
    try:
        info = parse_json((target / INFO_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def _facts(info: Mapping[str, Any]) -> list[Any]:
    """Return the fields that identify a dataset: its arguments and content, without the version of its writer."""
    return [info.get(name) for name in ("schema", "name", "args", "fingerprint")]


def refuse_other(target: Path, args: Mapping[str, Any], *, force: bool) -> None:
    """Raise a DataError if the target is a dataset made with other arguments, unless `force` is set.

    Called before any work is done.
    """
    if force or not (target / INFO_FILE).is_file():
        return
    difference = _difference(target, json.dumps({"args": dict(args)}))
    if difference.startswith(_OTHER_ARGUMENTS):
        raise _other_dataset(target, difference)


def _other_dataset(target: Path, difference: str) -> DataError:
    return DataError(
        f"{target} holds something else: {difference}; nothing was written",
        hint="give another --out, or --force to replace it",
    )


_OTHER_ARGUMENTS = "a dataset made with other arguments"


def _difference(target: Path, text: str) -> str:
    """Describe how the arguments or the content differ, for the error message."""
    stored, new = _stored(target), parse_json(text)
    old_args, new_args = stored.get("args"), new["args"]
    if not isinstance(old_args, dict):
        return "no readable dataset.json in it"
    changed = [
        f"{key} was {old_args.get(key)!r}, now {new_args.get(key)!r}"
        for key in sorted({*old_args, *new_args})
        if old_args.get(key) != new_args.get(key)
    ]
    if changed:
        return f"{_OTHER_ARGUMENTS} ({'; '.join(changed)})"
    if stored.get("fingerprint") != new.get("fingerprint"):
        return "a dataset made with the same arguments from other source data"
    return damage_of(target) or "a dataset of another name or form"


def _refuse_foreign(target: Path, *, replace: bool = False) -> None:
    """Raise a DataError if the target is neither a dataset nor an empty folder. Called before any work is done.

    Args:
        replace: whether the target is going to be replaced. Only a folder that this program has made is ever removed:
            it has a dataset.json and only files of a dataset. A link to such a folder, or a dataset folder with further
            files, is an error then; it may still be read, and it may be up to date.
    """
    if not target.exists() and not target.is_symlink():
        return
    linked = target.is_symlink()
    names, listed = {path.name for path in target.iterdir()} if target.is_dir() else {""}, _stored(target).get("files")
    known = listed if isinstance(listed, dict) else {}
    others = sorted(name for name in names if not (_is_own(name) or INDEX.sub("", name) in known))
    if (not names and not linked) or (INFO_FILE in names and not (replace and (linked or others))):
        return
    what = "is a link and" if linked else "is not a dataset folder and"
    if INFO_FILE in names and not linked:
        what = f"holds {others[0]}, which is not a file of a dataset, and"
    raise DataError(
        f"{target} {what} is not replaced, not even with --force; nothing was written",
        hint="give another --out, or remove it yourself",
    )


def _is_own(name: str) -> bool:
    """Return whether a file name is one that `vlmrl prep` writes into a dataset folder."""
    shard = name.startswith("media-") and name.endswith(".arrow")
    return shard or name in (INFO_FILE, DROPPED_FILE) or name.endswith(".parquet")
