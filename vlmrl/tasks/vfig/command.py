"""Command `vlmrl prep figures`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from vlmrl.errors import DataError
from vlmrl.tasks.dataset_assembly import Limits, Prepared, check_name, drawn_counts, short_source
from vlmrl.tasks.options import Option, PrepCommand
from vlmrl.tasks.own_prep import prepare_own
from vlmrl.tasks.vfig.drawn.figure import DrawnSettings
from vlmrl.tasks.vfig.filters import Filters
from vlmrl.tasks.vfig.rows import Shares, drawn_rows, source_rows
from vlmrl.tasks.vfig.sources import read_sources
from vlmrl.tasks.vfig.task import NAME, figures_task


def prep(
    sources: Annotated[str | None, Option("Sources of SVG code, as described above.", positional=True)] = None,
    bench: Annotated[
        str | None, Option("Sources whose figures become the test split; train and validation do without them.")
    ] = None,
    synthetic: Annotated[int | None, Option("Draw this many training figures instead of reading.", min=20)] = None,
    simple: Annotated[bool, Option("Drawn figures: one to three shapes on 64 x 64 pixels, for tiny models.")] = False,
    out: Annotated[Path | None, Option("Dataset folder to make; default: data/NAME.")] = None,
    name: Annotated[str | None, Option("Name of the dataset; default: figures.")] = None,
    seed: Annotated[int, Option("Seed of drawn figures.")] = 0,
    val_share: Annotated[float, Option("Share of the figures for validation.", min=0, max=0.9)] = 0.1,
    start_share: Annotated[
        float, Option("Share of the other figures for a split `start`, for supervised training.", min=0, max=0.9)
    ] = 0.0,
    min_basic: Annotated[
        float, Option("Least share of basic shapes and lines among the shapes (VFig: 0.4).", min=0, max=1)
    ] = 0.0,
    max_complex: Annotated[int, Option("Most paths and polygons (VFig: 50); 0: any number.", min=0)] = 0,
    max_chars: Annotated[int, Option("Most characters of the code.", min=100, max=1_000_000)] = 30_000,
    max_aspect: Annotated[float, Option("Largest ratio of the picture's sides.", min=1, max=1000)] = 8.0,
    *,
    limits: Limits,
    force: bool = False,
) -> Prepared:
    """Make the dataset. Raises: DataError for an option or source that cannot be used; nothing is written."""
    whole = check_name(name or NAME)
    folder = out or Path("data") / whole
    task = figures_task({"name": whole, "task": NAME})
    if synthetic is not None:
        if other := sources or bench:
            raise DataError(f"--synthetic makes the figures, but {other} is a source", hint="leave one out")
        settings = DrawnSettings(simple=simple)
        counts = drawn_counts(synthetic)
        args: dict[str, Any] = {"synthetic": synthetic, "simple": simple, "seed": seed}
        drawing = replace(task, prep=lambda **_: drawn_rows(counts, settings, seed))
        return prepare_own(drawing, {**args, **limits.args}, folder, limits, name=whole, force=force)
    if not sources:
        raise DataError(
            "no source of figures is named", hint="name a folder of SVG files or a table, or draw some: --synthetic 600"
        )
    filters, shares = Filters(min_basic, max_complex, max_chars, max_aspect), Shares(val_share, start_share)
    args = {
        "sources": [short_source(part.strip()) for part in sources.split(",")],
        "bench": [short_source(part.strip()) for part in bench.split(",")] if bench else [],
        **_fields(filters),
        **_fields(shares),
    }

    def read(**_: Any):
        tests = read_sources(bench) if bench else ()
        return source_rows(read_sources(sources), tests, filters, shares, limits.workers)

    return prepare_own(replace(task, prep=read), {**args, **limits.args}, folder, limits, name=whole, force=force)


def _fields(settings: Filters | Shares) -> Mapping[str, Any]:
    return dict(vars(settings))


PREP = PrepCommand(
    prep,
    "Figures with their SVG code, from code that you have, or drawn.\n\n"
    "SOURCES: folders of .svg files, or tables (Parquet, JSONL, JSON, `hub:org/name`) with the code in a column "
    "(svg, response, ground_truth_code), within `reward_model`, or in the last answer of `messages`. Commas separate "
    "several; LABEL=PATH names one. Each figure is drawn anew from its code, and figures that look the same are in one "
    "split alone. --synthetic N draws labelled diagrams instead.\n\n"
    "Example: vlmrl prep figures icons=svg/icons,charts.json --bench svg/bench --out data/figures\n\n"
    "Example: vlmrl prep figures --synthetic 600 --out data/drawn",
    keeps=lambda options: False,
)
