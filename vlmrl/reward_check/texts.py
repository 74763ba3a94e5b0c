"""Measures of response texts: similarity, repetition within a text, and classes of characters.

All texts of a step are measured together, and the amount of work is bounded. Suffixes: D texts, N characters of all
texts together, U distinct texts, K hash functions, G groups.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from vlmrl.reward_check.scores import Floats, Ints

ANSWER = re.compile(r"<answer>([^<]{1,400})</answer>|\\boxed\{([^{}]{1,200})\}")
MOST_PLAIN_ANSWER_CHARS = 40
MAX_CHARS = 4_000
"""Maximum number of characters of a text that are measured. Of a longer text, its beginning and its end, half each."""
LIKENESS_CHARS = 1_000
"""Maximum number of characters of a text that are compared with other texts, taken from its beginning and its end."""
REPEAT_CHARS = 12
"""Length of the character n-grams whose repetition is counted: about three words, and longer than a tag's name."""
REPEATING = 0.9
"""A text repeats itself if at least this share of its n-grams occurred earlier in it.

Markup with many similar elements has a lower share.
"""
LEAST_REPEATING_CHARS = 100
SHINGLE_CHARS = 5
HASHES = 32
ALIKE = 0.9
"""Two texts are alike if they share at least this part of their character n-grams (Jaccard's coefficient) and have
the same ending.
"""
ENDING_CHARS = 24
PREFIX_CHARS = 24
CLASSES = ("lowercase", "digit", "uppercase", "punctuation", "whitespace", "non_ascii")
"""Classes of characters. All characters outside ASCII (letters, digits and signs) are `non_ascii`."""

_BASE = np.uint64(0x9E3779B97F4A7C15)
_ASCII_CLASS = np.asarray(
    [
        1 if c.isdigit() else 2 if c.isupper() else 0 if c.isalpha() else 4 if c.isspace() or not c.isprintable() else 3
        for c in map(chr, range(128))
    ]
    + [5]
)


@dataclass(frozen=True)
class TextMeasures:
    """Measures of the texts of one step; shares are in [0, 1].

    Args:
        alike_share: size of the largest set of texts that are alike, as a share of all texts.
        alike_in_group_share: size of the largest such set in a group, as a share of its texts, averaged over groups.
        same_prefix_share: share of texts that begin with the most common first PREFIX_CHARS characters.
        repeating_share: share of texts that repeat themselves.
        class_shares: class of characters -> its share of a text's characters, averaged over texts.
        top_character_share: share of a text's most common ASCII character (spaces left out), averaged over texts.
        characters_mean: length of a text in characters, averaged over texts.
    """

    alike_share: float
    alike_in_group_share: float
    same_prefix_share: float
    repeating_share: float
    class_shares: dict[str, float]
    top_character_share: float
    characters_mean: float


def measure_texts(texts: Sequence[str], groups: Sequence[int]) -> TextMeasures:
    """Return the measures of the texts of a step.

    Args:
        groups: group number of each text.
    Raises: ValueError if there is no text.
    """
    if not texts:
        raise ValueError("there is no text to measure")
    cut = [_ends(text, MAX_CHARS) for text in texts]
    code_N, text_N = _characters(cut)
    size_D = np.bincount(text_N, minlength=len(texts))
    some_D = np.maximum(size_D, 1)
    ascii_N = np.minimum(code_N, 128)
    class_DC = _table(text_N, _ASCII_CLASS[ascii_N], len(texts), len(CLASSES)) / some_D[:, None]
    character_DA = _table(text_N, ascii_N, len(texts), 129)
    character_DA[:, [ord(" "), 128]] = 0
    alike, in_group = _alike_shares(texts, np.asarray(groups))
    prefixes = np.unique([text.lstrip()[:PREFIX_CHARS] for text in texts], return_counts=True)[1]
    return TextMeasures(
        alike,
        in_group,
        float(prefixes.max() / len(texts)),
        float(np.mean(_repeating(code_N, text_N, size_D))),
        dict(zip(CLASSES, class_DC.mean(0).tolist(), strict=True)),
        float(np.mean(character_DA.max(1) / some_D)),
        float(np.mean([len(text) for text in texts])),
    )


def repeats_itself(text: str) -> bool:
    """Return whether a text repeats itself, in words or in characters (see REPEATING)."""
    code_N, text_N = _characters([_ends(text, MAX_CHARS)])
    return bool(_repeating(code_N, text_N, np.asarray([len(code_N)]))[0])


def answer_of(text: str) -> str | None:
    """Return the final answer of a response: in `<answer>` or a box, else the whole text if it is short, else None."""
    matches = ANSWER.findall(text)
    if matches:
        return "".join(matches[-1]).strip()
    plain = text.strip()
    return plain if 0 < len(plain) <= MOST_PLAIN_ANSWER_CHARS and "<" not in plain else None


@lru_cache(maxsize=4096)
def joins_words(character: str) -> bool:
    """Return whether a character's script has no spaces between words: Han, kana, Thai, Lao, Khmer, Burmese ..."""
    name = unicodedata.name(character, "")
    return name.startswith(("CJK ", "HIRAGANA", "KATAKANA", "THAI ", "LAO ", "KHMER ", "MYANMAR ", "TIBETAN ", "YI "))


def _ends(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most // 2] + text[-(most // 2) :]


def _characters(texts: Sequence[str]) -> tuple[Any, Ints]:
    """Return (code point [N], index of its text [N]) of all characters."""
    code_N = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.int64)
    return code_N, np.repeat(np.arange(len(texts)), [len(text) for text in texts])


def _table(row_N: Ints, column_N: Ints, rows: int, columns: int) -> Floats:
    counts = np.bincount(row_N * columns + column_N, minlength=rows * columns)
    return counts.reshape(rows, columns).astype(np.float64)


def _ngrams(code_N: Any, text_N: Ints, length: int) -> tuple[Any, Ints]:
    """Return (hash, index of its text) of every character n-gram that lies within one text."""
    number = max(0, len(code_N) - length + 1)
    hash_N = np.zeros(number, dtype=np.uint64)
    for shift in range(length):
        hash_N = (hash_N + code_N[shift : shift + number].astype(np.uint64) + np.uint64(1)) * _BASE
        hash_N ^= hash_N >> np.uint64(29)
    whole_N = text_N[:number] == text_N[length - 1 :]
    return hash_N[whole_N], text_N[:number][whole_N]


def _repeating(code_N: Any, text_N: Ints, size_D: Ints) -> Any:
    """Return [D]: whether each text repeats itself."""
    hash_N, owner_N = _ngrams(code_N, text_N, REPEAT_CHARS)
    # The index of the text is in the high bits, so that one sort brings the equal n-grams of each text together.
    key_N = np.sort((owner_N.astype(np.uint64) << np.uint64(44)) | (hash_N >> np.uint64(20)))
    first_N = np.ones(len(key_N), dtype=bool)
    first_N[1:] = key_N[1:] != key_N[:-1]
    distinct_D = np.bincount((key_N[first_N] >> np.uint64(44)).astype(np.int64), minlength=len(size_D))
    total_D = np.maximum(size_D - REPEAT_CHARS + 1, 1)
    return (size_D >= LEAST_REPEATING_CHARS) & (1 - distinct_D / total_D >= REPEATING)


def _alike_shares(texts: Sequence[str], group_D: Ints) -> tuple[float, float]:
    """Return `alike_share` and `alike_in_group_share` (see `TextMeasures`)."""
    plain = [_ends(" ".join(_ends(text, 2 * LIKENESS_CHARS).split()).casefold(), LIKENESS_CHARS) for text in texts]
    known = {text: number for number, text in enumerate(dict.fromkeys(plain))}
    text_D = np.asarray([known[text] for text in plain])
    alike_UU = _alike(list(known))
    _, group_D = np.unique(group_D, return_inverse=True)
    counts_GU = _table(group_D, text_D, int(group_D.max()) + 1, len(known))
    near_GU = np.where(counts_GU > 0, counts_GU @ alike_UU, 0)
    overall = float((counts_GU.sum(0) @ alike_UU).max() / len(texts))
    return overall, float(np.mean(near_GU.max(1) / counts_GU.sum(1)))


def _alike(texts: Sequence[str]) -> Floats:
    """Return [U, U]: 1 where two of the U distinct texts are alike, else 0. MinHash estimates Jaccard's coefficient."""
    signature_UK = _signatures(texts)
    ending_U = np.unique([answer_of(t) or t[-ENDING_CHARS:] for t in texts], return_inverse=True)[1]
    alike_UU = np.zeros((len(texts), len(texts)))
    for number in range(len(texts)):
        alike_UU[number] = (np.mean(signature_UK == signature_UK[number], axis=1) >= ALIKE) & (
            ending_U == ending_U[number]
        )
    return alike_UU


def _signatures(texts: Sequence[str]) -> Any:
    """Return [U, K]: the smallest hash of each text's n-grams, for each of K hash functions.

    A short text is padded to one n-gram.
    """
    code_N, text_N = _characters([text.ljust(SHINGLE_CHARS, "\0") for text in texts])
    hash_N, owner_N = _ngrams(code_N, text_N, SHINGLE_CHARS)
    starts_U = np.searchsorted(owner_N, np.arange(len(texts)))
    odd_K = np.random.default_rng(0).integers(0, 1 << 63, HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    mixed = ((hash_N * odd) for odd in odd_K)
    return np.stack([np.minimum.reduceat(h ^ (h >> np.uint64(31)), starts_U) for h in mixed], axis=1)
