"""Search for the form of a right answer that a reward reads, and honest answers and tricks in this form."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from vlmrl.redaction.redact import quoted
from vlmrl.reward_check.math_attacks import BOX, math_attacks
from vlmrl.reward_check.text_attacks import text_attacks
from vlmrl.reward_check.trick_results import EPSILON, HUNG, MOST_HUNG, Attempts, Honest
from vlmrl.tasks.answer_forms import AnswerForm, answer_forms
from vlmrl.tasks.attack import Attack, Make, Play, responding, says
from vlmrl.tasks.base import Task
from vlmrl.types import RewardInput, Row

COMPARED = 4
"""Number of rows with different truths whose answers are exchanged to see whether a reward reads a form."""


class TriedForm(NamedTuple):
    """Mean scores of answers in a form, each given to a few rows: on the row that it is right for, and on the others.

    Length and format earn the same in both means, which differ only if the reward reads the truth.
    """

    form: AnswerForm
    right: float
    wrong: float

    @property
    def is_read(self) -> bool:
        return self.right > self.wrong + EPSILON


def tried_forms(attempts: Attempts, echo: str, most: float) -> list[TriedForm]:
    """Return the forms that the reward reads, the one that pays most first, then those on which it does not fail.

    Args:
        echo: prompt template, used when a row has no stored prompt.
        most: largest possible score; a form that earns it ends the search.
    """
    tried: list[TriedForm] = []
    hung = 0
    for form in answer_forms(attempts.rows, echo):
        texts = form.known(attempts.rows)[:COMPARED]
        rows = [next(x for x in attempts.rows if form.text(x) == text) for text in texts]
        said = texts if len(texts) > 1 else [*texts, form.wrong(rows[0], texts)]
        values, error = attempts.score([responding(x, form.around(text)) for text in said for x in rows])
        earned_TR, own_TR = values.reshape(len(said), len(rows)), np.eye(len(said), len(rows), dtype=bool)
        one = TriedForm(form, float(earned_TR[own_TR].mean()), float(earned_TR[~own_TR].mean()))
        tried += [] if math.isnan(one.right + one.wrong) else [one]
        hung += HUNG in error
        if hung == MOST_HUNG or (one.is_read and one.right >= most - EPSILON):
            break
    return sorted(tried, key=lambda one: (not one.is_read, -one.right))


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
    if BOX in form.before:
        attacks += math_attacks(form, known)
    play = Play(informed, wrong, guesses, attacks, right_answer=form.text)
    return play if trace is None else _traced_play(attempts, play, trace)


def tracer(task: Task | None, source: str) -> Make | None:
    """Return a function from a row's input to a correct response, made by a user's own task; None if it has no traces.

    The random generator has the same seed for each row, so two texts differ only if their rows differ.
    """
    if task is None or task.own is None or task.trace is None:
        return None
    name, write = task.name, task.correct_response
    return lambda x: write(Row(x.prompt_id, source, name, x.truth, x.media, x.columns), random.Random(0), x.seen_sizes)


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


class Reading(NamedTuple):
    """Answer to the question whether a reward tells right answers from wrong ones.

    Args:
        is_read: right answers earn more than wrong ones.
        why_not: why it is not known how a right answer is written; "" = it is known, or the reward reads none.
        record: highest score of a saved response or of an answer that was tried.
    """

    is_read: bool
    why_not: str = ""
    record: float = math.inf


def reading(attempts: Attempts, forms: Sequence[TriedForm], honest: Honest, bounds: tuple[float, float]) -> Reading:
    """Return whether a reward for text answers reads them.

    If no right answer earns more than a wrong one, the form is not known, or the reward reads none. It surely reads
    none if answers earn the most that is known, or no more than silence, and that is not the least.

    Args:
        bounds: least and largest possible score; infinite if the reward does not declare them.
    """
    if not forms:
        return Reading(False, "no truth could be written as an answer that the reward scores")
    if forms[0].is_read:
        return Reading(True)
    scores = [attempts.on(Attack("saved", "", "guess", make)).values_R for make in (lambda x: x.response, says(""))]
    said, silence = (float(np.nan_to_num(values_R, nan=-math.inf).max()) for values_R in scores)
    best, slack = max(one.right for one in forms), honest.tolerance
    record = max(best, said, honest.uninformed.mean or -math.inf)
    least, most = (end if math.isfinite(end) else other for end, other in zip(bounds, (0.0, record), strict=True))
    if max(best, silence) > least + slack and (best + slack >= most or silence + slack >= best):
        return Reading(False, record=record)
    example = forms[0].form.around(forms[0].form.text(attempts.rows[0]))
    why = f"no right answer that was tried earns more than a wrong one: {len(forms)} forms, such as {quoted(example)}"
    return Reading(False, why, record)
