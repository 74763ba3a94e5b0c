"""Plan of a dataset of figures (sources, filters, sizes), and reading of the sources. Neither numpy nor the renderer.

Sources are folders of SVG files, chats with a picture in JSON, and Parquet tables. Texts are not changed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vlmrl.data.parallel_parts import Progress
from vlmrl.data.table_files import parquet_batches, parquet_columns, parsed_row, place_of, require_file, text_rows
from vlmrl.data.table_values import image_bytes, python_rows, read_image, read_messages, show, split_images
from vlmrl.errors import DataError
from vlmrl.tasks.prompt import IMAGE
from vlmrl.tasks.vfig.drawn.figure import DrawnSettings
from vlmrl.tasks.vfig.truth import as_label

Kind = Literal["svg", "sharegpt", "parquet"]
MOST_FILE_BYTES = 16 * 1024 * 1024
"""Largest SVG file that is read."""
BATCH_ROWS = 64
NAMED = re.compile(r"([A-Za-z0-9._-]{1,60})=(.+)", re.ASCII | re.DOTALL)
CODE = ("response", "svg", "svg_code", "code")
"""Columns of a Parquet table that may hold the code, the preferred first; verl's `reward_model` may hold it, too."""
REWARD_MODEL, TRUE_CODE = "reward_model", ("ground_truth_code", "ground_truth")
"""verl's column, and its fields that may hold the code: VFig's, beside which verl's is an image's path, and verl's."""
IMAGES = ("images", "image")
SOURCES = ("data_source", "source")
COLUMNS_HELP = f"columns: {', '.join(CODE[:2])} or {REWARD_MODEL} ({' or '.join(TRUE_CODE)}), and images, data_source"


@dataclass(frozen=True)
class SourceFigure:
    """Figure of a source.

    Args:
        text: text that holds its code.
        image: file of its own image; None = the code alone is there.
        metadata: entities of a drawn figure; None = not known.
    """

    label: str
    where: str
    text: str
    image: bytes | None = None
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class WrongRow:
    """Row or file of a source that cannot be read, and why."""

    label: str
    where: str
    reason: str


@dataclass(frozen=True)
class FigureSource:
    """Place of figures.

    Args:
        kind: "svg" = a folder of SVG files, with those in folders within it; "sharegpt" = JSON with messages and
            images; "parquet" = a table.
        label: of its figures. Rows of a table may have labels of their own.
        image_root: folder that image paths start from, and stay in; None = the folder of the file.
    """

    kind: Kind
    path: Path
    label: str
    image_root: Path | None = None

    @property
    def short(self) -> str:
        """Source without its folder: a dataset holds no path of the machine that made it."""
        return f"{self.kind} {self.label}={self.path.name}"

    def figures(self) -> Iterator[SourceFigure | WrongRow]:
        """Yield the figures, in an order that depends on the content alone.

        Raises: DataError for a source that cannot be read as a whole.
        """
        readers = {"svg": _svg_files, "sharegpt": _sharegpt_rows, "parquet": _parquet_rows}
        return readers[self.kind](self)

    @property
    def root(self) -> Path:
        """Folder that image paths start from."""
        return self.image_root or self.path.parent


def named_source(kind: Kind, text: str, image_root: Path | None = None, label: str | None = None) -> FigureSource:
    """Return the source that the text of an option names: a path, or NAME=PATH.

    Args:
        label: of its figures; None = that in the text, else the name of the folder or file.
    Raises: DataError for a path where no such source is.
    """
    match = NAMED.fullmatch(text)
    path = Path(text)
    if match is not None and not path.exists():
        label, path = label or match[1], Path(match[2])
    if kind == "svg":
        if not path.is_dir():
            problem = "is not a folder" if path.exists() else "is not there"
            raise DataError(f"the folder of SVG files {path} {problem}", hint="give a folder, or NAME=FOLDER")
    else:
        require_file(path, hint="give a file, or NAME=FILE")
    if image_root is not None and not image_root.is_dir():
        raise DataError(f"--image-root {image_root} is not a folder")
    name = path.resolve().name if kind == "svg" else path.stem
    return FigureSource(kind, path, as_label(label or name), image_root)


def bench_source(text: str, image_root: Path | None = None) -> FigureSource:
    """Return the source that --bench names: a folder of SVG files, a Parquet table, or JSON with messages and images.

    Raises: DataError for another path.
    """
    match = NAMED.fullmatch(text)
    path = Path(match[2] if match is not None and not Path(text).exists() else text)
    ending = path.suffix.lower()
    kinds: dict[str, Kind] = {".parquet": "parquet", ".json": "sharegpt", ".jsonl": "sharegpt"}
    if not path.is_dir() and path.exists() and ending not in kinds:
        raise DataError(
            f"--bench {path} is not a source of figures", hint="a folder of .svg, or .parquet, .json, .jsonl"
        )
    return named_source(kinds.get(ending, "svg") if not path.is_dir() else "svg", text, image_root)


def _svg_files(source: FigureSource) -> Iterator[SourceFigure | WrongRow]:
    files = sorted(path for path in source.path.rglob("*") if path.suffix.lower() == ".svg" and path.is_file())
    if not files:
        raise DataError(f"the folder {source.path} holds no .svg file")
    for file in files:
        where = f"{source.label}: {file.relative_to(source.path)}"
        try:
            if file.stat().st_size > MOST_FILE_BYTES:
                yield WrongRow(source.label, where, f"a file of more than {MOST_FILE_BYTES:,} bytes")
                continue
            yield SourceFigure(source.label, where, file.read_bytes().decode("utf-8"))
        except UnicodeDecodeError:
            yield WrongRow(source.label, where, "it is not UTF-8 text")
        except OSError as error:
            yield WrongRow(source.label, where, f"it cannot be read: {error.strerror or error}")


def _sharegpt_rows(source: FigureSource) -> Iterator[SourceFigure | WrongRow]:
    for number, row in text_rows(source.path):
        where = f"{source.label}: {place_of(source.path.name, number)}"
        cells = parsed_row(row)
        if isinstance(cells, str):
            yield WrongRow(source.label, where, cells)
            continue
        try:
            chat = cells["messages"] if "messages" in cells else cells.get("conversations")
            turns, answer, inside, *_ = read_messages(chat, "")
            if answer is None:
                raise DataError("its last message is not the assistant's")
            images = [value for name in IMAGES for value in split_images(cells.get(name))] or inside
            marks = sum(turn.content.count(IMAGE) for turn in turns)
            if not images and marks:
                raise DataError(f"it has {marks} {IMAGE} mark{'s' * (marks > 1)} and no image")
            yield SourceFigure(source.label, where, answer, _only_image(images, source.root))
        except DataError as error:
            yield WrongRow(source.label, where, error.message)


def _parquet_rows(source: FigureSource) -> Iterator[SourceFigure | WrongRow]:
    columns = parquet_columns(source.path)
    code = next((name for name in (*CODE, REWARD_MODEL) if name in columns), None)
    if code is None:
        names = ", ".join(f"`{name}`" for name in (*CODE, REWARD_MODEL))
        known = ", ".join(columns) or "none"
        message = f"the table has none of the columns {names}; it has: {known}"
        raise DataError(message, where=str(source.path), hint=COLUMNS_HELP)
    picture = next((name for name in IMAGES if name in columns), None)
    labels = next((name for name in SOURCES if name in columns), None)
    number = 0
    for batch in parquet_batches(source.path, [name for name in (code, picture, labels) if name], BATCH_ROWS):
        begin = number
        rows = python_rows(batch, lambda index, begin=begin: place_of(source.path.name, begin + index))
        for cells in rows:
            own = cells.get(labels) if labels else None
            label = as_label(own) if isinstance(own, str) and own else source.label
            where = f"{label}: {place_of(source.path.name, number)}"
            number += 1
            try:
                text = _code_of(cells[code])
                images = split_images(cells.get(picture)) if picture else []
                yield SourceFigure(label, where, text, _only_image(images, source.root))
            except DataError as error:
                yield WrongRow(label, where, error.message)


def _code_of(cell: Any) -> str:
    text = next(filter(None, map(cell.get, TRUE_CODE)), None) if isinstance(cell, Mapping) else cell
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"the code is {show(text if isinstance(cell, Mapping) else cell, 60)}, not a text")
    return text


def _only_image(images: Sequence[Any], root: Path) -> bytes | None:
    """Return the file of the only image of a row; None without one. Raises: DataError for several, or a wrong one."""
    if len(images) > 1:
        raise DataError(f"{len(images)} images, where one is expected")
    return image_bytes(read_image(images[0], root, ""), "") if images else None


@dataclass(frozen=True)
class Filters:
    """Filters of figures. None = the filter is off.

    Args:
        min_basic: smallest share of basic shapes and lines among all shapes, in [0, 1].
        max_complex: largest number of paths and polygons.
        max_chars: largest number of characters of the code.
        repeats: whether code that repeats itself is left out.
        max_aspect: largest ratio of the longer to the shorter side of a picture.
        min_image: smallest shorter side in pixels of an image that comes with the code.
        max_difference: largest difference of such an image and the drawing of the code, in [0, 1].
    """

    min_basic: float | None = None
    max_complex: int | None = None
    max_chars: int | None = None
    repeats: bool = False
    max_aspect: float | None = None
    min_image: int | None = None
    max_difference: float | None = None


@dataclass(frozen=True)
class PictureSizes:
    """Sizes of pictures, the same for all uses of a dataset.

    A drawing has the size that the code declares. It is scaled down to `max_pixels`, or up until its shorter side has
    `min_side` pixels. An image that comes with the code is scaled down, too.
    """

    max_pixels: int
    min_side: int

    def enlarged(self, width: int, height: int) -> tuple[int, int]:
        """Return the size to which a smaller drawing is scaled up; the same size if it is large enough."""
        scale = min(self.min_side / min(width, height), math.sqrt(self.max_pixels / (width * height)))
        if scale <= 1:
            return width, height
        return max(1, math.floor(width * scale)), max(1, math.floor(height * scale))


@dataclass(frozen=True)
class Plan:
    """Figures to collect, and how.

    Args:
        sources: figures to train on.
        filters: of `sources`.
        drawn, drawn_bench: numbers of drawn training rows and benchmark rows.
        drawn_settings, drawn_filters, seed: of drawn figures.
        benches: figures of the split `test`. They pass no filter: only what cannot be drawn is left out.
        beside: folders of datasets that are used together with this one.
        val_share: share of the figures that is in validation.
        max_bad: largest share of the rows of a source that cannot be read.
        workers: processes that draw; None = one per core.
    """

    sources: Sequence[FigureSource]
    filters: Filters
    sizes: PictureSizes
    drawn: int = 0
    drawn_bench: int = 0
    drawn_settings: DrawnSettings = field(default_factory=DrawnSettings)
    drawn_filters: Filters = field(default_factory=Filters)
    seed: int = 0
    benches: Sequence[FigureSource] = ()
    beside: Sequence[Path] = ()
    val_share: float = 0.1
    max_bad: float = 0.0
    workers: int | None = None
    progress: Progress | None = None
