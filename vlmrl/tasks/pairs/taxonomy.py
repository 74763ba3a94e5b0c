"""Rewards for pairs over a hierarchy: format, a calibrated answer, and one part per level of names or of relations.

The level rules are TaxonRL's (arXiv:2603.04380, its `concrete` and `basic` rewards), generalised to any number and
names of levels, and without the holes of the published code: every known trick is a named test in
tests/unit/rewards/test_tricks.py. The published rewards, unchanged, are in tasks/taxonrl/published.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from vlmrl.errors import RewardError
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.text_parsing import normalise_name
from vlmrl.tasks.pairs.reward import AnswerRule, ConsistencyRule, LevelsDecide, NameForm, PairReward, Said, pair_spec

RELATIONS = {"same": False, "different": True, "uncertain": None}
"""Word -> whether the pair differs."""


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

    `consistency` or `repaired` are parts on request. Nothing at all is earned by a response that breaks the format, was
    cut at the token limit, (complete) leaves a level out although no level above it differs, or (consistency "gate")
    answers the opposite of what its own names say. Otherwise, going down the levels:
    - the truth of the level is not known: None, its weight goes to the other parts;
    - the pair has been the same so far: 1 for both names right and in order, 0.5 for one of them (`partial`);
    - the pair truly differs at a coarser level: 1 for leaving the level out, if both names of the level where the pair
      first differs were right; 0 for stating it, and 0 for a missing level after wrong names;
    - it is stated although a level above it is stated to differ: 0 for it and for all levels below. Otherwise a
      response could bet on two outcomes at once.

    Args:
        levels: tag names, coarse -> fine; the truth has a field of the same name with the two names.
        levels_weight: share of the whole reward that the levels have, in equal parts.
        format_weight: share of the format; the answer gets the rest.
        answer: "brier" = 1 - (p - y)^2, a proper score; "truncated_bce" = 1 - min(cross-entropy, 1), TaxonRL's, which
            favours extreme answers (with a belief of 0.6, the answer 1 earns 0.600 and the answer 0.6 earns 0.327).
        partial: half of a level's value for one right name; False = both or nothing, as in TaxonRL's bird and fungi
            rewards.
        consistency: what happens when p > 0.5 and a level is stated different, or p < 0.5 and every level is stated and
            equal: "gate" = the response earns nothing; "part" = an extra part with a quarter of the levels' share;
            "off" = it earns its score in the usual way.
        levels_decide: what names say about the answer. True: two images are the same exactly when all levels are equal.
            "different": a level that differs makes them different, equal levels decide nothing (the levels end above
            the class: genera of two species). False: nothing.
        complete: a response must go down until two names differ or the levels end. False = as in TaxonRL: a level left
            out costs that level only, and a model that is unsure learns to leave it out and to hedge.
        relaxed: repair a missing slash in the closing tag of think or answer (see `PairFormat`), say so in the note,
            and report the part `repaired` (1 = it was), which has no weight: its mean is the share of repaired ones.
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

    The words are accepted in any case. A response states every level until one is Different, and none below. Going
    down:
    - the truth of the level is not known: None, its weight goes to the other parts;
    - stated: 1 for the right word, 0 for the other;
    - left out below a level that is Different: it is Different, too, because levels below a difference differ.
    So each level earns by its own word alone, and the likelier word at each level earns most, for any belief.
    Uncertain is a legal word that leaves the answer free, and earns 0. A value below one half would change no choice
    (the likelier of the two words earns at least one half on average), and a value above it would reward silence.

    The truth of a level is its field with the two names; where these are not known, `distance` (0 = same class; each
    level further up that differs counts one more, the class itself being 1). The arguments are those of `taxonomy`.
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
    """Return the baseline without levels: parts `format` and `answer` (the rest of 1), by the rules of `taxonomy`."""
    reward = PairReward(NameForm(), (), answer, consistency="off", levels_decide=False, relaxed=relaxed)
    return pair_spec("pair_answer", reward, format_weight=format_weight)


@dataclass(frozen=True)
class RelationForm:
    """Same, Different or Uncertain. The truth is given as names: it differs where they do."""

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
        """Return the word for every level: Different for one left out below Different; None where nothing is said."""
        words: dict[str, Any] = {}
        implied = None
        for level in levels:
            words[level] = stated.get(level, implied)
            implied = "different" if words[level] == "different" else implied
        return words


@dataclass(frozen=True)
class RelationReward(PairReward):
    """Pair reward for relations. Where the names of a level are not known, `distance` says whether it differs."""

    def read_truth(self, truth: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
        same, values = super().read_truth(truth)
        distance = truth.get("distance")
        if distance is None or None not in values.values():
            return same, values
        if isinstance(distance, bool) or not isinstance(distance, int) or distance < 0 or same != (distance == 0):
            raise RewardError(f"truth field `distance` is {distance!r:.80}, and `same` is {same}")
        finest = 1 if self.levels_decide is True else 2
        for steps, level in enumerate(reversed(self.levels)):
            if values[level] is None:
                values[level] = "different" if distance >= finest + steps else "same"
        return same, values


def _levels(levels: Sequence[str]) -> tuple[str, ...]:
    if not levels:
        raise RewardError("levels = [] cannot be used", hint="name the levels, or use the reward `pair_answer`")
    return tuple(levels)
