"""Known tricks against rewards for text or number answers: several answers at once, echoes, answers in wrong places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from vlmrl.rewards.math.latex import tidy
from vlmrl.rewards.math.units import split_unit
from vlmrl.tasks.answer_forms import AnswerForm
from vlmrl.tasks.attack import Attack, Kind, says, void_attacks
from vlmrl.types import RewardInput

SHORT = ("yes", "no", "true", "false")
"""Words whose first letter is another spelling."""


def text_attacks(rows: Sequence[RewardInput], form: AnswerForm) -> list[Attack]:
    """Return all tricks for rows with text answers. `form`: the form that the reward reads."""
    known = form.known(rows)
    every = " ".join(known)
    numbers = " ".join(str(n) for n in range(200))

    def both(name: str, idea: str, write: Callable[[str, str], str]) -> Attack:
        def one(x: RewardInput) -> str:
            return write(form.wrong(x, known), form.text(x))

        def other(x: RewardInput) -> str:
            return write(form.text(x), form.wrong(x, known))

        return Attack(name, idea, "broken", one, turned=other)

    attacks = [
        *void_attacks(""),
        Attack("empty form", "the form without an answer", "void", says(form.around(""))),
        *text_misses(form),
        Attack("not a number", "the float that equals nothing", "guess", says(form.around("nan"))),
        Attack("infinite", "a number beyond all bounds", "guess", says(form.around("1e999"))),
        Attack("all numbers", "0 to 199", "guess", says(form.around(numbers))),
        Attack("placeholder", "the word None", "guess", says(form.around("None"))),
    ]
    if len(known) < 2:
        return attacks
    attacks += [
        both("two answers", "the right one and a wrong one, each in its form",
             lambda a, b: f"{form.around(a)} {form.around(b)}"),
        both("answer in think", "one answer inside think, one outside",
             lambda a, b: f"<think><answer>{a}</answer></think><answer>{b}</answer>"),
        both("or", "both in one answer", lambda a, b: form.around(f"{a} or {b}")),
        Attack("denied", "not the right answer", "loose", lambda x: form.around(f"not {form.text(x)}")),
    ]  # fmt: skip
    if form.union(rows) is not None:
        return attacks  # of sets, all members are a guess of the right form
    return [
        *attacks,
        both("in a list", "the right one and a wrong one in a list", lambda a, b: form.around(f"{a},{b}")),
        Attack("every answer", "all answers of the dataset in one", "guess", says(form.around(every))),
        Attack("every answer, bare", "the same without a form", "guess", says(every)),
    ]


def text_misses(form: AnswerForm) -> list[Attack]:
    """Return the near misses for text answers: wrong answers that are close to the right one.

    Letters, lists and mappings have none: what is left of them when they are cut or joined is not an answer.
    """

    def write(change: Callable[[str, str], str], x: RewardInput) -> str | None:
        right = form.text(x)
        if not right or right[0] in "[{(" or (len(right) == 1 and right.isalpha()):
            return None
        changed = change(right, "9" if any(c.isdigit() for c in right) else "x")
        return None if not changed or _alike(changed, right) else form.around(changed)

    def whole(text: str) -> bool:
        return not ("." in text and text.replace(".", "").isdigit())

    changes: tuple[tuple[Kind, str, str, Callable[[str, str], str]], ...] = (
        ("miss", "longer at the end", "the right answer with 9 or x after it", lambda t, m: f"{t}{m}" * whole(t)),
        ("miss", "longer at the front", "the right answer with 9 or x before it", lambda t, m: f"{m}{t}"),
        ("miss", "first half", "the first half of the right answer", lambda t, _: t[: len(t) // 2] * whole(t)),
        ("miss", "last half", "the last half of the right answer", lambda t, _: t[(len(t) + 1) // 2 :] * whole(t)),
        ("miss", "backwards", "the digits of the right answer in reverse", lambda t, _: t[::-1] * t.isdigit()),
        ("loose", "minus", "the right number, negative",
         lambda t, _: f"-{t}" * bool(t.strip("0.") and t.replace(".", "").isdigit())),
    )  # fmt: skip
    return [Attack(name, idea, kind, partial(write, change)) for kind, name, idea, change in changes]


def _alike(one: str, other: str) -> bool:
    """Return whether two texts are the same answer. Example: half of `1.0` is `1.`, and half of `12 cm` is `12`."""
    try:
        return float(one) == float(other)
    except ValueError:
        is_short = other.lower() in SHORT and other[:1] == one
        return is_short or one.strip(" .") in (other.strip(" ."), split_unit(tidy(other))[0])
