"""`vlmrl prep <domain>`: what a source is, and who makes a dataset of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vlmrl.errors import DataError
from vlmrl.tasks.assemble import Limits, Prepared
from vlmrl.tasks.domain import Domain
from vlmrl.tasks.domain_prep import MAX_BAD, VALIDATION_PAIRS, RowPlan, prepare_rows
from vlmrl.tasks.domains import DOMAINS

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class DomainRequest:
    """What a person asked for.

    Args:
        domain: its name.
        source: a table, a folder, an archive, or `hub:name`; None = the published data set.
        synthetic: draw so many training pairs instead; None = read.
        out, name: default data/<name>, and the domain's name.
        num_pairs: split -> pairs to make of raw images; of a table, `validation` alone counts.
        levels: what the folders above a raw image are, outermost first; None = the domain's own.
    """

    domain: str
    source: str | None = None
    synthetic: int | None = None
    out: Path | None = None
    name: str | None = None
    seed: int = 0
    num_pairs: Mapping[str, int] = field(
        default_factory=lambda: {"train": 6000, "validation": VALIDATION_PAIRS, "test": 1200}
    )
    levels: Sequence[str] | None = None
    max_bad: float = MAX_BAD
    images_root: Path | None = None


def prepare_domain(request: DomainRequest, limits: Limits, *, force: bool = False) -> Prepared:
    """Make the dataset. Raises: DataError for a source, name or row that cannot be used."""
    domain = DOMAINS[request.domain]
    name = request.name or domain.name
    if not NAME.fullmatch(name):
        raise DataError(f"the dataset name {name!r} cannot be used", hint="give --name with letters, digits, . _ and -")
    source = request.source or published(domain)
    out = request.out or Path("data") / name
    plan = RowPlan(source, name, request.seed, request.num_pairs["validation"], request.max_bad, request.images_root)
    return prepare_rows(out, domain, plan, limits, force=force)


def published(domain: Domain) -> str:
    """The hub name of the domain's published data set: one with intermediate truth, where there is one."""
    with_truth = [name for name in domain.datasets if re.search(r"-im(-|$)", name)]
    return f"hub:{(with_truth or domain.datasets)[0]}"
