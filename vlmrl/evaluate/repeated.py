"""Estimates from several samples per prompt: pass@k, maj@k and mean@k, with intervals over prompts.

The k samples are a random draw without replacement from the n samples of a prompt. Each estimate is the mean over all
such draws, so it is unbiased for k fresh samples and has no randomness of its own. A prompt counts as one number,
whatever n is; its interval therefore treats the samples of a prompt as one cluster.

A prompt with fewer than k samples has no estimate (NaN), and is left out of the mean; the interval's `n` is the number
of prompts that are in it. If no prompt has k samples, the estimate is NaN, and None in a summary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache, reduce
from itertools import groupby

import numpy as np

from vlmrl.evaluate.estimates import EMPTY, UNIT_RANGE, Floats, Integers, Interval, RowKeys, mean_interval

BEGINNINGS = ("pass@", "maj@", "mean@")
"""Beginnings of the names of these metrics."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that one or more of k samples, drawn without replacement from n, are correct.

    It is 1 - C(n - c, k) / C(n, k), unbiased for the chance with k fresh samples (Chen et al. 2021, eq. 1).

    Returns: NaN for k > n: fewer samples do not tell.
    Raises: ValueError unless 1 <= k and 0 <= c <= n.
    Example: n = 4, c = 1, k = 2 -> 1 - 3/6 = 0.5.
    """
    n, c = num_samples, num_correct
    if not (k >= 1 and 0 <= c <= n):
        raise ValueError(f"pass@{k} of {c} correct among {n} samples")
    return math.nan if k > n else 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean_at_k(accuracies: Sequence[float], k: int) -> float:
    """Return the mean accuracy of k samples of a prompt, averaged over all draws: the mean of all n.

    Returns: NaN for k > n.
    Raises: ValueError unless 1 <= k.
    """
    if k < 1:
        raise ValueError(f"mean@{k} needs k of at least 1")
    return math.nan if k > len(accuracies) else math.fsum(accuracies) / len(accuracies)


def maj_at_k(answers: Sequence[Hashable | None], accuracies: Sequence[float], k: int) -> float:
    """Return the expected accuracy of the most frequent answer among k samples, drawn without replacement from n.

    Rule for ties: the most frequent answers have equal chances, so the result is their mean accuracy. A sample without
    an answer (None) has no vote; a draw without any vote counts as 0. If equal answers have different accuracies, the
    answer has their mean.

    Args:
        answers: the answer of each sample in a form in which equal answers are equal, or None.
        accuracies: of the same samples, each in [0, 1].
    Returns: in [0, 1]; NaN for k > n.
    Raises: ValueError unless 1 <= k, and for lengths that differ.
    Source: self-consistency, Wang et al. 2023 (arXiv:2203.11171), averaged over all draws instead of one.
    Example: answers A, A, B with accuracies 1, 1, 0; k = 2: the draws AA, AB, AB -> (1 + 1/2 + 1/2) / 3 = 2/3.
    """
    if k < 1 or len(answers) != len(accuracies):
        raise ValueError(f"maj@{k} of {len(answers)} answers and {len(accuracies)} accuracies")
    if k > len(answers):
        return math.nan
    by_answer: dict[Hashable, list[float]] = {}
    for answer, accuracy in zip(answers, accuracies, strict=True):
        if answer is not None:
            by_answer.setdefault(answer, []).append(accuracy)
    if k == len(answers):  # a single draw
        most = max(map(len, by_answer.values()), default=0)
        means = [math.fsum(own) / len(own) for own in by_answer.values() if len(own) == most]
        return math.fsum(means) / len(means) if means else 0.0
    # Answers in descending order of their votes: the chances depend only on these numbers, and are kept for reuse.
    of_answers = sorted(by_answer.values(), key=len, reverse=True)
    chances = _winning_chances(tuple(map(len, of_answers)), len(answers) - sum(map(len, of_answers)), k)
    return math.fsum(chance * math.fsum(own) / len(own) for chance, own in zip(chances, of_answers, strict=True))


@lru_cache(maxsize=4096)
def _winning_chances(votes: tuple[int, ...], abstentions: int, k: int) -> tuple[float, ...]:
    """Return for each answer the chance to win a draw of k samples; tied answers share it. Exact up to rounding.

    Args:
        votes: number of samples with each answer, in descending order.
        abstentions: number of samples without an answer.
    """
    draws = math.comb(sum(votes) + abstentions, k)
    chances: list[float] = []
    for own, equals in groupby(votes):  # answers with equal votes have equal chances
        others = list(votes)
        others.remove(own)
        won = Counter[int]()
        for drawn in range(1, min(own, k) + 1):
            won.update(_wins(own, others, abstentions, k, drawn))
        # Integers of any size: one division per number of tied answers, so that nothing overflows.
        chance = math.fsum(count / (tied * draws) for tied, count in won.items())
        chances += [chance] * len(list(equals))
    return tuple(chances)


def _wins(own: int, others: Sequence[int], abstentions: int, k: int, drawn: int) -> dict[int, int]:
    """Return t -> number of draws of k in which an answer has `drawn` votes, no other more, and t answers as many."""
    # (samples drawn so far, answers with as many votes as this one) -> number of ways
    ways = {(drawn, 1): math.comb(own, drawn)}
    for votes in others:
        following: dict[tuple[int, int], int] = {}
        for (taken, tied), count in ways.items():
            for more in range(min(votes, drawn, k - taken) + 1):
                key = (taken + more, tied + (more == drawn))
                following[key] = following.get(key, 0) + count * math.comb(votes, more)
        ways = following
    wins = Counter[int]()
    for (taken, tied), count in ways.items():
        wins[tied] += count * math.comb(abstentions, k - taken)
    return wins


NO_ANSWER = -1


class SampleTable:
    """Graded samples of many prompts, as arrays.

    Args:
        prompt_S: [S] number of each sample's prompt, any integers.
        accuracy_S: [S] in [0, 1]; 1 = correct.
        answer_S: [S] the answers as integers, equal ones equal, NO_ANSWER for none; None = not known.
        clusters_S: ids of what the prompt of each sample shares with others; () = it is a cluster of its own.

    Attributes:
        prompt_P, clusters_P: number and ids of each prompt. Prompts are in the order of their first samples.
    """

    def __init__(self, prompt_S: Integers, accuracy_S: Floats, answer_S: Integers | None, clusters_S: RowKeys) -> None:
        _, first_U, prompt_of_S = np.unique(prompt_S, return_index=True, return_inverse=True)
        is_first_S = np.zeros(len(prompt_S), dtype=bool)
        is_first_S[first_U] = True
        self.prompt_P, self.clusters_P = prompt_S[is_first_S], clusters_S.take(is_first_S)
        rank_U = np.empty(len(first_U), dtype=np.int64)
        rank_U[np.argsort(first_U)] = np.arange(len(first_U))
        prompt_of_S = rank_U[prompt_of_S.ravel()]
        order_S = np.argsort(prompt_of_S, kind="stable")  # the samples of a prompt together, in their order
        self._accuracy_S = accuracy_S[order_S]
        self._answer_S = None if answer_S is None else answer_S[order_S]
        self._size_P = np.bincount(prompt_of_S, minlength=len(first_U))
        self._begin_P = np.cumsum(self._size_P) - self._size_P
        self._is_share = bool(np.isin(accuracy_S, UNIT_RANGE).all())

    def shown_estimates(self) -> list[tuple[str, int]]:
        """Return (metric, k) of the estimates that a summary shows; [] if a prompt has fewer than two samples.

        With n = samples of the prompt that has the fewest: pass@k for k = 1, 2, 4, ... and n; maj@k for the same k from
        3 (with two votes it is the mean), if answers are known; mean@n. Only mean@n and maj@k if an accuracy is neither
        0 nor 1.
        """
        n = int(self._size_P.min()) if len(self._size_P) else 0
        if n < 2:
            return []
        ks = sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})
        passes = [("pass", k) for k in ks if self._is_share]
        return [*passes, *(("maj", k) for k in ks if self._answer_S is not None and k > 2), ("mean", n)]

    def of_prompts(self, prompt_P: Integers) -> SampleTable:
        """Return the samples of some of the prompts, in this order."""
        places = {prompt: place for place, prompt in enumerate(self.prompt_P.tolist())}
        chosen = [places[prompt] for prompt in prompt_P.tolist()]
        place_S = np.repeat(np.array(chosen, dtype=np.int64), self._size_P[chosen])
        own_S = np.concatenate([np.arange(self._begin_P[p], self._begin_P[p] + self._size_P[p]) for p in chosen])
        clusters_S = RowKeys.of(self.clusters_P[place] for place in place_S.tolist())
        answer_S = None if self._answer_S is None else self._answer_S[own_S]
        return SampleTable(self.prompt_P[place_S], self._accuracy_S[own_S], answer_S, clusters_S)

    def interval(self, metric: str, k: int) -> Interval:
        """Return the mean of an estimate over the prompts that have k samples, with its 95% interval over prompts.

        Returns: EMPTY if no prompt has k samples.
        """
        value_P = self.values(metric, k)
        has_value_P = ~np.isnan(value_P)
        if not has_value_P.any():
            return EMPTY
        return mean_interval(value_P[has_value_P], self.clusters_P.take(has_value_P), UNIT_RANGE)

    def values(self, metric: str, k: int) -> Floats:
        """Return an estimate for every prompt, NaN where it has fewer than k samples; [P].

        Args:
            metric: "pass", "maj" or "mean".
        Raises: ValueError for another metric, and for maj@k if answers are not known.
        """
        if metric == "pass" or (metric == "mean" and self._is_share):
            correct_P = np.add.reduceat((self._accuracy_S == 1).astype(np.int64), self._begin_P)
            # Few (samples, correct) pairs are different. [P] -> [U] -> [P]
            pairs_U2, pair_P = np.unique(np.stack([self._size_P, correct_P], 1), axis=0, return_inverse=True)
            estimate = pass_at_k if metric == "pass" else lambda n, c, k: math.nan if k > n else c / n
            return np.array([estimate(n, c, k) for n, c in pairs_U2.tolist()])[pair_P.ravel()]
        return np.array([self._value(metric, k, i) for i in range(len(self._size_P))])

    def _value(self, metric: str, k: int, prompt: int) -> float:
        own = slice(self._begin_P[prompt], self._begin_P[prompt] + self._size_P[prompt])
        accuracies = self._accuracy_S[own].tolist()
        if metric == "mean":
            return mean_at_k(accuracies, k)
        if metric != "maj" or self._answer_S is None:
            raise ValueError(f"{metric}@{k}: unknown metric, or the answers were not saved")
        return maj_at_k([a if a != NO_ANSWER else None for a in self._answer_S[own].tolist()], accuracies, k)


def in_common(tables: Sequence[SampleTable]) -> list[SampleTable]:
    """Return the samples of the prompts that all tables have, in the order of the first one; [] if there are none."""
    shared = reduce(np.intersect1d, (table.prompt_P for table in tables))
    prompt_P = tables[0].prompt_P[np.isin(tables[0].prompt_P, shared)]
    return [table.of_prompts(prompt_P) for table in tables] if len(prompt_P) else []
