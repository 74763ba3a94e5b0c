"""Definition of a domain: pairs of photographs, the question, the truth of a row, and the variants of the task.

A row shows two images. Its truth has `same` (bool), `distance` (int or None) if there is a hierarchy, and one entry per
field: two names, image 1 first, with None for an unknown name. The fields and their vocabularies are those of the
domain's layout (layouts.py). A variant determines which fields a response must name, and in which form.

Source: TaxonRL, arXiv:2603.04380 (repository max-vkl/TaxonRL at f4b80ac): its data sets, prompts and reward functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from vlmrl.tasks.entry import MAIN
from vlmrl.tasks.taxonrl.layouts import LAYOUTS, settled_distance

Form = Literal["answer", "names", "verdicts", "labels", "named_labels"]
"""Form of a response inside think.

answer: reasoning without tags. names: two names per level. verdicts: Same, Different or Uncertain per level. labels:
two labels `a; b`. named_labels: two labels `Image1=a; Image2=b`.
"""
BASELINE = "baseline"
INDIVIDUAL = "individual"
RANKS = ("order", "family", "genus", "species")
"""Fields that are levels of the hierarchy in domains that compare species; coarse to fine."""


@dataclass(frozen=True)
class Field:
    """Truth field: two names, image 1 first.

    Args:
        name: its name in the truth.
        tag: its tag in responses, `<tag>a; b</tag>`.
        labels: the closed vocabulary, as spelled in the truth; empty = any name.
        aliases: other spelling -> label; differences in case, `-`, `_` and blanks need no alias.
        level: whether it is a level of the hierarchy: two different names mean two different species.
        fixed: whether it never changes for an individual: two different labels mean two different individuals.
    """

    name: str
    tag: str
    labels: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    level: bool = False
    fixed: bool = False


@dataclass(frozen=True)
class Variant:
    """Variant of a domain's task: which fields a response must name.

    Args:
        required_fields: truth fields that a response must name, in order.
        published: TaxonRL's reward function for this variant, `file:function`.
    """

    name: str
    form: Form = "answer"
    required_fields: tuple[str, ...] = ()
    published: str = "lfw:compute_score"


@dataclass(frozen=True)
class Domain:
    """One domain.

    Args:
        name: name of the task.
        summary: one line for `vlmrl recipe list --tasks`.
        about: first paragraph of the help of `vlmrl prep`.
        subject: word for the thing in an image, in the singular.
        target: "species" or "individual": the question is whether the two images show the same one.
        variants: variants of the task, the baseline first.
        datasets: TaxonRL's data sets on the hub.
        main: the variant that `im` selects; None if there is only the baseline.
        layout: name of the layout (layouts.py) of TaxonRL's `answer_im`; "answer" if there is only the column `answer`.
    """

    name: str
    summary: str
    about: str
    subject: str
    target: Literal["species", "individual"]
    variants: tuple[Variant, ...]
    datasets: tuple[str, ...]
    main: str | None = None
    layout: str = "answer"

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """Fields of the truth, besides `same` and `distance`; levels coarse to fine."""
        layout = LAYOUTS[self.layout]
        fields = []
        for name in layout.fields:
            known = layout.vocabularies.get(name)
            labels, aliases = ((), {}) if known is None else (known.names, dict(known.aliases))
            if known is not None:
                aliases |= {code: label for label, code in known.codes.items()}
            level = self.target == "species" and name in RANKS
            fields.append(Field(name, name.replace("_", "-"), labels, aliases, level, name in layout.fixed))
        return tuple(fields)

    @property
    def field_names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.fields)

    @property
    def levels(self) -> tuple[str, ...]:
        """Truth fields that are levels of the hierarchy, coarse to fine."""
        return tuple(one.name for one in self.fields if one.level)

    @property
    def ranks(self) -> tuple[str, ...]:
        """Ranks of the hierarchy, coarse to fine, down to the rank that is compared; empty without a hierarchy.

        The species is included even if the truth has no field for it. A pair that first differs at the last rank has
        distance 1; a pair that first differs at the rank above has distance 2.
        """
        return (*LAYOUTS[self.layout].ranks[::-1], "species") if self.levels else ()

    @property
    def variant_names(self) -> tuple[str, ...]:
        return tuple(variant.name for variant in self.variants)

    def truth_field(self, name: str) -> Field:
        return next(one for one in self.fields if one.name == name)

    def variant(self, name: str) -> Variant:
        """Return the variant of that name; `im` is the main one. Raises: KeyError when there is none."""
        variant_name = self.main if name == MAIN else name
        for variant in self.variants:
            if variant.name == variant_name:
                return variant
        raise KeyError(name)


def classes_of(domain: Domain) -> tuple[str, ...]:
    """Return the fields that are equal for every pair with the answer "same": all ranks, or the individual."""
    return domain.ranks or (INDIVIDUAL,)


def known_fields(domain: Domain, truths: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the fields with two known names in at least one truth: `truth_fields` of a dataset's dataset.json."""
    known: set[str] = set()
    for truth in truths:
        known |= {name for name in domain.field_names if _known(truth.get(name))}
    return [name for name in domain.field_names if name in known]


def truth_distance(domain: Domain, truth: Mapping[str, Any]) -> int | None:
    """Return `settled_distance` of a truth if the domain has a hierarchy, else None."""
    return settled_distance(truth) if domain.levels else None


def _known(pair: Any) -> bool:
    return pair is not None and None not in pair
