"""Rewards for pairs of images: format, a calibrated answer, and one part per level of the hierarchy.

The level rules are TaxonRL's (arXiv:2603.04380, its `concrete` rewards) made generic in the number and names of levels,
and without the holes of the published code: every known trick is a named test in tests/unit/rewards/test_tricks.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vlmrl.errors import RewardError
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.parse import LEVEL_NAME, Names, PairResponse, normalise_name, parse_pair_response
from vlmrl.types import RewardInput

AnswerRule = Literal["brier", "truncated_bce"]
ConsistencyRule = Literal["gate", "part", "off"]


@dataclass(frozen=True)
class PairTruth:
    """The truth of a pair, checked: `same`, and level -> the two normalised names (None = not known)."""

    same: bool
    names: Mapping[str, Names | None]


@dataclass(frozen=True)
class PairReward:
    """The reward function of a pair task; see `taxonomy` for the arguments and the rules."""

    levels: tuple[str, ...]
    answer: AnswerRule = "brier"
    partial: bool = True
    consistency: ConsistencyRule = "gate"
    levels_decide: bool = True
    complete: bool = True
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, x: RewardInput) -> dict[str, Any]:
        truth = read_truth(x.truth, self.levels, self.aliases, levels_decide=self.levels_decide)
        response = parse_pair_response(x.response, self.levels, self.aliases)
        problem = "cut off at the token limit" if x.finish == "length" else response.problem
        if not problem and self.complete:
            problem = self._stops_early(response)
        agrees = self._agrees(response) if not problem else None
        if not problem and agrees is False and self.consistency == "gate":
            problem = f"the answer {response.confidence} contradicts the names"
        parts: dict[str, Any] = {"format": 0.0 if problem else 1.0, "answer": 0.0, "note": problem}
        parts |= level_parts(response.names, truth.names, self.levels, partial=self.partial)
        if self.consistency == "part":
            parts["consistency"] = None if agrees is None and not problem else float(bool(agrees))
        if problem:
            return {k: 0.0 if isinstance(v, float) else v for k, v in parts.items()}
        parts["answer"] = answer_score(response.confidence or 0.0, truth.same, self.answer)
        return parts

    def _stops_early(self, response: PairResponse) -> str:
        """What is wrong with a response that leaves levels out although no stated level differs; "" when nothing is."""
        for level in self.levels:
            names = response.names.get(level)
            if names is None:
                return f"<{level}> is missing although no level above it differs"
            if names[0] != names[1]:
                return ""
        return ""

    def _agrees(self, response: PairResponse) -> bool | None:
        """Whether the answer agrees with the names; None when they do not decide. An answer of 0.5 agrees with both."""
        stated = [pair for pair in response.names.values() if pair is not None]
        differs = any(first != second for first, second in stated)
        complete = len(stated) == len(self.levels)
        if not self.levels_decide or not (differs or (stated and complete)) or response.confidence is None:
            return None
        return response.confidence <= 0.5 if differs else response.confidence >= 0.5


def taxonomy(
    *,
    levels: Sequence[str],
    answer: AnswerRule = "brier",
    partial: bool = True,
    consistency: ConsistencyRule = "gate",
    levels_decide: bool = True,
    complete: bool = True,
    aliases: Mapping[str, str] | None = None,
) -> RewardSpec:
    """Parts `format`, `answer` and one per level (and `consistency` on request), each in [0, 1].

    Nothing at all is earned by a response that breaks the format, was cut at the token limit, (complete) leaves a level
    out although no level above it differs, or (consistency "gate") answers the opposite of what its own names say.
    Otherwise, going down the levels:
    - the truth of the level is not known: None, its weight goes to the other parts;
    - the pair has been the same so far: 1 for both names right and in order, 0.5 for one of them (`partial`);
    - the pair truly differs at a coarser level: 1 for leaving the level out, if both names of the level where the pair
      parts were right; 0 for stating it, and 0 for silence that no right name has earned.

    Args:
        levels: tag names, coarse -> fine; the truth has a field of the same name with the two names.
        answer: "brier" = 1 - (p - y)^2, a proper score; "truncated_bce" = 1 - min(cross-entropy, 1), TaxonRL's, which
            pays for extremes (with belief 0.6 it pays 0.600 for saying 1 and 0.327 for saying 0.6).
        partial: half a level for one right name; False = both or nothing, as in TaxonRL's bird and fungi rewards.
        consistency: what happens when p > 0.5 and a level is stated different, or p < 0.5 and every level is stated
            and equal: "gate" = the response earns nothing; "part" = an extra part; "off" = it is paid all the same.
        levels_decide: two images are the same exactly when all levels are equal. False where they are not (individuals
            with an age group, say): then names and answer cannot contradict each other.
        complete: a response must go down until two names differ or the levels end. False = as in TaxonRL: a level left
            out costs that level only, and a model that is unsure learns to leave it out and to hedge.
        aliases: other spelling -> name.
    Raises: RewardError for levels that cannot be tags or an unknown option.
    """
    levels = tuple(levels)
    _check_options(levels, answer, consistency)
    reward = PairReward(levels, answer, partial, consistency, levels_decide, complete, dict(aliases or {}))
    share = 0.3 if consistency == "part" else 0.4
    weights = {"format": 0.2, "answer": 0.4} | {level: share / len(levels) for level in levels}
    if consistency == "part":
        weights["consistency"] = 0.1
    return RewardSpec("taxonomy", reward, dict.fromkeys(weights, (0.0, 1.0)), weights, pure=True)


def pair_answer(*, answer: AnswerRule = "brier") -> RewardSpec:
    """The baseline without levels: parts `format` (weight 0.2) and `answer` (0.8), by the same rules as `taxonomy`."""
    _check_options(None, answer, "off")
    reward = PairReward((), answer, consistency="off", levels_decide=False)
    weights = {"format": 0.2, "answer": 0.8}
    return RewardSpec("pair_answer", reward, dict.fromkeys(weights, (0.0, 1.0)), weights, pure=True)


def answer_score(confidence: float, same: bool, rule: AnswerRule = "brier") -> float:
    """Score in [0, 1] of the probability `confidence` of "same".

    Example: confidence 0.8, same -> brier 1 - 0.2^2 = 0.96; truncated_bce 1 + ln 0.8 = 0.7769.
    """
    if rule == "brier":
        return 1.0 - (confidence - float(same)) ** 2
    right = min(max(confidence if same else 1.0 - confidence, 1e-15), 1.0)
    return 1.0 - min(-math.log(right), 1.0)


def level_parts(
    stated: Mapping[str, Names | None], truth: Mapping[str, Names | None], levels: Sequence[str], *, partial: bool
) -> dict[str, float | None]:
    """One number in [0, 1] a level, or None where its truth is not known. The rules are those of `taxonomy`.

    Example: truth order (a, b), family (c, d); stated order (a, b) only -> {"order": 1.0, "family": 1.0}.
    """
    parts: dict[str, float | None] = {}
    parted: str | None = None
    for level in levels:
        names, true_names = stated.get(level), truth.get(level)
        if true_names is None:
            parts[level] = None
        elif parted is not None:
            parts[level] = 1.0 if names is None and stated.get(parted) == truth.get(parted) else 0.0
        else:
            parts[level] = _pair_match(names, true_names, partial)
            if true_names[0] != true_names[1]:
                parted = level
    return parts


def read_truth(
    truth: Mapping[str, Any],
    levels: Sequence[str],
    aliases: Mapping[str, str] | None = None,
    *,
    levels_decide: bool = True,
) -> PairTruth:
    """The truth of a pair in checked form.

    Raises: RewardError when `same` is not true or false, a level does not hold two names, or (levels_decide) `same`
        contradicts the levels: a wrong truth is a mistake to repair, never a 0 for every response.
    """
    same = truth.get("same")
    if not isinstance(same, (bool, int, float)) or same not in (0, 1):
        raise RewardError(f"truth field `same` is {same!r:.80}, not true or false", hint="check the dataset's columns")
    names = {level: _true_names(truth, level, aliases) for level in levels}
    equal = [pair[0] == pair[1] for pair in names.values() if pair is not None]
    contradicts = not all(equal) if same else bool(levels) and len(equal) == len(names) and all(equal)
    if levels_decide and contradicts:
        raise RewardError(
            f"truth says the pair is {'the same' if same else 'different'}, its levels say the opposite: {names}",
            hint="repair the row, or set levels_decide = false in [reward.args] if levels do not decide about `same`",
        )
    return PairTruth(bool(same), names)


def _true_names(truth: Mapping[str, Any], level: str, aliases: Mapping[str, str] | None) -> Names | None:
    value = truth.get(level)
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or len(value) != 2:
        raise RewardError(f"truth field `{level}` is {value!r:.80}, not a list of two names")
    if any(_is_missing(name) for name in value):
        return None
    if not all(isinstance(name, (str, int)) for name in value):
        raise RewardError(f"truth field `{level}` is {value!r:.80}, not a list of two names")
    return normalise_name(str(value[0]), level, aliases), normalise_name(str(value[1]), level, aliases)


def _is_missing(name: Any) -> bool:
    """None, an empty text, NaN, or the text "nan" that tables write for it."""
    return name is None or (isinstance(name, float) and math.isnan(name)) or str(name).strip().lower() in ("", "nan")


def _pair_match(names: Names | None, truth: Names, partial: bool) -> float:
    if names is None:
        return 0.0
    right = int(names[0] == truth[0]) + int(names[1] == truth[1])
    return right / 2 if partial else float(right == 2)


def _check_options(levels: tuple[str, ...] | None, answer: str, consistency: str) -> None:
    if answer not in ("brier", "truncated_bce"):
        raise RewardError(f"unknown answer rule {answer!r}", hint='use "brier" or "truncated_bce"')
    if consistency not in ("gate", "part", "off"):
        raise RewardError(f"unknown consistency rule {consistency!r}", hint='use "gate", "part" or "off"')
    if levels is None:
        return
    reserved = {"think", "answer", "format", "consistency", "note", "same", "distance"}
    bad = [level for level in levels if not LEVEL_NAME.fullmatch(level) or level in reserved]
    if not levels or bad or len(set(levels)) < len(levels):
        raise RewardError(
            f"levels = {list(levels)} cannot be used" + (f": {bad[0]!r} is not a usable name" if bad else ""),
            hint="name each level once, coarse first, with letters, digits, `-` and `_`; not think, answer, same ...",
        )
