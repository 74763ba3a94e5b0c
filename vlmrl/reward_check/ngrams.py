"""N-grams that became frequent and earn more: they spread over a run and correlate with the score. The work is bounded.

Text without spaces between words (Chinese, Thai, a long run of digits) is split into characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from vlmrl.reward_check.response_columns import ResponseColumns
from vlmrl.reward_check.scores import Floats, Ints, Scores
from vlmrl.reward_check.texts import joins_words

WORD = re.compile(r"[^\W_]+|</?[A-Za-z][^<>\s]{0,40}>")
"""A word, or a tag as one word."""
MAX_WORDS = 400
"""Maximum number of words of a response, from its start; a character of text without spaces counts as a word."""
MAX_NGRAM = 3
MAX_CHARACTERS = 8
"""Length of the longest n-gram of characters."""
LONGEST_WORD = 24
"""Maximum length of a word, in characters; longer words are split into characters."""
MIN_TEXTS = 20
"""Minimum number of texts with an n-gram."""
MIN_PROMPTS = 8
"""Minimum number of prompts that have texts both with and without an n-gram."""
MOST = 15
MIN_Z = 4.0
"""Minimum number of standard errors of both the rise and the pay of an n-gram that is reported. Among some 100,000
n-grams of honest text, 4 in both at once are not expected.
"""


@dataclass(frozen=True)
class Holders:
    """Texts that contain each n-gram: pairs (gram, text), each once. `words` returns the words of an n-gram."""

    gram_P: Ints
    text_P: Ints
    number: int
    words: Callable[[int], list[int]]


def paid_ngrams(facts: ResponseColumns, scores: Scores, texts: Mapping[int, str]) -> dict[str, Any]:
    """Return the n-grams whose frequency rose over the run and that correlate with the score.

    An n-gram has 1 to 3 words, or 1 to 8 characters of text without spaces. Each has the number of its texts (`texts`),
    its share in the first and in the last third of the steps, and how much more texts with it are paid than texts
    without it (`pays`). Pay is compared among the samples of one prompt, and the rise between prompts. So a score that
    rises with training or a name that belongs to a prompt cannot look paid. (Where each row is a prompt of its own, the
    texts of a step are compared, and a name that occurs in easy prompts can look paid.) Rise and pay must both be MIN_Z
    standard errors above zero.

    Args:
        texts: row of the input -> response: the sample that is examined, with whole groups.
    Returns: `texts` (how many), `thirds` (whether there are steps to compare), `found`: the n-grams by rise times pay,
        the largest first; of n-grams that are in the same texts, the longest alone. `unit` of each: words or
        characters.
    """
    at = np.flatnonzero(np.isin(facts.rows_N, np.asarray(list(texts), dtype=np.int64)) & ~scores.failed_N)
    third_D = _thirds(facts.steps_N[at])
    result: dict[str, Any] = {"texts": len(at), "thirds": bool(len(at)) and int(third_D.max()) > 0, "found": []}
    if not result["thirds"]:
        return result
    prompts = TextsByPrompt.of(facts.groups_N[at], facts.steps_N[at], third_D, scores.values_N[at])
    by_texts: dict[bytes, dict[str, Any]] = {}
    units = WordSequence.of([texts[row] for row in facts.rows_N[at].tolist()])
    for holders in _ngrams(units, len(at)):
        for gram, one in _judged(holders, prompts):
            key = np.sort(holders.text_P[holders.gram_P == gram]).tobytes()
            by_texts[key] = {**units.spelled(holders.words(gram)), **one}
    result["found"] = sorted(by_texts.values(), key=lambda f: -(f["last"] - f["first"]) * f["pays"])[:MOST]
    return result


@dataclass(frozen=True)
class TextsByPrompt:
    """Texts by prompt: D texts of C prompts (each text its own prompt where the prompts are not known).

    Args:
        prompt_D: prompt of each text.
        size_C: number of texts of each prompt.
        third_C: third of the steps that a prompt is in.
        rest_D: score minus the mean of the texts it is compared with: those of its prompt, else those of its step.
        stratum_D: index of the set of texts that a text is compared with.
        size_S: number of texts of each stratum.
    """

    prompt_D: Ints
    size_C: Ints
    third_C: Ints
    rest_D: Floats
    stratum_D: Ints
    size_S: Ints

    @classmethod
    def of(cls, groups_D: Ints, steps_D: Any, third_D: Ints, values_D: Floats) -> TextsByPrompt:
        _, first, prompt_D, size_C = np.unique(groups_D, return_index=True, return_inverse=True, return_counts=True)
        stratum_D = prompt_D if size_C.max() > 1 else np.unique(steps_D, return_inverse=True)[1]
        size_S = np.bincount(stratum_D)
        mean_S = np.bincount(stratum_D, weights=values_D) / np.maximum(size_S, 1)
        return cls(prompt_D, size_C, third_D[first], values_D - mean_S[stratum_D], stratum_D, size_S)


@dataclass(frozen=True)
class WordSequence:
    """Words of texts, one text after the other; T words in total.

    Args:
        text_T: number of its text.
        word_T: index in `names`.
        names: spellings, in lower case.
        character: for each name, whether it is one character of text without spaces.
    """

    text_T: Ints
    word_T: Ints
    names: Sequence[str]
    character: Any

    @classmethod
    def of(cls, texts: Sequence[str]) -> WordSequence:
        """Split the texts into words, each text's first MAX_WORDS. Other strings are split into their characters."""
        known: dict[str, int] = {}
        rows = [
            [known.setdefault(m.group().lower(), len(known)) for m, _ in zip(WORD.finditer(t), range(MAX_WORDS))]  # noqa: B905
            for t in texts
        ]
        joined = {number: word for word, number in known.items() if not _is_word(word)}
        split: dict[int, list[int]] = {}
        characters: dict[str, int] = {}
        for number, word in joined.items():
            split[number] = [len(known) + characters.setdefault(c, len(characters)) for c in word[:MAX_WORDS]]
        if split:
            rows = [[u for w in row for u in split.get(w, (w,))][:MAX_WORDS] for row in rows]
        text_T = np.repeat(np.arange(len(texts)), [len(row) for row in rows])
        word_T = np.asarray([w for row in rows for w in row], dtype=np.int64)
        return cls(text_T, word_T, [*known, *characters], np.arange(len(known) + len(characters)) >= len(known))

    def spelled(self, words: Sequence[int]) -> dict[str, str]:
        """Return an n-gram as text with the kind of its units: `{"ngram", "unit"}`."""
        text = self.names[words[0]]
        for before, word in pairwise(words):
            apart = "" if self.character[before] and self.character[word] else " "
            text += apart + self.names[word]
        return {"ngram": text, "unit": "characters" if all(self.character[w] for w in words) else "words"}


def _is_word(text: str) -> bool:
    """Return whether this is a word as languages with spaces have them, or a tag."""
    return text.startswith("<") or (len(text) <= LONGEST_WORD and (text.isascii() or not any(map(joins_words, text))))


def _ngrams(units: WordSequence, texts: int) -> Iterator[Holders]:
    """Yield the n-grams of each length that are in at least MIN_TEXTS of the texts.

    The ends of a frequent n-gram are frequent, so that longer n-grams are built from frequent shorter ones alone.
    N-grams longer than MAX_NGRAM consist of characters alone.
    """
    text_T, word_T, vocabulary = units.text_T, units.word_T, len(units.names)
    character_T = units.character[word_T] if vocabulary else np.zeros(0, dtype=bool)
    gram_T, number = word_T, vocabulary
    longer: list[Ints] = []
    for length in range(1, MAX_CHARACTERS + 1):
        if length > 1:
            # gram_T: the n-gram that begins at each token, -1 = not frequent; one more word makes the next length
            whole = (np.roll(text_T, 1 - length) == text_T) & (gram_T >= 0)
            whole[len(whole) - length + 1 :] = False
            if length > MAX_NGRAM:
                whole &= np.logical_and.reduce([np.roll(character_T, -shift) for shift in range(length)])
            if not whole.any():
                return
            codes = np.where(whole, gram_T * vocabulary + np.roll(word_T, 1 - length), -1)
            values, inverse = np.unique(codes, return_inverse=True)
            gram_T = np.where(values[inverse] >= 0, inverse, -1)
            longer, number = [*longer, values], len(values)
        used = gram_T >= 0
        pairs = np.unique(gram_T[used] * texts + text_T[used])
        gram_P, text_P = pairs // texts, pairs % texts
        frequent = np.bincount(gram_P, minlength=number) >= MIN_TEXTS
        kept = frequent[gram_P]
        yield Holders(gram_P[kept], text_P[kept], number, partial(_words, longer, vocabulary))
        gram_T = np.where(used & frequent[gram_T], gram_T, -1)


def _words(longer: Sequence[Ints], vocabulary: int, gram: int) -> list[int]:
    """Return the words of an n-gram. Each entry of `longer` splits an n-gram into a shorter one and its last word."""
    words: list[int] = []
    for values in reversed(longer):
        gram, word = divmod(int(values[gram]), vocabulary)
        words.insert(0, word)
    return [gram, *words]


def _judged(holders: Holders, prompts: TextsByPrompt) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the n-grams with certain rise and pay, and these. Letters: K pairs of an n-gram and a prompt."""
    size, p = holders.number, prompts
    number = len(p.size_C)
    cells, cell_P = np.unique(holders.gram_P * number + p.prompt_D[holders.text_P], return_inverse=True)
    gram_K, prompt_K = cells // number, cells % number
    share_K = np.bincount(cell_P) / p.size_C[prompt_K]
    first, first_error = _mean_share(share_K, gram_K, p.third_C[prompt_K] == 0, size, int(np.sum(p.third_C == 0)))
    last, last_error = _mean_share(share_K, gram_K, p.third_C[prompt_K] == 2, size, int(np.sum(p.third_C == 2)))
    earned_K = np.bincount(cell_P, weights=p.rest_D[holders.text_P], minlength=len(cells))
    earned = np.bincount(gram_K, weights=earned_K, minlength=size)
    error = np.sqrt(np.bincount(gram_K, weights=earned_K**2, minlength=size))
    compared = np.bincount(gram_K, weights=np.abs(earned_K) > 1e-12, minlength=size)
    strata, stratum_P = np.unique(holders.gram_P * len(p.size_S) + p.stratum_D[holders.text_P], return_inverse=True)
    held = np.bincount(stratum_P)
    against = held * (1 - held / p.size_S[strata % len(p.size_S)])
    contrast = np.bincount(strata // len(p.size_S), weights=against, minlength=size)
    texts = np.bincount(holders.gram_P, minlength=size)
    rises = last - first > np.maximum(MIN_Z * np.hypot(first_error, last_error), 1e-9)
    pays = earned > np.maximum(MIN_Z * error, 1e-9)
    enough = (texts >= MIN_TEXTS) & (compared >= MIN_PROMPTS) & (contrast > 0)
    for gram in np.flatnonzero(rises & pays & enough).tolist():
        share = {"first": float(first[gram]), "last": float(last[gram])}
        yield gram, {"texts": int(texts[gram]), **share, "pays": float(earned[gram] / contrast[gram])}


def _mean_share(share_K: Floats, gram_K: Ints, here_K: Any, size: int, number: int) -> tuple[Floats, Floats]:
    """Return each n-gram's mean share over `number` prompts (0 for prompts without it), and its standard error."""
    if number < 2:
        return np.zeros(size), np.full(size, np.inf)
    mean = np.bincount(gram_K[here_K], weights=share_K[here_K], minlength=size) / number
    square = np.bincount(gram_K[here_K], weights=share_K[here_K] ** 2, minlength=size) / number
    return mean, np.sqrt(np.maximum(square - mean**2, 0) / (number - 1))


def _thirds(steps: Any) -> Any:
    """Return 0, 1, 2 for steps in the first, middle and last third of the run's range; 0 for all of a single step."""
    if not len(steps) or steps.min() == steps.max():
        return np.zeros(len(steps), dtype=np.int64)
    past = steps.astype(np.int64) - int(steps.min())
    return past * 2 if past.max() == 1 else past * 3 // (past.max() + 1)
