"""Correct responses for a domain's variant, for `vlmrl sft`: tags, and sentences that follow from the truth alone."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from vlmrl.errors import DataError
from vlmrl.tasks.pairs.task import draw_probability
from vlmrl.tasks.taxonrl.domain import BASELINE, Domain, Field, Variant
from vlmrl.tasks.taxonrl.layouts import names_agree
from vlmrl.types import Row

LEVELS_UP = ("genus", "family", "order")
PLURALS = {"order": "orders", "family": "families", "genus": "genera"}


def write_response(domain: Domain, variant: Variant, row: Row, rng: random.Random) -> str:
    """Return a correct response to a row: the tags down to the first level that differs, then the probability.

    The probability has four decimals and varies as in `pairs.task.write_trace`. The response follows the domain's own
    prompt. It therefore earns the maximum of every part except the answer, with the task's own reward and with the
    published reward.

    Raises: DataError when a name that the response must state is not known for the row.
    """
    lines, settled = [], False
    for name in variant.required_fields:
        field, pair = domain.truth_field(name), row.truth.get(name)
        agree = names_agree(pair, name)
        if agree is None and variant.form == "verdicts":
            agree = _level_agrees(name, row.truth)
        if agree is None:
            raise DataError(
                f"the row does not know its `{name}`: no correct response can be written",
                where=row.place,
                hint=f'leave such rows out, or set variant = "{BASELINE}"',
            )
        step = [_words(domain, field, pair, agree), f"<{field.tag}>{_body(variant, pair, agree)}</{field.tag}>"]
        lines += reversed(step) if variant.form == "named_labels" else step  # there the tag is the first line
        settled = (field.level or field.fixed) and not agree
        if settled:
            break
    lines.append(("So " if settled else "") + _conclusion(domain, row.truth["same"]))
    lines[-1] = lines[-1][0].upper() + lines[-1][1:]
    probability = f"{draw_probability(row.truth['same'], rng):.4f}"
    return "<think>\n" + "\n".join(lines) + f"\n</think>\n<answer>{probability}</answer>"


def _level_agrees(level: str, truth: Mapping[str, Any]) -> bool | None:
    """Return whether the pair is equal at a level whose names are unknown, from `distance` (1 = the species differ)."""
    distance = truth.get("distance")
    return None if distance is None else distance < 2 + LEVELS_UP.index(level)


def _body(variant: Variant, pair: Any, agree: bool) -> str:
    if variant.form == "verdicts":
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
