"""Parts of a score that look at the response as a whole: its thought tags, its script, its end and its length."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

from vlmrl.errors import RewardError, unknown
from vlmrl.rewards.text_parsing import VISIBLE, find_tags
from vlmrl.types import RewardInput

SCRIPTS: dict[str, tuple[str, ...]] = {
    "latin": ("LATIN",),
    "cyrillic": ("CYRILLIC",),
    "greek": ("GREEK",),
    "han": ("CJK", "HIRAGANA", "KATAKANA"),
    "hangul": ("HANGUL",),
    "arabic": ("ARABIC",),
    "devanagari": ("DEVANAGARI",),
}
"""Script -> first words of its letters' names in Unicode."""
OF_FORMULAS = (
    "GREEK", "MATHEMATICAL", "DOUBLE-STRUCK", "SCRIPT", "BLACK-LETTER", "MODIFIER", "SUPERSCRIPT",
    "SUBSCRIPT",               "KELVIN", "ANGSTROM", "PLANCK", "FULLWIDTH", "LATIN",
)  # fmt: skip
"""First words of letters that formulas use in every language."""
LETTERS_BEYOND_ASCII = re.compile(r"[^\W\d_\x00-\x7f]")
LETTERS = re.compile(r"[^\W\d_]")
RANGES: dict[str, tuple[float, float]] = {"think_format": (0.0, 1.0), "language": (-1.0, 0.0), "ending": (-1.0, 0.0)}
"""Part -> its range."""


def check_script(script: str) -> None:
    """Raise a RewardError for an unknown script."""
    if script not in SCRIPTS:
        raise unknown("script", str(script), SCRIPTS, error=RewardError)


def check_min_tokens(min_tokens: int) -> None:
    """Raise a RewardError for a number of tokens below 0, or that is no integer."""
    if type(min_tokens) is not int or min_tokens < 0:
        raise RewardError(f"min_tokens = {min_tokens!r} is not an integer >= 0")


def think_format(x: RewardInput) -> float:
    """Return 1 if the response is one `<think>` thought, and then an answer, neither of them empty; else 0."""
    tags = find_tags(x.response, ("think",))
    if [tag.closes for tag in tags] != [False, True]:
        return 0.0
    before, thought = x.response[: tags[0].start], x.response[tags[0].end : tags[1].start]
    after = x.response[tags[1].end :]
    return float(not before.strip() and bool(VISIBLE.search(thought)) and bool(VISIBLE.search(after)))


def language(x: RewardInput, script: str = "latin") -> float:
    """Return minus the share of letters that belong to another script, in [-1, 0].

    Latin and Greek letters stand in formulas of every language and never count as another script.

    Example: 3 Cyrillic letters among 12 letters of an English response -> -0.25.
    """
    others = sum(not _belongs(letter, script) for letter in LETTERS_BEYOND_ASCII.findall(x.response))
    return -others / len(LETTERS.findall(x.response)) if others else 0.0


@lru_cache(maxsize=4096)
def _belongs(letter: str, script: str) -> bool:
    first = unicodedata.name(letter, "").partition(" ")[0]
    return first in SCRIPTS[script] or first in OF_FORMULAS


def ending(x: RewardInput, min_tokens: int = 0) -> float:
    """Return 0 for a response that ended by itself and has at least `min_tokens` tokens, else -1."""
    return 0.0 if x.finish == "stop" and x.num_tokens >= min_tokens else -1.0


def check_lengths(soft_tokens: int, max_tokens: int) -> None:
    """Raise a RewardError unless 0 < soft_tokens < max_tokens."""
    if not 0 < soft_tokens < max_tokens:
        raise RewardError(f"soft_tokens = {soft_tokens} and max_tokens = {max_tokens}: 0 < soft < max must hold")


def length(x: RewardInput, soft_tokens: int, max_tokens: int) -> float:
    """Return 1 up to `soft_tokens` tokens, falling linearly to 0 at `max_tokens`; 0 for a response that was cut.

    Source: DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), moved from [-1, 0] to [0, 1].
    """
    if x.finish == "length":
        return 0.0
    return min(1.0, max(0.0, (max_tokens - x.num_tokens) / (max_tokens - soft_tokens)))


def response_parts(
    x: RewardInput, *, script: str = "latin", min_tokens: int = 0, lengths: Sequence[int] = ()
) -> dict[str, float]:
    """Return these parts of a response. `lengths`: soft_tokens and max_tokens; empty = without the part `length`."""
    parts = {
        "think_format": think_format(x),
        "language": language(x, script),
        "ending": ending(x, min_tokens),
    }
    return {**parts, "length": length(x, *lengths)} if lengths else parts
