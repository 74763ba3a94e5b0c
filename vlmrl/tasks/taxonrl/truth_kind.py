"""Kinds of TaxonRL's rows, which their truths identify, and the form of these truths in a table of responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vlmrl.data.dataset_visit import RowLabels
from vlmrl.tasks.pairs.answer_form import AnswerForm, FormField
from vlmrl.tasks.pairs.play import player
from vlmrl.tasks.pairs.truth_kind import PAIRS, pair_labels_of
from vlmrl.tasks.taxonrl.domain import Domain, Variant
from vlmrl.tasks.taxonrl.domains import DOMAINS
from vlmrl.tasks.taxonrl.layouts import LAYOUTS
from vlmrl.tasks.truth_kinds import RowKind, Truth, TruthForm
from vlmrl.types import Row


def has_species(truth: Truth) -> bool:
    return "same" in truth and bool(truth.get("species"))


def labels_of(row: Row) -> RowLabels:
    """Return the labels for the data doctor: those of pairs, and the species in the images if the rows ask for them."""
    labels = pair_labels_of(row)
    if labels.group or labels.distance is None or not row.truth.get("species"):
        return labels
    return labels._replace(group="species", names=tuple(str(n) for n in row.truth["species"] if n is not None))


SPECIES_PAIRS = replace(PAIRS, matches=has_species, labels=labels_of, specificity=2)


def domain_kind(domain: Domain, variant: Variant) -> RowKind:
    """Return the kind of a domain's rows. In the probe, its answers have the form of the variant."""
    return replace(SPECIES_PAIRS, play=player(answer_form(domain, variant)))


def answer_form(domain: Domain, variant: Variant) -> AnswerForm:
    """Return the form of a variant's answers."""
    fields = [domain.truth_field(name) for name in variant.required_fields]
    return AnswerForm(variant.form, tuple(FormField(f.name, f.tag, tuple(f.labels), f.level) for f in fields))


def truth_form(domain: str, truth: Truth, columns: Sequence[str]) -> TruthForm:
    """Return the form of a domain's truths in a table: typed fields, or TaxonRL's `;`-separated line."""
    fields = ("same", "distance", *DOMAINS[domain].field_names)
    layout = DOMAINS[domain].layout
    return TruthForm(
        fields, partial(read_line, layout), partial(write_line, layout), info=partial(known_fields_of, domain)
    )


def read_line(layout: str, text: str) -> Truth:
    return LAYOUTS[layout if ";" in text else "answer"].read(text)


def write_line(layout: str, truth: Truth) -> str:
    """Return a truth, which may contain errors, as a `;`-separated line. Raises: RewardError as `Layout.write`."""
    return LAYOUTS[layout].write(truth, sound=False)


def known_fields_of(domain: str, truth: Truth, is_sure: bool) -> Mapping[str, Any]:
    """Return the truth fields that are filled in the first row; {} if that row may not represent the others."""
    if not is_sure:
        return {}
    return {"truth_fields": [name for name in DOMAINS[domain].field_names if truth.get(name) is not None]}
