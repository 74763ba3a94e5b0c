"""Files of an evaluation, read and written without torch, for programs that compare or show evaluations.

<run>/eval/<name>/rows.parquet     one row per response: text, score, parts, outcome
                  media.arrow      images that rewards made for the responses, if any
                  summary.json     metrics with intervals, what was evaluated
                  SHA256SUMS       hashes of these files; written last

Until it is finished, graded records are kept piece by piece, so a killed evaluation finds those that were complete:

    <folder>/000003.parquet    records of a piece, one row per response; written last
             000003.arrow      images that rewards made for them, if any

Without a folder, the pieces are kept in memory.
"""

from __future__ import annotations

import json
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vlmrl.dist.world import World
from vlmrl.errors import StoreError, reason_of
from vlmrl.evaluate.metrics import EvalColumns
from vlmrl.evaluate.record_table import has_shown, outcome_names, read_records, record_table, write_records
from vlmrl.redaction.redact import redact_value
from vlmrl.store.checkpoints import hash_line
from vlmrl.store.evaluated_rows import SCHEMA, one_text, read_summary, row_groups, training_name
from vlmrl.store.files import remove_tree, sync_file, sync_folder, temp_path, write_atomic, write_json
from vlmrl.store.layout import EVAL_HASHES, EVAL_MEDIA, EVAL_ROWS, EVAL_SUMMARY, eval_dir
from vlmrl.store.media import ShardFolder, write_shard
from vlmrl.types import Group, Rows, ScoredSample
from vlmrl.untrusted import parse_json

MERGED = "merged"
"""Folder with the pieces of all processes."""
FACTS = b"vlmrl.piece"
"""Key of the facts of a piece in the metadata of its Parquet file."""


@dataclass(frozen=True)
class Piece:
    """Graded responses to some rows.

    Args:
        records: as `evaluate.run.make_records` makes them.
        num_problems, first_problem: responses that the task could not measure.
        images_left_out: responses whose images were not kept.
        image_bytes: size of the images of all responses; one that several responses share counts for each.
        files: sha256 -> image file that a reward made.
    """

    records: Sequence[Mapping[str, Any]]
    num_problems: int = 0
    first_problem: str = ""
    images_left_out: int = 0
    image_bytes: int = 0
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)


class GradedPieces:
    """Pieces by number.

    Args:
        folder: its parent exists; None = the pieces stay in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._kept: dict[int, Piece] = {}
        self._temporary: TemporaryDirectory[str] | None = None

    @classmethod
    def temporary(cls) -> GradedPieces:
        """Return an empty store on this machine's disk, which is deleted with the object."""
        folder = TemporaryDirectory(prefix="vlmrl-pieces-")
        pieces = cls(Path(folder.name))
        pieces._temporary = folder
        return pieces

    def __contains__(self, number: int) -> bool:
        return number in self._kept if self.folder is None else self._path(number).is_file()

    def write(self, number: int, piece: Piece) -> None:
        """Keep a piece. Raises: StoreError when it cannot be written."""
        if self.folder is None:
            self._kept[number] = piece
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if piece.files:
            write_shard(self._path(number).with_suffix(".arrow"), sorted(piece.files.items()))
        facts = [
            piece.num_problems,
            piece.first_problem,
            piece.images_left_out,
            piece.image_bytes,
            len(piece.files),
            _absent(piece.records),
        ]
        write_atomic(self._path(number), record_table(piece.records, {FACTS.decode(): json.dumps(facts)}))

    def read(self, number: int) -> Piece:
        """Return a piece as it was written. Raises: StoreError when it cannot be read."""
        if self.folder is None:
            return self._kept[number]
        path = self._path(number)
        try:
            records, metadata = read_records(path)
            num_problems, first_problem, left_out, image_bytes, num_files, absent = parse_json(metadata[FACTS])
            for name, rows in absent.items():
                for row in rows:
                    del records[row]["outcome"][name], records[row][name]
            files = self._files(number)
            if len(files) != num_files:
                raise StoreError(f"{num_files - len(files)} of its images are missing")
        except (KeyError, ValueError, IndexError, TypeError, StoreError) as error:
            raise StoreError(
                f"a graded piece of an unfinished evaluation cannot be read: {reason_of(error)}",
                where=str(path),
                hint="remove this file: its responses are then graded again",
            ) from error
        return Piece(records, num_problems, first_problem, left_out, image_bytes, files)

    def remove(self) -> None:
        """Delete all pieces: the results are elsewhere."""
        self._kept = {}
        if self.folder is not None and self.folder.is_dir():
            remove_tree(self.folder)

    def _files(self, number: int) -> dict[str, bytes]:
        assert self.folder is not None
        name = f"{number:06d}.arrow"
        if not (self.folder / name).is_file():
            return {}
        shard = ShardFolder(self.folder, name)
        return {sha256: content for sha256 in shard.hashes() if (content := shard.get(sha256)) is not None}

    def _path(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{number:06d}.parquet"


@dataclass
class MergedPieces:
    """Pieces of all processes, in the order of the rows.

    Args:
        sizes: number of records of each piece.
        outcomes: names of all outcomes, in order of first appearance.
        shown: whether the model saw other images than those of the rows.
        num_problems, first_problem, images_left_out, files: as of `Piece`, of all pieces.
    """

    pieces: GradedPieces
    sizes: list[int] = field(default_factory=list)
    outcomes: dict[str, None] = field(default_factory=dict)
    num_problems: int = 0
    first_problem: str = ""
    images_left_out: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    shown: bool = False

    def take(self, piece: Piece) -> None:
        """Add the facts of the next piece."""
        self.sizes.append(len(piece.records))
        self.outcomes |= dict.fromkeys(outcome_names(piece.records))
        self.num_problems += piece.num_problems
        self.first_problem = self.first_problem or piece.first_problem
        self.images_left_out += piece.images_left_out
        self.files |= piece.files
        self.shown = self.shown or has_shown(piece.records)

    @property
    def rows(self) -> Sequence[dict[str, Any]]:
        """All records: a list if they are in memory."""
        read = lambda number: self.pieces.read(number).records  # noqa: E731
        rows = ChunkedRows(self.sizes, read, tuple(self.outcomes), self.shown)
        return list(rows) if self.pieces.folder is None else rows

    def columns(self, by: Sequence[str]) -> EvalColumns:
        """Return the columns of all records. `by`: see `Task.by`."""
        columns = EvalColumns(by)
        for number in range(len(self.sizes)):
            for record in self.pieces.read(number).records:
                columns.add(record)
        return columns


def merge_pieces(pieces: GradedPieces, count: int, world: World) -> MergedPieces:
    """Return the pieces of all processes together. Of pieces on disk, only the first process gets the records.

    Args:
        pieces: of this process, numbers 0 to count - 1.
    """
    if world.size == 1:
        merged = MergedPieces(pieces)
        for number in range(count):
            merged.take(pieces.read(number))
        return merged
    target = GradedPieces(None if pieces.folder is None else pieces.folder / MERGED)
    merged = MergedPieces(target)
    for number in range(count):
        own = pieces.read(number)
        of_ranks = world.gather(own)
        if not (world.is_main or pieces.folder is None):
            continue
        piece = _interleaved(of_ranks)
        target.write(number, piece)
        merged.take(piece)
    return merged


def _interleaved(of_ranks: Sequence[Piece]) -> Piece:
    """Return the pieces of all ranks as one: rank i has every size-th row from the i-th."""
    groups = [_by_prompt(piece.records) for piece in of_ranks]
    size, total = len(groups), sum(map(len, groups))
    records = [record for i in range(total) for record in groups[i % size][i // size]]
    return Piece(
        records,
        sum(piece.num_problems for piece in of_ranks),
        next((piece.first_problem for piece in of_ranks if piece.first_problem), ""),
        sum(piece.images_left_out for piece in of_ranks),
        sum(piece.image_bytes for piece in of_ranks),
        {sha256: file for piece in of_ranks for sha256, file in piece.files.items()},
    )


def _by_prompt(records: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the records of each prompt: a prompt begins with sample 0."""
    groups: list[list[Mapping[str, Any]]] = []
    for record in records:
        if record["sample"] == 0 or not groups:
            groups.append([])
        groups[-1].append(record)
    return groups


class ChunkedRows(Rows[dict[str, Any]]):
    """Records in chunks, as one sequence; one chunk is in memory at a time.

    Args:
        sizes: number of records of each chunk.
        read: number of a chunk -> its records.
        outcomes, shown: as of `MergedPieces`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        read: Callable[[int], Sequence[Any]],
        outcomes: Sequence[str] = (),
        shown: bool = False,
    ) -> None:
        super().__init__(sum(sizes), self._record)
        self._read, self.outcomes, self.shown = read, tuple(outcomes), shown
        self._ends = list(accumulate(sizes))
        self._open: tuple[int, Sequence[Any]] = (-1, ())

    def _record(self, place: int) -> dict[str, Any]:
        number = bisect_right(self._ends, place)
        if self._open[0] != number:
            self._open = (-1, ())  # the old chunk is freed before the new one is read
            self._open = (number, self._read(number))
        return self._open[1][place - (self._ends[number - 1] if number else 0)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def chunks(self) -> Iterator[Sequence[Mapping[str, Any]]]:
        """Yield the records chunk by chunk."""
        for number in range(len(self._ends)):
            yield self._read(number)


def _absent(records: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return outcome -> rows that do not have it, though others of the piece do: a table knows only empty cells."""
    absent = {name: [i for i, r in enumerate(records) if name not in r["outcome"]] for name in outcome_names(records)}
    return {name: rows for name, rows in absent.items() if rows}


@dataclass(frozen=True)
class Evaluation:
    """Rows and summary of one evaluation.

    Args:
        rows: one mapping per response, see `evaluate.run.make_records`; each outcome is also a key of its own
            (`row["accuracy"]`). Those of a large evaluation that was just made are read from its pieces, one at a time.
        summary: see `evaluate.metrics.summarise`; as read from disk it also has "schema" and "meta".
        files: sha256 -> image file that a reward made; not read from disk (store/media.py finds them).
    """

    rows: Sequence[dict[str, Any]]
    summary: dict[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @property
    def one_text(self) -> str:
        """Return that nearly all answers are one text, such as `all 16 answers are one text, to ...`; "" if not."""
        said = [(row["text"], json.dumps(row["truth"], sort_keys=True)) for row in self.rows]
        same = one_text([text for text, _ in said], [truth for _, truth in said])
        return same.words() if same else ""


def write_evaluation(folder: Path, evaluation: Evaluation, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Write an evaluation, replacing an existing one as a whole. Return the summary with `meta` in it.

    Args:
        meta: what was evaluated (model, checkpoint, split, sampling ...); JSON values.
    Raises: StoreError if the run is gone: it is not made again.
    """
    summary = {"schema": SCHEMA, "meta": redact_value(dict(meta)), **evaluation.summary}
    temp_dir = temp_path(folder)
    try:
        folder.parent.mkdir(exist_ok=True)
        temp_dir.mkdir()
        write_rows(temp_dir / EVAL_ROWS, evaluation.rows)
        if evaluation.files:
            write_shard(temp_dir / EVAL_MEDIA, sorted(evaluation.files.items()))
        write_json(temp_dir / EVAL_SUMMARY, summary)
        lines = [hash_line(path) for path in sorted(temp_dir.iterdir())]
        write_atomic(temp_dir / EVAL_HASHES, b"\n".join(lines) + b"\n")
        if folder.exists():
            remove_tree(folder)
        temp_dir.rename(folder)
        sync_folder(folder.parent)
    except BaseException as error:
        shutil.rmtree(temp_dir, ignore_errors=True)
        if isinstance(error, (OSError, StoreError)) and not folder.parent.parent.is_dir():
            message = "the run was removed while it was evaluated, so the results have no place"
            hint = "its responses are kept in `unfinished` beside the runs; restore the run and repeat the command"
            raise StoreError(message, where=str(folder), hint=hint) from error
        raise
    return summary


def read_evaluation(folder: Path) -> Evaluation:
    """Return what `write_evaluation` wrote. Raises: StoreError when it is missing, damaged or of a newer schema."""
    return Evaluation(read_records(folder / EVAL_ROWS)[0], read_summary(folder))


def stored_rows(folder: Path) -> Sequence[dict[str, Any]]:
    """Return the rows of a written evaluation, read from the disk when they are looked at."""
    path = folder / EVAL_ROWS
    return ChunkedRows(row_groups(path), lambda number: read_records(path, number)[0])


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows of an evaluation to a new file. Raises: StoreError when it cannot be written."""
    if isinstance(rows, ChunkedRows):
        write_records(path, rows.chunks(), rows.outcomes, rows.shown)
    else:
        write_records(path, [rows], outcome_names(rows), has_shown(rows))
    sync_file(path)


def training_folder(run_dir: Path, split: str, source: str, step: int, setting: str = "") -> Path:
    """Return the folder for a validation during training. A user's own `vlmrl eval` of that name is not replaced."""
    folder = eval_dir(run_dir, training_name(split, source, step, setting))
    try:
        is_users = not read_summary(folder).get("meta", {}).get("during")
    except StoreError:  # it is missing or damaged
        return folder
    return eval_dir(run_dir, f"training-{folder.name}") if is_users else folder


KEPT_BYTES = 64 * 1024 * 1024
"""Maximum size of all images of an evaluation by `vlmrl eval`; a validation during training has an eighth of it."""


@dataclass
class ArtifactLimit:
    """Limit in bytes, used up response by response. A response that does not fit loses its images and is counted.

    Args:
        left: bytes that may still be kept.
        left_out: responses whose images were not kept.
    """

    left: int
    left_out: int = 0

    def keep(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with the images that fit."""
        return [replace(group, samples=tuple(map(self._kept, group.samples))) for group in groups]

    def _kept(self, sample: ScoredSample) -> ScoredSample:
        score = sample.score
        size = sum(map(len, (*score.files.values(), *sample.files.values())))
        if size <= self.left:
            self.left -= size
            return sample
        self.left_out += 1
        return replace(sample, score=replace(score, artifacts={}, files={}), files={})


def kept_files(groups: Sequence[Group]) -> dict[str, bytes]:
    """Return the images that rewards made, and those of tools: sha256 -> image file."""
    samples = [s for group in groups for s in group.samples]
    return {sha256: file for s in samples for sha256, file in (*s.files.items(), *s.score.files.items())}
