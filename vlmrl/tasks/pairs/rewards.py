"""Rewards of pair tasks, by name: over a hierarchy, or over labels of a closed vocabulary (age groups, types, species).

Over a hierarchy, the parts are the format, a calibrated answer, and one part per level of names or of relations. The
rules for levels are those of TaxonRL (arXiv:2603.04380, its `concrete` and `basic` rewards), for any number of levels
with any names. Tricks that earn too much with the published code do not work here: each known trick is a named test in
tests/unit/rewards/test_tricks.py. The unchanged published rewards are in tasks/taxonrl/rewards.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import excerpt, quoted
from vlmrl.rewards import Builtin
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.text_parsing import normalise_name
from vlmrl.tasks.pairs.answer import two_pieces
from vlmrl.tasks.pairs.reward import (
    AnswerRule,
    ConsistencyRule,
    Form,
    LevelsDecide,
    NameForm,
    PairReward,
    Said,
    pair_spec,
)

RELATIONS = {"same": False, "different": True, "uncertain": None}
"""Word in a tag -> whether the pair differs at the level; None = not stated."""


def taxonomy(
    *,
    levels: Sequence[str],
    levels_weight: float = 0.4,
    format_weight: float = 0.2,
    answer: AnswerRule = "brier",
    partial: bool = True,
    consistency: ConsistencyRule = "gate",
    levels_decide: LevelsDecide = True,
    complete: bool = True,
    relaxed: bool = False,
    aliases: Mapping[str, str] | None = None,
) -> RewardSpec:
    """Return the reward with parts `format`, `answer` and one per level, each in [0, 1].

    The parts `consistency` and `repaired` exist only if the arguments ask for them. A response earns nothing at all if
    it breaks the format, was cut at the token limit, leaves a level out although no level above it differs (with
    `complete`), or gives an answer that contradicts its own names (with `consistency` "gate"). Otherwise each level,
    from coarse to fine, earns the following:
    - if the truth of the level is not known: None; its weight goes to the other parts;
    - if all levels above it are truly the same: 1 for two right names in the right order, 0.5 for one (`partial`);
    - if a level above it truly differs: 1 for leaving the level out, provided that both names of the first different
      level were right; 0 for stating the level, and 0 for leaving it out after wrong names;
    - if it is stated below a level that the response states to differ: 0 for it and for all levels below. Otherwise a
      response could bet on two outcomes at once.

    Args:
        levels: tag names, coarse -> fine; each is also the name of the truth field with the two names.
        levels_weight: share of all levels together in the whole reward; each level has an equal part of it.
        format_weight: share of the format; the answer has the rest.
        answer: "brier" = 1 - (p - y)^2, a proper score; "truncated_bce" = 1 - min(cross-entropy, 1), TaxonRL's score.
            The latter favours extreme answers: if the true probability is 0.6, the answer 1 earns 0.600 on average, and
            the answer 0.6 earns 0.327.
        partial: whether one right name earns half of the level; False = only two right names earn it, as in TaxonRL's
            bird and fungi rewards.
        consistency: treatment of a contradiction: p > 0.5 and a level is stated to differ, or p < 0.5 and every level
            is stated and equal. "gate" = the response earns nothing; "part" = an extra part with a quarter of the
            levels' share; "off" = no effect on the score.
        levels_decide: what the names determine. True: two images are the same exactly when all levels are equal.
            "different": a level that differs makes the images different, but equal levels determine nothing (the levels
            end above the class: two species of one genus). False: nothing.
        complete: whether a response must state all levels down to the first whose names differ. False, as in TaxonRL: a
            missing level earns 0 for that level only; an unsure model then learns to leave levels out and to hedge.
        relaxed: whether a missing slash in the closing tag of think or answer is repaired (see `PairFormat`). A repair
            is mentioned in the note. The part `repaired` (1 = it was repaired) has no weight; its mean is the share of
            repaired responses.
        aliases: other spelling -> name.
    Raises: RewardError for levels that cannot be tags, an unknown option, or weights that are not shares of 1.
    """
    form = NameForm(partial, dict(aliases or {}))
    reward = PairReward(form, _levels(levels), answer, consistency, levels_decide, complete, relaxed)
    return pair_spec("taxonomy", reward, levels_weight=levels_weight, format_weight=format_weight)


def taxonomy_relations(
    *,
    levels: Sequence[str],
    levels_weight: float = 0.4,
    format_weight: float = 0.2,
    answer: AnswerRule = "brier",
    consistency: ConsistencyRule = "gate",
    levels_decide: LevelsDecide = True,
    relaxed: bool = False,
    aliases: Mapping[str, str] | None = None,
) -> RewardSpec:
    """Return the reward as `taxonomy` does, for tags that say Same, Different or Uncertain instead of two names.

    Upper and lower case are accepted. A response states every level down to the first Different, and no level below it.
    Each level, from coarse to fine, earns the following:
    - if the truth of the level is not known: None; its weight goes to the other parts;
    - if it is stated: 1 for the right word, 0 for the other;
    - if it is left out below a Different level: it counts as Different, because levels below a difference differ.
    So the score of each level depends on its own word alone, and the more likely word earns most on average. Uncertain
    is a legal word; it earns 0 and agrees with any answer. Its value is 0 because a positive value below one half would
    change no choice (the more likely of the two words earns at least one half on average), and a value above one half
    would reward a response that states nothing.

    The truth of a level is the field with its two names. If these are not known, `distance` is used: 0 = same class, 1
    = only the class differs, and 1 more for each higher level that differs. The arguments are those of `taxonomy`.
    """
    reward = RelationReward(
        RelationForm(NameForm(aliases=dict(aliases or {}))),
        _levels(levels),
        answer,
        consistency,
        levels_decide,
        relaxed=relaxed,
    )
    return pair_spec("taxonomy_relations", reward, levels_weight=levels_weight, format_weight=format_weight)


def pair_answer(*, format_weight: float = 0.2, answer: AnswerRule = "brier", relaxed: bool = False) -> RewardSpec:
    """Return the baseline reward without levels: the parts `format` and `answer`, by the rules of `taxonomy`.

    Their weights are `format_weight` and 1 - `format_weight`.
    """
    reward = PairReward(NameForm(), (), answer, consistency="off", levels_decide=False, relaxed=relaxed)
    return pair_spec("pair_answer", reward, format_weight=format_weight)


@dataclass(frozen=True)
class RelationForm(Form):
    """Form with the words Same, Different or Uncertain. The truth holds names: a level differs if its names differ."""

    names: NameForm
    what: ClassVar[str] = "relations"
    stops: ClassVar[bool] = True

    def read(self, level: str, body: str) -> Said:
        word = normalise_name(body, level)
        if word not in RELATIONS:
            return Said(None, None, f"<{level}> holds none of Same, Different and Uncertain")
        return Said(word, RELATIONS[word])

    def read_truth(self, level: str, first: str | None, second: str | None) -> Said:
        differs = self.names.read_truth(level, first, second).differs
        return Said(None if differs is None else "different" if differs else "same", differs)

    def parts(
        self, stated: Mapping[str, Any], truth: Mapping[str, Any], levels: Sequence[str]
    ) -> dict[str, float | None]:
        said = self.said(stated, levels)
        return {level: None if (right := truth.get(level)) is None else float(said[level] == right) for level in levels}

    def said(self, stated: Mapping[str, Any], levels: Sequence[str]) -> dict[str, Any]:
        """Return the word of every level. A level left out below Different is Different; others are None if missing."""
        words: dict[str, Any] = {}
        implied = None
        for level in levels:
            words[level] = stated.get(level, implied)
            implied = "different" if words[level] == "different" else implied
        return words


@dataclass(frozen=True)
class RelationReward(PairReward):
    """Pair reward for relations. If the names of a level are not known, `distance` determines whether it differs."""

    def read_truth(self, truth: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
        same, values = super().read_truth(truth)
        distance = truth.get("distance")
        if distance is None or None not in values.values():
            return same, values
        if isinstance(distance, bool) or not isinstance(distance, int) or distance < 0 or same != (distance == 0):
            raise RewardError(f"truth field `distance` is {quoted(distance)}, and `same` is {same}")
        finest = 1 if self.levels_decide is True else 2
        for steps, level in enumerate(reversed(self.levels)):
            if values[level] is None:
                values[level] = "different" if distance >= finest + steps else "same"
        return same, values


def _levels(levels: Sequence[str]) -> tuple[str, ...]:
    if not levels:
        raise RewardError("levels = [] cannot be used", hint="name the levels, or use the reward `pair_answer`")
    return tuple(levels)


@dataclass(frozen=True)
class Vocabulary:
    """Names that a field may hold. `aliases`: other spelling -> name; `codes`: name -> its code in the data.

    Case, `-`, `_` and blanks have no effect: `sub-adult` is `SubAdult`.
    """

    names: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    codes: Mapping[str, str] = field(default_factory=dict)

    def find(self, text: str) -> str | None:
        """Return the name for a text, which may have another spelling; None if the text is no name of the list."""
        return self._spelt.get(_squeezed(text))

    @cached_property
    def _spelt(self) -> dict[str, str]:
        codes = {code: name for name, code in self.codes.items()}
        spelt = {**self.aliases, **codes, **{name: name for name in self.names}}
        return {_squeezed(other): name for other, name in spelt.items()}


def _squeezed(text: str) -> str:
    return normalise_name(text).replace(" ", "")


def pair_labels(
    *,
    tag: str,
    labels: Sequence[str],
    field: str | None = None,
    named: bool = False,
    levels_weight: float = 0.4,
    format_weight: float = 0.2,
    answer: AnswerRule = "brier",
    partial: bool = True,
    consistency: ConsistencyRule = "gate",
    levels_decide: LevelsDecide = False,
    relaxed: bool = False,
    aliases: Mapping[str, str] | None = None,
) -> RewardSpec:
    """Return the reward with the parts `format`, `answer` and one for the labels (named as `field`), each in [0, 1].

    The rules of `taxonomy` hold. The response states `<TAG>label 1; label 2</TAG>` inside think, once. It earns 1 for
    two right labels in the right order, and 0.5 for one right label (`partial`). A label that is not in the vocabulary
    breaks the format, and then the response earns nothing: `Adult or Juvenile`, which names two possibilities, is no
    label. Case, `-`, `_` and blanks have no effect: `sub-adult` is `SubAdult`.

    Args:
        tag: name of the tag, such as `age-group`.
        labels: the vocabulary.
        field: truth field with the two labels, and name of the part; default: the tag with `_` for `-`.
        named: whether the tag holds `Image1=label 1; Image2=label 2`.
        levels_decide: whether the labels determine the answer. "different": two images with different labels cannot be
            the same individual (labels are species); equal labels determine nothing. False: the labels determine
            nothing (ages). True: equal labels also mean the same individual.
        aliases: other spelling -> label.
        The other arguments are those of `taxonomy`.
    Raises: RewardError for an empty vocabulary, an alias of an unknown label, and all that `taxonomy` refuses; while
        scoring, for a truth that is not in the vocabulary.
    """
    aliases = dict(aliases or {})
    vocabulary = Vocabulary(tuple(map(str, labels)), aliases)
    if not vocabulary.names or isinstance(labels, str):
        raise RewardError(f"labels = {labels!r} is not a list of labels", hint='such as labels = ["Adult", "Juvenile"]')
    unknown = [label for label in aliases.values() if label not in vocabulary.names]
    if unknown:
        raise RewardError(
            f"aliases name {unknown[0]!r}, which is not a label", hint=f"known: {', '.join(vocabulary.names)}"
        )
    field = tag.replace("-", "_") if field is None else field
    form = LabelForm(vocabulary, named, partial)
    reward = PairReward(
        form, (tag,), answer, consistency, levels_decide, relaxed=relaxed, fields={tag: field} if field != tag else {}
    )
    return pair_spec("pair_labels", reward, levels_weight=levels_weight, format_weight=format_weight)


@dataclass(frozen=True)
class LabelForm(Form):
    """Form `label 1; label 2`, or (named) `Image1=label 1; Image2=label 2`, with labels of one vocabulary."""

    vocabulary: Vocabulary
    named: bool = False
    partial: bool = True
    what: ClassVar[str] = "labels"

    def read(self, level: str, body: str) -> Said:
        pieces, problem = two_pieces(body, level, "label", named=self.named)
        if problem:
            return Said(None, None, problem)
        names: list[str] = []
        for text in pieces:
            label = self.vocabulary.find(normalise_name(text, level))
            if label is None:
                known = ", ".join(self.vocabulary.names)
                return Said(None, None, f"<{level}> holds {excerpt(text, 40)!r}, which is none of {known}")
            names.append(label)
        return Said(tuple(names), names[0] != names[1])

    def read_truth(self, level: str, first: str | None, second: str | None) -> Said:
        if first is None or second is None:
            return Said(None, None)
        names = []
        for label in (normalise_name(first, level), normalise_name(second, level)):
            if label in ("", "nan"):
                return Said(None, None)
            names.append(self.vocabulary.find(label))
        if None in names:
            raise RewardError(
                f"the truth of <{level}> is {[first, second]}, one of which is not a label",
                hint=f"labels: {', '.join(self.vocabulary.names)}; name other spellings under aliases in [reward.args]",
            )
        return Said(tuple(names), names[0] != names[1])


REWARDS: Mapping[str, Builtin] = {
    "taxonomy": Builtin(taxonomy, "pairs: format, calibrated answer, one part per level of a hierarchy", version=2),
    "taxonomy_relations": Builtin(
        taxonomy_relations, "pairs: the same with Same, Different or Uncertain per level instead of names", version=1
    ),
    "pair_labels": Builtin(
        pair_labels, "pairs: format, calibrated answer, a label of a vocabulary per image", version=2
    ),
    "pair_answer": Builtin(
        pair_answer,
        "pairs: format and calibrated answer, the baseline without levels",
        version=1,
        lacks="it scores the answer alone and has no levels",
    ),
}
