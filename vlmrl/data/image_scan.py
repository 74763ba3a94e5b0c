"""Scan of all images of a collection, on all cores: validity, hash of the content, images that look alike, shards.

Results and shards are made in parts (parallel_parts.py). After a kill, the next run makes only the missing parts, and
no byte depends on the process that writes it.

Near duplicates are found without a comparison of all pairs. The hash is a difference hash: each bit states whether a
cell is brighter than its right neighbour, at 64 bits to find candidates and 256 bits to confirm them. It is robust to a
change of file format, size and quality, but not to crops and mirroring.

Source: the dHash of Neal Krawetz ("Kind of Like That", 2013); the search is multi-index hashing (Norouzi et al.,
arXiv:1307.2982): hashes within 3 bits agree in at least one of 4 parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vlmrl.data import images as limits
from vlmrl.data.images import ShardFile, decode_image, image_hash, shard_name, store_decoded
from vlmrl.data.measurements import fit_size
from vlmrl.data.parallel_parts import Make, Progress, make_parts, write_lines
from vlmrl.data.table_pieces import OpenTable, read_piece
from vlmrl.data.table_values import image_bytes, read_image, show, split_images
from vlmrl.errors import DataError
from vlmrl.store import media as store_media
from vlmrl.types import Media

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage


COARSE_BITS, FINE_BITS = 3, 20
"""Maximum number of bits in which two near duplicates differ: of the 64 coarse bits, and of the 256 fine bits."""
PARTS = 4
HASH_BYTES = 40
MAX_NEIGHBOURS = 4096
"""Maximum number of hashes with which a hash is compared, of all hashes that agree with it in one part."""
CONTRAST = 24
"""Minimum difference between the lightest and the darkest cell, of 255. The hash of a flatter image is useless."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """Result of a search for near duplicates.

    Args:
        near: for each image, the groups of the other images that look like it, as a bit mask; 0 = no image does.
        examples: positions (i, j) of images that look alike and are in different groups.
        skipped: number of images that were not searched, as they are too flat to distinguish.
    """

    near: list[int]
    examples: list[tuple[int, int]]
    skipped: int


def look_hash(image: PILImage) -> str:
    """Return the hash of an RGB image, 80 hex digits: 8 bytes coarse, 32 bytes fine; all zeros for a flat image."""
    import numpy as np
    from PIL import Image

    grey = image.convert("L")
    bits = []
    for size in (8, 16):
        # [size, size + 1]: one column more than bits, as each cell is compared with its right neighbour
        cells = np.asarray(grey.resize((size + 1, size), Image.Resampling.BOX)).astype(np.int16)
        if size == 16 and int(cells.max()) - int(cells.min()) < CONTRAST:
            return "0" * (2 * HASH_BYTES)
        bits.append((cells[:, :-1] > cells[:, 1:]).ravel())
    return np.packbits(np.concatenate(bits)).tobytes().hex()  # [64 + 256] bits -> 40 bytes


def find_near_copies(hashes: Sequence[str], groups: Sequence[int], shown: int = 20) -> Likeness:
    """Find images whose hashes differ in at most `COARSE_BITS` coarse and `FINE_BITS` fine bits.

    Memory does not grow with the number of pairs that look alike: among the frames of a film, nearly all pairs do.

    Args:
        hashes: results of `look_hash`.
        groups: for each image, the groups that it is in, as a bit mask, 0 to 2^62. A group is a split, for example.
        shown: maximum number of examples.
    """
    import numpy as np

    if not hashes:
        return Likeness([], [], 0)
    table = np.frombuffer(bytes.fromhex("".join(hashes)), np.uint8).reshape(len(hashes), HASH_BYTES)
    rows = np.flatnonzero(table.any(axis=1))
    unique, first, inverse = np.unique(table[rows], axis=0, return_index=True, return_inverse=True)
    # Below: N images, R that are not flat, U distinct hashes. inverse: [R], positions in `unique`. first: [U], image
    # number of the first image with the hash. masks: [N].
    inverse, first, masks = inverse.reshape(-1), rows[first], np.asarray(groups, dtype=np.int64)
    equal = ((i, j) for i, j in zip(first[inverse].tolist(), rows.tolist(), strict=True) if groups[i] != groups[j])
    examples = set(islice(equal, shown))
    own = np.zeros(len(unique), dtype=np.int64)  # groups of the images that have the hash
    np.bitwise_or.at(own, inverse, masks[rows])  # [R] -> [U]
    near = np.zeros(len(unique), dtype=np.int64)  # groups of the images whose hash is close, but not equal
    for a, b in _close_rows(unique, lambda a, b: (own[b] & ~near[a]) | (own[a] & ~near[b])):
        np.bitwise_or.at(near, a, own[b])
        np.bitwise_or.at(near, b, own[a])
        if len(examples) < shown:
            apart = np.flatnonzero(masks[first[a]] != masks[first[b]])[:shown]
            pairs = zip(first[a[apart]].tolist(), first[b[apart]].tolist(), strict=True)
            examples |= {(min(pair), max(pair)) for pair in pairs}
    near_images = np.zeros(len(hashes), dtype=np.int64)
    near_images[rows] = near[inverse]  # [U] -> [R], written into [N]
    # Images with an equal hash look alike, too: add each group that has another image with the same hash.
    for bit in range(int(own.max(initial=0)).bit_length()):
        member = masks[rows] >> bit & 1
        equals = np.bincount(inverse, weights=member, minlength=len(unique))[inverse] - member
        near_images[rows] |= (equals > 0).astype(np.int64) << bit
    return Likeness(near_images.tolist(), sorted(examples)[:shown], len(hashes) - len(rows))


def _close_rows(table: Any, gain: Callable[[Any, Any], Any]) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of distinct hashes within both limits, as two arrays of row numbers. A pair may be repeated.

    Rows that agree in a part are neighbours when they are sorted by it. All rows are compared with their next
    neighbour at once, then with the neighbour after that, until no two rows that agree are that far apart.

    Args:
        table: [U, 40] bytes, one distinct hash per row.
        gain: (row numbers, row numbers) -> for each pair, a number that is not 0 if the pair adds a group to a result;
            other pairs are not yielded.
    """
    import numpy as np

    words = np.ascontiguousarray(table).view(np.uint64)  # [U, 40] bytes -> [U, 5]: one coarse word, four fine ones
    parts = np.ascontiguousarray(table[:, :8]).view(f"u{8 // PARTS}")  # [U, 8] bytes -> [U, PARTS]
    for part in range(PARTS):
        order = np.argsort(parts[:, part], kind="stable")
        keys = parts[order, part]
        starts = np.arange(len(keys))
        for distance in range(1, MAX_NEIGHBOURS + 1):
            starts = starts[: np.searchsorted(starts, len(keys) - distance)]
            # The keys are sorted: a row that differs from this neighbour differs from all later ones.
            starts = starts[keys[starts] == keys[starts + distance]]
            if not len(starts):
                break
            a, b = order[starts], order[starts + distance]
            useful = np.flatnonzero(gain(a, b))
            a, b = a[useful], b[useful]
            close = np.bitwise_count(words[a, 0] ^ words[b, 0]) <= COARSE_BITS
            a, b = a[close], b[close]
            fine = np.bitwise_count(words[a, 1:] ^ words[b, 1:]).sum(axis=1, dtype=np.uint16)
            yield a[fine <= FINE_BITS], b[fine <= FINE_BITS]


@dataclass(frozen=True, slots=True)
class Stored:
    """Image to be stored.

    Args:
        sha256, bytes: hash and size of the file as it is stored.
        place: place of its source file, as the `ShardReader` expects it.
        max_pixels: a larger image is scaled down to this number of pixels; None = the size is not changed.
    """

    sha256: str
    bytes: int
    place: Any
    max_pixels: int | None = None


ShardReader = Callable[[Sequence[Any]], Iterator[bytes]]
"""Places -> their image files, in order. Picklable: each process has a copy. Raises: DataError when a file is gone."""
ReadFile = Callable[[str], bytes]
"""Relative path -> the file. Picklable: a copy in another process opens the source again. Raises: DataError."""


@dataclass(frozen=True, slots=True)
class Examined:
    """Facts of a sound image.

    Args:
        media, bytes: reference and size of the file as it is stored.
        look: perceptual hash (data/image_scan.py).
        remarks: unusual properties of the source file; see `remarks_on`.
    """

    media: Media
    bytes: int
    look: str
    remarks: tuple[str, ...] = ()


def examine(data: bytes, max_pixels: int | None = None) -> Examined:
    """Decode an image file to prove that it is valid, and return its facts. Raises: DataError if it is not valid."""
    stored, media, image = stored_form(data, max_pixels)
    return Examined(media, len(stored), look_hash(image), tuple(limits.remarks_on(data)))


def stored_form(data: bytes, max_pixels: int | None = None) -> tuple[bytes, Media, Any]:
    """Return the file that is stored for a source file, its reference and its pixels.

    A file within `max_pixels` is stored as `store_decoded` says. A larger one is scaled down (Lanczos) and stored as
    JPEG of quality 95 if it was a JPEG, else as PNG.
    """
    stored, media, image = store_decoded(data)
    size = fit_size(media.width, media.height, max_pixels) if max_pixels else (media.width, media.height)
    if size == (media.width, media.height):
        return stored, media, image
    return _smaller(stored, image, size)


def _smaller(data: bytes, image: Any, size: tuple[int, int]) -> tuple[bytes, Media, Any]:
    import io

    from PIL import Image

    small = image.resize(size, Image.Resampling.LANCZOS)
    if data.startswith(b"\xff\xd8"):  # a JPEG
        buffer = io.BytesIO()
        small.save(buffer, format="JPEG", quality=95, subsampling=0)
        data = buffer.getvalue()
    else:
        data = limits.encode_png(small)
    return data, Media(image_hash(data), *size), decode_image(data)


def plan_shards(images: Iterable[Stored]) -> list[list[Stored]]:
    """Return the images of each shard, in order. A shard ends with the batch in which it reaches `SHARD_BYTES`.

    `ShardWriter` follows the same rule, so both write the same files for the same images.
    """
    shards: list[list[Stored]] = [[]]
    batch = written = 0
    for image in images:
        if written >= limits.SHARD_BYTES:
            shards.append([])
            written = 0
        shards[-1].append(image)
        batch += image.bytes
        if batch >= store_media.BATCH_BYTES:
            written, batch = written + batch, 0
    return shards


def write_shards(
    folder: Path,
    images: Sequence[Stored],
    reader: ShardReader,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Write `media-*.arrow` into the folder; shards that already exist are not written again.

    Args:
        images: each content once.
    Raises: DataError when a source file has changed.
    """
    plan = plan_shards(images)
    paths = [folder / shard_name(number) for number in range(len(plan))]
    make_parts(partial(_write_shard, reader), plan, paths, workers=workers, progress=progress, what="writing images")


def _write_shard(reader: ShardReader, images: Sequence[Stored], path: Path) -> None:
    shard = ShardFile(path)
    for image, data in zip(images, reader([image.place for image in images]), strict=True):
        if image_hash(data) != image.sha256:  # a file that is stored as it is needs no second decoding
            data = stored_form(data, image.max_pixels)[0]
        if image_hash(data) != image.sha256:
            raise DataError("an image changed while it was read", where=str(image.place), hint="run the command again")
        shard.add(image.sha256, data)
    shard.close()


PART_FILES = 256
"""Number of images per part."""
MAX_REMEMBERED = 50_000
"""Maximum number of images whose results a process keeps in memory. When it is reached, all are removed."""


_known: dict[str, dict[str, Any]] = {}
"""Results of `look` by content, for all parts that this process makes: a collection of pairs repeats its images."""


def look(data: bytes) -> dict[str, Any]:
    """Return the fields for `examined`, or {"reason": why the image cannot be used}."""
    sha256 = image_hash(data)
    fields = _known.get(sha256)
    if fields is None:
        if len(_known) >= MAX_REMEMBERED:
            _known.clear()
        try:
            fields = _fields(examine(data))
        except DataError as error:
            fields = {"reason": error.message}
        _known[sha256] = fields
    return fields


def examined(fields: dict[str, Any]) -> Examined:
    """Return the facts of an image from its JSON line."""
    media = Media(fields["sha256"], fields["width"], fields["height"])
    return Examined(media, fields["bytes"], fields["look"], tuple(fields.get("remarks", ())))


def scan_files(
    read: ReadFile,
    paths: Sequence[str],
    work: Path,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[str, Examined | str]]:
    """Yield (path, its facts or the reason why it cannot be used) of each image file, in the order of `paths`."""
    results = look_at(paths, read, work, workers=workers, progress=progress)
    for path, fields in zip(paths, results, strict=True):
        yield path, fields["reason"] if "reason" in fields else examined(fields)


def look_at(
    places: Sequence[Any], read: Callable[[Any], bytes], work: Path, *, workers: int | None, progress: Progress | None
) -> Iterator[dict[str, Any]]:
    """Yield the result of `look` for each image, in the order of `places`, computed on all cores.

    Args:
        read: returns the file at a place; picklable. The message of its DataError becomes the "reason".
        work: folder for the parts.
    """
    make = partial(_look_at_part, read)
    return _in_parts(make, places, work, "images", workers=workers, progress=progress, what="reading images")


def _in_parts(make: Make, places: Sequence[Any], work: Path, name: str, **settings: Any) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines of the parts `NAME-00000.jsonl` of these places. `settings`: of `make_parts`."""
    portions = [places[start : start + PART_FILES] for start in range(0, len(places), PART_FILES)]
    parts = [work / f"{name}-{i:05d}.jsonl" for i in range(len(portions))]
    make_parts(make, portions, parts, **settings)
    for part in parts:
        with part.open(encoding="ascii") as lines:
            yield from map(json.loads, lines)


def _look_at_part(read: Callable[[Any], bytes], places: Sequence[Any], part: Path) -> None:
    def look_at_one(place: Any) -> dict[str, Any]:
        try:
            return look(read(place))
        except DataError as error:
            return {"reason": error.message}

    write_lines(part, [look_at_one(place) for place in places])


def _fields(image: Examined) -> dict[str, Any]:
    fields: dict[str, Any] = {"sha256": image.media.sha256, "width": image.media.width, "height": image.media.height}
    fields |= {"bytes": image.bytes, "look": image.look}
    return fields | ({"remarks": list(image.remarks)} if image.remarks else {})


def shrink_images(
    reader: ShardReader,
    places: Sequence[Any],
    max_pixels: int,
    work: Path,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Iterator[Examined]:
    """Yield the facts of images scaled down to `max_pixels`, in the order of `places`."""
    make, name = partial(_shrink, reader, max_pixels), f"small-{max_pixels}"
    lines = _in_parts(make, places, work, name, workers=workers, progress=progress, what="resizing images")
    yield from map(examined, lines)


def _shrink(reader: ShardReader, max_pixels: int, places: Sequence[Any], part: Path) -> None:
    write_lines(part, [_fields(examine(data, max_pixels)) for data in reader(places)])


MAX_PATH = 1000
"""Longest path of an image, in characters; a longer text is an image in base64."""


class TablePlace(NamedTuple):
    """Place of an image: table, piece, row in the piece, position in the row; and the row in words, for messages."""

    table: int
    piece: int
    row: int
    position: int
    where: str

    def __str__(self) -> str:
        return f"{self.where}, image {self.position + 1}"


def read_places(tables: Sequence[OpenTable], places: Sequence[TablePlace]) -> Iterator[bytes]:
    """Yield image files by their place in several tables. Places in the tables' order are read in one pass."""
    for (index, piece), members in groupby(places, key=lambda one: (one.table, one.piece)):
        files, column = tables[index].files, tables[index].columns["images"]
        rows = enumerate(read_piece(files.pieces[piece], [column]))
        number, values = -1, []
        for place in members:
            while number < place.row:
                number, row = next(rows)
                values = split_images(row.get(column))
            yield image_bytes(read_image(values[place.position], files.root, ""), "")


def look_at_cell(value: Any, root: Path | None) -> dict[str, Any]:
    """Return the fields of an image value of a cell, or {"reason": why the image cannot be used}.

    Args:
        root: folder that image paths start from; None = image paths are refused.
    """
    try:
        data = image_bytes(read_image(value, root, ""), "")
    except DataError as error:
        return {"reason": error.message}
    fields = look(data)
    name = _name_of(value)
    return {"reason": f"{name}: {fields['reason']}"} if "reason" in fields and name else fields


def _name_of(value: Any) -> str:
    """Return the path that a table gives for an image; "" if it gives none."""
    path = value.get("path") if isinstance(value, Mapping) else value
    is_path = isinstance(path, str) and 0 < len(path) <= MAX_PATH and not path.startswith("data:")
    return show(path, 60) if is_path else ""
