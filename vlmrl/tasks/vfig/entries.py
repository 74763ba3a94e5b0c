"""Entry of the task figures in the table of tasks, the kind of its rows, and the command `vlmrl prep figures`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from vlmrl.errors import DataError
from vlmrl.tasks.dataset_assembly import Limits, Prepared, check_name
from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.own_prep import prepare_own
from vlmrl.tasks.prep_options import Option, PrepCommand
from vlmrl.tasks.vfig.drawn.figure import DrawnSettings
from vlmrl.tasks.vfig.figure_sources import FigureSource, Filters, PictureSizes, Plan, bench_source, named_source
from vlmrl.tasks.vfig.task import FIGURES, NAME, SUMMARY, figures_task
from vlmrl.tasks.vfig.truth import truth_form

MIN_BASIC, MAX_COMPLEX = 0.4, 50
"""Filter of the code of published figures. Source: the appendix of the paper on VFig (arXiv 2603.24575)."""
SVG_HELP = "Folder of SVG files, with those in folders within it; NAME=FOLDER names the source. Several times."
SHAREGPT_HELP = "JSON or JSONL with messages and images; NAME=FILE names the source. Several times."
PARQUET_HELP = "Parquet with response (or reward_model) and images, data_source; NAME=FILE. Several times."
BENCH_HELP = "Held-out figures, for the split test: a folder of SVG files, .json, .jsonl or .parquet. Several times."
BESIDE_HELP = "Other dataset of this task that is used with this one: no figure that it holds out is in train here."
BASIC_HELP = f"Least share of basic shapes and lines; default: {MIN_BASIC}, 0 for drawn figures. 0: off."
COMPLEX_HELP = f"Largest number of paths and polygons; default: {MAX_COMPLEX}, no limit for drawn figures."
CHARS_HELP = "Largest number of characters of the code."
ASPECT_HELP = "Largest ratio of the sides of a picture."
DIFFERENCE_HELP = "Leave out images that differ from the drawing of their code by more, 0 to 1; default: only count."
FEWEST_HELP = "Smallest number of shapes in a drawn figure; default: 3, with --simple 1."
MOST_HELP = "Largest number of shapes in a drawn figure; default: 12, with --simple 3."
ARROW_HELP = "Probability of an arrow in a --simple figure of several shapes."
PIXELS_HELP = "Larger pictures are scaled down to this area in pixels."


def prep(
    svg: Annotated[list[str] | None, Option(SVG_HELP)] = None,
    sharegpt: Annotated[list[str] | None, Option(SHAREGPT_HELP)] = None,
    parquet: Annotated[list[str] | None, Option(PARQUET_HELP)] = None,
    synthetic: Annotated[int, Option("Draw this many training rows.", min=0)] = 0,
    simple: Annotated[bool, Option("Draw few flat shapes, with very short code.")] = False,
    fewest: Annotated[int | None, Option(FEWEST_HELP, min=1)] = None,
    most: Annotated[int | None, Option(MOST_HELP, min=1)] = None,
    arrow_chance: Annotated[float, Option(ARROW_HELP, min=0, max=1)] = 0.5,
    seed: Annotated[int, Option("Seed of drawn figures.")] = 0,
    bench: Annotated[list[str] | None, Option(BENCH_HELP)] = None,
    synthetic_bench: Annotated[int, Option("Draw this many rows for the split test.", min=0)] = 0,
    beside: Annotated[list[Path] | None, Option(BESIDE_HELP)] = None,
    label: Annotated[str | None, Option("Name of the only source; default: of its folder or file.")] = None,
    image_root: Annotated[Path | None, Option("Folder that image paths start from; default: the file's.")] = None,
    val_share: Annotated[float, Option("Share of the figures in validation.", min=0, max=0.5)] = 0.1,
    min_basic: Annotated[float | None, Option(BASIC_HELP, min=0, max=1)] = None,
    max_complex: Annotated[int | None, Option(COMPLEX_HELP, min=0)] = None,
    max_chars: Annotated[int, Option(CHARS_HELP, min=100)] = 20_000,
    max_aspect: Annotated[float, Option(ASPECT_HELP, min=1)] = 8.0,
    min_image: Annotated[int, Option("Least shorter side of an image in pixels.", min=1)] = 32,
    max_difference: Annotated[float | None, Option(DIFFERENCE_HELP, min=0, max=1)] = None,
    max_pixels: Annotated[int, Option(PIXELS_HELP, min=3136, max=16_777_216)] = 1_003_520,
    min_side: Annotated[int, Option("Smaller drawings get this shorter side in pixels.", min=1, max=1344)] = 64,
    max_bad: Annotated[float, Option("Largest share of unreadable rows that are left out.", min=0, max=1)] = 0.01,
    out: Annotated[Path | None, Option("Dataset folder to make; default: data/NAME.")] = None,
    name: Annotated[str | None, Option("Name of the dataset; default: the task's.")] = None,
    *,
    limits: Limits,
) -> Prepared:
    """Make the dataset. Raises: DataError for an option, source or row that cannot be used; nothing is written."""
    sources = _sources({"svg": svg, "sharegpt": sharegpt, "parquet": parquet}, image_root, label)
    benches = [bench_source(text, image_root) for text in bench or []]
    if not (sources or benches or synthetic or synthetic_bench):
        raise DataError("no figures are named", hint="--svg FOLDER, --sharegpt FILE, --parquet FILE, or --synthetic N")
    drawn = Filters(min_basic, max_complex)
    filters = Filters(
        min_basic=MIN_BASIC if min_basic is None else min_basic or None,
        max_complex=MAX_COMPLEX if max_complex is None else max_complex,
        max_chars=max_chars,
        repeats=True,
        max_aspect=max_aspect,
        min_image=min_image,
        max_difference=max_difference,
    )
    plan = Plan(
        sources=sources,
        filters=filters,
        sizes=PictureSizes(max_pixels, min_side),
        drawn=synthetic,
        drawn_bench=synthetic_bench,
        drawn_settings=DrawnSettings(simple, fewest=fewest, most=most, arrow_chance=arrow_chance),
        drawn_filters=drawn,
        seed=seed,
        benches=benches,
        beside=list(beside or []),
        val_share=val_share,
        max_bad=max_bad,
        workers=limits.workers,
        progress=limits.progress,
    )
    name = check_name(name or NAME)
    args = {
        "sources": [source.short for source in plan.sources],
        "benches": [source.short for source in plan.benches],
        "beside": [folder.name for folder in plan.beside],
        "filters": asdict(plan.filters),
        "sizes": asdict(plan.sizes),
        "synthetic": plan.drawn,
        "synthetic_bench": plan.drawn_bench,
        **({**asdict(plan.drawn_settings), "seed": plan.seed} if plan.drawn or plan.drawn_bench else {}),
        **({"drawn_filters": asdict(plan.drawn_filters)} if plan.drawn else {}),
        "val_share": plan.val_share,
        "max_bad": plan.max_bad,
        **limits.args,
    }
    from vlmrl.tasks.vfig.collecting import Collector  # it loads the renderer, which no other command needs

    collector = Collector(plan)
    task = replace(figures_task({}), prep=lambda **_: collector.splits(), notes=lambda _: collector.notes())
    place = out or Path("data") / name
    return prepare_own(task, args, place, limits, name=name, source=collector.report.fields)


def _sources(options: dict[Any, list[str] | None], image_root: Path | None, label: str | None) -> list[FigureSource]:
    given = [(kind, text) for kind, texts in options.items() for text in texts or []]
    if label is not None and len(given) != 1:
        raise DataError(f"--label names one source, but there are {len(given)}", hint="write NAME=PATH for each")
    return [named_source(kind, text, image_root, label) for kind, text in given]


PREP = PrepCommand(
    prep,
    "Figures with their SVG code.\n\n"
    "Sources: --svg (folders of SVG files, which are drawn), --sharegpt and --parquet (code with its image), and "
    "--synthetic (drawn diagrams of labelled shapes and arrows, which need no download). Several are mixed. Equal "
    "figures are kept once, and those of --bench are in no other split.\n\n"
    "Example: vlmrl prep figures --synthetic 600 --synthetic-bench 100 --out data/figures\n\n"
    "Example: vlmrl prep figures --sharegpt arxiv.json --svg icons=icons/ --bench bench/arxiv --out data/figures",
)


TASKS = {NAME: TaskEntry(figures_task, SUMMARY, truth_form=truth_form, prep=PREP)}
KINDS = (FIGURES,)
