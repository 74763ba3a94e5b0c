"""Results of tricks that were tried on a reward: the score of each trick on every row, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vlmrl.reward_check.scores import Floats
from vlmrl.reward_check.statistics import mean
from vlmrl.rewards.several_scorer import RewardScorer
from vlmrl.tasks.attack import Attack
from vlmrl.types import RewardInput

EPSILON = 1e-9
HUNG = "no answer within"
"""Text in the error of a row whose worker was killed because it did not answer."""
MOST_HUNG = 3
"""Number of tricks on which the reward hangs after which the probe stops, because each one costs a full time limit."""
SLOW_SECONDS = 1.0
"""Time limit for scoring one response, in seconds. If a model learns to write slower responses, the run stalls."""
WORDS = {
    "hole": "pays more than honest play without knowledge",
    "leak": "pays for what should earn nothing",
    "blind": "pays a wrong answer like the right one",
    "improper": "the best answer is not one's belief",
    "hangs": "makes the reward hang",
    "breaks": "makes the reward fail",
    "slow": "takes more than a second",
    "lenient": "counts what a person would not call right",
    "silent": "a broken truth is scored without an error",
    "unfair": "an honest answer in another spelling loses",
}
"""Verdict -> its meaning, the worst first: undeserved scores, then failures that stop a run, then lost scores."""
ADVICE = {
    "hole": "read one answer from one place, and pay nothing for a response that breaks the format",
    "leak": "pay the minimum for what cannot be read: no default answer, no credit for missing parts",
    "blind": "compare the whole answer, every name in its place, and nothing else",
    "breaks": "return a number for any text, 0 for what cannot be read; check for NaN and overflow",
    "hangs": "no nested repeats in a regular expression, no eval, and a limit on the length that is read",
    "slow": "no regular expression that restarts at every character, and a limit on the length that is read",
    "lenient": "read the whole answer: its sign, a denial before it, and what follows",
    "unfair": "ignore case, outer blanks and final full stops",
    "silent": "raise an error for a truth that cannot be read: a 0 for every response hides it",
    "improper": "a proper score, such as 1 - (p - y)**2",
}
"""Verdict -> advice to the author of the reward."""
TO_PROBE = "show the form of an answer in the prompt, such as <answer>NUMBER</answer>, or in a saved response"
"""Advice to the user whose reward reads none of the forms that were tried."""
WARNINGS = ("unfair", "silent", "lenient")
"""Verdicts that give no response an undeserved score. They are reported, but counted as warnings."""
FAILURES = ("hangs", "breaks", "slow")
"""Verdicts that hold whatever form of an answer the reward reads."""


@dataclass(frozen=True)
class ProbeResult:
    """Result of a trick.

    Args:
        kind: kind of the trick, see attacks.py; also `truth` and `belief`.
        mean, best: mean and maximum of its score over the rows; None if the reward failed on all of them.
        paid: share of rows on which the trick earned more than the lowest-scoring response to the same row.
        errors: number of rows on which the reward failed; `error` is the first failure.
        verdict: a key of WORDS; "" = no finding.
    """

    name: str
    idea: str
    kind: str
    mean: float | None
    best: float | None
    paid: float | None
    errors: int
    error: str
    verdict: str
    example: str

    @property
    def flagged(self) -> bool:
        return self.verdict not in ("", *WARNINGS)


@dataclass
class Tried:
    """Scores of one trick on the rows: NaN where the reward failed or the trick does not fit the row."""

    attack: Attack
    values_R: Floats
    error: str
    slowest: float

    @property
    def mean(self) -> float | None:
        return mean(self.values_R)


@dataclass(frozen=True)
class Honest:
    """Scores of honest answers (see probe.py): informed, wrong, and the best uninformed answer.

    Args:
        all: uninformed answer -> its mean score.
        tolerance: differences of two scores up to this are noise of the reward or rounding.
    """

    informed: Tried
    wrong: Tried
    uninformed: Tried
    all: Mapping[str, float]
    tolerance: float


class Attempts:
    """Tries of responses on the rows, with one scorer. `seconds`: times of all rows that were scored so far."""

    def __init__(self, scorer: RewardScorer, rows: Sequence[RewardInput]) -> None:
        self.scorer, self.rows = scorer, rows
        self.seconds: list[float] = []

    def on(self, attack: Attack, *, rows: Sequence[RewardInput] | None = None, strict: bool = False) -> Tried:
        """Return the scores of a trick. If the attack has `turned`, the lower score of its two orders."""
        rows = (self.rows if rows is None else rows)[: attack.most]
        values, error = self.score([attack.write(x) for x in rows], strict)
        slowest = max(self.seconds[-len(rows) :], default=0.0)
        if slowest > SLOW_SECONDS and not error:  # once more: a slow reward is slow again, a busy machine is not
            self.score([attack.write(x) for x in rows], strict)
            slowest = min(slowest, max(self.seconds[-len(rows) :], default=0.0))
        if attack.turned is not None:
            others, other = self.score([attack.write(x, turned=True) for x in rows], strict)
            values, error = np.minimum(values, others), error or other
        filled = np.full(len(self.rows), math.nan)
        filled[: len(values)] = values
        return Tried(attack, filled, error, slowest)

    def score(self, inputs: Sequence[RewardInput | None], strict: bool = False) -> tuple[Floats, str]:
        """Return (scores, first error); NaN for None, where the reward failed, and for all after a first that hangs."""
        places = [i for i, x in enumerate(inputs) if x is not None]
        names = [f"row {i}" for i in places]
        texts = [x for x in inputs if x is not None]
        runs = [single.in_worker for single in self.scorer.spec.singles]
        alone = int(any(run is not None and not run.batched for run in runs))
        scores = self.scorer.score(texts[:alone], strict=strict, rows=names[:alone])
        self.seconds += self.scorer.seconds
        if not any(HUNG in (s.error or "") for s in scores):  # if the first row hangs, all rows would take hours
            scores += self.scorer.score(texts[alone:], strict=strict, rows=names[alone:])
            self.seconds += self.scorer.seconds
        values = np.full(len(inputs), math.nan)
        values[places[: len(scores)]] = [s.value for s in scores]
        return values, next((s.error for s in scores if s.error is not None), "")


def ranked(results: Sequence[ProbeResult]) -> list[ProbeResult]:
    """Return the results sorted by verdict, the worst first (see WORDS); within a verdict by mean score, highest first.

    Results without a finding come last.
    """
    order = [*WORDS, ""]
    return sorted(results, key=lambda r: (order.index(r.verdict), math.inf if r.mean is None else -r.mean))
