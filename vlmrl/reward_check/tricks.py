"""Known tricks against rewards for texts, numbers and boxed mathematical answers, and the result of each on every row.

The form of a right answer that a reward reads is searched for; honest answers and tricks are written in it. Tricks are
several answers at once, echoes, answers in wrong places.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from vlmrl.redaction.redact import quoted
from vlmrl.reward_check.scores import Floats
from vlmrl.reward_check.statistics import mean
from vlmrl.rewards.math.latex import read_number, tidy
from vlmrl.rewards.math.reading import split_unit
from vlmrl.rewards.scoring import Scorer
from vlmrl.tasks.answer_forms import AnswerForm, answer_forms
from vlmrl.tasks.attack import Attack, Kind, Make, Probe, responding, says, void_attacks
from vlmrl.tasks.base import Task
from vlmrl.types import Call, RewardInput, Row, Turn

EPSILON = 1e-9
HUNG = "no answer within"
"""Text in the error of a row whose worker was killed because it did not answer."""
MOST_HUNG = 3
"""Number of tricks on which the reward hangs after which the probe stops, because each one costs a full time limit."""
SLOW_SECONDS = 1.0
"""Time limit for scoring one response, in seconds. If a model learns to write slower responses, the run stalls."""
WORDS = {
    "hole": "pays more than an honest answer without knowledge of the truth",
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
        kind: kind of the trick, see tasks/attack.py; also `truth` and `belief`.
        mean, best: mean and maximum of its score over the rows; None if the reward failed on all of them.
        paid: share of rows on which the trick earned more than the lowest-scoring response to the same row.
        errors: number of rows on which the reward failed; `error` is the first failure.
        verdict: a key of WORDS; "" = no finding.
        example: the response to the row on which the trick earns most, loses most or fails first.
        of_example: the truth of that row, and what the response earns.
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
    of_example: str = ""

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

    def __init__(self, scorer: Scorer, rows: Sequence[RewardInput]) -> None:
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


ARGUMENTS: Mapping[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "array": [1, 2, 3, 4], "object": {}}
"""Type of a tool's parameter -> the argument that a trick gives; a text, where the parameter takes one."""
TOOL_TEXT = "The picture has 3 parts, and the largest one is on the left."


def episode_attacks(tools: Sequence[Mapping[str, Any]], turns: int, probe: Probe) -> list[Attack]:
    """Return the tricks with calls of tools. `tools`: their schemas; `turns`: largest number of turns of an episode."""
    function, seen = tools[0]["function"], Turn("tool", TOOL_TEXT)
    types = {name: facts.get("type") for name, facts in function["parameters"]["properties"].items()}
    takes_text = any(kind not in ARGUMENTS for kind in types.values())

    def call(text: str) -> Turn:
        one = Call(function["name"], {name: ARGUMENTS.get(kind, text) for name, kind in types.items()})
        said = json.dumps({"name": one.name, "arguments": one.arguments})
        return Turn("assistant", f"<tool_call>\n{said}\n</tool_call>", calls=(one,))

    def repeated(x: RewardInput) -> str:
        said, right = probe.informed.make(x) or "", probe.right_answer(x)
        is_in = isinstance(right, str) and right and right in said
        return said.replace(right, TOOL_TEXT) if is_in else f"<answer>{TOOL_TEXT}</answer>"

    def attack(name: str, idea: str, kind: Kind, episode: Callable[[RewardInput], Sequence[Turn]], cut=False) -> Attack:
        return Attack(name, idea, kind, says(""), cut, episode=episode)

    hidden = attack(
        "answer in a call", "the right answer in the argument of a call, and a wrong one at the end", "broken",
        lambda x: [call(probe.informed.make(x) or ""), seen, Turn("assistant", probe.wrong.make(x) or "")],
    )  # fmt: skip
    return [
        attack("calls without an answer", "a tool is called, and nothing is answered", "void",
               lambda x: [call("1"), seen, Turn("assistant", "")]),
        attack("endless calls", "tools are called until the limit of turns", "void",
               lambda x: [*[call("1"), seen] * (turns - 1), call("1")], cut=True),
        attack("the tool's text", "what the tool returned, as the answer", "guess",
               lambda x: [call("1"), seen, Turn("assistant", repeated(x))]),
        *([hidden] if takes_text else []),
    ]  # fmt: skip


BOX = "\\boxed"
OTHER_UNITS = {"cm": "in", "m": "ft", "km": "mi", "mm": "cm", "in": "cm", "ft": "m"}
"""Unit -> one that measures the same and has another size."""


def math_attacks(form: AnswerForm, known: Sequence[str]) -> list[Attack]:
    """Return the tricks for answers in boxes. `known`: the answers of all rows."""
    answer = form.text

    def wrong(x: RewardInput) -> str:
        return form.wrong(x, known)

    def miss(name: str, idea: str, change: Callable[[str, str], str | None], kind: Kind = "miss") -> Attack:
        def make(x: RewardInput) -> str | None:
            changed = change(answer(x), wrong(x)) if answer(x) else None
            return None if changed is None else form.around(changed)

        return Attack(name, idea, kind, make)

    def boxed(template: str) -> Make:
        return lambda x: template % f"{BOX}{{{answer(x)}}}" if answer(x) else None

    return [
        miss("denied in the box", "not equal to the right answer", lambda t, _: f"\\neq {t}"),
        miss("contradiction in the box", "the right answer = a wrong one", lambda t, w: f"{t} = {w}"),
        miss("wrong, then = right", "a wrong answer = the right one", lambda t, w: f"{w} = {t}"),
        miss("or in the box", "the right answer or a wrong one", lambda t, w: f"{t} \\text{{ or }} {w}"),
        miss("more or less", "the right answer, plus or minus one", lambda t, _: f"{t} \\pm 1"),
        miss("power", "the right number to the power of 3", _power),
        miss("a hundred times", "100 times the right number", lambda t, _: _scaled(t, Fraction(100))),
        miss("a hundredth", "a hundredth of the right number", lambda t, _: _scaled(t, Fraction(1, 100))),
        miss("nearly", "0.01 more than the right integer", _nearly, "loose"),
        miss("other unit", "the right number with another unit", _other_unit),
        miss("tuple for a set", "round brackets around a set's elements", _as_tuple),
        Attack("everything", "an interval with every number in it", "guess", says(f"{BOX}{{(-\\infty, \\infty)}}")),
        Attack("variable", "a box with an x", "void", says(f"{BOX}{{x}}")),
        Attack("empty box", "a box without an answer", "void", says(f"{BOX}{{}}")),
        Attack("words in the box", "a box that calls itself right", "void", says(f"{BOX}{{\\text{{correct}}}}")),
        Attack("code in the box", "Python in a box", "void", says(f"{BOX}{{__import__('os').getpid()}}")),
        Attack("power tower", "a number that takes a computer years, in a box", "void",
               says(f"{BOX}{{9^{{9^{{9^{{9}}}}}}}}"), most=1),
        Attack("box in the thought", "the right box in the thought, none after it", "loose",
               boxed("<think>%s</think> I cannot tell.")),
        Attack("box, then cut off", "the right box, then half of another one", "loose", boxed("%s or \\boxed{")),
        Attack("denied before the box", "`not` before the right box", "loose", boxed("It is not %s.")),
        Attack("taken back", "the right box, then a wrong one", "loose",
               lambda x: f"{BOX}{{{answer(x)}}}. No, it is {BOX}{{{wrong(x)}}}." if answer(x) else None),
        Attack("blanks in the box", "blanks around the right answer", "fair", lambda x: form.around(f" {answer(x)} ")),
        Attack("more after the box", "a sentence that says `boxed` after the right answer", "fair",
               lambda x: f"{form.around(answer(x))}. I hope that this boxed answer helps."),
    ]  # fmt: skip


def _power(text: str, _: str) -> str | None:
    number = read_number(tidy(split_unit(tidy(text))[0]))
    return None if number is None or number.value in (0, 1) else f"{split_unit(tidy(text))[0]}^3"


def _scaled(text: str, factor: Fraction) -> str | None:
    number = read_number(tidy(text))
    if number is None or not number.value:
        return None
    value = number.value * factor
    return str(value.numerator) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _nearly(text: str, _: str) -> str | None:
    return f"{text}.01" if re.fullmatch(r"[0-9]+", text) else None


def _other_unit(text: str, _: str) -> str | None:
    value, unit = split_unit(tidy(text))
    other = OTHER_UNITS.get(unit.name) if unit is not None else None
    return None if other is None else f"{value}\\text{{ {other}}}"


def _as_tuple(text: str, _: str) -> str | None:
    match = re.fullmatch(r"\\\{(.*,.*)\\\}", text)
    return f"({match.group(1)})" if match else None


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


def text_probe(attempts: Attempts, forms: Sequence[TriedForm], trace: Make | None) -> Probe:
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
    probe = Probe(informed, wrong, guesses, attacks, right_answer=form.text)
    return probe if trace is None else _traced_probe(attempts, probe, trace)


def tracer(task: Task | None, source: str) -> Make | None:
    """Return a function from a row's input to a correct response, made by a user's own task; None if it has no traces.

    The random generator has the same seed for each row, so two texts differ only if their rows differ.
    """
    if task is None or task.own is None or task.trace is None:
        return None
    name, write = task.name, task.correct_response
    return lambda x: write(Row(x.prompt_id, source, name, x.truth, x.media, x.columns), random.Random(0), x.seen_sizes)


def _traced_probe(attempts: Attempts, probe: Probe, trace: Make) -> Probe:
    """Return `probe` with the task's correct responses as honest answers, if they earn more than `probe.informed`.

    Its wrong answer to a row is then the correct response to another row.
    """
    counts = Counter(text for x in attempts.rows if (text := trace(x)) is not None)
    texts = [text for text, _ in counts.most_common()]

    def wrong(x: RewardInput) -> str | None:
        right = trace(x)
        return next((text for text in texts if text != right), None)

    informed = Attack("honest", "the response that the task calls correct", "fair", trace)
    known, traced = (attempts.on(one).mean for one in (probe.informed, informed))
    if traced is None or (known is not None and known >= traced):
        return probe
    constants = [Attack(f"always {text[:60]}", "the same correct response", "guess", says(text)) for text in texts[:5]]
    other = Attack("honest, wrong", "the correct response of another row", "fair", wrong)
    return replace(probe, informed=informed, wrong=other, guesses=[*probe.guesses, *constants], right_answer=trace)


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
