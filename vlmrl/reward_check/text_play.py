"""Search for the form of a right answer that a reward reads, and honest answers and tricks in this form."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vlmrl.reward_check.math_attacks import BOX, math_attacks
from vlmrl.reward_check.text_attacks import text_attacks
from vlmrl.reward_check.trick_results import EPSILON, HUNG, MOST_HUNG, Attempts, Honest
from vlmrl.tasks.answer_forms import AnswerForm, answer_forms
from vlmrl.tasks.attack import Attack, Make, Play, says
from vlmrl.types import RewardInput

COMPARED = 4
"""Number of rows with different truths whose answers are exchanged to see whether a reward reads a form."""


@dataclass(frozen=True)
class TriedForm:
    """Scores of a form on a few rows with different truths. Each answer is given to each of these rows.

    So length and format earn the same in `right` and in `wrong`, which differ only if the reward reads the truth.

    Args:
        right: mean score of the answers on their own rows; NaN if the reward failed on one.
        wrong: mean score of the same answers on the other rows.
    """

    form: AnswerForm
    right: float
    wrong: float

    @property
    def is_read(self) -> bool:
        return self.right > self.wrong + EPSILON


def tried_forms(attempts: Attempts, echo: str, most: float) -> list[TriedForm]:
    """Return the forms that the reward reads, the one that pays most first; then all others in the same order.

    Args:
        echo: prompt template, used when a row has no stored prompt.
        most: largest possible score; a form that earns it ends the search.
    """
    tried: list[TriedForm] = []
    hung = 0
    for form in answer_forms(attempts.rows, echo):
        one, has_hung = _tried(attempts, form)
        hung += has_hung
        tried += [] if has_hung else [one]
        if hung == MOST_HUNG or (one.is_read and one.right >= most - EPSILON):
            break
    return sorted(tried, key=lambda t: (not t.is_read, -t.right if t.right == t.right else math.inf))


def _tried(attempts: Attempts, form: AnswerForm) -> tuple[TriedForm, bool]:
    """Return the scores of a form, and whether the reward hung on it."""
    texts = form.known(attempts.rows)[:COMPARED]
    rows = [next(x for x in attempts.rows if form.text(x) == text) for text in texts]
    others = texts if len(texts) > 1 else [form.wrong(rows[0], texts)] * bool(rows)
    answers = list(dict.fromkeys([*texts, *others]))
    earned_AR = np.full((len(answers), len(rows)), math.nan)
    for place, text in enumerate(answers):
        result = attempts.on(Attack("form", "", "guess", says(form.around(text))), rows=rows)
        if HUNG in result.error:
            return TriedForm(form, math.nan, math.nan), True
        earned_AR[place] = result.values_R[: len(rows)]
    own_AR = np.eye(len(answers), len(rows), dtype=bool)
    means = [float(earned_AR[mask].mean()) if mask.any() else math.nan for mask in (own_AR, ~own_AR)]
    return TriedForm(form, *means), False


def text_play(attempts: Attempts, forms: Sequence[TriedForm], trace: Make | None) -> Play:
    """Return honest answers and tricks for rows whose answers are texts, in the first of the forms.

    If the task's own correct responses (`trace`) earn more than every known form, they are the honest answers.
    """
    form, rows = forms[0].form if forms else AnswerForm(), attempts.rows
    known = form.known(rows)
    said = [form.around(guess) for guess in known or ["I do not know."]]
    said += [one.form.around(guess) for one in forms if one.is_read for guess in one.form.known(rows)[:1]]
    said += [form.around(union)] if (union := form.union(rows)) is not None else []
    guesses = [Attack(f"always {t[:60]}", "the same well-formed guess", "guess", says(t)) for t in dict.fromkeys(said)]
    idea = "an answer in the form that pays best"
    informed = Attack("honest", idea, "fair", lambda x: form.around(form.text(x)) if form.text(x) else None)
    wrong = Attack("honest, wrong", idea, "fair", lambda x: form.around(form.wrong(x, known)))
    attacks = text_attacks(rows, form)
    if BOX in form.frame.before:
        attacks += math_attacks(form, known)
    play = Play(informed, wrong, guesses, attacks, right_answer=form.text)
    return play if trace is None else _traced_play(attempts, play, trace)


def _traced_play(attempts: Attempts, play: Play, trace: Make) -> Play:
    """Return `play` with the task's correct responses as honest answers, if they earn more than `play.informed`.

    Its wrong answer to a row is then the correct response to another row. If they earn no more, `play` is returned.
    """
    counts = Counter(text for x in attempts.rows if (text := trace(x)) is not None)
    texts = [text for text, _ in counts.most_common()]

    def wrong(x: RewardInput) -> str | None:
        right = trace(x)
        return next((text for text in texts if text != right), None)

    informed = Attack("honest", "the response that the task calls correct", "fair", trace)
    known, traced = (attempts.on(one).mean for one in (play.informed, informed))
    if traced is None or (known is not None and known >= traced):
        return play
    constants = [Attack(f"always {text[:60]}", "the same correct response", "guess", says(text)) for text in texts[:5]]
    other = Attack("honest, wrong", "the correct response of another row", "fair", wrong)
    return replace(play, informed=informed, wrong=other, guesses=[*play.guesses, *constants], right_answer=trace)


@dataclass(frozen=True)
class Reading:
    """Whether a reward tells right answers from wrong ones.

    Args:
        is_read: right answers earn more than the same answers to other rows, in at least one form.
        why_not: why the form of a right answer is not known; "" = it is known, or it is sure that no form is read.
        record: highest score of a saved response or of an answer that was tried.
    """

    is_read: bool
    why_not: str = ""
    record: float = math.inf


def reading(attempts: Attempts, forms: Sequence[TriedForm], honest: Honest, bounds: tuple[float, float]) -> Reading:
    """Return whether a reward for text answers reads them.

    If no right answer earns more than a wrong one, the form is not known, or the reward reads none. It reads none if it
    prefers wrong answers, or if they earn as much as anything that is known, or no more than silence.

    Args:
        bounds: least and largest possible score; infinite if the reward does not declare them.
    """
    if any(one.is_read for one in forms):
        return Reading(True)
    told = [attempts.on(Attack("saved", "", "guess", make)) for make in (lambda x: x.response, says(""))]
    said, silence = (np.where(np.isnan(t.values_R), -math.inf, t.values_R) for t in told)
    best = max((one.right for one in forms if not math.isnan(one.right)), default=-math.inf)
    record = max(best, float(said.max()), honest.uninformed.mean or -math.inf)
    least, most = (end if math.isfinite(end) else other for end, other in zip(bounds, (0.0, record), strict=True))
    slack = honest.tolerance
    is_paid_anyway = best > least + slack and best + slack >= min(most, float(silence.max()))
    if is_paid_anyway or any(one.wrong > one.right + slack for one in forms):
        return Reading(False, record=record)
    if not forms:
        why = "the truths have no value that could be written as an answer"
    else:
        example = forms[0].form.around(forms[0].form.text(attempts.rows[0]))
        why = f"no right answer that was tried earns more than a wrong one: {len(forms)} forms, such as {example!r:.80}"
    return Reading(False, why, record)
