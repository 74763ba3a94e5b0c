"""`vlmrl prep`: raw data -> a dataset folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vlmrl.cli.output import JSON_HELP, console, emit, say
from vlmrl.errors import Interruption
from vlmrl.visible import visible

if TYPE_CHECKING:
    from vlmrl.tasks.assemble import Limits, Prepared

FORCE_HELP = "Replace another dataset at the same place."
TOKENS_HELP = "Limit of a prompt with its images, in tokens; the longest rows are seen to as --on-overlong says."
OVERLONG_HELP = "Rows over --max-prompt-tokens: fail, resize (large images are made smaller), or drop."
WORKERS_HELP = "Processes; default: one a core."
DOMAINS = {
    "fungi": "Fungi, same species or not: order, family, genus and species of both.",
    "bird": "Birds, same species or not: order, family and genus of both.",
    "sea_star": "Sea stars, same individual or not: the species of both.",
    "chimp": "Chimpanzees, same individual or not: the age group of both.",
    "gorilla": "Gorillas, same individual or not: the type of both (silverback, adult female, ...).",
    "human": "Faces, same person or not (LFW, CPLFW).",
    "whale": "Whales, same individual or not.",
}
"""Domain -> first line of its help; a test holds it to the table of tasks, which is not imported at start."""
prep = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make a dataset folder from raw data.")


def register(app: typer.Typer) -> None:
    for name, summary in DOMAINS.items():
        prep.command(name, help=_domain_help(name, summary))(_domain_command(name))
    app.add_typer(prep, name="prep")


@prep.command("digits")
def digits(
    out: Path = typer.Option(Path("data/digits"), help="Dataset folder to make."),
    seed: int = typer.Option(0, help="Seed of splits and pairs."),
    pairs: int = typer.Option(6000, min=2, help="Training pairs (start has up to 400, validation 300, test 1,200)."),
    force: bool = typer.Option(False, "--force", help=FORCE_HELP),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Pairs of real handwritten digits: same digit or not. Needs no download.

    Example: vlmrl prep digits --out data/digits --seed 0
    """
    from vlmrl.tasks.digits.task import prepare_digits

    _show(prepare_digits(out, seed=seed, num_pairs=pairs, force=force), as_json)


@prep.command("pairs")
def pairs(
    source: Path = typer.Option(..., help="Folder or zip archive of images; the folders above an image are its names."),
    levels: str = typer.Option(
        ..., help="Names of the last folders above an image, coarse to fine: alphabet,character"
    ),
    name: str | None = typer.Option(None, help="Name of the dataset; default: that of the source."),
    out: Path | None = typer.Option(None, help="Dataset folder to make; default: data/NAME."),
    num_pairs: int = typer.Option(6000, "--pairs", min=2, help="Training pairs."),
    validation_pairs: int = typer.Option(300, min=2, help="Validation pairs."),
    test_pairs: int = typer.Option(1200, min=2, help="Test pairs."),
    seed: int = typer.Option(0, help="Seed of splits and pairs."),
    unseen_classes: int = typer.Option(0, min=0, help="Whole classes that only the test has: half of its pairs."),
    distance_shares: str | None = typer.Option(None, help="Share of each distance of different pairs: 1=0.5,2=0.5"),
    max_prompt_tokens: int | None = typer.Option(None, min=1, help=TOKENS_HELP),
    on_overlong: str = typer.Option("fail", help=OVERLONG_HELP),
    workers: int | None = typer.Option(None, min=1, help=WORKERS_HELP),
    force: bool = typer.Option(False, "--force", help=FORCE_HELP),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Pairs of images, same class or not, from any labelled image folder whose path spells the hierarchy.

    Example: vlmrl prep pairs --source images.zip --levels family,species --out data/birds
    """
    from vlmrl.tasks.pairs.collect import parse_shares, prepare_folder

    counts = {"train": num_pairs, "validation": validation_pairs, "test": test_pairs}
    with _tells_what_is_kept():
        made = prepare_folder(
            source, [level.strip() for level in levels.split(",")], name=name, out=out, num_pairs=counts, seed=seed,
            unseen_classes=unseen_classes, distance_shares=parse_shares(distance_shares), force=force,
            limits=_limits(max_prompt_tokens, on_overlong, workers),
        )  # fmt: skip
    _show(made, as_json)


def _domain_help(name: str, summary: str) -> str:
    return (
        f"{summary}\n\n"
        "SOURCE: rows as TaxonRL published them (problem, images, answer, answer_im) in Parquet, JSONL, CSV or a"
        " folder of the `datasets` library, `hub:org/name`, each with `@split` if one split is wanted; or images: a"
        " folder or zip archive whose folders are names, a table with an image column and names, LFW's pairs.txt."
        " Default: the published data set on the hub. --synthetic N draws N training pairs instead.\n\n"
        f"Example: vlmrl prep {name} --synthetic 600 --out data/{name}\n\n"
        f"Example: vlmrl prep {name} rows.parquet --max-prompt-tokens 2048 --on-overlong resize"
    )


def _domain_command(domain: str) -> Callable[..., None]:
    def command(
        source: str | None = typer.Argument(None, help="Rows or images, as described above."),
        synthetic: int | None = typer.Option(None, min=20, help="Draw this many training pairs instead of reading."),
        out: Path | None = typer.Option(None, help="Dataset folder to make; default: data/NAME."),
        name: str | None = typer.Option(None, help="Name of the dataset; default: the domain."),
        seed: int = typer.Option(0, help="Seed of splits, pairs and drawings."),
        validation_pairs: int = typer.Option(
            300, min=0, help="Rows cut off train where the source has no validation split (0: none); pairs to make."
        ),
        num_pairs: int = typer.Option(6000, "--pairs", min=2, help="Raw images: training pairs to make."),
        test_pairs: int = typer.Option(1200, min=2, help="Raw images: test pairs to make."),
        levels: str | None = typer.Option(
            None, help="Raw images: what the folders above an image are, outermost first: type,individual"
        ),
        max_bad: float = typer.Option(0.01, min=0, max=1, help="Largest share of wrong rows that are left out."),
        max_prompt_tokens: int | None = typer.Option(None, min=1, help=TOKENS_HELP),
        on_overlong: str = typer.Option("fail", help=OVERLONG_HELP),
        images_root: Path | None = typer.Option(None, help="Folder that image paths lead from; default: the table's."),
        workers: int | None = typer.Option(None, min=1, help=WORKERS_HELP),
        force: bool = typer.Option(False, "--force", help=FORCE_HELP),
        as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
    ) -> None:
        from vlmrl.tasks.taxonrl.prepare import DomainRequest, prepare_domain

        request = DomainRequest(
            domain=domain,
            source=source,
            synthetic=synthetic,
            out=out,
            name=name,
            seed=seed,
            num_pairs={"train": num_pairs, "validation": validation_pairs, "test": test_pairs},
            levels=[level.strip() for level in levels.split(",")] if levels else None,
            max_bad=max_bad,
            images_root=images_root,
        )
        with _tells_what_is_kept(keeps=synthetic is None):
            made = prepare_domain(request, _limits(max_prompt_tokens, on_overlong, workers), force=force)
        _show(made, as_json)

    return command


@contextmanager
def _tells_what_is_kept(*, keeps: bool = True) -> Iterator[None]:
    """Say in an interruption what is left of the work. `keeps`: the parts that are done."""
    try:
        yield
    except KeyboardInterrupt:
        kept = "the parts that are done are kept" if keeps else "nothing was written"
        raise Interruption("prep", kept) from None


def _limits(max_prompt_tokens: int | None, on_overlong: str, workers: int | None) -> Limits:
    from vlmrl.cli.progress import PartCounter
    from vlmrl.tasks.assemble import parse_limits

    return parse_limits(max_prompt_tokens, on_overlong, workers, PartCounter())


def _show(made: Prepared, as_json: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    info = made.info
    for line in made.found:
        say(f"found: {line}")
    table = Table(title=Text(visible(f"{made.path.name}: {made.outcome}")))
    columns = ["split", "rows", "same", "by distance", "images"]
    if not any(fields["by_distance"] for fields in info["splits"].values()):
        columns.remove("by distance")
    for column in columns:
        table.add_column(column, justify="left" if column == "split" else "right")
    for split, fields in info["splits"].items():
        cells = {key: f"{fields[key]:,}" for key in ("rows", "same", "images")}
        cells |= {"split": split, "by distance": "  ".join(f"{d}: {n:,}" for d, n in fields["by_distance"].items())}
        table.add_row(*(Text(visible(cells[column])) for column in columns))
    console().print(table)
    show_doctor(info["doctor"])
    reports = [(split, report) for split, fields in info["splits"].items() for report in fields.get("reports", ())]
    for split, report in reports[:5]:
        details = ", ".join(f"{key} {value}" for key, value in report.items() if key != "reason")
        say(f"note: {split}: {report['reason']}: {details}")
    if len(reports) > 5:
        say(f"note: {len(reports) - 5} more notes in dataset.json")
    say(f"{made.path}  fingerprint {info['fingerprint'][:16]}")
    emit({"path": str(made.path), "outcome": made.outcome, "found": list(made.found), "info": dict(info)}, as_json)


def show_doctor(report: Mapping[str, Any]) -> None:
    """The data doctor's checks as a table: what was looked at, the verdict, what was found."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="data doctor")
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("finding", overflow="fold")
    for check in report["checks"]:
        table.add_row(*(Text(visible(check[column])) for column in ("check", "verdict", "finding")))
    console().print(table)
