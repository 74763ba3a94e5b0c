"""Core of the rewards for pairs of images: read a response, check that it is consistent, score it against the truth.

A `Form` defines the content of a level's tag (names, labels, relations) and its score. `PairReward` holds the rules
that are common to all forms: the strict format, the levels that a response must state, and its consistency.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar, Literal, NamedTuple

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import quoted
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.text_parsing import LEVEL_NAME, MAX_NAME_CHARS, normalise_name
from vlmrl.tasks.pairs.answer import Names, PairFormat, two_names
from vlmrl.types import RewardInput

AnswerRule = Literal["brier", "truncated_bce"]
ConsistencyRule = Literal["gate", "part", "off"]
LevelsDecide = bool | Literal["different"]
RESERVED = frozenset({"think", "answer", "format", "consistency", "repaired", "note", "detail", "same", "distance"})
MAX_CACHED_CHARS = 3 * MAX_NAME_CHARS
"""Maximum length of a tag's text whose reading is cached, in characters."""


class Said(NamedTuple):
    """Content of a level's tag, or of its truth.

    Args:
        value: the content; None = it cannot be read, or the truth is not known.
        differs: whether the two images differ at the level; None = the content does not determine this.
        problem: the error in the tag's content, in words; "" = no error.
    """

    value: Any
    differs: bool | None
    problem: str = ""


class Form(ABC):
    """Form of the tag of a level, and its score.

    Results of `read` and `read_truth` are cached, so they may depend only on their arguments.
    """

    what: ClassVar[str]
    """Word for the content of the tags, in the plural, such as "names"."""
    stops: ClassVar[bool] = False
    """True = stating a level below one that differs breaks the format."""

    partial: bool = True
    """True = one right name earns half of the level."""

    @abstractmethod
    def read(self, level: str, body: str) -> Said: ...

    @abstractmethod
    def read_truth(self, level: str, first: str | None, second: str | None) -> Said:
        """Read the truth from a pair of names. Raises: RewardError for names that are not in the form's vocabulary."""

    def said(self, stated: Mapping[str, Any], levels: Sequence[str]) -> Mapping[str, Any]:
        """Return the stated values, and the values of missing levels as far as they follow from the stated ones."""
        return stated

    def parts(
        self, stated: Mapping[str, Any], truth: Mapping[str, Any], levels: Sequence[str]
    ) -> dict[str, float | None]:
        """Return one number in [0, 1] per level; None where the truth is not known."""
        return level_parts(stated, truth, levels, partial=self.partial)


class PairReading(NamedTuple):
    """Content of a response as a reward reads it, without the truth. See `problem` for an unreadable response.

    Args:
        problem: reason why the response earns nothing; "" = it follows the rules. If the response cannot be read,
            `confidence` and `agrees` are None and `stated` is empty. If it only contradicts itself, they have values.
        confidence: probability of "same" in [0, 1].
        stated: level -> value of its tag, for the levels that the response states.
        agrees: whether the answer agrees with the levels; None = the levels do not determine the answer.
        repair: description of the repaired tags; "" = nothing was repaired.
    """

    problem: str
    confidence: float | None = None
    stated: Mapping[str, Any] = {}
    agrees: bool | None = None
    repair: str = ""

    def as_detail(self) -> dict[str, Any]:
        """Return the reading as a JSON value, without empty fields."""
        problem, confidence, stated, agrees, repair = self
        if confidence is None:
            return {"problem": problem, "repair": repair} if repair else {"problem": problem}
        values = {level: [*v] if type(v) is tuple else v for level, v in stated.items()}
        detail = {"confidence": confidence, "stated": values, "agrees": agrees}
        return {**detail, "repair": repair} if repair else detail

    @classmethod
    def of_detail(cls, detail: Any) -> PairReading | None:
        """Return the reading that `as_detail` wrote; None for anything else, such as in a damaged file."""
        if not isinstance(detail, Mapping):
            return None
        problem, confidence, stated, agrees, repair = (
            detail.get(name, default) for name, default in zip(cls._fields, ("", None, {}, None, ""), strict=True)
        )
        readable = isinstance(stated, Mapping) and isinstance(problem, str) and isinstance(repair, str)
        readable = readable and all(
            isinstance(v, str) or (isinstance(v, list) and len(v) == 2) for v in stated.values()
        )
        if not readable or agrees not in (None, True, False) or bool(problem) is not (confidence is None):
            return None
        if confidence is not None and (type(confidence) is not float or not 0 <= confidence <= 1):
            return None
        values = {level: tuple(v) if isinstance(v, list) else v for level, v in stated.items()}
        return cls(problem, confidence, values, agrees, repair)


@dataclass(frozen=True)
class NameForm(Form):
    """Form `name 1; name 2`. `aliases`: other spelling -> name."""

    partial: bool = True
    aliases: Mapping[str, str] = field(default_factory=dict)
    what: ClassVar[str] = "names"

    def read(self, level: str, body: str) -> Said:
        names, problem = two_names(body, level, self.aliases)
        return Said(names, names[0] != names[1] if names else None, problem)

    def read_truth(self, level: str, first: str | None, second: str | None) -> Said:
        if first is None or second is None:
            return Said(None, None)
        names = normalise_name(first, level, self.aliases), normalise_name(second, level, self.aliases)
        return Said(None, None) if "" in names or "nan" in names else Said(names, names[0] != names[1])


@dataclass(frozen=True)
class PairReward:
    """Reward function of a pair task; see `taxonomy` in rewards.py for the other arguments and the rules.

    Args:
        fields: level -> name of its truth field and of its part, if this is not the level's own name.
    """

    form: Form
    levels: tuple[str, ...]
    answer: AnswerRule = "brier"
    consistency: ConsistencyRule = "gate"
    levels_decide: LevelsDecide = True
    complete: bool = True
    relaxed: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, x: RewardInput) -> dict[str, Any]:
        same, truth = self.read_truth(x.truth)
        free, missing = self.read_freely(x.response)
        problem, confidence, stated, agrees, repair = self._by_the_rules(free, missing)
        if x.finish == "length":
            problem = "cut off at the token limit"
        if problem or confidence is None:
            return self._nothing(truth, problem, free)
        parts: dict[str, Any] = {"format": 1.0, "answer": answer_score(confidence, same, self.answer)}
        parts |= self.form.parts(stated, truth, self.levels)
        if self.consistency == "part":
            parts["consistency"] = None if agrees is None else float(agrees)
        if self.relaxed:
            parts["repaired"] = float(bool(repair))
        parts["note"], parts["detail"] = repair, free.as_detail()
        return self._renamed(parts) if self.fields else parts

    def read(self, response: str) -> PairReading:
        """Return the reading of any text (without special tokens) by this reward's rules, in linear time."""
        return self._by_the_rules(*self.read_freely(response))

    def read_freely(self, response: str) -> tuple[PairReading, str]:
        """Read a response, but allow it to leave levels out and to contradict itself.

        Returns: the reading; and, in words, the first missing level without a different level above it ("" = none). The
            response should have stated this level.
        """
        problem, confidence, bodies, repair = self._format.split(response)
        if problem or confidence is None:
            return PairReading(problem, repair=repair), ""
        stated, differs, problem, missing = self._read(bodies)
        if problem:
            return PairReading(problem, repair=repair), missing
        return PairReading("", confidence, stated, self._agrees(confidence, differs), repair), missing

    def _by_the_rules(self, free: PairReading, missing: str) -> PairReading:
        if missing and self.complete:
            return PairReading(missing, repair=free.repair)
        if free.agrees is False and self.consistency == "gate":
            return free._replace(problem=f"the answer {free.confidence} contradicts the {self.form.what}")
        return free

    def read_truth(self, truth: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
        """Check the truth of a row, and return `same` and level -> value (None = not known).

        Raises: RewardError when `same` is not true or false, a level does not hold two names of the form's vocabulary,
            or `same` contradicts the levels. The user must repair a wrong truth; responses are not scored 0 for it.
        """
        same = truth.get("same")
        if same is not True and same is not False:
            same = _checked_same(same)
        values: dict[str, Any] = {}
        differ, equal = False, bool(self.levels)
        for level, name, read in self._truth_readers:
            pair = truth.get(name)
            if type(pair) is not list or len(pair) != 2 or not type(pair[0]) is type(pair[1]) is str:
                pair = _two(pair, name)
            value, differs, _ = read(pair[0], pair[1])
            values[level] = value
            differ = differ or differs is True
            equal = equal and differs is False
        if self.levels_decide and (differ if same else equal and self.levels_decide is True):
            raise RewardError(
                f"truth says the pair is {'the same' if same else 'different'}, its levels say the opposite: {values}",
                hint="repair the row, or set levels_decide in [reward.args] if the levels do not decide about `same`",
            )
        return same, values

    def _read(self, bodies: Mapping[str, str]) -> tuple[dict[str, Any], bool | None, str, str]:
        """Return (level -> value, whether the images differ, first error, first missing level), the last two in words.

        The images differ if one level differs. They are equal if every level is stated and equal. In all other cases
        the result is None. Reading stops at the first error.
        """
        stated: dict[str, Any] = {}
        missing = parted = ""
        equal = bool(self.levels)
        for level, read in self._readers.items():
            body = bodies.get(level)
            if body is None:
                equal = False
                if not parted and not missing:
                    missing = f"<{level}> is missing although no level above it differs"
                continue
            value, differs, problem = read(body) if len(body) <= MAX_CACHED_CHARS else read.__wrapped__(body)
            if not problem and parted and self.form.stops:
                problem = f"<{level}> is stated below <{parted}>, which differs"
            if problem:
                return stated, None, problem, missing
            stated[level] = value
            equal = equal and differs is False
            if differs:
                parted = level
        return stated, True if parted else False if equal else None, "", missing

    def _agrees(self, confidence: float, differs: bool | None) -> bool | None:
        """Return whether the answer agrees with the levels; None if they determine no answer. 0.5 agrees with both."""
        if differs is None or not self.levels_decide:
            return None
        if differs:
            return confidence <= 0.5
        return confidence >= 0.5 if self.levels_decide is True else None

    def _nothing(self, truth: Mapping[str, Any], problem: str, free: PairReading) -> dict[str, Any]:
        parts: dict[str, Any] = {"format": 0.0, "answer": 0.0}
        parts |= {level: None if value is None else 0.0 for level, value in truth.items()}
        if self.consistency == "part":
            parts["consistency"] = 0.0
        if self.relaxed:
            parts["repaired"] = 0.0
        parts["note"], parts["detail"] = problem, free.as_detail()
        return self._renamed(parts) if self.fields else parts

    def _renamed(self, parts: dict[str, Any]) -> dict[str, Any]:
        return {self.fields.get(name, name): part for name, part in parts.items()}

    @cached_property
    def _format(self) -> PairFormat:
        return PairFormat(self.levels, relaxed=self.relaxed)

    @cached_property
    def _readers(self) -> dict[str, Any]:
        return {level: lru_cache(4096)(partial(self.form.read, level)) for level in self.levels}

    @cached_property
    def _truth_readers(self) -> list[tuple[str, str, Callable[[str | None, str | None], Said]]]:
        cached = {level: lru_cache(4096)(partial(self.form.read_truth, level)) for level in self.levels}
        return [(level, self.fields.get(level, level), read) for level, read in cached.items()]


def pair_spec(name: str, reward: PairReward, *, levels_weight: float = 0.0, format_weight: float = 0.2) -> RewardSpec:
    """Return the reward with its weights.

    The format has the weight `format_weight`, the levels have equal shares of `levels_weight`, and the answer has the
    rest of 1. If there is a part `consistency`, it has a quarter of `levels_weight`.

    Raises: RewardError for an unknown option, levels that cannot be tags, or weights that are not shares of 1.
    """
    _check_options(reward)
    for key, weight in (("levels_weight", levels_weight), ("format_weight", format_weight)):
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= 1:
            raise RewardError(f"{key} = {weight!r} is not a number from 0 to 1")
    rest = 1.0 - format_weight - levels_weight
    if rest < -1e-9:
        raise RewardError(
            f"levels_weight {levels_weight} and format_weight {format_weight} add up to more than 1",
            hint="they are shares of the whole reward; the answer gets the rest",
        )
    weights = {"format": format_weight, "answer": max(rest, 0.0)}
    has_consistency = reward.consistency == "part"
    share = levels_weight * (0.75 if has_consistency else 1.0)
    weights |= {reward.fields.get(level, level): share / len(reward.levels) for level in reward.levels}
    if has_consistency:
        weights["consistency"] = levels_weight - share
    parts = [*weights, *(["repaired"] if reward.relaxed else [])]
    return RewardSpec(name, reward, dict.fromkeys(parts, (0.0, 1.0)), weights, pure=True)


def answer_score(confidence: float, same: bool, rule: AnswerRule = "brier") -> float:
    """Return the score in [0, 1] of an answer: `confidence` is its probability of "same", `same` is the truth.

    Example: confidence 0.8, same -> brier 1 - 0.2^2 = 0.96; truncated_bce 1 + ln 0.8 = 0.7769.
    """
    if rule == "brier":
        return 1.0 - (confidence - same) ** 2
    right = min(max(confidence if same else 1.0 - confidence, 1e-15), 1.0)
    return 1.0 - min(-math.log(right), 1.0)


def level_parts(
    stated: Mapping[str, Names | None], truth: Mapping[str, Names | None], levels: Sequence[str], *, partial: bool
) -> dict[str, float | None]:
    """Return level -> score of its names in [0, 1] by the rules of `taxonomy`; None where its truth is not known.

    Example: truth order (a, b), family (c, d); stated order (a, b) only -> {"order": 1.0, "family": 1.0}.
    """
    parts: dict[str, float | None] = {}
    parted: str | None = None
    ended = broken = False
    for level in levels:
        names, right = stated.get(level), truth.get(level)
        broken = broken or (ended and names is not None)
        if right is None:
            parts[level] = None
        elif broken:
            parts[level] = 0.0
        elif parted is not None:
            parts[level] = 1.0 if names is None and stated.get(parted) == truth.get(parted) else 0.0
        else:
            if names == right:
                parts[level] = 1.0
            elif names is None or not partial:
                parts[level] = 0.0
            else:
                parts[level] = 0.5 if names[0] == right[0] or names[1] == right[1] else 0.0
            if right[0] != right[1]:
                parted = level
        ended = ended or (names is not None and names[0] != names[1])
    return parts


def _checked_same(same: Any) -> bool:
    if not isinstance(same, (int, float)) or same not in (0, 1):
        raise RewardError(
            f"truth field `same` is {quoted(same)}, not true or false", hint="check the dataset's columns"
        )
    return bool(same)


def _two(pair: Any, level: str) -> tuple[str | None, str | None]:
    """Return the value of a truth field as two texts; None in place of a text = not known."""
    if pair is None:
        return None, None
    if isinstance(pair, (str, bytes)) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise RewardError(f"truth field `{level}` is {quoted(pair)}, not a list of two names")
    if any(name is None or (isinstance(name, float) and math.isnan(name)) for name in pair):
        return None, None
    if not all(isinstance(name, (str, int)) for name in pair):
        raise RewardError(f"truth field `{level}` is {quoted(pair)}, not a list of two names")
    return str(pair[0]), str(pair[1])


def _check_options(reward: PairReward) -> None:
    if reward.answer not in ("brier", "truncated_bce"):
        raise RewardError(f"unknown answer rule {reward.answer!r}", hint='use "brier" or "truncated_bce"')
    if reward.consistency not in ("gate", "part", "off"):
        raise RewardError(f"unknown consistency rule {reward.consistency!r}", hint='use "gate", "part" or "off"')
    if not isinstance(reward.levels_decide, bool) and reward.levels_decide != "different":
        raise RewardError(f"unknown levels_decide {reward.levels_decide!r}", hint='use true, false or "different"')
    names = [*reward.levels, *reward.fields.values()]
    bad = [name for name in names if not LEVEL_NAME.fullmatch(str(name)) or name in RESERVED]
    if bad or len(set(reward.levels)) < len(reward.levels):
        raise RewardError(
            f"levels = {list(reward.levels)} cannot be used" + (f": {bad[0]!r} is not a usable name" if bad else ""),
            hint="name each level once, coarse first, with letters, digits, `-` and `_`; not think, answer, same ...",
        )
