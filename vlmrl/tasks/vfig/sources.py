"""Sources of SVG code: folders of files, and tables of conversations or of VFig's columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from vlmrl.data.table_pieces import locate_rows, open_row_files, read_piece
from vlmrl.errors import DataError
from vlmrl.json_text import parse_json
from vlmrl.svg.extract import find_svg
from vlmrl.svg.limits import SvgRefused
from vlmrl.tasks.vfig.truth import MOST_LABEL_CHARS

CODE_COLUMNS = ("svg", "Svg", "SVG", "ground_truth_code", "response", "code", "text")
"""Columns that hold code, in the order in which they are tried."""
TALKS = ("messages", "conversations")
LABEL = "data_source"
"""Column with the label of a row's source."""
COLUMNS = (*CODE_COLUMNS, "reward_model", *TALKS, LABEL)
SPEAKERS = ("assistant", "gpt")
HELP = (
    "rows have the code in `svg`, `response` or `ground_truth_code`, within `reward_model`, or in the last answer of "
    "`messages`"
)


class Candidate(NamedTuple):
    """Code that may become a row.

    Args:
        svg: the code; None if there is none.
        label: name of its source.
        origin: its place, for messages.
        problem: why there is no code.
    """

    svg: str | None
    label: str
    origin: str
    problem: str = ""


def read_sources(text: str) -> Iterator[Candidate]:
    """Yield the figures of sources, which commas separate; each is PATH or LABEL=PATH.

    Raises: DataError for a source that is not there, or has no code.
    """
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        label, separator, place = part.partition("=")
        if not separator or "/" in label:
            label, place = "", part
        yield from _read(place, label)


def _read(place: str, label: str) -> Iterator[Candidate]:
    path = Path(place.partition("@")[0])
    name = (label or path.stem or "figures")[:MOST_LABEL_CHARS]
    if path.suffix.lower() == ".svg" and path.is_file():
        yield _of_file(path, name)
        return
    if path.is_dir() and (svg_files := sorted(path.rglob("*.svg"))):
        for file in svg_files:
            yield _of_file(file, name)
        return
    yield from _of_table(place, name, keep_label=bool(label))


def _of_file(path: Path, label: str) -> Candidate:
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        return Candidate(None, label, str(path), f"it cannot be read: {error.strerror}")
    return _candidate(text, label, str(path))


def _candidate(text: str, label: str, origin: str) -> Candidate:
    try:
        return Candidate(find_svg(text), label, origin)
    except SvgRefused as error:
        return Candidate(None, label, origin, error.reason)


def _of_table(place: str, label: str, *, keep_label: bool) -> Iterator[Candidate]:
    """Yield the rows of a table. `keep_label`: the label stands also where rows have one of their own."""
    with TemporaryDirectory(prefix="vlmrl-prep-") as work:
        files = open_row_files(locate_rows(place), Path(work))
        columns = [name for name in COLUMNS if name in files.columns]
        if not set(columns) - {LABEL}:
            known = ", ".join(files.columns)
            raise DataError(f"no column with SVG code; the table {files.label} has: {known}", hint=HELP)
        for piece in files.pieces:
            for index, row in enumerate(read_piece(piece, columns)):
                own = row.get(LABEL)
                name = own[:MOST_LABEL_CHARS] if isinstance(own, str) and own.strip() and not keep_label else label
                origin = files.where(piece, index)
                text = code_of(row)
                if text is None:
                    yield Candidate(None, name, origin, "the row has no SVG code")
                else:
                    yield _candidate(text, name, origin)


def code_of(row: Mapping[str, Any]) -> str | None:
    """Return the text of a row that holds its SVG code; None if there is none."""
    nested = row.get("reward_model")
    if isinstance(nested, str):
        try:
            nested = parse_json(nested)
        except ValueError:
            nested = None
    places: list[Mapping[str, Any]] = [row, nested] if isinstance(nested, Mapping) else [row]
    for place in places:
        for name in CODE_COLUMNS:
            value = place.get(name)
            if isinstance(value, str) and "<svg" in value:
                return value
    for name in TALKS:
        turns = row.get(name)
        for turn in reversed(turns if isinstance(turns, list) else []):
            if isinstance(turn, Mapping) and (turn.get("role") or turn.get("from")) in SPEAKERS:
                return _text_of(turn.get("content") or turn.get("value"))
    return None


def _text_of(content: Any) -> str | None:
    """Return the text of a message: a text, or a list of parts of which some have a text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return None
