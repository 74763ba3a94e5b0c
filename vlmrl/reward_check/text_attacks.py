"""Known tricks against rewards for text or number answers: several answers at once, echoes, answers in wrong places."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        both("two tags", "the right one and a wrong one, each in its tag",
             lambda a, b: f"<think>x</think><answer>{a}</answer><answer>{b}</answer>"),
        both("answer in think", "one answer inside think, one outside",
             lambda a, b: f"<think><answer>{a}</answer></think><answer>{b}</answer>"),
        both("two boxes", "the right one and a wrong one", lambda a, b: f"\\boxed{{{a}}} or \\boxed{{{b}}}"),
        both("or", "both in one answer", lambda a, b: form.around(f"{a} or {b}")),
        Attack("denied", "not the right answer", "loose", lambda x: form.around(f"not {form.text(x)}")),
    ]  # fmt: skip
    if form.union(rows) is not None:
        return attacks  # of sets, all members are a guess of the right form
    return [
        *attacks,
        Attack("every answer", "all answers of the dataset in one", "guess", says(form.around(every))),
        Attack("every answer, bare", "the same without a form", "guess", says(every)),
    ]


def text_misses(form: AnswerForm) -> list[Attack]:
    """Return the near misses for text answers: wrong answers that are close to the right one.

    Letters, lists and mappings have none: what is left of them when they are cut or joined is not an answer.
    """

    def miss(
        name: str,
        idea: str,
        change: Callable[[str], str | None],
        turned: Callable[[str], str] | None = None,
        kind: Kind = "miss",
    ) -> Attack:
        def make(x: RewardInput, change: Callable[[str], str | None] = change) -> str | None:
            answer = form.text(x)
            is_letter = len(answer) == 1 and answer.isalpha()
            changed = change(answer) if answer and not is_letter and answer[0] not in "[{(" else None
            return None if changed is None or _alike(changed, answer) else form.around(changed)

        return Attack(name, idea, kind, make, turned=None if turned is None else lambda x: make(x, turned))

    def half(text: str, piece: slice) -> str | None:
        is_decimal = "." in text and text.replace(".", "").isdigit()
        return None if is_decimal else text[piece] or None

    def more(text: str) -> str:
        return "9" if any(c.isdigit() for c in text) else "x"

    return [
        miss("longer at the end", "the right answer with 9 or x after it",
             lambda t: None if "." in t else f"{t}{more(t)}"),
        miss("longer at the front", "the right answer with 9 or x before it", lambda t: f"{more(t)}{t}"),
        miss("first half", "the first half of the right answer", lambda t: half(t, slice(len(t) // 2))),
        miss("last half", "the last half of the right answer", lambda t: half(t, slice((len(t) + 1) // 2, None))),
        miss(
            "minus",
            "the right number, negative",
            lambda t: f"-{t}" if t.strip("0.") and t.replace(".", "").isdigit() else None,
            kind="loose",
        ),
        miss("in a list", "the right answer before or after others",
             lambda t: f"{t},{t}{more(t)},{more(t)}{t}", lambda t: f"{t}{more(t)},{more(t)}{t},{t}"),
    ]  # fmt: skip


def _alike(one: str, other: str) -> bool:
    """Return whether two texts are the same answer. Example: half of `1.0` is `1.`, and half of `12 cm` is `12`."""
    try:
        return float(one) == float(other)
    except ValueError:
        is_short = other.lower() in SHORT and other[:1] == one
        return is_short or one.strip(" .") in (other.strip(" ."), split_unit(tidy(other))[0])
