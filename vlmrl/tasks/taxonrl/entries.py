"""Entries of the seven domains in the table of tasks, kinds of their rows, commands `vlmrl prep <domain>`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from vlmrl.tasks.dataset_assembly import Limits, Prepared
from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.prep_options import Option, PrepCommand
from vlmrl.tasks.taxonrl import prepare
from vlmrl.tasks.taxonrl.domains import DOMAINS, Domain
from vlmrl.tasks.taxonrl.task import PROFILES, SPECIES_PAIRS, domain_task, truth_form

CUT_HELP = "Rows cut off train where the source has no validation split (0: none); pairs to make."
LEVELS_HELP = "Raw images: what the folders above an image are, outermost first: type,individual"


def prep(
    domain: str,
    source: Annotated[str | None, Option("Rows or images, as described above.", positional=True)] = None,
    synthetic: Annotated[int | None, Option("Draw this many training pairs instead of reading.", min=20)] = None,
    out: Annotated[Path | None, Option("Dataset folder to make; default: data/NAME.")] = None,
    name: Annotated[str | None, Option("Name of the dataset; default: the domain.")] = None,
    seed: Annotated[int, Option("Seed of splits, pairs and drawings.")] = 0,
    validation_pairs: Annotated[int, Option(CUT_HELP, min=0)] = 300,
    num_pairs: Annotated[int, Option("Raw images: training pairs to make.", flag="--pairs", min=2)] = 6000,
    test_pairs: Annotated[int, Option("Raw images: test pairs to make.", min=2)] = 1200,
    levels: Annotated[str | None, Option(LEVELS_HELP)] = None,
    max_bad: Annotated[float, Option("Largest share of wrong rows that are left out.", min=0, max=1)] = 0.01,
    images_root: Annotated[
        Path | None, Option("Folder that image paths are relative to; default: the table's.")
    ] = None,
    *,
    limits: Limits,
) -> Prepared:
    """Make the dataset of a domain; see `prepare.prepare_domain`."""
    request = prepare.DomainRequest(
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
    return prepare.prepare_domain(request, limits)


def prep_command(domain: Domain) -> PrepCommand:
    """Return the command of a domain."""
    return PrepCommand(
        partial(prep, domain.name),
        f"{domain.about}\n\n"
        "SOURCE: rows as TaxonRL published them (problem, images, answer, answer_im) in Parquet, JSONL, CSV or a"
        " folder of the `datasets` library, `hub:org/name`, each with `@split` if one split is wanted; or images: a"
        " folder or zip archive whose folders are names, a table with an image column and names, LFW's pairs.txt."
        " Default: the published data set on the hub. --synthetic N draws N training pairs instead.\n\n"
        f"Example: vlmrl prep {domain.name} --synthetic 600 --out data/{domain.name}\n\n"
        f"Example: vlmrl prep {domain.name} rows.parquet --max-prompt-tokens 2048 --on-overlong resize",
        keeps=lambda options: options["synthetic"] is None,
    )


def _entry(domain: Domain) -> TaskEntry:
    return TaskEntry(
        partial(domain_task, domain),
        domain.summary,
        variants=domain.variant_names,
        main=domain.main,
        profiles=PROFILES,
        truth_form=partial(truth_form, domain.name),
        prep=prep_command(domain),
    )


TASKS = {name: _entry(domain) for name, domain in DOMAINS.items()}
KINDS = (SPECIES_PAIRS,)
