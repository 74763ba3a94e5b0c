"""Entries of the seven domains in the table of tasks, kinds of their rows, commands `vlmrl prep <domain>`."""

from __future__ import annotations

from functools import partial

from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.prep_options import PrepCommand
from vlmrl.tasks.taxonrl.domains import DOMAINS, Domain
from vlmrl.tasks.taxonrl.prepare import prepare_domain
from vlmrl.tasks.taxonrl.task import PROFILES, SPECIES_PAIRS, domain_task, truth_form


def prep_command(domain: Domain) -> PrepCommand:
    """Return the command of a domain."""
    return PrepCommand(
        partial(prepare_domain, domain.name),
        f"{domain.about}\n\n"
        "SOURCE: rows as TaxonRL published them (problem, images, answer, answer_im) in Parquet, JSONL, CSV or a"
        " folder of the `datasets` library, `hub:org/name`, each with `@split` if one split is wanted; or images: a"
        " folder or zip archive whose folders are names, a table with an image column and names, LFW's pairs.txt."
        " Default: the published data set on the hub. --synthetic N draws N training pairs instead.\n\n"
        f"Example: vlmrl prep {domain.name} --synthetic 600 --out data/{domain.name}\n\n"
        f"Example: vlmrl prep {domain.name} rows.parquet --max-prompt-tokens 2048 --on-overlong resize",
        keeps=lambda options: options["synthetic"] is None,
    )


TASKS = {
    name: TaskEntry(
        partial(domain_task, domain),
        domain.summary,
        variants=domain.variant_names,
        main=domain.main,
        profiles=PROFILES,
        truth_form=partial(truth_form, domain.name),
        prep=prep_command(domain),
    )
    for name, domain in DOMAINS.items()
}
KINDS = (SPECIES_PAIRS,)
