"""Checks of rendered prompts (template, images, control tokens in the text), and the trial of one right answer per row.

The trial shows the form of the truth, and whether the reward pays what looks right.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from shlex import quote
from typing import TYPE_CHECKING, Any

from vlmrl.errors import Problem, RecipeError, VlmrlError
from vlmrl.redaction.redact import excerpt, quoted
from vlmrl.tasks.answer_forms import answer_forms, spellings
from vlmrl.types import Message, RewardInput, Row, Score

if TYPE_CHECKING:
    from vlmrl.data.encode import Encoder
    from vlmrl.tasks.source import Source


SHOWN = 3


def named(row: Row, error: VlmrlError) -> tuple[str, str]:
    """Return (place of the row, error message), for the list of examples in a problem."""
    inside = bool(error.where and row.origin and error.where.startswith(row.origin))
    words = f"{error.message} ({error.hint})" if error.hint and not inside else error.message
    return (error.where or row.place) if inside else row.place, words


def examples(bad: Sequence[tuple[str, str]]) -> str:
    """Return the first few failures, one per line."""
    lines = [f"{name}: {words}" for name, words in bad[:SHOWN]]
    return "first of them:\n  " + "\n  ".join(lines)


def examples_and_export(source: Source, bad: Sequence[tuple[str, str]]) -> str:
    """Return the first few failures, and the command that leaves such rows out; it knows no template of a recipe."""
    export = f"\n`vlmrl data export {quote(source.dataset.path)} OUT --sound` writes the others"
    return examples(bad) + (export if source.template == source.task.template else "")


@dataclass
class PromptScan:
    """Scan of a source's prompts, row by row, without reading an image.

    Args:
        encoder: encoder of the model; None = only checks that need no model.
        learns: whether the rows' correct responses are trained on, as in `vlmrl sft`.
        stopped: True if the template fails for every row; further rows are then not checked.
    """

    source: Source
    encoder: Encoder | None = None
    learns: bool = False
    rows: int = 0
    stopped: bool = False
    failed: list[tuple[str, str]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    typed: list[tuple[str, Counter[str]]] = field(default_factory=list)
    _faults: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        no_problem = lambda width, height: None  # noqa: E731
        self._size_problem = lru_cache(maxsize=100_000)(self.encoder.size_problem if self.encoder else no_problem)

    def look(self, row: Row) -> None:
        """Check one row. Do nothing if the template has failed for every row (`stopped`)."""
        if self.stopped:
            return
        self.rows += 1
        try:
            messages = self.source.messages(row)
        except RecipeError as error:
            self.stopped = True
            self._faults.append(Problem(error.message, error.where, error.hint))
            return
        except VlmrlError as error:
            self.failed.append(named(row, error))
            return
        for number, media in enumerate(row.media, start=1):
            if problem := self._size_problem(media.width, media.height):
                self.refused.append((row.place, f"image {number} {problem}"))
                break
        if self.encoder is not None:
            self._look_at_text(row, messages, self.encoder)

    def _look_at_text(self, row: Row, messages: Sequence[Message], encoder: Encoder) -> None:
        from vlmrl.data.chat_template import IMAGE_SLOT

        texts = [piece for message in messages for piece in message.content.split(IMAGE_SLOT)]
        if self.learns and self.source.task.trace is not None:
            try:
                texts.append(self.source.task.correct_response(row, random.Random(0)))
            except VlmrlError as error:
                self.failed.append(named(row, error))
        token_counts = sum((encoder.control.found_in(text) for text in texts), Counter())
        if token_counts:
            self.typed.append((row.place, token_counts))

    @property
    def is_sound(self) -> bool:
        """Return whether every row so far gave a prompt and, if responses are trained on, a response."""
        return not (self.stopped or self.failed)

    def problems(self, where: str) -> list[Problem]:
        """Return the problems of the rows that were checked so far.

        Args:
            where: place of the source in the recipe, used if a problem names no place.
        """
        rows = f"{self.rows:,} rows of `{self.source.name}` ({self.source.split})"
        problems = list(self._faults)
        if self.failed:
            what = "no prompt, or no response to learn" if self.learns else "no prompt"
            message = f"{len(self.failed):,} of {rows} make {what}"
            problems.append(Problem(message, where, examples_and_export(self.source, self.failed)))
        if self.refused:
            message = f"{len(self.refused):,} of {rows} have an image that the model does not accept"
            problems.append(Problem(message, where, examples(self.refused)))
        if self.typed:
            total: Counter[str] = Counter()
            for _, tokens in self.typed:
                total.update(tokens.keys())
            listing = ", ".join(f"{token} in {count:,}" for token, count in total.most_common(SHOWN))
            message = f"{len(self.typed):,} of {rows} contain control tokens of the model: {listing}"
            lines = [(place, ", ".join(f"{n} x {name}" for name, n in tokens.items())) for place, tokens in self.typed]
            hint = (
                "they are read as plain text: they do not end a turn and are not images (an image is <image>); "
                f"{examples(lines)}"
            )
            problems.append(Problem(message, where, hint, "warning"))
        return problems


TYPES = {bool: "true or false", int: "an integer", float: "a number", str: "text", list: "a list", dict: "a mapping"}


def truth_form(row: Row) -> str:
    """Return the type and value of each field of a row's truth. Example: ``answer is an integer, such as 3``."""
    return "; ".join(
        f"`{name}` is {TYPES.get(type(value), type(value).__name__)}, such as {excerpt(str(value), 60)}"
        for name, value in row.truth.items()
    )


@dataclass
class TruthScan:
    """Scan of truths: the number of rows, and field -> type in words -> (number of rows, the first of them)."""

    rows: int = 0
    kinds: dict[str, dict[str, tuple[int, Row]]] = field(default_factory=dict)

    def look(self, row: Row) -> None:
        """Note the types of a row's truth. An integer and a float are both numbers; a field may be None."""
        self.rows += 1
        for name, value in row.truth.items():
            kinds = self.kinds.setdefault(name, {})
            if value is not None:
                kind = float if type(value) is int else type(value)
                number, first = kinds.get(words := TYPES.get(kind, kind.__name__), (0, row))
                kinds[words] = (number + 1, first)

    def problems(self, source: Any, where: str) -> list[Problem]:
        """Return warnings for truths that are all empty, and for fields that have another type in other rows."""
        of = f"of `{source.name}` ({source.split})"
        if self.rows and not self.kinds:
            message = f"the truth {of} is empty in all {self.rows:,} rows that were read: no answer to compare with"
            hint = f'name its column: `columns = {{answer = "..."}}`; the columns: {", ".join(source.rows[0].columns)}'
            return [Problem(message, where, hint, "warning")]
        problems = []
        for name, kinds in self.kinds.items():
            if len(kinds) > 1:
                usual = max(kinds, key=lambda kind: kinds[kind][0])
                other, (_, row) = next((kind, at) for kind, at in kinds.items() if kind != usual)
                message = (
                    f"`{name}` {of} is {usual} in most rows, but {other} in {row.place}: {quoted(row.truth[name])}"
                )
                problems.append(Problem(message, where, "give it one type: the number 3 is not the text 3", "warning"))
        return problems


def trial_of(source: Any, rows: Sequence[Row]) -> list[str]:
    """Return responses to the first row: its right answer in each form, then a wrong one in each, then a longer one.

    The wrong one is another row's answer, if there is one without the right one in it. The longer one is the right
    answer and more, such as 29 for 2, and wrong. [] if the answer is not a plain value.
    """
    answer = rows[0].truth.get("answer")
    if answer is None or isinstance(answer, (list, dict)):
        return []
    x, *others = (RewardInput("", row.truth, row.columns, prompt=prompt_text(source, row)) for row in rows)
    forms = answer_forms([x])
    apart = {form: [text for text in form.known(others) if form.text(x) not in text] for form in forms}
    answers = [(form, form.text(x)) for form in forms]
    answers += [(form, form.wrong(x, apart[form])) for form in forms] + [(form, form.wrong(x, [])) for form in forms]
    return [form.around(text) for form, text in answers]


def prompt_text(source: Any, row: Row) -> str:
    return "\n".join(message.content for message in source.messages(row))


def paid(texts: Sequence[str], scores: Sequence[Score], prompt: str = "") -> tuple[float, str] | None:
    """Return the best score of a right answer that earns more than a wrong one of its form, and its text.

    Of several such texts, it is one with the marks that the prompt shows, such as <answer>, else the shortest.

    Args:
        texts: right and wrong responses of `trial_of`, with their `scores`.
    Returns: None if no right answer earns more than a wrong one.
    """
    half = len(scores) // 2
    trials = zip(texts, scores[:half], scores[half:], strict=False)
    pairs = [(right.value, text) for text, right, wrong in trials if right.value > wrong.value]
    marks = {text: MARK.findall(text) for _, text in pairs}
    is_shown = {text: bool(own) and all(mark in prompt for mark in own) for text, own in marks.items()}
    return max(pairs, key=lambda pair: (pair[0], is_shown[pair[1]], -len(pair[1])), default=None)


def searched(name: str, texts: Sequence[str], scores: Sequence[Score], where: str) -> list[Problem]:
    """Return a warning if a longer, wrong answer earns what the right one in it does.

    Args:
        texts: all responses of `trial_of`, with their `scores`.
    """
    third = len(scores) // 3
    for i in range(third):
        right, wrong, longer = (scores[i + k * third].value for k in range(3))
        if right == longer > wrong:
            message = (
                f"the reward of `{name}` pays {right:g} for the wrong {excerpt(texts[i + 2 * third], 60)!r} as for the "
                f"right {excerpt(texts[i], 60)!r}: does it search for the truth in the text?"
            )
            hint = "compare the whole answer; `vlmrl reward-check RUN --probe` tries more such responses"
            return [Problem(message, where, hint, "warning")]
    return []


def told_answers(source: Any, rows: Sequence[Row], where: str) -> list[Problem]:
    """Return a warning if most prompts state the answer of their own row, and few that of another row.

    Options and examples that prompts list are no statement: other rows' answers stand there, too.
    """
    shown = [(prompt_text(source, row), _answer(row)) for row in rows]
    shown = [(prompt, answer) for prompt, answer in shown if answer]
    apart = [(p, b) for (p, a), (_, b) in zip(shown, shown[1:] + shown[:1], strict=True) if a != b]
    if min(len(shown), len(apart)) < FEWEST:
        return []
    own, other = (sum(map(_states, *zip(*pairs, strict=True))) for pairs in (shown, apart))
    if own < MOSTLY * len(shown) or other > SELDOM * len(apart):
        return []
    message = (
        f"{own} of {len(shown)} sampled prompts of `{source.name}` state the right answer of their row, such as "
        f"{excerpt(shown[0][1], 60)!r}: the model can copy it"
    )
    hint = "take it out of the prompt or its template; it may stand there if the task is to find it in a given text"
    return [Problem(message, where, hint, "warning")]


MARK = re.compile(r"<\w+>|\\boxed")
FEWEST, MOSTLY, SELDOM = 8, 0.9, 0.3
"""Least number of prompts from which is concluded; least share with their own answer, largest with another row's."""
OPTION_BEFORE = re.compile(
    r"(([,/|;]|\bor)\s*(an? |the )?|(^|[\s(])([A-Za-z0-9]{1,2}[.):]|[-*])\s*)[\"'`\[(]*\Z", re.IGNORECASE
)
OPTION_AFTER = re.compile(r"[\"'`)\]]*\s*([,/|;]|or\b)", re.IGNORECASE)
"""Text before and after one of several options: a comma, `or`, or a mark such as `(A)`."""


def _answer(row: Row) -> str:
    """Return the right answer of a row as it is usually written; "" if it is no plain value."""
    plain = not any(isinstance(value, (list, dict)) for value in row.truth.values())
    return next(iter(spellings(RewardInput("", row.truth, row.columns)).values()), "").strip() if plain else ""


def _states(prompt: str, answer: str) -> bool:
    """Return whether a prompt contains the answer as words of their own that are not one of several options."""
    for match in re.finditer(rf"(?<![\w.]){re.escape(answer)}(?!\w|\.\w)", prompt):
        before, after = prompt[max(0, match.start() - 12) : match.start()], prompt[match.end() : match.end() + 6]
        is_letter = len(answer) <= 2 and re.match(r"[.):] ?\S", after)
        if not (is_letter or OPTION_BEFORE.search(before) or OPTION_AFTER.match(after)):
            return True
    return False


def unpaid(name: str, row: Row, where: str, *, reads_text: bool) -> Problem:
    """Return the warning that no right answer that was tried earns more than a wrong one of its form.

    Args:
        reads_text: an answer earns more than a wrong one if the truth is given as text.
    """
    if reads_text:
        message = f"the reward of `{name}` pays no right answer, unless the truth is text; it is: {truth_form(row)}"
        return Problem(message, where, 'a truth keeps the type of its table: compare str(x.truth["answer"])', "warning")
    message = (
        f"no form of a right answer is known that the reward of `{name}` pays: whether it tells right from wrong was "
        f"not tested; the truth: {truth_form(row)}"
    )
    hint = (
        "tried: the truth alone, in tags, in a box, as JSON, and in the forms that the prompt shows; show the form in "
        "the prompt, such as The hour is [HOUR], and see the parts: `vlmrl try RECIPE`"
    )
    return Problem(message, where, hint, "warning")


def differing_parts(name: str, pairs: Sequence[tuple[Row, Score]], where: str) -> list[Problem]:
    """Return a warning if the reward returns other parts for other rows."""
    places: dict[tuple[str, ...], str] = {}
    for row, score in pairs:
        if score.parts:
            places.setdefault(tuple(sorted(score.parts)), row.place)
    if len(places) < 2:
        return []
    shown = "; ".join(f"{', '.join(parts)} for {place}" for parts, place in list(places.items())[:3])
    message = f"the reward of `{name}` returns other parts for other rows: {shown}"
    hint = "return every part for every row: None for one that does not apply, so that its weight goes to the others"
    return [Problem(message, where, hint, "warning")]
