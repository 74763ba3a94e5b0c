"""`vlmrl prep` of the mathematics tasks: read, check and write rows, or make problems with exact answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from vlmrl.data.dataset_writer import building, refuse_other
from vlmrl.data.image_scan import FileReader, MemoryFiles
from vlmrl.data.parallel_parts import make_parts
from vlmrl.data.row_images import RowReader
from vlmrl.data.table_pieces import locate_rows, open_row_files
from vlmrl.errors import DataError, unknown
from vlmrl.tasks.dataset_assembly import Assembly, Limits, Prepared, assemble
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
from vlmrl.tasks.table_request import TableRequest
from vlmrl.tasks.table_rows import IMAGES


def prepare_collection(
    collection: Collection,
    request: TableRequest,
    limits: Limits,
    *,
    topics: Sequence[str] = (),
    width: int,
    force: bool = False,
) -> Prepared:
    """Make the dataset of a collection.

    Args:
        topics: of problems that are made here; () = the usual ones.
        width: of drawn figures in pixels.
    Raises: DataError for a source, name, topic or row that cannot be used; nothing is written.
    """
    if request.synthetic is not None:
        return _prepare_drawn(collection, request, topics, width, limits, force)
    if request.table is None:
        raise DataError(
            f"`vlmrl prep {collection.name}` needs a source: there is no published table of its rows",
            hint="name MAYE's folder of JSONL files and images, or a table; --synthetic N makes problems",
        )
    return _prepare_rows(collection, request, limits, force)


def _prepare_rows(collection: Collection, request: TableRequest, limits: Limits, force: bool) -> Prepared:
    name, out = request.place(collection.name)
    args = {**request.args(), **limits.args}
    refuse_other(out, args, force=force)
    located = [locate_rows(*one) for one in request.sources()]
    key = [collection.name, name, [str(one.root) for one in located], args, [one.state for one in located]]
    with building(out, key=key) as build:
        tables = []
        for number, one in enumerate(located):
            folder = build.work / f"table-{number}"
            folder.mkdir(exist_ok=True)
            tables.append(open_row_files(one, folder))
        columns = [find_columns(table, figures=collection.figures) for table in tables]
        pieces = choose_pieces(tables)
        parts = [build.work / f"problems-{i:05d}.jsonl" for i in range(len(pieces))]
        scan = ScanProblems(tables, columns)
        make_parts(scan, pieces, parts, workers=limits.workers, progress=limits.progress, what="reading rows")
        survey = survey_rows(collection, pieces, parts)
        refuse_bad(survey, request.max_bad, collection.images_at)
        assembly = Assembly(
            images=survey.images,
            places=survey.places,
            reader=TablesReader([RowReader(t, c.get(IMAGES, "")) for t, c in zip(tables, columns, strict=True)]),
            rows=dict(survey.rows),
            fields=partial(row_fields, name, parts),
            schema=row_schema(),
            dropped=[*survey.bad, *survey.repeated],
            notes=notes_on(survey),
        )
        cut_validation(assembly, request.validation_rows, request.seed)
        info = {
            "name": name,
            "task": collection.name,
            "seed": request.seed,
            "source": {"name": args["source"], "test": args["test"], "rows": dict(survey.read)},
            "args": args,
            "counts": {"images": len(survey.images), "rows": survey.read.total()},
        }
        return assemble(build, assembly, info, limits, force=force)


def _prepare_drawn(
    collection: Collection, request: TableRequest, topics: Sequence[str], width: int, limits: Limits, force: bool
) -> Prepared:
    name, out = request.place(collection.name)
    counts, figures = request.drawn(), collection.figures
    known = drawn.TOPICS if figures else written.TOPICS
    topics = tuple(topics) or (drawn.USUAL_TOPICS if figures else written.USUAL_TOPICS)
    for topic in topics:
        if topic not in known:
            raise unknown("topic", topic, known, error=DataError)
    args = {**request.args(), "topics": list(topics), **({"width": width} if figures else {}), **limits.args}
    refuse_other(out, args, force=force)
    if figures:
        problems = drawn.draw_problems(
            counts, seed=request.seed, values=collection.values, topics=topics, width=width, progress=limits.progress
        )
        planned, images, files = drawn_rows(collection, problems)
        fields = partial(drawn_fields, name)
    else:
        planned = written_rows(collection, written.write_problems(counts, seed=request.seed, topics=topics))
        images, files, fields = [], {}, partial(written_fields, name)
    assembly = Assembly(images, list(files), FileReader(MemoryFiles(files)), planned, fields, row_schema())
    with building(out) as build:
        info = {
            "name": name,
            "task": collection.name,
            "seed": request.seed,
            "source": {"name": "drawn geometry" if figures else "written mathematics", "rows": counts},
            "args": args,
            "counts": {"images": len(assembly.images), "rows": sum(counts.values())},
        }
        return assemble(build, assembly, info, limits, force=force)
