"""Measures of response texts: similarity, repetition, classes of characters, n-grams, and correlations with the score.

All texts of a step are measured together, and the amount of work is bounded. Suffixes: D texts, N characters of all
texts together, U distinct texts, K hash functions, G groups. N-grams are reported that became more frequent during a
run and earn higher scores. Text without spaces between words (Chinese, Thai, a long sequence of digits) is split into
characters. Scores are correlated with length, parts and step.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

from vlmrl.reward_check.responses import ResponseColumns
from vlmrl.reward_check.scores import Floats, Ints, Scores
from vlmrl.reward_check.statistics import correlation, mean, ranks

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


WORD = re.compile(r"[^\W_]+|</?[A-Za-z][^<>\s]{0,40}>")
"""Pattern of one word. A tag such as `<answer>` is one word, too."""
MAX_WORDS = 400
"""Maximum number of words that are read from a response, from its start.

In text without spaces, each character counts as a word.
"""
MAX_NGRAM = 3
MAX_CHARACTERS = 8
"""Length of the longest n-gram of characters."""
LONGEST_WORD = 24
"""Maximum length of a word, in characters; longer words are split into characters."""
MIN_TEXTS = 20
"""Minimum number of texts that contain an n-gram; rarer n-grams are ignored."""
MIN_PROMPTS = 8
"""Minimum number of prompts with texts that contain an n-gram and texts that do not; other n-grams are ignored."""
MOST = 15
MIN_Z = 4.0
"""Threshold for a report, in standard errors: an n-gram's rise in frequency and its extra score must both exceed it.

Among about 100,000 n-grams of honest text, no n-gram is expected to exceed 4 in both.
"""


@dataclass(frozen=True)
class Holders:
    """Texts that contain each n-gram, as P distinct pairs of an n-gram and a text.

    Args:
        number: number of n-grams.
        words: returns the words of an n-gram.
    """

    gram_P: Ints
    text_P: Ints
    number: int
    words: Callable[[int], list[int]]


def paid_ngrams(facts: ResponseColumns, scores: Scores, texts: Mapping[int, str]) -> dict[str, Any]:
    """Return the n-grams whose frequency rose over the run and that correlate with the score.

    An n-gram has 1 to 3 words, or 1 to 8 characters of text without spaces. The scores of texts with and without an
    n-gram are compared only between samples of one prompt. Its frequencies are compared between prompts of the first
    and the last third of the steps. So an n-gram is not reported only because all scores rise during training, or
    because it belongs to an easy prompt. (If every row has a different prompt, the texts of a step are compared
    instead; then a name that occurs in easy prompts can be reported.) The rise in frequency and the extra score must
    both be MIN_Z standard errors above zero.

    Args:
        texts: row of the input -> response: a sample of all responses, with whole groups.
    Returns: `texts`: number of texts; `thirds`: whether there are several steps to compare; `found`: the n-grams,
        sorted by rise times extra score, the largest first. If several n-grams occur in the same texts, only the
        longest is kept. Each n-gram has `texts`: number of texts that contain it; `first` and `last`: its share in the
        first and the last third of the steps; `pays`: mean score of texts with it minus that of texts without it;
        `unit`: words or characters.
    """
    at = np.flatnonzero(np.isin(facts.rows_N, np.asarray(list(texts), dtype=np.int64)) & ~scores.failed_N)
    third_D = _thirds(facts.steps_N[at])
    result: dict[str, Any] = {"texts": len(at), "thirds": bool(len(at)) and int(third_D.max()) > 0, "found": []}
    if not result["thirds"]:
        return result
    prompts = TextsByPrompt.of(facts.groups_N[at], facts.steps_N[at], third_D, scores.values_N[at])
    by_texts: dict[bytes, dict[str, Any]] = {}
    units = WordSequence.of([texts[row] for row in facts.rows_N[at].tolist()])
    for holders in _frequent_ngrams(units, len(at)):
        for gram, one in _judged(holders, prompts):
            key = np.sort(holders.text_P[holders.gram_P == gram]).tobytes()
            by_texts[key] = {**units.spelled(holders.words(gram)), **one}
    result["found"] = sorted(by_texts.values(), key=lambda f: -(f["last"] - f["first"]) * f["pays"])[:MOST]
    return result


@dataclass(frozen=True)
class TextsByPrompt:
    """D texts grouped by their C prompts. If the prompts are not known, each text counts as a prompt of its own.

    Args:
        size_C: number of texts of each prompt.
        third_C: third of the steps in which a prompt was used: 0, 1 or 2.
        rest_D: score of a text minus the mean score of its stratum.
        stratum_D: stratum of a text: the set of texts that it is compared with. These are the texts of its prompt, or
            those of its step if every prompt has a single text.
        size_S: number of texts of each of the S strata.
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
        text_T: index of the text that contains the word.
        word_T: index of the word in `names`.
        names: distinct words, in lower case.
        character: whether each of `names` is one character of text without spaces.
    """

    text_T: Ints
    word_T: Ints
    names: Sequence[str]
    character: Any

    @classmethod
    def of(cls, texts: Sequence[str]) -> WordSequence:
        """Split each text into its first MAX_WORDS words; text without spaces is split into its characters."""
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
        """Return `{"ngram", "unit"}`: an n-gram as text, and whether it consists of "words" or of "characters"."""
        text = self.names[words[0]]
        for before, word in pairwise(words):
            apart = "" if self.character[before] and self.character[word] else " "
            text += apart + self.names[word]
        return {"ngram": text, "unit": "characters" if all(self.character[w] for w in words) else "words"}


def _is_word(text: str) -> bool:
    """Return whether `text` is a tag, or a word of a language that writes spaces between words."""
    return text.startswith("<") or (len(text) <= LONGEST_WORD and (text.isascii() or not any(map(joins_words, text))))


def _frequent_ngrams(units: WordSequence, texts: int) -> Iterator[Holders]:
    """Yield, for each length, the n-grams that occur in at least MIN_TEXTS of the texts.

    An n-gram can be frequent only if the n-gram without its last word is frequent. So longer n-grams are built only
    from frequent shorter ones. N-grams longer than MAX_NGRAM consist of characters only.
    """
    text_T, word_T, vocabulary = units.text_T, units.word_T, len(units.names)
    character_T = units.character[word_T] if vocabulary else np.zeros(0, dtype=bool)
    gram_T, number = word_T, vocabulary
    longer: list[Ints] = []
    for length in range(1, MAX_CHARACTERS + 1):
        if length > 1:
            # gram_T: the n-gram that begins at each word, -1 = not frequent. Here each gets one more word.
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
    """Return the words of the n-gram `gram`.

    Args:
        longer: for each length from 2: n-gram -> code of its beginning (without the last word) and its last word.
        vocabulary: number of distinct words.
    """
    words: list[int] = []
    for values in reversed(longer):
        gram, word = divmod(int(values[gram]), vocabulary)
        words.insert(0, word)
    return [gram, *words]


def _judged(holders: Holders, prompts: TextsByPrompt) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (n-gram, its measures) of the n-grams whose rise and extra score are both significant (MIN_Z).

    Suffix K: pairs of an n-gram and a prompt.
    """
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
    """Return (mean, standard error) of each n-gram's share over `number` prompts; 0 for a prompt without the n-gram."""
    if number < 2:
        return np.zeros(size), np.full(size, np.inf)
    mean = np.bincount(gram_K[here_K], weights=share_K[here_K], minlength=size) / number
    square = np.bincount(gram_K[here_K], weights=share_K[here_K] ** 2, minlength=size) / number
    return mean, np.sqrt(np.maximum(square - mean**2, 0) / (number - 1))


def _thirds(steps: Any) -> Any:
    """Return 0, 1 or 2 for steps in the first, middle or last third of the run; all 0 if there is a single step."""
    if not len(steps) or steps.min() == steps.max():
        return np.zeros(len(steps), dtype=np.int64)
    past = steps.astype(np.int64) - int(steps.min())
    return past * 2 if past.max() == 1 else past * 3 // (past.max() + 1)


def correlations(facts: ResponseColumns, scores: Scores, texts: Mapping[int, str]) -> dict[str, Any]:
    """Return Pearson's and rank correlations (Spearman's) of the score, over the rows that have a score.

    Returns: `length` (in characters), `tokens` (None if the numbers of tokens are not known) and `step`: for each,
        {"pearson", "spearman"} with the score; `cut`: share of responses that the token limit ended, their mean score,
        and the mean score of all other responses; `parts`: part -> part -> Pearson's correlation; `ngrams`: see
        `paid_ngrams`; `by_step`: [step, mean score, mean characters, rank correlation of score and length within the
        step].
    """
    there = ~scores.failed_N
    values, chars = scores.values_N[there], facts.chars_N[there].astype(np.float64)
    tokens = facts.tokens_N[there].astype(np.float64)
    cut, steps = facts.cut_N[there], facts.steps_N[there]
    return {
        "length": _both(chars, values),
        "tokens": _both(tokens, values) if np.any(tokens) else None,
        "step": _both(steps.astype(np.float64), values),
        "cut": {"share": mean(cut), "score_cut": mean(values[cut]), "score_whole": mean(values[~cut])},
        "parts": _between(scores.at(there)),
        "by_step": _by_step(steps, values, chars),
        "ngrams": paid_ngrams(facts, scores, texts),
    }


def _both(a: Floats, b: Floats) -> dict[str, float | None]:
    return {"pearson": correlation(a, b), "spearman": correlation(ranks(a), ranks(b)) if len(a) else None}


def _between(scores: Scores) -> dict[str, dict[str, float | None]]:
    """Return Pearson's correlation of each pair of parts, over the rows to which both parts apply."""
    table: dict[str, dict[str, float | None]] = {}
    names = list(scores.parts)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            a, b = scores.parts[one], scores.parts[other]
            both = ~np.isnan(a) & ~np.isnan(b)
            table.setdefault(one, {})[other] = correlation(a[both], b[both])
    return table


def _by_step(steps: Any, values: Floats, chars: Floats) -> list[list[Any]]:
    order = np.argsort(steps, kind="stable")
    starts = np.flatnonzero(np.diff(steps[order], prepend=-1) != 0)
    return [
        [int(steps[rows[0]]), mean(values[rows]), mean(chars[rows]), _both(chars[rows], values[rows])["spearman"]]
        for rows in np.split(order, starts[1:])
        if len(rows)
    ]
