"""Near misses: answers with a single error. If one earns as much as the right answer, the reward ignores this error."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vlmrl.tasks.attack import IGNORED, Attack, Make
from vlmrl.tasks.pairs.answer_form import AnswerForm, FormField, Pair
from vlmrl.tasks.pairs.attacks import confident
from vlmrl.types import RewardInput

FALSE = ("Falsum", "Errorum")
"""Invented names, which no dataset contains."""


def name_misses(form: AnswerForm) -> list[Attack]:
    """Return near misses for a form with names or labels in its tags. The answer is right, and agrees with the tags."""
    if form.kind not in ("names", "labels", "named_labels"):
        return []

    def miss(name: str, idea: str, change: Callable[[FormField, Pair], Pair]) -> Attack:
        def make(x: RewardInput) -> str | None:
            true = form.names_of(x)
            said = {f.name: change(f, pair) for f, pair in form.stated(true)}
            return form.write(said, confident(x)) if said and any(said[n] != true[n] for n in said) else None

        return Attack(name, idea, "miss", make)

    def each(change: Callable[[str], str]) -> Callable[[FormField, Pair], Pair]:
        return lambda field, pair: (change(pair[0]), change(pair[1]))

    return [
        miss(IGNORED, "names of nothing, or of others, in every tag", _false),
        miss("longer names", "right names with letters after them", each(lambda name: f"{name}oides")),
        miss("cut names", "the first half of each right name", each(lambda name: name[: max(1, len(name) // 2)])),
        miss("one of several", "each right name with a slash and another", _among("{} / {}")),
        miss("either or", "`right or false` for each name", _among("{} or {}")),
        miss("names denied", "`not` before each right name", each(lambda name: f"not {name}")),
        miss("any text", "a pattern that matches everything", lambda f, p: (".*", ".*")),
        miss("no letters", "a dash for each name", lambda f, p: ("-", "-")),
        miss("only the first", "the second name of each tag is false", lambda f, p: (p[0], _false(f, p)[1])),
        miss("only the second", "the first name of each tag is false", lambda f, p: (_false(f, p)[0], p[1])),
        miss("swapped", "right names, those of the images swapped", lambda f, p: (p[1], p[0])),
    ]


def _false(field: FormField, pair: Pair) -> Pair:
    """Return false names for a pair: the same false name twice if the true names are equal, else two different ones."""
    free = [*(label for label in field.labels if label not in pair), *FALSE]
    return (free[0], free[0]) if pair[0] == pair[1] else (free[0], free[1])


def _among(form: str) -> Callable[[FormField, Pair], Pair]:
    """Return a function that puts a false name beside each right name, as in `{} or {}`."""

    def change(field: FormField, pair: Pair) -> Pair:
        false = _false(field, pair)
        return form.format(pair[0], false[0]), form.format(pair[1], false[1])

    return change


def every_name(form: AnswerForm, rows: Sequence[RewardInput]) -> list[Attack]:
    """Return attacks with all names of the dataset in both places of every tag; their answer is always 0.5."""
    if form.kind != "names" or not form.fields:
        return []
    known = {f.name: sorted({name for x in rows for name in form.names_of(x)[f.name] or ()}) for f in form.fields}

    def joined(mark: str) -> Make:
        pairs = {name: (mark.join(names), mark.join(names)) for name, names in known.items() if names}
        return lambda x: form.write(pairs, 0.5) if pairs else None

    return [
        Attack("every name", "all names of the dataset in every place", "guess", joined(" ")),
        Attack("every name, or", "the same, joined by `or`", "guess", joined(" or ")),
        Attack("every name, listed", "the same, joined by commas", "guess", joined(", ")),
    ]
