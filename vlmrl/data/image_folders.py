"""Images of a user: files as a dataset without truths, and collections in which an image's folders are its names.

A row's id is the path of the image, and its key is a hash of the path and of the file's content. Folders are read with
all folders in them, sorted by path. Hidden files and files without the ending of an image are not looked at, links are
not followed. A zip archive is never unpacked to disk: its entries are read one by one, with limits, so a path in it
cannot lead outside.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import stat
import struct
import unicodedata
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol

from vlmrl.data.dataset import require_split
from vlmrl.data.image_scan import scan_files
from vlmrl.data.images import MAX_FILE_BYTES, decode_cached, image_hash, probe_image
from vlmrl.data.parallel_parts import Progress
from vlmrl.data.splits import LabelledImage
from vlmrl.data.table_values import IMAGE_SUFFIXES
from vlmrl.errors import DataError
from vlmrl.types import LeftOut, Media, Row, Rows
from vlmrl.untrusted import encodable, file_problem

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage


MAX_TOTAL_BYTES = 1 << 40
MAX_ENTRIES = 5_000_000
_BAD_NAME = set(";<>")
_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(OSError, RuntimeError, EOFError, ValueError, OverflowError),
)
"""Errors of zipfile for an archive or a file in it that is damaged or uses what Python cannot read."""


@dataclass
class Labelled:
    """Labelled image collection that has been read.

    Args:
        name: last part of the source's path.
        images: sound images; the labels of each are the names of the folders above it.
        ignored: file ending -> number of files that are no images.
        fingerprint: hash of labels, file names and contents.
    """

    name: str
    images: list[LabelledImage]
    dropped: list[LeftOut]
    ignored: dict[str, int]
    fingerprint: str
    collection: Collection

    @property
    def about(self) -> dict[str, Any]:
        """Entry of dataset.json about the source."""
        ignored = {"ignored_files": self.ignored, "fingerprint": self.fingerprint}
        return {"name": self.name, "images": len(self.images), **ignored}


class Collection(Protocol):
    """Files of a folder or archive, by relative path."""

    def paths(self) -> Iterator[tuple[str, str | None]]:
        """Yield (path, reason why it may not be read or None), sorted by path."""
        ...

    def read(self, path: str) -> bytes: ...


def read_labelled(
    source: Path,
    levels: Sequence[str],
    work: Path,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Labelled:
    """Read every image below `source`; the last len(levels) folders above a file are its names, coarse to fine.

    Hidden files, `__MACOSX` and files without the ending of an image are ignored and counted. Links, unsafe paths,
    broken images and files with too few folders above them are dropped, each with its reason.

    Args:
        work: folder for the parts of the scan.
    Raises: DataError when the source is neither a folder nor a zip archive, or names of siblings differ only in case or
        punctuation, which the answer format does not distinguish.
    """
    collection = open_collection(source)
    labels: dict[str, tuple[str, ...]] = {}
    dropped: list[LeftOut] = []
    paths, ignored = image_paths(collection, dropped)
    for path in paths:
        try:
            labels[path] = _labels(PurePosixPath(path), levels)
        except DataError as error:
            dropped.append(LeftOut(encodable(path), error.message))
    images: list[LabelledImage] = []
    digest = hashlib.sha256()
    for path, result in scan_files(collection.read, list(labels), work, workers=workers, progress=progress):
        if isinstance(result, str):
            dropped.append(LeftOut(encodable(path), result))
            continue
        images.append(LabelledImage(result.media, labels[path], encodable(path), result, path=path))
        name = encodable(PurePosixPath(path).name)
        digest.update(f"{'/'.join(labels[path])}/{name}\0{result.media.sha256}\n".encode())
    refuse_twins(images, levels)
    dropped.sort(key=lambda drop: drop.origin)
    return Labelled(source.name, images, dropped, ignored, digest.hexdigest(), collection)


def collection_state(source: Path) -> Any:
    """Return a JSON value with the state of the source's files: it differs if any was added, removed or changed."""
    if source.is_file():
        return [source.stat().st_size, source.stat().st_mtime_ns]
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(source):
        folders.sort()
        for name in sorted(names):
            status = os.lstat(os.path.join(folder, name))
            digest.update(
                f"{folder}/{name}\0{status.st_size} {status.st_mtime_ns}\n".encode("utf-8", "backslashreplace")
            )
    return digest.hexdigest()


def image_paths(collection: Collection, dropped: list[LeftOut]) -> tuple[list[str], dict[str, int]]:
    """Return the sorted paths of a collection's image files, and the number of its other files by ending.

    Args:
        dropped: files that may not be read are appended to it, with the reason.
    """
    image_files: list[str] = []
    ignored: Counter[str] = Counter()
    for path, problem in collection.paths():
        place = PurePosixPath(path)
        if problem is not None:
            dropped.append(LeftOut(encodable(path), problem))
        elif any(part.startswith(".") or part == "__MACOSX" for part in place.parts):
            ignored["hidden"] += 1
        elif place.suffix.lower() not in IMAGE_SUFFIXES:
            ignored[place.suffix.lower() or "(no ending)"] += 1
        else:
            image_files.append(path)
    return image_files, dict(sorted(ignored.items()))


def open_collection(source: Path) -> Collection:
    """Open a folder or zip archive as a collection. Raises: DataError when it is neither."""
    if source.is_dir():
        return _Folder(source)
    if not source.exists():
        raise DataError(f"no folder or archive at {source}", hint="check --source")
    if problem := file_problem(source):
        raise DataError(f"{source} {problem}", hint="give a folder or a zip archive")
    return _Archive(source)


def _labels(place: PurePosixPath, levels: Sequence[str]) -> tuple[str, ...]:
    folders = place.parts[:-1]
    if len(folders) < len(levels):
        raise DataError(f"{len(folders)} folders above the file, but {len(levels)} levels ({', '.join(levels)})")
    return tuple(check_name(name.strip()) for name in folders[-len(levels) :])


def check_name(name: str) -> str:
    """Return the name if an answer can contain it. Raises: DataError when it cannot."""
    if not name or _BAD_NAME & set(name) or any(unicodedata.category(one).startswith("C") for one in name):
        raise DataError(f"the name {name!r} cannot be written in an answer (; < > or invisible characters)")
    return name


def refuse_twins(images: Sequence[LabelledImage], levels: Sequence[str]) -> None:
    """Raise a DataError if two names with the same parent are equal for the reward (`normalise_name`).

    A pair of these two classes would have the truth "different", although their names are equal.
    """
    from vlmrl.rewards.text_parsing import normalise_name

    first_names: dict[tuple[tuple[str, ...], str], str] = {}
    for labels in sorted({image.labels for image in images}):
        for depth, level in enumerate(levels):
            key = (labels[:depth], normalise_name(labels[depth], level))
            other = first_names.setdefault(key, labels[depth])
            if other != labels[depth]:
                raise DataError(
                    f"the {level} names {other!r} and {labels[depth]!r} differ only in case or punctuation",
                    where="/".join(labels[: depth + 1]),
                    hint="rename one of the folders, or join them",
                )


class _Folder:
    def __init__(self, root: Path) -> None:
        self._root = root

    def paths(self) -> Iterator[tuple[str, str | None]]:
        entries: list[tuple[str, str | None]] = []
        for folder, folders, names in os.walk(self._root, followlinks=False):
            here = Path(folder)
            links = [name for name in folders if (here / name).is_symlink()]
            entries += [(self._relative(here / name), "a link to a folder; links are not followed") for name in links]
            for name in names:
                kind = stat.S_IFMT((here / name).lstat().st_mode)
                problems = {stat.S_IFREG: None, stat.S_IFLNK: "a link; links are not followed"}
                entries.append((self._relative(here / name), problems.get(kind, "not a regular file")))
        yield from sorted(entries)

    def read(self, path: str) -> bytes:
        file = self._root / path
        try:
            if file.stat().st_size > MAX_FILE_BYTES:
                raise DataError(f"the file has {file.stat().st_size:,} bytes; the limit is {MAX_FILE_BYTES:,}")
            return file.read_bytes()
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror or error}") from error

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()


class _Archive:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except _DAMAGE as error:
            what = f"{path} is neither a folder nor a zip archive that can be read: {error}"
            raise DataError(what, hint="unpack it and give the folder") from error
        self._entries: dict[str, zipfile.ZipInfo] = {}
        self._repeats: list[str] = []
        for entry in self._zip.infolist():
            if entry.filename in self._entries:
                self._repeats.append(entry.filename)
            elif not entry.is_dir():
                self._entries[entry.filename] = entry
        total = sum(entry.file_size for entry in self._entries.values())
        if len(self._entries) > MAX_ENTRIES or total > MAX_TOTAL_BYTES:
            raise DataError(
                f"the archive has {len(self._entries):,} files and {total:,} bytes; "
                f"at most {MAX_ENTRIES:,} files and {MAX_TOTAL_BYTES:,} bytes are read",
                where=str(path),
            )

    def __reduce__(self):
        return (type(self), (self._path,))

    def paths(self) -> Iterator[tuple[str, str | None]]:
        entries = [(name, _entry_problem(entry)) for name, entry in self._entries.items()]
        entries += [
            (name, "its path is in the archive twice: the first of these files is used") for name in self._repeats
        ]
        yield from sorted(entries, key=lambda pair: (pair[0], pair[1] or ""))

    def read(self, path: str) -> bytes:
        try:
            with self._zip.open(self._entries[path]) as file:
                data = file.read(MAX_FILE_BYTES + 1)  # the size in the archive's entry may be wrong
        except _DAMAGE as error:
            raise DataError(f"cannot be read from the archive: {error}") from error
        if len(data) > MAX_FILE_BYTES:
            raise DataError(f"the file has more than {MAX_FILE_BYTES:,} bytes")
        return data


def _entry_problem(entry: zipfile.ZipInfo) -> str | None:
    parts = entry.filename.split("/")
    if stat.S_ISLNK(entry.external_attr >> 16):
        return "a link; links are not followed"
    if entry.filename.startswith("/") or ".." in parts or "\\" in entry.filename or ":" in parts[0]:
        return "its path leaves the archive"
    if entry.flag_bits & 0x1:
        return "encrypted"
    if entry.file_size > MAX_FILE_BYTES:
        return f"the file has {entry.file_size:,} bytes; the limit is {MAX_FILE_BYTES:,}"
    return None


SPLIT = "images"
"""Name of the one split, and of the dataset."""


@dataclass(frozen=True)
class NotShown:
    """Image that is not shown to the model. `image`: its path; `reason`: why it cannot be used."""

    image: str
    reason: str


@dataclass(frozen=True)
class ImageFile:
    """Image file that a model can be asked about.

    Args:
        name: its path as the user wrote it or, within a folder, the folder's path and the file's below it.
        place: its path below the folder that the user named; only the file's name for an image that was named itself.
    """

    name: str
    place: str
    path: Path
    media: Media

    @property
    def key(self) -> str:
        """Hash of the path and of the content."""
        return hashlib.sha256(f"{self.name}\0{self.media.sha256}".encode()).hexdigest()[:32]


class ImageFiles:
    """Dataset of image files. All files are read once, to hash them and to read their headers.

    Args:
        paths: image files and folders of them, as the user wrote them. An image that is named twice is one row.
        out: what the command will write; in a folder, images below it are not read. None = nothing.
        progress: called with (files read, all files).
    Raises: DataError when a path does not exist, or when there is no image that can be read.

    Attributes:
        files: the images, in the order of the rows.
        left_out: images that cannot be used.
    """

    name, path, task = SPLIT, SPLIT, "table"
    notes: Sequence[str] = ()

    def __init__(
        self,
        paths: Sequence[str],
        out: Path | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.left_out: list[NotShown] = []
        self.files: list[ImageFile] = []
        images = self._find(paths, out)
        for done, (name, (place, path)) in enumerate(images.items(), start=1):
            try:
                self.files.append(ImageFile(name, place, path, probe_image(_read(path))[0]))
            except DataError as error:
                self.left_out.append(NotShown(name, error.message))
            progress(done, len(images))
        self._paths: dict[str, list[Path]] = {}
        for file in self.files:
            self._paths.setdefault(file.media.sha256, []).append(file.path)
        if not self.files:
            raise self._no_image(paths)
        self.splits = {SPLIT: len(self.files)}
        self.info: Mapping[str, Any] = {"name": SPLIT, "task": self.task, "splits": {SPLIT: {"rows": len(self.files)}}}

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256("".join(file.key for file in self.files).encode()).hexdigest()

    def rows(self, split: str) -> Sequence[Row]:
        require_split(self, split)

        def make(index: int) -> Row:
            file = self.files[index]
            return Row(file.name, self.name, self.task, {}, (file.media,), {}, file.name)

        return Rows(len(self.files), make)

    def image_bytes(self, media: Media) -> bytes:
        """Return the bytes of an image. Raises: DataError when no file has the content any more."""
        for path in self._paths[media.sha256]:
            data = _read(path)
            if image_hash(data) == media.sha256:
                return data
        raise DataError("the image file changed since it was first read", where=self.place_of(media))

    def image(self, media: Media) -> PILImage:
        return decode_cached(self, media)

    def place_of(self, media: Media) -> str:
        return encodable(str(self._paths[media.sha256][0]))

    def _find(self, paths: Sequence[str], out: Path | None) -> dict[str, tuple[str, Path]]:
        """Return name -> (place, path) of all image files, in the order of the rows. Others go to `left_out`."""
        images: dict[str, tuple[str, Path]] = {}
        for text in paths:
            named = Path(text)
            if not os.path.lexists(named):
                hint = "name the folder: its images are found" if set(text) & set("*?[") else None
                raise DataError(f"there is no image or folder {text}", where="--images", hint=hint)
            if not named.is_dir():
                images.setdefault(encodable(os.path.normpath(text)), (encodable(named.name), named))
                continue
            dropped: list[LeftOut] = []
            inside, _ = image_paths(open_collection(named), dropped)
            own = _below(out, named)
            for place in inside:
                if own is None or not PurePosixPath(place).is_relative_to(own):
                    images.setdefault(_name(text, place), (encodable(place), named / place))
            self.left_out += [NotShown(_name(text, drop.origin), drop.reason) for drop in dropped]
        return images

    def _no_image(self, paths: Sequence[str]) -> DataError:
        where = ", ".join(paths)
        if not self.left_out:
            endings = "a folder is searched for files that end like images, such as .png, with all folders in it"
            return DataError("there is no image", where=where, hint=endings)
        first, *more = self.left_out
        others = f"; {len(more):,} more cannot be used either" if more else ""
        return DataError(f"there is no image that can be read: {first.image}: {first.reason}{others}", where=where)


def _read(path: Path) -> bytes:
    """Return the content of an image file. Raises: DataError when it is no regular file, too large or unreadable."""
    try:
        if problem := file_problem(path):
            raise DataError(problem)
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise DataError(f"image file of {size:,} bytes; the limit is {MAX_FILE_BYTES:,}")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}") from error


def _name(folder: str, place: str) -> str:
    return encodable(os.path.normpath(os.path.join(folder, place)))


def _below(out: Path | None, folder: Path) -> str | None:
    """Return the path of `out` below a folder; None if it is elsewhere."""
    if out is None:
        return None
    whole, base = out.resolve(), folder.resolve()
    return whole.relative_to(base).as_posix() if whole != base and whole.is_relative_to(base) else None
