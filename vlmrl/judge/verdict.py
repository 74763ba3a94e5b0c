"""Verdicts: strict reading of a judge's answer. What is not exactly one verdict is refused, never repaired."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from vlmrl.endpoint.chat import ChatAnswer
from vlmrl.endpoint.client import HIDDEN
from vlmrl.judge.failures import InvalidVerdict
from vlmrl.judge.rubric import REASON, Rubric
from vlmrl.redaction.redact import excerpt
from vlmrl.untrusted import one_line, parse_json, visible

MOST_REASON_CHARS = 2000
"""Maximum length of the judge's words that are kept."""
MOST_ANSWER_CHARS = 64 * 1024
MOST_LEVELS = 4


@dataclass(frozen=True)
class Verdict:
    """Scores of one candidate.

    Args:
        scores: axis -> number from 0 to 1, in the order of the rubric.
        reason: the judge's words, at most MOST_REASON_CHARS characters, without hidden characters.
        is_outage: the judge was down, and the settings say that this scores 0.
    """

    scores: Mapping[str, float]
    reason: str
    is_outage: bool = False

    def total(self, rubric: Rubric) -> float:
        """Return the weighted mean of the scores, from 0 to 1."""
        return min(1.0, max(0.0, math.fsum(weight * self.scores[name] for name, weight in rubric.weights.items())))

    def as_json(self) -> str:
        """Return the verdict as the text that `read_verdict` reads."""
        return json.dumps({REASON: self.reason, **self.scores}, allow_nan=False)


def verdict_of(rubric: Rubric, answer: ChatAnswer, secret: str = "") -> Verdict:
    """Return the verdict in a judge's answer.

    Args:
        secret: key of the judge, which its words may hold as escapes; "" = none.
    Raises: InvalidVerdict when it was cut by the token limit, or as `read_verdict`.
    """
    if answer.finish == "length":
        raise InvalidVerdict(
            "the judge's answer was cut by the token limit",
            hint="raise [judge] max_tokens; some models think first, and their thoughts count",
        )
    return read_verdict(rubric, answer.text, secret)


def read_verdict(rubric: Rubric, text: str, secret: str = "") -> Verdict:
    """Return the verdict in a text.

    The text is exactly one JSON object. It has the judge's words and a number for each axis: finite, from 0 to 1, no
    text, no truth value. No field is missing, repeated or added, and nothing stands around the object.

    Raises: InvalidVerdict.
    """
    if len(text) > MOST_ANSWER_CHARS:
        raise InvalidVerdict(f"the judge's answer has more than {MOST_ANSWER_CHARS:,} characters")
    try:
        value = parse_json(text, unique_keys=True, most_levels=MOST_LEVELS)
    except ValueError as error:
        words = excerpt(one_line(str(error)), 120)
        raise InvalidVerdict(f"the judge's answer is not one JSON object: {words}") from None
    if not isinstance(value, dict):
        raise InvalidVerdict(f"the judge's answer is a JSON {type(value).__name__}, not an object")
    try:
        fields = rubric.answer.model_validate(value).model_dump()
    except ValidationError as error:
        finding = error.errors(include_url=False, include_input=False, include_context=False)[0]
        name = excerpt(one_line(".".join(map(str, finding["loc"]))), 60)
        raise InvalidVerdict(f"the judge's answer is wrong at `{name}`: {finding['msg']}") from None
    words = fields.pop(REASON)
    reason = excerpt(visible(words.replace(secret, HIDDEN) if secret else words), MOST_REASON_CHARS)
    return Verdict({name: abs(float(fields[name])) for name in rubric.names}, reason)  # -0.0 is 0
