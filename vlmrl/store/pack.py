"""Archive of a run in one file: its files, and all images of its rollouts. The same run gives the same bytes."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from vlmrl.errors import StoreError
from vlmrl.redaction.redact import redact_beginning, redact_text
from vlmrl.store import layout
from vlmrl.store.files import TEMP_PREFIX, TRASH_PREFIX, require_ordinary, sync_folder, temp_path
from vlmrl.store.media import RunImages, ShardFolder, write_shard
from vlmrl.store.rollouts import rollout_media

Checkpoints = Literal["none", "last", "all"]
SHARD = "pack-00000.arrow"
LOG_PART = 1 << 20
"""Size of the parts in which a log is searched for secrets, in characters."""


@dataclass(frozen=True)
class Packed:
    """Content of an archive.

    Args:
        missing: hashes of images that were not found anywhere.
        left_out: names of checkpoints and merged models that are not in the archive.
    """

    path: Path
    num_files: int
    num_images: int
    bytes: int
    missing: tuple[str, ...]
    left_out: tuple[str, ...]


def pack_run(run_dir: Path, target: Path, images: RunImages, *, checkpoints: Checkpoints = "none") -> Packed:
    """Write the run folder as a .tar.gz. `tar xf FILE` makes an ordinary run folder from it on any machine.

    The run is not changed. Times, owners and order in the archive are fixed, so packing twice gives the same bytes.

    Raises: StoreError if the target is inside the run, the run has a link to a file outside it, or the write fails.
    """
    if run_dir.resolve() in target.resolve().parents:
        raise StoreError(
            "the archive cannot be inside the run it packs", where=str(target), hint="choose another place: -o"
        )
    require_ordinary(run_dir)
    complete = layout.complete_checkpoints(run_dir)
    kept = {"none": [], "last": complete[-1:], "all": complete}[checkpoints]
    paths = list(_files(run_dir, kept))
    merged = layout.merged_dirs(run_dir)
    left_out = tuple(path.name for path in [*complete, *merged] if path not in kept)
    named = rollout_media(sorted((run_dir / layout.ROLLOUTS).glob("*.parquet")))
    own = ShardFolder(run_dir / layout.MEDIA)
    needed = [named[sha256] for sha256 in sorted(named) if sha256 not in own]
    contents = {media.sha256: content for media in needed if (content := images.find(media)) is not None}
    missing = tuple(media.sha256 for media in needed if media.sha256 not in contents)
    about = {
        "schema": 1,
        "images": len(own) + len(contents),
        "missing_images": list(missing),
        "left_out": list(left_out),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    temp = temp_path(target)
    try:
        with tempfile.TemporaryDirectory() as scratch, open(temp, "wb") as raw:
            files = {path.relative_to(run_dir).as_posix(): path for path in paths}
            files.pop(layout.PACKED, None)
            if contents:
                files[f"{layout.MEDIA}/{SHARD}"] = Path(scratch, SHARD)
                write_shard(Path(scratch, SHARD), contents.items())
            for name in (name for name in files if name.startswith(f"{layout.LOGS}/")):
                files[name] = _redacted(files[name], Path(scratch))
            with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=6) as packed:
                _write_tar(packed, run_dir.resolve().name, files, json.dumps(about, indent=1).encode())
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(temp, target)
        sync_folder(target.parent)
    except OSError as error:
        temp.unlink(missing_ok=True)
        raise StoreError(f"cannot write the archive: {error.strerror or error}", where=str(target)) from error
    size = target.stat().st_size
    return Packed(target, len(files) + 1, len(own) + len(contents), size, missing, left_out)


def _redacted(log: Path, scratch: Path) -> Path:
    """Write a copy of a log with secrets hidden, and return its path. Logs of earlier versions may contain secrets."""
    copy = scratch / f"{len(list(scratch.iterdir()))}.log"
    opened = partial(open, encoding="utf-8", errors="surrogateescape", newline="")
    rest = ""
    with opened(log) as source, opened(copy, "w") as out:
        while part := source.read(LOG_PART):
            beginning, rest = redact_beginning(rest + part)
            out.write(beginning)
        out.write(redact_text(rest))
    return copy


def _write_tar(stream: io.IOBase, top: str, files: Mapping[str, Path], about: bytes) -> None:
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:  # type: ignore[arg-type]
        for name, path in sorted(files.items()):
            with open(path, "rb") as file:
                tar.addfile(_entry(f"{top}/{name}", os.fstat(file.fileno()).st_size), file)
        tar.addfile(_entry(f"{top}/{layout.PACKED}", len(about)), io.BytesIO(about))


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = size, 0o644, 0
    return entry


def _files(run_dir: Path, checkpoints: list[Path]) -> Iterator[Path]:
    """Yield the files of the run that belong in an archive.

    The lock, half-written files, merged models (`vlmrl merge` can make them again), and all checkpoints except
    `checkpoints` are left out.
    """
    merged = layout.merged_dirs(run_dir)
    for base, folders, files in os.walk(run_dir):
        here = Path(base)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith((TEMP_PREFIX, TRASH_PREFIX))
            and here / name not in merged
            and (here.name != layout.CHECKPOINTS or here.parent != run_dir or here / name in checkpoints)
        )
        of_logger = here.relative_to(run_dir).parts[:1] in [(name,) for name in layout.LOGGER_FOLDERS]
        for name in files:
            path = here / name
            if of_logger and path.is_symlink():
                continue  # it may lead anywhere: these folders are not checked
            if name != layout.LOCK and not name.startswith((TEMP_PREFIX, TRASH_PREFIX)) and path.is_file():
                yield path
