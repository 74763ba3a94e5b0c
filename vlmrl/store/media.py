"""Images of a run by content hash: from its media/*.arrow and its evaluations, then from the datasets in its manifest.

A shard is an Arrow IPC file with the columns `sha256` (hex text) and `bytes` (an image file), memory-mapped. Datasets
made by `vlmrl prep` hold their images in the same form. Other sources (a user's own table) are given as a callable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.store import layout
from vlmrl.store.files import write_atomic
from vlmrl.store.table_reader import arrow_fields, check_values, damage_told
from vlmrl.types import Media
from vlmrl.untrusted import parse_json

Resolver = Callable[[Media], "bytes | None"]
"""Function that returns the image file of a reference, or None if it does not have it."""

BATCH_BYTES = 8 * 1024 * 1024
"""Size in bytes at which a batch of images is written to its shard."""


class ShardFolder:
    """Image files by hash, from the shards of a folder whose names match `pattern`.

    Opening reads the hashes only. The bytes are returned as stored, unchecked. A missing folder is empty.

    Raises: StoreError when a shard is damaged.
    """

    def __init__(self, folder: Path, pattern: str = "*.arrow") -> None:
        self._batches: list[Any] = []
        self._index: dict[str, tuple[int, int]] = {}
        for path in sorted(folder.glob(pattern)) if folder.is_dir() else ():
            self._open(path)

    def __contains__(self, sha256: str) -> bool:
        return sha256 in self._index

    def __len__(self) -> int:
        return len(self._index)

    def hashes(self) -> list[str]:
        """Return every image's hash, in shard order."""
        return list(self._index)

    def get(self, sha256: str) -> bytes | None:
        """Return the image file, or None if it is not in these shards."""
        if sha256 not in self._index:
            return None
        batch, row = self._index[sha256]
        return self._batches[batch].column("bytes")[row].as_py()

    def _open(self, path: Path) -> None:
        import pyarrow as pa

        with damage_told(path, "image shard cannot be read"):
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                check_values(batch.select(["sha256", "bytes"]), _shard_schema())
                for row, sha256 in enumerate(batch.column("sha256").to_pylist()):
                    self._index.setdefault(sha256, (len(self._batches), row))
                self._batches.append(batch)


class RunImages:
    """Image files of one run. `notes` has a sentence for each dataset that is missing or has changed since the run.

    Args:
        resolvers: called in turn for images that neither the run nor a prepared dataset has.
    """

    def __init__(
        self,
        run_dir: Path,
        datasets: Iterable[Mapping[str, Any]] = (),
        resolvers: Sequence[Resolver] = (),
        cwd: str = "",
    ) -> None:
        self.run_dir, self._datasets, self._cwd = run_dir, tuple(datasets), cwd
        self._resolvers = tuple(resolvers)
        self._folders: list[ShardFolder] | None = None
        self.notes: list[str] = []

    def add_resolvers(self, resolvers: Iterable[Resolver]) -> None:
        """Add further resolvers; they are called last."""
        self._resolvers = (*self._resolvers, *resolvers)

    def find(self, media: Media) -> bytes | None:
        """Return the image file; None if it is not found, or if the bytes that are found have another hash."""
        for folder in self._open():
            if (content := folder.get(media.sha256)) is not None:
                return content if _matches(content, media) else None
        for resolver in self._resolvers:
            if (content := resolver(media)) is not None and _matches(content, media):
                return content
        return None

    def read(self, media: Media) -> bytes:
        """Return the image file. Raises: StoreError when it cannot be found."""
        content = self.find(media)
        if content is None:
            self._open()
            why = "; ".join(self.notes) or "neither the run's media/ nor its datasets have it"
            raise StoreError(f"image {media.sha256[:16]} cannot be found: {why}", where=str(self.run_dir))
        return content

    def _open(self) -> list[ShardFolder]:
        if self._folders is None:
            self._folders = [ShardFolder(self.run_dir / layout.MEDIA)]
            self._folders += [ShardFolder(folder, layout.EVAL_MEDIA) for folder in layout.eval_dirs(self.run_dir)]
            for dataset in self._datasets:
                folder = self._dataset_folder(dataset)
                if folder is not None:
                    self._folders.append(ShardFolder(folder))
        return self._folders

    def _dataset_folder(self, dataset: Mapping[str, Any]) -> Path | None:
        """Return the dataset's folder if it is a prepared dataset; note if its fingerprint differs from the run's."""
        path = Path(str(dataset.get("path", "")))
        places = [path] if path.is_absolute() else [Path(self._cwd or ".") / path, path]
        folder = next((p for p in places if (p / "dataset.json").is_file()), None)
        if folder is None:
            if not any(p.exists() for p in places) and not str(path).startswith("hub:"):
                self.notes.append(f"dataset {path} cannot be found")
            return None
        try:
            info = parse_json((folder / "dataset.json").read_bytes())
            fingerprint = info.get("fingerprint")
        except (OSError, ValueError, AttributeError):
            self.notes.append(f"dataset {path} is damaged")
            return None
        if dataset.get("fingerprint") not in (None, fingerprint):
            # Its images can still be used, because they are looked up by their hash.
            self.notes.append(f"dataset {path} has changed since the run")
        return folder


class ShardStream:
    """Writer of image files to a shard, in batches. The bytes of a shard depend only on its images and their order.

    Args:
        sink: binary file.

    Attributes:
        written_bytes: size of the images in batches that were written.
    """

    def __init__(self, sink: Any) -> None:
        import pyarrow as pa

        self._writer = pa.ipc.new_file(sink, _shard_schema())
        self._images: list[tuple[str, bytes]] = []
        self._has_batch, self._waiting_bytes, self.written_bytes = False, 0, 0

    def add(self, sha256: str, content: bytes) -> None:
        self._images.append((sha256, content))
        self._waiting_bytes += len(content)
        if self._waiting_bytes >= BATCH_BYTES:
            self._flush()

    def close(self) -> None:
        """Write the rest. A shard without images has an empty batch."""
        if self._images or not self._has_batch:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        import pyarrow as pa

        columns = [[image[part] for image in self._images] for part in (0, 1)]
        arrays = [pa.array(values, field.type) for values, field in zip(columns, _shard_schema(), strict=True)]
        self._writer.write_batch(pa.record_batch(arrays, schema=_shard_schema()))
        self.written_bytes += self._waiting_bytes
        self._images, self._waiting_bytes, self._has_batch = [], 0, True


def write_shard(path: Path, images: Iterable[tuple[str, bytes]]) -> None:
    """Write (sha256, image file) pairs as one shard, each hash once, in the given order."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    shard = ShardStream(sink)
    for sha256, content in dict(images).items():
        shard.add(sha256, content)
    shard.close()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, sink.getvalue().to_pybytes())


def _shard_schema() -> Any:
    import pyarrow as pa

    return pa.schema(arrow_fields("sha256:string bytes:binary"))


def _matches(content: bytes, media: Media) -> bool:
    return hashlib.sha256(content).hexdigest() == media.sha256
