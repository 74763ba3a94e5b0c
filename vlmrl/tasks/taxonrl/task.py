"""Task of a domain: one of its prompts, its truth schema, its rewards, its outcome and its correct answers.

Correct answers, for `vlmrl sft`, are tags, and sentences that follow from the truth alone. Rows are recognised by their
truths, also in a table of responses.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vlmrl.data.doctor import RowLabels
from vlmrl.errors import DataError
from vlmrl.tasks.base import Task, prepared_task
from vlmrl.tasks.pairs.answer import AnswerForm
from vlmrl.tasks.pairs.probe_responses import pair_probe
from vlmrl.tasks.pairs.task import METRICS, PAIRS, confidence_figures, draw_probability, outcome_as, pair_labels_of
from vlmrl.tasks.taxonrl.domains import (
    BASELINE,
    DISTANCES,
    DOMAINS,
    LAYOUTS,
    Domain,
    Field,
    Variant,
    contradictions,
    names_agree,
)
from vlmrl.tasks.truth_kinds import Truth, TruthForm
from vlmrl.types import Row

FORBIDDEN = ";<>\n"
"""Characters that no name may contain, because answers and TaxonRL's layouts use them as separators."""


def truth_problems(domain: Domain, truth: Mapping[str, Any]) -> list[str]:
    """Return every mistake in the truth of a row, in words; [] = there is none.

    `same` must be true or false. A field must hold two names, each None if unknown, and from its vocabulary if that is
    closed. The known names, `same` and `distance` must not contradict each other.
    """
    same = truth.get("same")
    wrong = [] if isinstance(same, bool) else [f"`same` is {same!r}, not true or false"]
    for field in domain.fields:
        wrong += _field_problems(field, truth.get(field.name))
    wrong += _distance_problems(domain, truth.get("distance"))
    return wrong or contradictions(LAYOUTS[domain.layout], truth)


def _field_problems(field: Field, pair: Any) -> list[str]:
    if pair is None:
        return []
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        return [f"`{field.name}` is {pair!r}, not two names"]
    wrong = []
    for name in pair:
        if name is None:
            continue
        if not isinstance(name, str) or not name.strip():
            wrong.append(f"`{field.name}` has {name!r}, which is neither a name nor null")
        elif any(c in name for c in FORBIDDEN) or name != name.strip():
            wrong.append(f"`{field.name}` has the name {name!r}, which no answer can hold (; < > or outer blanks)")
        elif field.labels and name not in field.labels:
            wrong.append(f"`{field.name}` has the label {name!r}, which is none of {', '.join(field.labels)}")
    return wrong


def _distance_problems(domain: Domain, distance: Any) -> list[str]:
    if distance is None:
        return []
    if not domain.levels:
        return [f"`distance` is {distance!r}, but `{domain.name}` has no hierarchy"]
    if type(distance) is not int or distance not in range(len(DISTANCES)):
        return [f"`distance` is {distance!r}, not a whole number from 0 to {len(DISTANCES) - 1}"]
    return []


LEVELS_UP = ("genus", "family", "order")
PLURALS = {"order": "orders", "family": "families", "genus": "genera"}


def write_response(domain: Domain, variant: Variant, row: Row, rng: random.Random) -> str:
    """Return a correct response to a row: the tags down to the first level that differs, then the probability.

    The probability has four decimals and varies as in `pairs.task.write_trace`. The response follows the domain's own
    prompt. It therefore earns the maximum of every part except the answer, with the task's own reward and with the
    published reward.

    Raises: DataError when a name that the response must state is not known for the row.
    """
    lines, differs = [], False
    for name in variant.required_fields:
        field, pair = domain.truth_field(name), row.truth.get(name)
        agree = names_agree(pair, name)
        if agree is None and variant.form == "agreements":
            distance = row.truth.get("distance")  # 1 = the species differ
            agree = None if distance is None else distance < 2 + LEVELS_UP.index(name)
        if agree is None:
            raise DataError(
                f"the row does not know its `{name}`: no correct response can be written",
                where=row.place,
                hint=f'leave such rows out, or set variant = "{BASELINE}"',
            )
        step = [_words(domain, field, pair, agree), f"<{field.tag}>{_body(variant, pair, agree)}</{field.tag}>"]
        lines += reversed(step) if variant.form == "named_labels" else step  # there the tag is the first line
        differs = (field.level or field.fixed) and not agree
        if differs:
            break
    lines.append(("So " if differs else "") + _conclusion(domain, row.truth["same"]))
    lines[-1] = lines[-1][0].upper() + lines[-1][1:]
    probability = f"{draw_probability(row.truth['same'], rng):.4f}"
    return "<think>\n" + "\n".join(lines) + f"\n</think>\n<answer>{probability}</answer>"


def _body(variant: Variant, pair: Any, agree: bool) -> str:
    if variant.form == "agreements":
        return "Same" if agree else "Different"
    if variant.form == "named_labels":
        return f"Image1={pair[0]}; Image2={pair[1]}"
    return f"{pair[0]}; {pair[1]}"


def _words(domain: Domain, field: Field, pair: Any, agree: bool) -> str:
    what = field.name.replace("_", " ")
    if not field.level:
        return f"The {what} of the {domain.subject} in image 1 is {pair[0]}, in image 2 {pair[1]}."
    if pair is None or None in pair:
        return f"The two are of the same {what}." if agree else f"The two are of different {PLURALS[what]}."
    if agree:
        return f"Both belong to the {what} {pair[0]}."
    return f"The first belongs to the {what} {pair[0]}, the second to the {what} {pair[1]}."


def _conclusion(domain: Domain, same: bool) -> str:
    if domain.target == "species":
        return "they are of the same species." if same else "they are of different species."
    one = "person" if domain.subject == "person" else "individual"
    return f"the images show the same {one}." if same else f"the images show two different {one}s."


def labels_of(row: Row) -> RowLabels:
    """Return the labels for the data doctor: those of pairs, and the species in the images if the rows ask for them."""
    labels = pair_labels_of(row)
    if labels.group or labels.distance is None or not row.truth.get("species"):
        return labels
    return labels._replace(group="species", names=tuple(str(n) for n in row.truth["species"] if n is not None))


SPECIES_PAIRS = replace(
    PAIRS, matches=lambda truth: "same" in truth and bool(truth.get("species")), labels=labels_of, specificity=2
)


def answer_form(domain: Domain, variant: Variant) -> AnswerForm:
    """Return the form of a variant's answers."""
    return AnswerForm(variant.form, tuple(domain.truth_field(name) for name in variant.required_fields))


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
    own = default_reward(domain, chosen)
    measure = outcome_as(*own)
    return prepared_task(
        domain.name,
        domain.summary,
        info,
        f"taxonrl/{domain.name}/{chosen.name}.jinja",
        variables={"labels": list(stated[0].labels)} if stated and stated[0].labels else {},
        validate=partial(truth_problems, domain),
        profiles={"default": own, "taxonrl": published_reward(domain, chosen)},
        outcome=measure(None),
        outcome_as=measure,
        metrics=METRICS,
        figures=confidence_figures,
        by=("distance",),
        trace=partial(write_response, domain, chosen),
        kind=replace(SPECIES_PAIRS, probe=partial(pair_probe, answer_form(domain, chosen))),
        variant=chosen.name,
        variants=domain.variant_names,
    )


def _choose(domain: Domain, info: Mapping[str, Any], name: str | None) -> Variant:
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
    if variant.form == "agreements":
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
