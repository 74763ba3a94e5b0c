"""Task of a domain: one of its prompts, its truth schema, its rewards, its outcome and its correct answers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.resources import files
from typing import Any

from vlmrl.errors import DataError
from vlmrl.tasks.base import Task, require_prepared
from vlmrl.tasks.pairs.outcome import METRICS, confidence_figures, outcome_as
from vlmrl.tasks.taxonrl.domain import BASELINE, Domain, Variant
from vlmrl.tasks.taxonrl.domain_trace import write_response
from vlmrl.tasks.taxonrl.domain_truth import truth_problems
from vlmrl.tasks.taxonrl.truth_kind import domain_kind

PROFILES = ("default", "taxonrl")


def domain_task(domain: Domain, info: Mapping[str, Any], variant: str | None = None) -> Task:
    """Return the task bound to a dataset made by `vlmrl prep <domain>`.

    Args:
        info: its dataset.json; `truth_fields` lists the fields that are known in its rows, by default all fields.
        variant: name of the variant; None = the main variant, or the baseline if the dataset lacks a field that the
            main variant needs.
    Raises: DataError when the dataset is a table that was not prepared, or lacks a field that the variant needs.
    """
    chosen = _choose(domain, info, variant)
    stated = [domain.truth_field(name) for name in chosen.required_fields]
    template = files("vlmrl.tasks.taxonrl") / domain.name / f"{chosen.name}.jinja"
    own = default_reward(domain, chosen)
    measure = outcome_as(*own)
    return Task(
        name=domain.name,
        summary=domain.summary,
        template=template.read_text(encoding="utf-8"),
        template_file=f"tasks/taxonrl/{domain.name}/{chosen.name}.jinja",
        variables={"labels": list(stated[0].labels)} if stated and stated[0].labels else {},
        validate=partial(truth_problems, domain),
        profiles={"default": own, "taxonrl": published_reward(domain, chosen)},
        outcome=measure(None),
        outcome_as=measure,
        metrics=METRICS,
        figures=confidence_figures,
        by=("distance",),
        trace=partial(write_response, domain, chosen),
        kind=domain_kind(domain, chosen),
        variant=chosen.name,
        variants=domain.variant_names,
    )


def _choose(domain: Domain, info: Mapping[str, Any], name: str | None) -> Variant:
    require_prepared(domain.name, info)
    there = info.get("truth_fields", domain.field_names)
    requested = domain.variant(name or domain.main or BASELINE)
    lacking = [f"`{field}`" for field in requested.required_fields if field not in there]
    if not lacking:
        return requested
    if name is None:
        return domain.variant(BASELINE)
    raise DataError(
        f"variant `{name}` of task `{domain.name}` needs the truth of {', '.join(lacking)}, and no row has it",
        hint=f'set variant = "{BASELINE}", or prepare a source that has these columns (TaxonRL: `answer_im`)',
    )


def default_reward(domain: Domain, variant: Variant) -> tuple[str, dict[str, Any]]:
    """Return the task's own reward of a variant: name in REWARDS and arguments."""
    levels: dict[str, Any] = {"levels": list(variant.required_fields), "levels_decide": "different"}
    if variant.form == "names":
        return "taxonomy", levels
    if variant.form == "verdicts":
        return "taxonomy_relations", levels
    if variant.form == "answer":
        return "pair_answer", {}
    (field,) = (domain.truth_field(name) for name in variant.required_fields)
    return "pair_labels", {
        "tag": field.tag,
        "labels": list(field.labels),
        "aliases": dict(field.aliases),
        "field": field.name,
        "named": variant.form == "named_labels",
        "levels_decide": "different" if field.fixed else False,
    }


def published_reward(domain: Domain, variant: Variant) -> tuple[str, dict[str, Any]]:
    """Return TaxonRL's published reward of a variant, with its bugs: name in REWARDS and arguments.

    For a baseline, only the answer is read from the ground truth.
    """
    return "taxonrl", {"function": variant.published, "layout": domain.layout if variant.required_fields else "answer"}
