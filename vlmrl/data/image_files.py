"""Image files of a user as a dataset: each image is a row without columns and without a truth.

The row's id is the path of the image, and its key is a hash of the path and of the file's content. A folder is read
with all folders in it, sorted by path. Hidden files and files without the ending of an image are not looked at. Links
within a folder are not followed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from vlmrl.data.dataset import Rows, decode_cached, require_split
from vlmrl.data.images import MAX_FILE_BYTES, image_hash, probe_image
from vlmrl.data.labelled_images import image_paths, open_collection
from vlmrl.errors import DataError
from vlmrl.types import Media, Row
from vlmrl.untrusted import encodable, file_problem

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

SPLIT = "images"
"""Name of the one split, and of the dataset."""


@dataclass(frozen=True)
class LeftOut:
    """Image that is not shown to the model. `image`: its path; `reason`: why it cannot be used."""

    image: str
    reason: str


@dataclass(frozen=True)
class ImageFile:
    """Image file that a model can be asked about.

    Args:
        name: its path as the user wrote it or, within a folder, the folder's path and the file's below it.
        place: its path below the folder that the user named; only the file's name for an image that was named itself.
        path: the file.
        media: hash of its content, and its size.
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
        self.left_out: list[LeftOut] = []
        self.files: list[ImageFile] = []
        images = self._find(paths, out)
        for done, (name, (place, path)) in enumerate(images.items(), start=1):
            try:
                self.files.append(ImageFile(name, place, path, probe_image(_read(path))[0]))
            except DataError as error:
                self.left_out.append(LeftOut(name, error.message))
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
                raise DataError(f"there is no image or folder {text}", where="--images", hint=_glob_hint(text))
            if not named.is_dir():
                images.setdefault(encodable(os.path.normpath(text)), (encodable(named.name), named))
                continue
            dropped: list[dict[str, Any]] = []
            inside, _ = image_paths(open_collection(named), dropped)
            own = _below(out, named)
            for place in inside:
                if own is None or not PurePosixPath(place).is_relative_to(own):
                    images.setdefault(_name(text, place), (encodable(place), named / place))
            self.left_out += [LeftOut(_name(text, drop["origin"]), drop["reason"]) for drop in dropped]
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


def _glob_hint(text: str) -> str | None:
    return "name the folder: its images are found" if set(text) & set("*?[") else None
