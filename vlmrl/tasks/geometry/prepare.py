"""`vlmrl prep` of the mathematics tasks: read, check and write rows, or make problems with exact answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vlmrl.data.dataset_writer import building, refuse_other
from vlmrl.data.image_scan import FileReader, MemoryFiles
from vlmrl.data.parallel_parts import make_parts
from vlmrl.data.row_images import RowReader
from vlmrl.data.table_pieces import locate_rows, open_row_files
from vlmrl.errors import DataError, unknown
from vlmrl.tasks.dataset_assembly import Assembly, Limits, Prepared, assemble, check_name, drawn_counts, short_source
from vlmrl.tasks.geometry import written
from vlmrl.tasks.geometry.dataset_rows import (
    drawn_fields,
    drawn_rows,
    row_fields,
    row_schema,
    written_fields,
    written_rows,
)
from vlmrl.tasks.geometry.drawn import collection as drawn
from vlmrl.tasks.geometry.problem_rows import ScanProblems, TablesReader, choose_pieces, find_columns
from vlmrl.tasks.geometry.survey import cut_validation, notes_on, refuse_bad, survey_rows
from vlmrl.tasks.geometry.task import Collection


@dataclass(frozen=True)
class GeometryRequest:
    """Options of `vlmrl prep` of a collection.

    Args:
        source: as `locate_rows` takes it; None = the published rows.
        test: source of the test split; None = that of `source`.
        synthetic: number of training problems to draw instead; None = read a source.
        out, name: default data/<name>, and the collection's name.
        validation_rows: rows to cut off train where the source has no validation split.
        topics: of problems that are made here; () = the usual ones.
        width: of drawn figures.
        max_bad: largest share of rows that may be left out because something is wrong with them.
    """

    collection: Collection
    source: str | None = None
    test: str | None = None
    synthetic: int | None = None
    out: Path | None = None
    name: str | None = None
    seed: int = 0
    validation_rows: int = 0
    topics: tuple[str, ...] = ()
    width: int = 448
    max_bad: float = 0.0
    images_root: Path | None = None


def prepare_collection(request: GeometryRequest, limits: Limits, *, force: bool = False) -> Prepared:
    """Make the dataset. Raises: DataError for a source, name, topic or row that cannot be used; nothing is written."""
    collection = request.collection
    name = check_name(request.name or collection.name)
    out = request.out or Path("data") / name
    if request.synthetic is not None:
        return _prepare_drawn(request, name, request.synthetic, out, limits, force)
    source = request.source or collection.published
    if source is None:
        raise DataError(
            f"`vlmrl prep {collection.name}` needs a source: there is no published table of its rows",
            hint="name MAYE's folder of JSONL files and images, or a table; --synthetic N makes problems",
        )
    return _prepare_rows(request, name, source, out, limits, force)


def _prepare_rows(request: GeometryRequest, name: str, source: str, out: Path, limits: Limits, force: bool) -> Prepared:
    args = {
        "source": short_source(source),
        "test": short_source(request.test) if request.test else None,
        "seed": request.seed,
        "validation_rows": request.validation_rows,
        "max_bad": request.max_bad,
        **limits.args,
    }
    refuse_other(out, args, force=force)
    located = [locate_rows(one, request.images_root) for one in (source, request.test) if one]
    key = [request.collection.name, name, str(request.images_root), args, [one.state for one in located]]
    with building(out, key=key) as build:
        tables = []
        for number, one in enumerate(located):
            folder = build.work / f"table-{number}"
            folder.mkdir(exist_ok=True)
            tables.append(open_row_files(one, folder))
        columns = [find_columns(table, figures=request.collection.figures) for table in tables]
        pieces = choose_pieces(tables)
        parts = [build.work / f"problems-{i:05d}.jsonl" for i in range(len(pieces))]
        scan = ScanProblems(tables, columns)
        make_parts(scan, pieces, parts, workers=limits.workers, progress=limits.progress, what="reading rows")
        survey = survey_rows(request.collection, pieces, parts)
        refuse_bad(survey, request.max_bad, request.collection.images_at)
        assembly = Assembly(
            images=survey.images,
            places=survey.places,
            reader=TablesReader([RowReader(t, c.images or "") for t, c in zip(tables, columns, strict=True)]),
            rows=dict(survey.rows),
            fields=partial(row_fields, name, parts),
            schema=row_schema(),
            dropped=[*survey.bad, *survey.repeated],
            notes=notes_on(survey),
        )
        cut_validation(assembly, request.validation_rows, request.seed)
        info = {
            "name": name,
            "task": request.collection.name,
            "seed": request.seed,
            "source": {"name": args["source"], "test": args["test"], "rows": dict(survey.read)},
            "args": args,
            "counts": {"images": len(survey.images), "rows": survey.read.total()},
        }
        return assemble(build, assembly, info, limits, force=force)


def _prepare_drawn(
    request: GeometryRequest, name: str, num_rows: int, out: Path, limits: Limits, force: bool
) -> Prepared:
    if other := request.source or request.test:
        raise DataError(f"--synthetic makes the problems, but {other} is a source of rows", hint="leave one out")
    figures = request.collection.figures
    known = drawn.TOPICS if figures else written.TOPICS
    topics = request.topics or (drawn.USUAL_TOPICS if figures else written.USUAL_TOPICS)
    for topic in topics:
        if topic not in known:
            raise unknown("topic", topic, known, error=DataError)
    args = {
        "synthetic": num_rows,
        "seed": request.seed,
        "topics": list(topics),
        **({"width": request.width} if figures else {}),
        **limits.args,
    }
    refuse_other(out, args, force=force)
    counts = drawn_counts(num_rows)
    make = _drawn if figures else _written
    assembly = make(request, name, topics, counts, limits)
    with building(out) as build:
        info = {
            "name": name,
            "task": request.collection.name,
            "seed": request.seed,
            "source": {"name": "drawn geometry" if figures else "written mathematics", "rows": counts},
            "args": args,
            "counts": {"images": len(assembly.images), "rows": sum(counts.values())},
        }
        return assemble(build, assembly, info, limits, force=force)


def _drawn(
    request: GeometryRequest, name: str, topics: tuple[str, ...], counts: Mapping[str, int], limits: Limits
) -> Assembly:
    problems = drawn.draw_problems(
        counts,
        seed=request.seed,
        values=request.collection.values,
        topics=topics,
        width=request.width,
        progress=limits.progress,
    )
    planned, images, files = drawn_rows(request.collection, problems)
    reader = FileReader(MemoryFiles(files))
    return Assembly(images, list(files), reader, planned, partial(drawn_fields, name), row_schema())


def _written(
    request: GeometryRequest, name: str, topics: tuple[str, ...], counts: Mapping[str, int], limits: Limits
) -> Assembly:
    planned = written_rows(request.collection, written.write_problems(counts, seed=request.seed, topics=topics))
    return Assembly([], [], FileReader(MemoryFiles({})), planned, partial(written_fields, name), row_schema())
