"""Words that came to be paid: n-grams that spread over a run and that go with the score. In bounded work."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlmrl.check.facts import Facts
from vlmrl.check.scores import Floats, Ints, Scores

WORD = re.compile(r"[^\W_]+|</?[A-Za-z][^<>\s]{0,40}>")
"""A word, or a tag as one word."""
MAX_WORDS = 400
"""Of each response, its first words."""
MAX_NGRAM = 3
MIN_TEXTS = 20
"""An n-gram in fewer of the texts, or in all but fewer, says nothing."""
MOST = 15
MIN_Z = 4.0
"""How many standard errors both the rise and the pay must be from nothing for an n-gram to be told: among some 100,000
n-grams of honest text, 4 in both at once are not expected."""


@dataclass(frozen=True)
class Holders:
    """Which texts hold which n-gram: pairs (gram, text), each once; `names[gram]` spells it."""

    gram_P: Ints
    text_P: Ints
    names: Sequence[str]


def paid_ngrams(facts: Facts, scores: Scores, texts: Mapping[int, str]) -> dict[str, Any]:
    """N-grams (1 to 3 words) whose frequency rose over the run and that go with the score.

    Of each: in how many of the texts it is (`texts`), its share in the first and in the last third of the steps, and by
    how much more texts with it are paid than texts without it (`pays`), compared within each third, so that a score
    which only rises with training is not taken for pay. Rise and pay must both be MIN_Z standard errors from nothing.

    Args:
        texts: row of the input -> response; the sample that is looked at.
    Returns: texts (how many), thirds (whether there are steps to compare), found: the n-grams by rise times pay, the
        largest first; of n-grams that are in the same texts, the longest alone.
    """
    at = np.flatnonzero(np.isin(facts.rows_N, np.asarray(list(texts), dtype=np.int64)) & ~scores.failed_N)
    third_D = _thirds(facts.steps_N[at])
    told: dict[str, Any] = {"texts": len(at), "thirds": bool(len(at)) and int(third_D.max()) > 0, "found": []}
    if not told["thirds"]:
        return told
    found: dict[bytes, dict[str, Any]] = {}
    for holders in _ngrams([texts[row] for row in facts.rows_N[at].tolist()]):
        for gram, one in _judged(holders, third_D, scores.values_N[at]):
            key = np.sort(holders.text_P[holders.gram_P == gram]).tobytes()
            found[key] = {"ngram": holders.names[gram], **one}
    told["found"] = sorted(found.values(), key=lambda f: -(f["last"] - f["first"]) * f["pays"])[:MOST]
    return told


def _ngrams(texts: Sequence[str]) -> Iterator[Holders]:
    """The n-grams of each length that are in at least MIN_TEXTS texts.

    A frequent n-gram has frequent ends, so the longer ones are made of frequent shorter ones alone.
    """
    known: dict[str, int] = {}
    words = [
        [known.setdefault(m.group().lower(), len(known)) for m, _ in zip(WORD.finditer(t), range(MAX_WORDS))]  # noqa: B905
        for t in texts
    ]
    text_T = np.repeat(np.arange(len(texts)), [len(w) for w in words])
    gram_T = word_T = np.asarray([w for row in words for w in row], dtype=np.int64)
    names = list(known)
    spelt = names
    for length in range(1, MAX_NGRAM + 1):
        if length > 1:
            # gram_T: the n-gram that begins at each token, -1 = not frequent; one more word makes the next length
            ends = np.roll(word_T, 1 - length)
            whole = (np.roll(text_T, 1 - length) == text_T) & (gram_T >= 0)
            whole[len(whole) - length + 1 :] = False
            codes = np.where(whole, gram_T * len(names) + ends, -1)
            values, inverse = np.unique(codes, return_inverse=True)
            spelt = [f"{spelt[v // len(names)]} {names[v % len(names)]}" if v >= 0 else "" for v in values.tolist()]
            gram_T = np.where(values[inverse] >= 0, inverse, -1)
        used = gram_T >= 0
        pairs = np.unique(gram_T[used] * len(texts) + text_T[used])
        gram_P, text_P = pairs // len(texts), pairs % len(texts)
        frequent = np.bincount(gram_P, minlength=len(spelt)) >= MIN_TEXTS
        kept = frequent[gram_P]
        yield Holders(gram_P[kept], text_P[kept], spelt)
        gram_T = np.where(used & frequent[gram_T], gram_T, -1)


def _judged(holders: Holders, third_D: Any, value_D: Floats) -> Iterator[tuple[int, dict[str, Any]]]:
    """The n-grams with a certain rise and a certain pay, with both."""
    size = len(holders.names)
    cell_P = holders.gram_P * 3 + third_D[holders.text_P]
    value_P = value_D[holders.text_P]

    def sums(weights: Any) -> Floats:
        return np.bincount(cell_P, weights=weights, minlength=3 * size).reshape(size, 3).astype(np.float64)

    total_3 = np.bincount(third_D, minlength=3).astype(np.float64)
    count_G3, sum_G3, square_G3 = sums(None), sums(value_P), sums(value_P**2)
    n = count_G3.sum(1)
    share_G3 = count_G3 / np.maximum(total_3, 1)
    pooled = (count_G3[:, 0] + count_G3[:, 2]) / (total_3[0] + total_3[2])
    error = np.sqrt(pooled * (1 - pooled) * (1 / total_3[0] + 1 / total_3[2]))
    rise = share_G3[:, 2] - share_G3[:, 0]
    all_sum, all_square = (np.bincount(third_D, weights=w, minlength=3) for w in (value_D, value_D**2))
    gap, spread, weight = np.zeros(size), np.zeros(size), np.zeros(size)
    for k in range(3):
        a, b = count_G3[:, k], total_3[k] - count_G3[:, k]
        usable = (a >= 2) & (b >= 2)
        a, b = np.where(usable, a, 2), np.where(usable, b, 2)
        mean_a, mean_b = sum_G3[:, k] / a, (all_sum[k] - sum_G3[:, k]) / b
        var_a = np.maximum(square_G3[:, k] / a - mean_a**2, 0) / (a - 1)
        var_b = np.maximum((all_square[k] - square_G3[:, k]) / b - mean_b**2, 0) / (b - 1)
        w = np.where(usable, a * b / (a + b), 0.0)
        gap, spread, weight = gap + w * (mean_a - mean_b), spread + w**2 * (var_a + var_b), weight + w
    certain = (rise > MIN_Z * error) & (gap > 1e-9) & (gap > MIN_Z * np.sqrt(spread))
    enough = (n >= MIN_TEXTS) & (n <= total_3.sum() - MIN_TEXTS)
    for gram in np.flatnonzero(certain & enough & (error > 0) & (weight > 0)).tolist():
        yield (
            gram,
            {
                "texts": int(n[gram]),
                "first": float(share_G3[gram, 0]),
                "last": float(share_G3[gram, 2]),
                "pays": float(gap[gram] / weight[gram]),
            },
        )


def _thirds(steps: Any) -> Any:
    """0, 1, 2 for steps in the first, the middle and the last third of the run's range; 0 for all of a single step."""
    if not len(steps) or steps.min() == steps.max():
        return np.zeros(len(steps), dtype=np.int64)
    low, high = int(steps.min()), int(steps.max())
    return np.minimum(2, (steps.astype(np.int64) - low) * 3 // (high - low + 1))
