"""Honest answers, blind guesses and tricks for pair rows, written in an answer form, for the probe of a reward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vlmrl.tasks.attack import Attack, Belief, Play, Stage, says
from vlmrl.tasks.pairs.answer_form import AnswerForm, four
from vlmrl.tasks.pairs.attacks import broken_truths, confident, pair_attacks
from vlmrl.tasks.pairs.near_misses import every_name, name_misses


def player(form: AnswerForm) -> Callable[[Stage], Play]:
    """Return a function for `RowKind.play`, for rows whose answers have this form."""
    return partial(play_pairs, form)


def play_pairs(form: AnswerForm, stage: Stage) -> Play:
    """Return the answers and tricks for pairs. If no tag has a weight, there are no tricks with false names.

    Such a reward does not score the names, so false names may earn as much as right ones.
    """
    rows = stage.rows
    guess = form.commonest(rows)
    prior = sum(bool(x.truth.get("same")) for x in rows) / len(rows)
    thoughts = {"": dict.fromkeys(guess), **({" and the commonest names": guess} if form.fields else {})}
    guesses = [
        Attack(f"always {four(p)}{more}", "a constant, well-formed answer", "guess", says(form.write(names, p)))
        for more, names in thoughts.items()
        for p in dict.fromkeys((0.5, 0.0, 1.0, round(prior, 4)))
    ]
    informed = Attack(
        "honest", "right names, a confident answer", "fair", lambda x: form.write(form.names_of(x), confident(x))
    )
    wrong = Attack(
        "honest, wrong",
        "false names, a wrong answer",
        "fair",
        lambda x: form.write(form.others(x, rows), four(1 - float(confident(x)))),
    )
    has_paid_tags = any(f.name not in stage.unpaid for f in form.fields)
    attacks = [
        *pair_attacks(form, rows, stage.echo),
        *(name_misses(form) if has_paid_tags else ()),
        *every_name(form, rows),
    ]
    return Play(
        informed,
        wrong,
        guesses,
        attacks,
        right_answer=lambda x: x.truth.get("same"),
        broken_truths=broken_truths(rows[0]),
        belief=_belief(form),
    )


def _belief(form: AnswerForm) -> Belief:
    """Return the `Belief` of pairs: the question "the same?", and a function that writes an answer to it.

    The written names always differ, so that all answers from 0 to 0.5 agree with them. The names then earn the same for
    all of these answers.
    """
    names = {f.name: ((f.labels[0], f.labels[1]) if len(f.labels) > 1 else ("Prima", "Secunda")) for f in form.fields}
    return Belief(lambda x: bool(x.truth.get("same")), lambda p: form.write(names, p))
