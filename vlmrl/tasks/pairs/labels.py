"""Reward for pairs whose images each have a label from a closed vocabulary: age groups, types, species."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import excerpt
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.text_parsing import normalise_name
from vlmrl.tasks.pairs.parse import two_pieces
from vlmrl.tasks.pairs.reward import (
    AnswerRule,
    ConsistencyRule,
    LevelsDecide,
    PairReward,
    Said,
    level_parts,
    pair_spec,
)
from vlmrl.tasks.pairs.vocabulary import Vocabulary

NAMED = tuple(re.compile(rf"image ?{i}[ \t]*=[ \t]*(.*)", re.DOTALL | re.IGNORECASE | re.ASCII) for i in (1, 2))


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
            f"aliases name {unknown[0]!r}, which is no label", hint=f"known: {', '.join(vocabulary.names)}"
        )
    field = tag.replace("-", "_") if field is None else field
    form = LabelForm(vocabulary, named, partial)
    reward = PairReward(
        form, (tag,), answer, consistency, levels_decide, relaxed=relaxed, fields={tag: field} if field != tag else {}
    )
    return pair_spec("pair_labels", reward, levels_weight=levels_weight, format_weight=format_weight)


@dataclass(frozen=True)
class LabelForm:
    """Form `label 1; label 2`, or (named) `Image1=label 1; Image2=label 2`, with labels of one vocabulary."""

    vocabulary: Vocabulary
    named: bool = False
    partial: bool = True
    what: ClassVar[str] = "labels"
    stops: ClassVar[bool] = False

    def read(self, level: str, body: str) -> Said:
        pieces, problem = two_pieces(body, level, "label")
        if problem:
            return Said(None, None, problem)
        names: list[str] = []
        for i, piece in enumerate(pieces):
            match = NAMED[i].fullmatch(piece) if self.named else None
            if self.named and match is None:
                return Said(None, None, f"<{level}> does not read `Image1=label; Image2=label`")
            text = match[1] if match else piece
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
                f"the truth of <{level}> is {[first, second]}, of which one is no label",
                hint=f"labels: {', '.join(self.vocabulary.names)}; name other spellings under aliases in [reward.args]",
            )
        return Said(tuple(names), names[0] != names[1])

    def said(self, stated: Mapping[str, Any], levels: Sequence[str]) -> Mapping[str, Any]:
        return stated

    def parts(
        self, stated: Mapping[str, Any], truth: Mapping[str, Any], levels: Sequence[str]
    ) -> dict[str, float | None]:
        return level_parts(stated, truth, levels, partial=self.partial)
