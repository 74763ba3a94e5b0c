"""What a domain is: pairs of photographs, what is asked of them, what the truth of a row holds, how much is asked for.

A row shows two images. Its truth is `same` (bool), `distance` (int or None, see `Domain.ranks`) and one entry a
field: two names, image 1 first, None where unknown. A variant says which of these fields a response must name, and in
which form.

Source: TaxonRL, arXiv:2603.04380 (repository max-vkl/TaxonRL at f4b80ac): its data sets, prompts and reward functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from vlmrl.rewards.parse import normalise_name

Form = Literal["answer", "names", "verdicts", "labels", "named_labels"]
"""What a response holds inside think: nothing but reasoning; two names a level; Same, Different or Uncertain a level;
two labels `a; b`; or two labels `Image1=a; Image2=b`."""
BASELINE = "baseline"
MAIN = "im"
"""Name of any task's main intermediate variant, besides the variant's own."""
LINNAEAN = ("order", "family", "genus", "species")
"""The ranks of a species, coarse to fine."""


@dataclass(frozen=True)
class Field:
    """A truth field: two names, image 1 first.

    Args:
        name: in the truth.    tag: in responses, `<tag>a; b</tag>`.
        labels: the closed vocabulary, as written in the truth; empty = any name.
        aliases: other spelling -> label.
        level: a rank of the hierarchy that the question asks about: two different names mean two different species.
        fixed: an individual has one of it for life, so two different labels mean two different individuals.
    """

    name: str
    tag: str = ""
    labels: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    level: bool = False
    fixed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tag", self.tag or self.name)
        object.__setattr__(self, "aliases", MappingProxyType(dict(self.aliases)))


@dataclass(frozen=True)
class Variant:
    """How much is asked for.

    Args:
        fields: truth fields that a response must name, in order.
        published: the function of TaxonRL that scored it, `file:function`.
    """

    name: str
    form: Form = "answer"
    fields: tuple[str, ...] = ()
    published: str = "lfw:compute_score"


@dataclass(frozen=True)
class Domain:
    """One domain.

    Args:
        name: of the task.    summary: one line for `vlmrl recipe list --tasks`.
        subject: what an image shows, in the singular.
        asked: what the two images are to have in common.
        variants: the baseline first.
        datasets: TaxonRL's data sets on the hub.
        fields: of the truth, besides `same` and `distance`; levels coarse to fine.
        main: the variant that `im` names; None where there is only the baseline.
        layout: name of TaxonRL's `;` layout of `answer_im` (rewards/layouts.py); "answer" = `answer` alone.
        ranks: the whole hierarchy down to what is asked, coarse to fine; empty where there is none. A pair that first
            differs at the last rank has distance 1, at the one above 2, and so on; 0 = the same.
    """

    name: str
    summary: str
    subject: str
    asked: Literal["species", "individual"]
    variants: tuple[Variant, ...]
    datasets: tuple[str, ...]
    fields: tuple[Field, ...] = ()
    main: str | None = None
    layout: str = "answer"
    ranks: tuple[str, ...] = ()

    @property
    def field_names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.fields)

    @property
    def variant_names(self) -> tuple[str, ...]:
        return tuple(variant.name for variant in self.variants)

    @property
    def levels(self) -> tuple[str, ...]:
        """Truth fields that are ranks of the hierarchy, coarse to fine."""
        return tuple(one.name for one in self.fields if one.level)

    def truth_field(self, name: str) -> Field:
        return next(one for one in self.fields if one.name == name)

    def variant(self, name: str) -> Variant:
        """The variant of that name; `im` is the main one. Raises: KeyError when there is none."""
        wanted = self.main if name == MAIN else name
        for variant in self.variants:
            if variant.name == wanted:
                return variant
        raise KeyError(name)


def known_fields(domain: Domain, truths: Iterable[Mapping[str, Any]]) -> list[str]:
    """The fields whose two names at least one truth knows: `truth_fields` of a prepared data set's dataset.json."""
    found: set[str] = set()
    for truth in truths:
        for name in domain.field_names:
            pair = truth.get(name)
            if name not in found and pair is not None and None not in pair:
                found.add(name)
    return [name for name in domain.field_names if name in found]


def truth_distance(domain: Domain, truth: Mapping[str, Any]) -> int | None:
    """The distance that `same` and the names make: 0 for the same, else by the coarsest rank known to differ.

    None where there is no hierarchy, or where a rank above the first that differs is not known. Names are compared as
    the reward does (`normalise_name`). A rank that the truth has no field for (a bird's species) is decided by `same`.
    Example: order, family, genus, species as ranks, genera differ -> 2.
    """
    if not domain.ranks:
        return None
    if truth.get("same"):
        return 0
    for steps, rank in zip(range(len(domain.ranks), 0, -1), domain.ranks, strict=True):
        if rank == domain.ranks[-1]:
            return steps
        agree = names_agree(truth.get(rank), rank)
        if agree is None:
            return None
        if not agree:
            return steps
    return None


def names_agree(pair: Any, level: str) -> bool | None:
    """Whether the two names of a field are the same one; None where either is not known."""
    if pair is None or any(name is None for name in pair):
        return None
    return normalise_name(pair[0], level) == normalise_name(pair[1], level)
