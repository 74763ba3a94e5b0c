"""`vlmrl prep`: raw data -> a dataset folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vlmrl.cli.output import JSON_HELP, console, emit

if TYPE_CHECKING:
    from vlmrl.tasks.pairs.prep import Prepared

FORCE_HELP = "Replace another dataset at the same place."
prep = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make a dataset folder from raw data.")


def register(app: typer.Typer) -> None:
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
    force: bool = typer.Option(False, "--force", help=FORCE_HELP),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Pairs of images, same class or not, from any labelled image folder whose path spells the hierarchy.

    Example: vlmrl prep pairs --source images.zip --levels family,species --out data/birds
    """
    from vlmrl.tasks.pairs.collect import parse_shares, prepare_folder

    counts = {"train": num_pairs, "validation": validation_pairs, "test": test_pairs}
    with console().status(f"reading {source}"):
        made = prepare_folder(
            source, [level.strip() for level in levels.split(",")], name=name, out=out, num_pairs=counts, seed=seed,
            unseen_classes=unseen_classes, distance_shares=parse_shares(distance_shares), force=force,
        )  # fmt: skip
    _show(made, as_json)


def _show(made: Prepared, as_json: bool) -> None:
    from rich.table import Table

    info, err = made.info, console()
    for line in made.found:
        err.print(f"found: {line}")
    table = Table(title=f"{made.path.name}: {made.outcome}")
    for column in ("split", "rows", "same", "by distance", "images", "~tokens"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for split, fields in info["splits"].items():
        tokens = info["histograms"][split]["prompt_tokens"]
        distances = "  ".join(f"{d}: {n}" for d, n in fields["by_distance"].items())
        table.add_row(
            split,
            str(fields["rows"]),
            str(fields["same"]),
            distances,
            str(fields["images"]),
            f"{tokens['min']}-{tokens['max']}",
        )
    err.print(table)
    dropped = info["dropped"]
    if dropped:
        err.print(
            f"dropped: {len(dropped)}, such as {dropped[0]['origin']}: {dropped[0]['reason']} (all in dataset.json)"
        )
    reports = [(split, report) for split, fields in info["splits"].items() for report in fields["reports"]]
    for split, report in reports[:5]:
        details = ", ".join(f"{key} {value}" for key, value in report.items() if key != "reason")
        err.print(f"note: {split}: {report['reason']}: {details}")
    if len(reports) > 5:
        err.print(f"note: {len(reports) - 5} more notes in dataset.json")
    err.print(f"{made.path}  fingerprint {info['fingerprint'][:16]}")
    emit({"path": str(made.path), "outcome": made.outcome, "found": list(made.found), "info": dict(info)}, as_json)
