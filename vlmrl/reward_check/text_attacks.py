"""Known tricks against rewards for text or number answers: several answers at once, echoes, answers in wrong places."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from vlmrl.errors import RewardError
from vlmrl.rewards.math.answer_text import last_box
from vlmrl.rewards.math.latex import tidy
from vlmrl.rewards.math.units import split_unit
from vlmrl.rewards.text_rewards import ground_truth
from vlmrl.tasks.attack import Attack, Make, says, void_attacks
from vlmrl.types import RewardInput

MOST_ANSWERS = 20
FORMS = (
    "{}",
    "<think>I cannot tell.</think><answer>{}</answer>",
    "\\boxed{{{}}}",
    "<think>I cannot tell.</think>\\boxed{{{}}}",
    "<answer>{}</answer>",
)
"""Forms of an honest answer that many rewards accept. See `learned_forms` for others."""
MOST_LEARNED = 6
"""Maximum number of forms that are learned from the rows."""
SLOT = re.compile(r"<(\w+)>(?P<tag>[^<>]*)</\1>|\\boxed\{(?P<box>[^{}]*)\}")
"""Tag or box with a text in it: the last one is where a response states its answer."""


def expected(x: RewardInput) -> list[str]:
    """Return the accepted answers of a row as texts; of a solution with a box, the box."""
    try:
        truth = ground_truth(x)
    except RewardError:
        return []
    accepted = truth if isinstance(truth, (list, tuple)) else [truth]
    return [last_box(str(one)).text or str(one) for one in accepted]


def learned_forms(rows: Sequence[RewardInput]) -> list[str]:
    """Return forms of an answer that the rows show, the most frequent first.

    In a saved response, the place of the answer is the last mention of the truth, or the last tag or box. In a prompt,
    it is the last tag or box, and the form is that tag or box alone.
    """
    counts: Counter[str] = Counter()
    for x in rows:
        right, said = right_text(x), x.response
        spans = [(m.span(m.lastgroup or 0), said) for m in SLOT.finditer(said)][-1:]
        if right and (at := said.rfind(right)) >= 0:
            spans.append(((at, at + len(right)), said))
        slot = next((m for m in reversed([*SLOT.finditer(x.prompt)])), None)
        if slot is not None:
            start, end = (n - slot.start() for n in slot.span(slot.lastgroup or 0))
            spans.append(((start, end), slot.group()))
        counts.update({f"{_escaped(text[:start])}{{}}{_escaped(text[end:])}" for (start, end), text in spans})
    return [form for form, _ in counts.most_common() if form not in FORMS][:MOST_LEARNED]


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def answers(rows: Sequence[RewardInput]) -> list[str]:
    """Return the distinct expected answers, the most frequent first."""
    counts: Counter[str] = Counter()
    for x in rows:
        counts.update(expected(x)[:1])
    return [text for text, _ in counts.most_common(MOST_ANSWERS)]


def right_text(x: RewardInput) -> str:
    return next(iter(expected(x)), "")


def wrong_text(x: RewardInput, known: Sequence[str]) -> str:
    return next((a for a in known if a != right_text(x)), right_text(x) + "0")


def text_attacks(rows: Sequence[RewardInput], form: str) -> list[Attack]:
    """Return all tricks for rows with text answers. `form`: the form that the reward accepts, such as FORMS[0]."""
    known = answers(rows)
    every = " ".join(known)
    numbers = " ".join(str(n) for n in range(200))
    tagged = form if form.endswith("</answer>") else "<think>x</think><answer>{}</answer>"

    def both(name: str, idea: str, form: str) -> Attack:
        def one(x: RewardInput) -> str:
            return form % (wrong_text(x, known), right_text(x))

        def other(x: RewardInput) -> str:
            return form % (right_text(x), wrong_text(x, known))

        return Attack(name, idea, "broken", one, turned=other)

    def holds(text: str) -> Make:
        return says(tagged.format(text))

    attacks = [
        *void_attacks(""),
        *text_misses(form, right_text),
        Attack("not a number", "the float that equals nothing", "guess", holds("nan")),
        Attack("infinite", "a number beyond all bounds", "guess", holds("1e999")),
        Attack("all numbers", "0 to 199", "guess", holds(numbers)),
        Attack("placeholder", "the word None", "guess", holds("None")),
    ]
    if len(known) < 2:
        return attacks
    return [
        *attacks,
        Attack("every answer", "all answers of the dataset in one", "guess", holds(every)),
        Attack("every answer, bare", "the same without tags", "guess", says(every)),
        both(
            "two answers",
            "the right one and a wrong one, each in its tag",
            "<think>x</think><answer>%s</answer><answer>%s</answer>",
        ),
        both(
            "answer in think",
            "one answer inside think, one outside",
            "<think><answer>%s</answer></think><answer>%s</answer>",
        ),
        both("two boxes", "the right one and a wrong one", "\\boxed{%s} or \\boxed{%s}"),
        both("or", "both in one answer", "<think>x</think><answer>%s or %s</answer>"),
        Attack(
            "denied",
            "not the right answer",
            "broken",
            lambda x: f"<think>x</think><answer>not {right_text(x)}</answer>",
        ),
    ]


def text_misses(form: str, right: Callable[[RewardInput], str]) -> list[Attack]:
    """Return the near misses for text answers: wrong answers that are close to the right one.

    Args:
        form: form of a response, with `{}` in place of the answer.
        right: row -> its right answer.
    """

    def miss(name: str, idea: str, change: Callable[[str], str | None]) -> Attack:
        def make(x: RewardInput) -> str | None:
            answer = right(x)
            changed = change(answer) if answer else None
            return None if changed is None or _alike(changed, answer) else form.format(changed)

        return Attack(name, idea, "miss", make)

    return [
        miss("longer at the end", "the right answer with 9 after it", lambda t: None if "." in t else f"{t}9"),
        miss("longer at the front", "the right answer with 9 before it", lambda t: f"9{t}"),
        miss("first half", "the first half of the right answer", lambda t: t[: len(t) // 2] or None),
        miss("last half", "the last half of the right answer", lambda t: t[(len(t) + 1) // 2 :] or None),
        miss(
            "minus",
            "the right number, negative",
            lambda t: f"-{t}" if t.strip("0.") and t.replace(".", "").isdigit() else None,
        ),
        miss("in a list", "the right answer among others", lambda t: f"{t}, {t}9, 9{t}"),
        miss("last of a list", "the right answer after others", lambda t: f"{t}9, 9{t}, {t}"),
    ]


def _alike(one: str, other: str) -> bool:
    """Return whether two texts are the same answer. Example: half of `1.0` is `1.`, and half of `12 cm` is `12`."""
    try:
        return float(one) == float(other)
    except ValueError:
        return one.strip(" .") in (other.strip(" ."), split_unit(tidy(other))[0])
