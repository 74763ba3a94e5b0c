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
from dataclasses import dataclass
from functools import lru_cache
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


@dataclass(frozen=True)
class PromptSamples:
    """Graded samples of one prompt.

    Args:
        accuracies: one number per sample, in [0, 1]; 1 = correct.
        answers: the answer of each sample, None where it has none; None = the answers are not known.
        cluster: ids of what the prompt shares with others, such as its images; () = it is a cluster of its own.
    """

    accuracies: tuple[float, ...]
    answers: tuple[Hashable | None, ...] | None = None
    cluster: tuple[Hashable, ...] = ()


def estimates_per_prompt(prompts: Sequence[PromptSamples], metric: str, k: int) -> list[float]:
    """Return an estimate for every prompt, NaN where it has fewer than k samples.

    Args:
        metric: "pass", "maj" or "mean".
    Raises: ValueError for another metric, and for maj@k if answers are not known.
    """
    if metric == "pass":
        return [pass_at_k(len(p.accuracies), sum(a == 1.0 for a in p.accuracies), k) for p in prompts]
    if metric == "mean":
        return [mean_at_k(p.accuracies, k) for p in prompts]
    if metric != "maj" or any(p.answers is None for p in prompts):
        raise ValueError(f"{metric}@{k}: unknown metric, or the answers were not saved")
    return [maj_at_k(p.answers or (), p.accuracies, k) for p in prompts]


def repeated_interval(prompts: Sequence[PromptSamples], metric: str, k: int) -> Interval:
    """Return the mean of an estimate over the prompts that have k samples, with its 95% interval over prompts.

    Args:
        metric: "pass", "maj" or "mean".
    Returns: EMPTY if no prompt has k samples.
    """
    return mean_of(np.array(estimates_per_prompt(prompts, metric, k)), RowKeys.of(p.cluster for p in prompts))


def mean_of(value_P: Floats, clusters: RowKeys) -> Interval:
    """Return the mean of an estimate over prompts with its 95% interval; NaN = a prompt has none.

    Returns: EMPTY if no prompt has an estimate.
    """
    has_value_P = ~np.isnan(value_P)
    if not has_value_P.any():
        return EMPTY
    return mean_interval(value_P[has_value_P], clusters.take(has_value_P), UNIT_RANGE)


class SampleTable:
    """Graded samples of many prompts, as arrays.

    Args:
        prompt_S: [S] number of each sample's prompt, any integers.
        accuracy_S: [S] in [0, 1].
        answer_S: [S] the answers as integers, equal ones equal; None = not known.
        no_answer: integer that stands for no answer.

    Attributes:
        is_first_S: whether a sample is the first one of its prompt. Prompts are in this order.
    """

    def __init__(self, prompt_S: Integers, accuracy_S: Floats, answer_S: Integers | None, no_answer: int) -> None:
        _, first_U, prompt_of_S = np.unique(prompt_S, return_index=True, return_inverse=True)
        self.is_first_S = np.zeros(len(prompt_S), dtype=bool)
        self.is_first_S[first_U] = True
        rank_U = np.empty(len(first_U), dtype=np.int64)
        rank_U[np.argsort(first_U)] = np.arange(len(first_U))
        prompt_of_S = rank_U[prompt_of_S.ravel()]
        order_S = np.argsort(prompt_of_S, kind="stable")  # the samples of a prompt together, in their order
        self._accuracy_S = accuracy_S[order_S]
        self._answer_S = None if answer_S is None else answer_S[order_S]
        self._no_answer = no_answer
        self._size_P = np.bincount(prompt_of_S, minlength=len(first_U))
        self._begin_P = np.cumsum(self._size_P) - self._size_P
        self._is_share = bool(np.isin(accuracy_S, UNIT_RANGE).all())

    def shown_estimates(self) -> list[tuple[str, int]]:
        """Return (metric, k) of the estimates that a summary shows: see `shown_estimates`."""
        fewest = int(self._size_P.min()) if len(self._size_P) else 0
        return _shown(fewest, self._is_share, self._answer_S is not None)

    def values(self, metric: str, k: int) -> Floats:
        """Return an estimate for every prompt: see `estimates_per_prompt`, [P]."""
        if metric == "pass" or (metric == "mean" and self._is_share):
            correct_P = np.add.reduceat((self._accuracy_S == 1).astype(np.int64), self._begin_P)
            # Few (samples, correct) pairs are different. [P] -> [U] -> [P]
            pairs_U2, pair_P = np.unique(np.stack([self._size_P, correct_P], 1), axis=0, return_inverse=True)
            estimate = pass_at_k if metric == "pass" else _mean_of_shares
            return np.array([estimate(n, c, k) for n, c in pairs_U2.tolist()])[pair_P.ravel()]
        return np.array([self._value(metric, k, i) for i in range(len(self._size_P))])

    def _value(self, metric: str, k: int, prompt: int) -> float:
        own = slice(self._begin_P[prompt], self._begin_P[prompt] + self._size_P[prompt])
        accuracies = self._accuracy_S[own].tolist()
        if metric == "mean":
            return mean_at_k(accuracies, k)
        if metric != "maj" or self._answer_S is None:
            raise ValueError(f"{metric}@{k}: unknown metric, or the answers were not saved")
        return maj_at_k([a if a != self._no_answer else None for a in self._answer_S[own].tolist()], accuracies, k)


def _mean_of_shares(num_samples: int, num_correct: int, k: int) -> float:
    return math.nan if k > num_samples else num_correct / num_samples


def shown_estimates(prompts: Sequence[PromptSamples]) -> list[tuple[str, int]]:
    """Return (metric, k) of the estimates that a summary shows; [] if a prompt has fewer than two samples.

    With n = samples of the prompt that has the fewest: pass@k for k = 1, 2, 4, ... and n; maj@k for the same k from 3
    (with two votes it is the mean), if answers are known; mean@n. Only mean@n and maj@k if an accuracy is neither 0
    nor 1.
    """
    n = min((len(p.accuracies) for p in prompts), default=0)
    is_share = all(a in (0.0, 1.0) for p in prompts for a in p.accuracies)
    return _shown(n, is_share, all(p.answers is not None for p in prompts))


def _shown(n: int, is_share: bool, has_answers: bool) -> list[tuple[str, int]]:
    if n < 2:
        return []
    ks = sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})
    shown = [("pass", k) for k in ks if is_share] + [("maj", k) for k in ks if has_answers and k > 2]
    return [*shown, ("mean", n)]
