"""The seven domains of TaxonRL: pairs of photographs, a question, the truth of a row, and the variants of the task.

A row shows two images. Its truth has `same` (bool), `distance` (int or None) if there is a hierarchy, and one entry per
field: two names, image 1 first, with None for an unknown name. A variant determines which fields a response must name,
and in which form. A ground truth of TaxonRL is one `;`-separated line per row, in the layout of its domain; layouts
convert it to a typed truth and back, and have the fields and their vocabularies.

Source: TaxonRL, arXiv:2603.04380 (repository max-vkl/TaxonRL at f4b80ac): its data sets, prompts and reward functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import quoted
from vlmrl.rewards.text_parsing import normalise_name
from vlmrl.tasks.entry import MAIN
from vlmrl.tasks.pairs.answer import FormField, Kind
from vlmrl.tasks.pairs.rewards import Vocabulary
from vlmrl.tasks.truth_kinds import CONTRADICTS

DISTANCES = ("sameSpecies", "sameGenus", "sameFamily", "sameOrder", "sameClass")
"""Words for `distance` 0, 1, 2, 3 and 4 in the ground truths."""
LAYOUT_RANKS = ("genus", "family", "order")
"""Coarsest rank that differs at distance 2, 3 and 4. At distance 1, only the species differs."""
UNKNOWN = ("", "nan", "none", "null", "n/a", "na", "unknown", "incertae sedis")
"""Words that mean an unknown name in tables, in lower case. "Incertae sedis" (uncertain placement) is one of them: two
taxa with this word are not necessarily related.
"""
HARD_LABEL = re.compile(r"([01])(?:\.0*)?")

Truth = Mapping[str, Any]


@dataclass(frozen=True)
class Layout:
    """Order of the fields in one domain's ground truth.

    Args:
        name: the domain, or `answer` for the layout of the baseline, which has the answer alone.
        columns: names of the line's columns in order: `answer`, `distance`, or a field with the number of its image,
            such as `family1`.
        fields: fields of the typed truth, in order.
        vocabularies: field -> its names, for fields with a closed vocabulary.
        fixed: fields that cannot differ between two images of the same class.
        also: a second order of columns, which is read but never written; a column `-` is ignored.
    """

    name: str
    columns: tuple[str, ...]
    fields: tuple[str, ...] = ()
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[str, ...]:
        """Fields that are ranks of a hierarchy above the species, fine -> coarse; () = there is no `distance`."""
        return tuple(rank for rank in LAYOUT_RANKS if rank in self.fields)

    def read(self, text: str | float) -> dict[str, Any]:
        """Return the typed truth for the text of a ground truth.

        Only 0 and 1 are accepted as an answer. A probability is refused, because `same` is yes or no, and rounding
        would change the row. The reward `taxonrl` can score such a row from the original text.

        Raises: RewardError for a wrong number of fields, a missing answer, an unknown label or distance, or fields that
            contradict each other.
        Example: fungi, `0;Boletaceae;Boletus;Boletales;Boletus edulis;Boletaceae;Suillus;Boletales;Suillus luteus` ->
            same False, distance 2, order [Boletales, Boletales], family ..., genus [Boletus, Suillus], species ...
        """
        values = [value.strip() for value in _text(text).split(";")]
        columns = self._columns_of(values, text)
        cells = dict(zip(columns, values, strict=True))
        truth: dict[str, Any] = {"same": self._same(cells["answer"], text)}
        names = {name: [self._name(name, cells[f"{name}{i}"], text) for i in (1, 2)] for name in self.fields}
        if self.ranks:
            truth["distance"] = self._distance(cells.get("distance", ""), text)
        truth |= names
        if wrong := contradictions(self, truth):
            raise self._error(f"{CONTRADICTS}: {wrong[0]}", text)
        if self.ranks and truth["distance"] is None:
            truth["distance"] = certain_distance(truth)
        return truth

    def write(self, truth: Truth, *, sound: bool = True) -> str:
        """Return a typed truth as a text in TaxonRL's form. `read` converts this text to the same typed truth.

        Args:
            sound: whether the truth must be without error. False = a truth that contradicts itself or has unknown
                labels is written, too, because TaxonRL's functions score such a truth.
        Raises: RewardError for a truth without `same`, a field that does not hold two names, or a name that cannot be
            written; if `sound`, also for everything that `read` refuses.
        """
        same = truth.get("same")
        if not isinstance(same, (bool, int, float)) or same not in (0, 1):
            raise RewardError(
                f"truth field `same` is {quoted(same)}, not true or false", hint="check the dataset's columns"
            )
        cells = {"answer": str(int(same)), "distance": ""}
        if truth.get("distance") is not None:
            distance = truth["distance"]
            if distance not in range(len(DISTANCES)):
                raise RewardError(f"truth field `distance` is {quoted(distance)}, not a number from 0 to 4")
            cells["distance"] = DISTANCES[int(distance)]
        for name in self.fields:
            pair = truth.get(name)
            pair = (None, None) if pair is None else pair
            if isinstance(pair, (str, bytes)) or not isinstance(pair, Sequence) or len(pair) != 2:
                raise RewardError(f"truth field `{name}` is {quoted(pair)}, not a list of two names")
            for i, value in enumerate(pair):
                cells[f"{name}{i + 1}"] = self._cell(name, value)
        text = ";".join(cells[column] for column in self.columns)
        if sound:
            self.read(text)
        return text

    def _columns_of(self, values: Sequence[str], text: Any) -> tuple[str, ...]:
        if values == [""]:
            raise self._error("is empty", text)
        for columns in (self.columns, self.also):
            if len(columns) == len(values):
                return columns
        like = [name for name, layout in LAYOUTS.items() if len(layout.columns) == len(values) and name != self.name]
        hint = f"it has as many fields as the layout {' or '.join(like)}" if like else None
        expected = f"{len(self.columns)} ({'; '.join(self.columns)})"
        raise self._error(f"has {len(values)} field{'s' * (len(values) != 1)}, not {expected}", text, hint)

    def _same(self, value: str, text: Any) -> bool:
        label = HARD_LABEL.fullmatch(value)
        if not value:
            raise self._error("has no answer", text)
        if label is None:
            hint = (
                "a probability cannot be read as same or different; the reward `taxonrl` scores such rows as they are"
            )
            raise self._error(f"has the answer {quoted(value, 40)}, which is neither 0 nor 1", text, hint)
        return label[1] == "1"

    def _name(self, name: str, value: str, text: Any) -> str | None:
        if value.lower() in UNKNOWN:
            return None
        if name not in self.vocabularies:
            return value
        label = self.vocabularies[name].find(value)
        if label is None:
            known = ", ".join(self.vocabularies[name].names)
            raise self._error(f"has the unknown {name.replace('_', ' ')} {quoted(value, 40)}", text, f"known: {known}")
        return label

    def _distance(self, word: str, text: Any) -> int | None:
        if word.lower() in UNKNOWN:
            return None
        spelt = [known.lower() for known in DISTANCES]
        if word.lower() not in spelt:
            raise self._error(f"has the unknown distance {quoted(word, 40)}", text, f"known: {', '.join(DISTANCES)}")
        return spelt.index(word.lower())

    def _cell(self, name: str, value: Any) -> str:
        if value is None:
            return ""
        if not isinstance(value, str) or ";" in value or value != value.strip() or value.lower() in UNKNOWN:
            raise RewardError(f"truth field `{name}` holds {quoted(value)}, which is not a name that can be written")
        codes = self.vocabularies[name].codes if name in self.vocabularies else {}
        return codes.get(value, value)

    def _error(self, problem: str, text: Any, hint: str | None = None) -> RewardError:
        return RewardError(f"the {self.name} ground truth {quoted(str(text), 120)} {problem}", hint=hint)


def distance_bounds(same: bool, equal: Mapping[str, bool | None]) -> tuple[int, int]:
    """Return the smallest and the largest distance that are consistent with `same` and the known ranks.

    If the smallest is above the largest, the ranks contradict each other.

    Args:
        equal: genus, family, order -> whether the two names are equal; None = not known.
    Example: not the same, genus different, family not known, order equal -> (2, 3).
    """
    differ = [i for i, rank in enumerate(LAYOUT_RANKS, start=2) if equal.get(rank) is False]
    agree = [i for i, rank in enumerate(LAYOUT_RANKS, start=2) if equal.get(rank) is True]
    low = max(differ, default=0 if same else 1)
    return low, 0 if same else min(agree, default=len(DISTANCES)) - 1


def certain_distance(truth: Truth) -> int | None:
    """Return the distance if `same` and the known names allow only one; None if they allow several.

    Example: fungi of one family whose genera differ -> 2.
    """
    low, high = distance_bounds(
        bool(truth["same"]), {rank: names_agree(truth.get(rank), rank) for rank in LAYOUT_RANKS}
    )
    return low if low == high else None


def contradictions(layout: Layout, truth: Truth) -> list[str]:
    """Return the contradictions between `same`, `distance` and the known names of a truth, in words.

    Args:
        truth: `same` true or false, each field two names or None, `distance` from 0 to 4 or None.
    """
    same, ranks = truth["same"], layout.ranks
    agree = {name: names_agree(truth.get(name), name) for name in layout.fields}
    decide = (*layout.fixed, *((*ranks, "species") if ranks else ()))
    wrong = [
        f"`same` is true but `{name}` differs: {' and '.join(truth[name])}"
        for name in layout.fields
        if same and name in decide and agree[name] is False
    ]
    if not same and ranks and agree.get("species") and agree["genus"] is not False:
        wrong.append(f"`same` is false but both are {truth['species'][0]}")
    if wrong or not ranks:
        return wrong
    low, high = distance_bounds(same, agree)
    if low > high:
        fine = next(rank for rank in ranks if agree[rank])
        coarse = next(rank for rank in reversed(ranks) if agree[rank] is False)
        return [f"`{coarse}` differs but the finer `{fine}` is the same: {truth[fine][0]}"]
    distance = truth.get("distance")
    if distance is None or low <= distance <= high:
        return []
    range_words = " to ".join(f"{number} ({DISTANCES[number]})" for number in dict.fromkeys((low, high)))
    return [f"`distance` is {distance} ({DISTANCES[distance]}); `same` and the names make it {range_words}"]


def names_agree(pair: Sequence[str | None] | None, field: str) -> bool | None:
    """Return whether the two names of a field are equal in the rewards' comparison; None if one is not known."""
    first, second = pair or (None, None)
    if first is None or second is None:
        return None
    return normalise_name(first, field) == normalise_name(second, field)


def _text(text: Any) -> str:
    """Return a ground truth as text; a table may hold a number in place of a text."""
    if isinstance(text, bool):
        return str(int(text))
    return text if isinstance(text, str) else "" if text is None else str(text)


AGE_GROUPS = Vocabulary(("Infant", "Juvenile", "SubAdult", "Adult", "Elderly"))
GENDERS = Vocabulary(("Female", "Male"), aliases={"F": "Female", "M": "Male"})
GORILLA_TYPES = Vocabulary(
    ("Silverback", "Blackback", "Adult female", "Juvenile", "Infant"),
    aliases={"Juvenil": "Juvenile"},
)
SEA_STARS = Vocabulary(
    ("Asterias rubens", "Anthenea australiae"), codes={"Asterias rubens": "Asru", "Anthenea australiae": "Anau"}
)

LAYOUTS: dict[str, Layout] = {
    "answer": Layout("answer", ("answer",)),
    "fungi": Layout(
        "fungi",
        ("answer", "family1", "genus1", "order1", "species1", "family2", "genus2", "order2", "species2"),
        ("order", "family", "genus", "species"),
    ),
    "bird": Layout(
        "bird",
        ("answer", "distance", "genus1", "family1", "order1", "genus2", "family2", "order2"),
        ("order", "family", "genus"),
    ),
    "sea_star": Layout(
        "sea_star", ("answer", "species1", "species2"), ("species",), {"species": SEA_STARS}, fixed=("species",)
    ),
    "chimp": Layout(
        "chimp",
        ("answer", "age_group1", "gender1", "age_group2", "gender2"),
        ("age_group", "gender"),
        {"age_group": AGE_GROUPS, "gender": GENDERS},
        fixed=("gender",),
    ),
    "gorilla": Layout(
        "gorilla",
        ("answer", "type1", "type2"),
        ("type",),
        {"type": GORILLA_TYPES},
        also=("answer", "type1", "-", "type2", "-"),
    ),
}
"""Domain -> layout. `fungi` and `bird` have different orders of ranks. `gorilla` also reads chimp's five fields."""


BASELINE = "baseline"
INDIVIDUAL = "individual"
RANKS = ("order", "family", "genus", "species")
"""Fields that are levels of the hierarchy in domains that compare species; coarse to fine."""


@dataclass(frozen=True)
class Field(FormField):
    """Truth field: two names, image 1 first.

    Args:
        aliases: other spelling -> label; differences in case, `-`, `_` and blanks need no alias.
        fixed: whether it never changes for an individual: two different labels mean two different individuals.
    """

    aliases: Mapping[str, str] = field(default_factory=dict)
    fixed: bool = False


@dataclass(frozen=True)
class Variant:
    """Variant of a domain's task: which fields a response must name.

    Args:
        required_fields: truth fields that a response must name, in order.
        published: TaxonRL's reward function for this variant, `file:function`.
    """

    name: str
    form: Kind = "answer"
    required_fields: tuple[str, ...] = ()
    published: str = "lfw:compute_score"


@dataclass(frozen=True)
class Domain:
    """One domain.

    Args:
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
            fields.append(Field(name, name.replace("_", "-"), labels, level, aliases, name in layout.fixed))
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
    """Return `certain_distance` of a truth if the domain has a hierarchy, else None."""
    return certain_distance(truth) if domain.levels else None


def _known(pair: Any) -> bool:
    return pair is not None and None not in pair


NAMED = ("order", "family", "genus")

BIRD = Domain(
    name="bird",
    summary="birds, same species or not: order, family and genus of both, a probability (`vlmrl prep bird`)",
    about="Birds, same species or not: order, family and genus of both.",
    subject="bird",
    target="species",
    variants=(
        Variant(BASELINE),
        Variant("im_basic", "agreements", NAMED, "lfw_bird_im_basic:compute_score_gemini"),
        Variant("im_concrete", "names", NAMED, "lfw_bird_im_concrete:compute_score_gemini"),
    ),
    main="im_concrete",
    layout="bird",
    datasets=("maxvonk/bird-pairs-v2-im-800px",),
)


CHIMP = Domain(
    name="chimp",
    summary="chimpanzees, same individual or not: the age group of both, a probability (`vlmrl prep chimp`)",
    about="Chimpanzees, same individual or not: the age group of both.",
    subject="chimpanzee",
    target="individual",
    variants=(
        Variant(BASELINE),
        Variant("im", "labels", ("age_group",), "lfw_intermediate:compute_score_gemini"),
        Variant("im_named", "named_labels", ("age_group",), "lfw_intermediate:compute_score_chatgpt"),
    ),
    main="im",
    layout="chimp",
    datasets=(
        "maxvonk/chimp-pairs-v2-800px-meta-data-fixed-names",
        "maxvonk/chimp-pairs-v2-800px-meta-data-fixed-names-im",
    ),
)


FUNGI = Domain(
    name="fungi",
    summary="fungi, same species or not: order, family and genus of both, a probability (`vlmrl prep fungi`)",
    about="Fungi, same species or not: order, family, genus and species of both.",
    subject="fungus",
    target="species",
    variants=(
        Variant(BASELINE),
        Variant("im_concrete", "names", ("order", "family", "genus"), "lfw_fungi_im:compute_score_gemini"),
    ),
    main="im_concrete",
    layout="fungi",
    datasets=("maxvonk/danish-fungi-2024-pairs-800px",),
)


GORILLA = Domain(
    name="gorilla",
    summary="gorillas, same individual or not: the type of both, a probability (`vlmrl prep gorilla`)",
    about="Gorillas, same individual or not: the type of both (silverback, adult female, ...).",
    subject="gorilla",
    target="individual",
    variants=(Variant(BASELINE), Variant("im", "labels", ("type",), "lfw_intermediate_gorilla:compute_score_gemini")),
    main="im",
    layout="gorilla",
    datasets=(
        "maxvonk/gorilla-pairs-v3-30k-800px",
        "maxvonk/gorilla-pairs-v3-30k-800px-im",
        "maxvonk/gorilla-pairs-v4-800px-cv",
        "maxvonk/gorilla-pairs-v4-800px-notcv",
        "maxvonk/gorilla-pairs-v4-800px-cv-im",
    ),
)


HUMAN = Domain(
    name="human",
    summary="faces, same person or not: a probability (`vlmrl prep human`)",
    about="Faces, same person or not (LFW, CPLFW).",
    subject="person",
    target="individual",
    variants=(Variant(BASELINE),),
    datasets=("maxvonk/lfw", "maxvonk/cplfw_normal", "maxvonk/cplfw_aligned"),
)


SEA_STAR = Domain(
    name="sea_star",
    summary="sea stars, same individual or not: the species of both, a probability (`vlmrl prep sea_star`)",
    about="Sea stars, same individual or not: the species of both.",
    subject="sea star",
    target="individual",
    variants=(Variant(BASELINE), Variant("im", "labels", ("species",), "lfw_sea_star_im:compute_score_gemini")),
    main="im",
    layout="sea_star",
    datasets=("maxvonk/sea-star-pairs-800px",),
)


WHALE = Domain(
    name="whale",
    summary="whales, same individual or not: a probability (`vlmrl prep whale`)",
    about="Whales, same individual or not.",
    subject="whale",
    target="individual",
    variants=(Variant(BASELINE),),
    datasets=("maxvonk/whale-pairs-v1-800px",),
)


DOMAINS: Mapping[str, Domain] = MappingProxyType(
    {domain.name: domain for domain in (FUNGI, BIRD, SEA_STAR, CHIMP, GORILLA, HUMAN, WHALE)}
)
"""Name of a task -> its domain."""
