"""Entries of the seven domains in the table of tasks, and the kind of their rows."""

from __future__ import annotations

from functools import partial

from vlmrl.tasks.entry import TaskEntry
from vlmrl.tasks.taxonrl.command import prep_command
from vlmrl.tasks.taxonrl.domain import Domain
from vlmrl.tasks.taxonrl.domain_task import PROFILES, domain_task
from vlmrl.tasks.taxonrl.domains import DOMAINS
from vlmrl.tasks.taxonrl.truth_kind import SPECIES_PAIRS, truth_form


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
