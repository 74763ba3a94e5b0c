"""Reflection in responses: words such as "re-check", and how often responses with such words are correct.

Counts are integers and add up. So the ratios of several ranks, steps or sources are those of the pooled responses: sum
the counts first, then compute the ratios.

Two profiles say what counts as a word:

- `default`: whole words with their inflections ("re-evaluating", "verified", "double-check"). "yet" is left out, as it
  is mostly a plain conjunction, and "wait" counts only as it stands ("waiter" and "waiting" do not).
- `maye`: the 15 words of MAYE, anywhere in the lower-cased text. "waiter", "await" and "Tibet yeti" count.

REFLECTION measures both profiles. A task that has it as `set_metrics` gets the metrics in evaluations and in training.
Names: `reflection/<ratio>` and `reflection/words_per_1k_tokens`; in training also `reflection/word/<word>` and
`reflection/count/<count>`. Those of the profile `maye` begin with `reflection/maye/`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from vlmrl.errors import unknown
from vlmrl.metric import SHARE, Metric
from vlmrl.tasks.base import GradedResponse, PooledMetrics

MAYE_WORDS = (
    "re-check", "re-evaluate", "re-examine", "re-think", "recheck", "reevaluate", "reexamine", "reevaluation",
    "rethink", "check again", "think again", "try again", "verify", "wait", "yet",
)  # fmt: skip
"""Words of the profile `maye`.

Source: MAYE, arXiv:2504.02587, section 4; after DeepScaleR (Luo et al. 2025) and Logic-RL (Xie et al. 2025).
"""
_HYPHEN = "[-\u2010\u2011]?"
_AGAIN = r"(?:[ \t\n]{1,3}\w{1,20}){0,2}[ \t\n]{1,3}again\b"
"""The word "again", with at most two words before it: "check it again"."""
STEMS: Mapping[str, re.Pattern[str]] = {
    word: re.compile(rf"\b{pattern}", re.IGNORECASE)
    for word, pattern in {
        "re-check": rf"re{_HYPHEN}check(?:s|ed|ing)?\b",
        "re-evaluate": rf"re{_HYPHEN}evaluat(?:e|es|ed|ing|ion|ions)\b",
        "re-examine": rf"re{_HYPHEN}examin(?:e|es|ed|ing|ation|ations)\b",
        "re-think": rf"re{_HYPHEN}(?:think(?:s|ing)?|thought)\b",
        "double-check": r"double[- \u2010\u2011]?check(?:s|ed|ing)?\b",
        "check again": rf"check(?:s|ed|ing)?{_AGAIN}",
        "think again": rf"(?:think(?:s|ing)?|thought){_AGAIN}",
        "try again": rf"(?:try|tries|tried|trying){_AGAIN}",
        "verify": rf"(?:re{_HYPHEN})?verif(?:y|ies|ied|ying|ication|ications)\b",
        "wait": r"wait\b",
    }.items()
}
"""Word of the profile `default` -> its pattern."""
NEEDLES: Mapping[str, tuple[str, ...]] = {
    "re-check": ("check",), "re-evaluate": ("evaluat",), "re-examine": ("examin",), "re-think": ("think", "thought"),
    "double-check": ("check",), "check again": ("check",), "think again": ("again",), "try again": ("again",),
    "verify": ("verif",), "wait": ("wait",),
}  # fmt: skip
"""Word of the profile `default` -> texts of which every match has one. Patterns search 30 times slower than texts."""
PROFILES: Mapping[str, tuple[str, ...]] = {"default": tuple(STEMS), "maye": MAYE_WORDS}
"""Profile -> its words, in the order of metrics."""
RATIOS = (
    "reflection_ratio", "reflection_ratio_in_correct_answers", "reflection_ratio_in_incorrect_answers",
    "correct_ratio_in_reflection_texts", "correct_ratio_in_no_reflection_texts",
)  # fmt: skip
"""Names of the five ratios, as MAYE has them."""
PREFIX = "reflection/"
"""Beginning of the names of these metrics."""
PREFIXES: Mapping[str, str] = {"default": PREFIX, "maye": f"{PREFIX}maye/"}
"""Profile -> beginning of the names of its metrics in REFLECTION."""
WORD, COUNT = "word/", "count/"
"""Beginnings of the names of counts, after the prefix."""
RATE = "words_per_1k_tokens"


@dataclass(frozen=True)
class ReflectionCounts:
    """Counts of a batch of responses. All are integers, so that their sums do not depend on the order.

    Args:
        tokens: their sampled tokens.
        reflecting: responses with at least one word.
        graded: responses whose correctness is known.
        graded_reflecting, correct, correct_reflecting: of the graded: with a word, correct, and both.
        words: word -> number of occurrences, for every word of the profile.
    """

    responses: int = 0
    tokens: int = 0
    reflecting: int = 0
    graded: int = 0
    graded_reflecting: int = 0
    correct: int = 0
    correct_reflecting: int = 0
    words: Mapping[str, int] = field(default_factory=dict)

    def ratios(self) -> dict[str, float | None]:
        """Return the five RATIOS; None where the denominator is 0.

        With N responses, N_ref with a word, N_+ correct and N_ref+ both: N_ref / N, N_ref+ / N_+,
        (N_ref - N_ref+) / (N - N_+), N_ref+ / N_ref, (N_+ - N_ref+) / (N - N_ref). The last four are over the graded
        responses.

        Source: MAYE, arXiv:2504.02587, table 2. Deviation: MAYE's code averages the ratios of ranks, and has 0 for an
            empty denominator, which lowers the ratios of rare events.
        """
        right, wrong = self.correct, self.graded - self.correct
        with_word, without = self.graded_reflecting, self.graded - self.graded_reflecting
        pairs = (
            (self.reflecting, self.responses),
            (self.correct_reflecting, right),
            (with_word - self.correct_reflecting, wrong),
            (self.correct_reflecting, with_word),
            (right - self.correct_reflecting, without),
        )
        return {name: above / below if below else None for name, (above, below) in zip(RATIOS, pairs, strict=True)}

    def per_1k_tokens(self) -> float | None:
        """Return the occurrences of all words per 1,000 sampled tokens; None without tokens."""
        return 1000 * sum(self.words.values()) / self.tokens if self.tokens else None

    def shares(self, prefix: str = PREFIX) -> dict[str, float | None]:
        """Return the five ratios and the rate per 1,000 tokens, under names that begin with `prefix`."""
        ratios = {prefix + name: value for name, value in self.ratios().items()}
        return {**ratios, f"{prefix}{RATE}": self.per_1k_tokens()}

    def flat(self, prefix: str = PREFIX) -> dict[str, int]:
        """Return all counts by name: `<prefix>count/<field>` and `<prefix>word/<word>`."""
        numbers = {f"{prefix}{COUNT}{name}": getattr(self, name) for name in COUNTS}
        return numbers | {f"{prefix}{WORD}{word}": count for word, count in self.words.items()}

    @classmethod
    def from_flat(cls, sums: Mapping[str, float], profile: str) -> ReflectionCounts:
        """Return the counts of a profile from the sums of REFLECTION, such as those of an evaluation or of a step.

        Names that are missing count 0.

        Raises: RecipeError for an unknown profile.
        """
        if profile not in PROFILES:
            raise unknown("reflection profile", profile, PROFILES)
        prefix = PREFIXES[profile]
        numbers = {name: int(sums.get(f"{prefix}{COUNT}{name}", 0)) for name in COUNTS}
        return cls(**numbers, words={word: int(sums.get(f"{prefix}{WORD}{word}", 0)) for word in PROFILES[profile]})


COUNTS = tuple(f.name for f in fields(ReflectionCounts) if f.name != "words")
"""Names of the counts besides those of the words."""


def count_words(text: str, profile: str = "default") -> dict[str, int]:
    """Return word -> number of occurrences that do not overlap, for every word of a profile.

    Raises: RecipeError for an unknown profile.
    Example: "Let me re-evaluate. Wait: verified." -> re-evaluate 1, verify 1, wait 1 (default); `maye` counts
        re-evaluate and wait.
    """
    if profile not in PROFILES:
        raise unknown("reflection profile", profile, PROFILES)
    lowered = text.lower()
    if profile == "default":
        return {
            word: sum(1 for _ in pattern.finditer(text)) if any(map(lowered.__contains__, NEEDLES[word])) else 0
            for word, pattern in STEMS.items()
        }
    return {word: lowered.count(word) for word in PROFILES[profile]}


def _counts(text: str, accuracy: float | None, tokens: int, profile: str) -> ReflectionCounts:
    words = count_words(text, profile)
    graded = accuracy is not None and not math.isnan(accuracy)
    reflects, is_correct = any(words.values()), graded and accuracy == 1.0
    return ReflectionCounts(
        1, tokens, int(reflects), int(graded), int(graded and reflects), int(is_correct),
        int(is_correct and reflects), words,
    )  # fmt: skip


def _count_graded(graded: GradedResponse) -> dict[str, int]:
    """Return the counts of one response, in all profiles."""
    x, _, outcome = graded
    accuracy = outcome.get("accuracy")
    return {
        name: number
        for profile, prefix in PREFIXES.items()
        for name, number in _counts(x.response, accuracy, x.num_tokens, profile).flat(prefix).items()
    }


def _shares_of_all(sums: Mapping[str, int]) -> dict[str, float | None]:
    return {
        name: value
        for profile, prefix in PREFIXES.items()
        for name, value in ReflectionCounts.from_flat(sums, profile).shares(prefix).items()
    }


REFLECTION = PooledMetrics(_count_graded, _shares_of_all)
"""Metrics of reflection in both profiles, for `Task.set_metrics`."""
FACTS: Mapping[str, Metric] = {
    name: Metric("neither", None if name.endswith(RATE) else SHARE) for name in _shares_of_all({})
}
"""Metric of REFLECTION -> its range and direction, for `Task.metrics`."""
