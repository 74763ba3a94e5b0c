"""Small rewards on text: an exact answer, a number, the presence of tags, the length, the script, the end."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

from vlmrl.errors import RewardError, unknown
from vlmrl.redaction.redact import quoted
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.text_parsing import BLANKS, VISIBLE, find_tags, tagged_text, untagged
from vlmrl.types import RewardInput

SCRIPTS: dict[str, tuple[str, ...]] = {
    "latin": ("LATIN",),
    "cyrillic": ("CYRILLIC",),
    "greek": ("GREEK",),
    "han": ("CJK", "HIRAGANA", "KATAKANA"),
    "hangul": ("HANGUL",),
    "arabic": ("ARABIC",),
    "devanagari": ("DEVANAGARI",),
}
"""Script -> first words of its letters' names in Unicode."""
OF_FORMULAS = (
    "GREEK", "MATHEMATICAL", "DOUBLE-STRUCK", "SCRIPT", "BLACK-LETTER", "MODIFIER", "SUPERSCRIPT",
    "SUBSCRIPT",               "KELVIN", "ANGSTROM", "PLANCK", "FULLWIDTH", "LATIN",
)  # fmt: skip
"""First words of letters that formulas use in every language."""
LETTERS_BEYOND_ASCII = re.compile(r"[^\W\d_\x00-\x7f]")
LETTERS = re.compile(r"[^\W\d_]")
RANGES: dict[str, tuple[float, float]] = {"think_format": (0.0, 1.0), "language": (-1.0, 0.0), "ending": (-1.0, 0.0)}
"""Part -> its range."""


def check_script(script: str) -> None:
    """Raise a RewardError for an unknown script."""
    if script not in SCRIPTS:
        raise unknown("script", str(script), SCRIPTS, error=RewardError)


def check_min_tokens(min_tokens: int) -> None:
    """Raise a RewardError for a number of tokens below 0, or that is no integer."""
    if type(min_tokens) is not int or min_tokens < 0:
        raise RewardError(f"min_tokens = {min_tokens!r} is not an integer >= 0")


def measure_think_format(x: RewardInput) -> float:
    """Return 1 if the response is one `<think>` thought, and then an answer, neither of them empty; else 0.

    Of an episode, the parts about form and answer read the last turn.
    """
    tags = find_tags(x.answer, ("think",))
    if [tag.closes for tag in tags] != [False, True]:
        return 0.0
    before, thought = x.answer[: tags[0].start], x.answer[tags[0].end : tags[1].start]
    after = x.answer[tags[1].end :]
    return float(not before.strip() and bool(VISIBLE.search(thought)) and bool(VISIBLE.search(after)))


def measure_language(x: RewardInput, script: str = "latin") -> float:
    """Return minus the share of letters that belong to another script, in [-1, 0].

    Latin and Greek letters stand in formulas of every language and never count as another script.

    Example: 3 Cyrillic letters among 12 letters of an English response -> -0.25.
    """
    others = sum(not _belongs(letter, script) for letter in LETTERS_BEYOND_ASCII.findall(x.response))
    return -others / len(LETTERS.findall(x.response)) if others else 0.0


@lru_cache(maxsize=4096)
def _belongs(letter: str, script: str) -> bool:
    first = unicodedata.name(letter, "").partition(" ")[0]
    return first in SCRIPTS[script] or first in OF_FORMULAS


def measure_ending(x: RewardInput, min_tokens: int = 0) -> float:
    """Return 0 for a response that ended by itself and has at least `min_tokens` tokens, else -1."""
    return 0.0 if x.finish == "stop" and x.num_tokens >= min_tokens else -1.0


def check_lengths(soft_tokens: int, max_tokens: int) -> None:
    """Raise a RewardError unless 0 < soft_tokens < max_tokens."""
    if not 0 < soft_tokens < max_tokens:
        raise RewardError(f"soft_tokens = {soft_tokens} and max_tokens = {max_tokens}: 0 < soft < max must hold")


def measure_length(x: RewardInput, soft_tokens: int, max_tokens: int) -> float:
    """Return 1 up to `soft_tokens` tokens, falling linearly to 0 at `max_tokens`; 0 for a response that was cut.

    Source: DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), moved from [-1, 0] to [0, 1].
    """
    if x.finish == "length":
        return 0.0
    return min(1.0, max(0.0, (max_tokens - x.num_tokens) / (max_tokens - soft_tokens)))


def response_parts(
    x: RewardInput, *, script: str = "latin", min_tokens: int = 0, lengths: Sequence[int] = ()
) -> dict[str, float]:
    """Return these parts of a response. `lengths`: soft_tokens and max_tokens; empty = without the part `length`."""
    parts = {
        "think_format": measure_think_format(x),
        "language": measure_language(x, script),
        "ending": measure_ending(x, min_tokens),
    }
    return {**parts, "length": measure_length(x, *lengths)} if lengths else parts


NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,300})(?:\.[0-9]{1,300})?")
TRUTH_KEYS = ("ground_truth", "answer", "solution", "label", "target")
UNIT = (0.0, 1.0)
MOST_ANSWER_CHARS = 200
"""Maximum length of an answer in the detail: without a tag it is the whole response."""


def ground_truth(x: RewardInput, key: str | None = None) -> Any:
    """Return the expected answer of a row, wherever the dataset keeps it.

    Places in order: the truth, verl's reward_model, the other columns. Names in order: only `key` if given; else
    ground_truth, answer, solution, label, target. If none is there: the truth field, if there is only one.

    Raises: RewardError when there is none: a wrong column name must not give 0 for every response.
    """
    nested = x.columns.get("reward_model")
    nested = nested if isinstance(nested, Mapping) else {}
    names = (key,) if key else TRUTH_KEYS
    for place in (x.truth, nested, x.columns):
        for name in names:
            if place.get(name) is not None:
                return place[name]
    if not key and len(x.truth) == 1 and (only := next(iter(x.truth.values()))) is not None:
        return only
    known = ", ".join([*x.truth, *x.columns]) or "none"
    raise RewardError(
        f"the row has no expected answer under {f'`{key}`' if key else ', '.join(TRUTH_KEYS)}; its columns: {known}",
        hint='name the column: [reward.args] key = "..."' if not key else "check the column's name",
    )


def exact_match(*, key: str | None = None, tag: str | None = "answer", require_tag: bool = False) -> RewardSpec:
    """Return a reward. Part `answer`: 1 for the expected text, ignoring case and white space.

    Part `format`: 1 if exactly one tag is there.

    Args:
        key: truth field or column with the expected text, or a list of accepted texts; default: see `ground_truth`.
        tag: both the answer and the expected one are read from `<tag>...</tag>`; without any such tag, and for None,
            they are the whole text.
        require_tag: a response without exactly one tag earns 0.
    """
    return _answer_reward("exact_match", _any(_same_text), ("answer",), key, tag, require_tag)


def number_match(
    *, key: str | None = None, tag: str | None = "answer", require_tag: bool = False, tolerance: float = 0.0
) -> RewardSpec:
    """Return a reward. Part `answer`: 1 if the answer is a decimal within `tolerance` of the expected number.

    Args:
        tolerance: absolute, >= 0.
        key, tag, require_tag: as in `exact_match`.
    """
    if not (isinstance(tolerance, (int, float)) and 0 <= tolerance < math.inf):
        raise RewardError(f"tolerance = {tolerance!r} is not a number >= 0")
    grade = _any(partial(_same_number, tolerance=tolerance))
    return _answer_reward("number_match", grade, ("answer",), key, tag, require_tag)


def token_f1(*, key: str | None = None, tag: str | None = "answer", require_tag: bool = False) -> RewardSpec:
    """Return a reward for short answers in words. Part `f1`: how many words the answer shares with the expected one.

    It is 2 x shared / (words of both), as for SQuAD (arXiv:1606.05250): a repeated word counts as often as both have
    it. Case, punctuation and the articles a, an, the do not count. Of several accepted texts the best counts. Part
    `answer`: 1 if the words are the same, in the same order. `format`: 1 if exactly one tag is there.

    Args:
        key, tag, require_tag: as in `exact_match`.
    """
    grade = lambda answer, accepted: word_overlap(answer, list(map(str, accepted)))  # noqa: E731
    return _answer_reward("token_f1", grade, ("f1", "answer"), key, tag, require_tag)


ARTICLES = frozenset(("a", "an", "the"))
WORDS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_]+(?:[.,][0-9]+)*")
"""Words of an answer: a Chinese or Japanese letter is one by itself, and 1,000.5 is one number."""


def answer_words(text: str) -> list[str]:
    """Return the words of an answer as they are compared. A text without any is one word, itself."""
    plain = re.sub("['\u2019]", "", unicodedata.normalize("NFKC", text).casefold())
    words = [word.replace(",", "") for word in WORDS.findall(plain)]
    return [word for word in words if word not in ARTICLES] or plain.split() or [""]


def accepted_answers(x: RewardInput, key: str = "answer", tag: str = "answer") -> list[str]:
    """Return the accepted texts of a row, those of its truth field `key`. Raises: RewardError if there is none."""
    answers = x.truth.get(key)
    accepted = answers if isinstance(answers, (list, tuple)) else [answers]
    texts = [str(untagged(one, tag)) for one in accepted if one is not None]
    if not texts or not all(text.strip() for text in texts):
        raise RewardError(f"the row's `{key}` is {quoted(answers, 60)}, not a text or a list of texts")
    return texts


def word_overlap(answer: str, accepted: Sequence[str]) -> tuple[float, bool]:
    """Return (the best F1 of an answer's words with an accepted text's, whether the words are those of one of them).

    Raises: ValueError without an accepted text.
    """
    words = answer_words(answer)
    best = [_f1(words, answer_words(text)) for text in accepted]
    return max(best), any(words == answer_words(text) for text in accepted)


def _f1(words: Sequence[str], truth: Sequence[str]) -> float:
    shared = sum((Counter(words) & Counter(truth)).values())
    return 2 * shared / (len(words) + len(truth))


def format_tags(*, tags: Sequence[str] = ("think", "answer")) -> RewardSpec:
    """Return a reward. Part `format`: 1 if the response is `<a>...</a><b>...</b>` for the given tags.

    No tag may be empty, and no text may be around them.
    """
    return RewardSpec(
        "format_tags", partial(_tags_in_order, tags=tuple(tags)), {"format": UNIT}, {"format": 1.0}, pure=True
    )


def length(*, soft_tokens: int, max_tokens: int) -> RewardSpec:
    """Return a reward. Part `length`: 1 up to `soft_tokens`, falling linearly to 0 at `max_tokens`.

    A response that was cut at the token limit earns 0.

    Source: DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), moved from [-1, 0] to [0, 1].
    """
    check_lengths(soft_tokens, max_tokens)
    fn = partial(_length_part, soft_tokens=soft_tokens, max_tokens=max_tokens)
    return RewardSpec("length", fn, {"length": UNIT}, {"length": 1.0}, pure=True)


def think_format() -> RewardSpec:
    """Return a reward. Part `think_format`: 1 for one `<think>` thought, then an answer, neither of them empty."""
    return _part("think_format", measure_think_format)


def language(*, script: str = "latin") -> RewardSpec:
    """Return a reward. Part `language`: minus the share of letters that belong to another script.

    Latin and Greek letters stand in formulas of every language and never count as another script.

    Args:
        script: latin, cyrillic, greek, han, hangul, arabic or devanagari.
    """
    check_script(script)
    return _part("language", partial(measure_language, script=script))


def ending(*, min_tokens: int = 0, ended: float = 0.0) -> RewardSpec:
    """Return a reward. Part `ending`: `ended` for a response that ended by itself, -1 if it was cut or is too short.

    Args:
        min_tokens: minimum length in tokens; 0 = any.
        ended: from 0 to 1. A number above 0 makes the part a gate for other rewards: they count in whole responses.
    """
    check_min_tokens(min_tokens)
    if isinstance(ended, bool) or not isinstance(ended, (int, float)) or not 0 <= ended <= 1:
        raise RewardError(f"ended = {quoted(ended, 60)} is not a number from 0 to 1")
    measure = partial(measure_ending, min_tokens=min_tokens)
    spec = _part("ending", lambda x: measure(x) or float(ended))
    return replace(spec, ranges={"ending": (-1.0, float(ended))})


def tool_use() -> RewardSpec:
    """Return a reward. Part `tool_use`: 1 if a tool has answered a call of the episode without an error, else 0.

    Behind a gate, tools are paid only beside a right answer: gate = "task.accuracy".
    """
    fn = lambda x: {"tool_use": float(answered_calls(x) > 0)}  # noqa: E731
    return RewardSpec("tool_use", fn, {"tool_use": UNIT}, {"tool_use": 1.0}, pure=True)


def environment_reward() -> RewardSpec:
    """Return a reward. Part `environment`: what the environment's `get_reward` has returned, in [0, 1].

    Without tools (`eval --tools off`) nothing is measured, and it is 0.
    """
    fn = lambda x: {"environment": float(x.measured.get("reward", 0.0))}  # noqa: E731
    ranges, weights = {"environment": UNIT}, {"environment": 1.0}
    return RewardSpec("environment_reward", fn, ranges, weights, pure=True, accuracy="environment")


def answered_calls(x: RewardInput) -> int:
    """Return the number of calls of an episode that a tool has answered without an error."""
    turns = pairwise(x.turns)
    return sum(max(0, len(turn.calls) - answer.errors) for turn, answer in turns if answer.role == "tool")


def _part(name: str, measure: Callable[[RewardInput], float]) -> RewardSpec:
    return RewardSpec(name, lambda x: {name: measure(x)}, {name: RANGES[name]}, {name: 1.0}, pure=True)


def plain_number(text: str) -> float | None:
    """Return the value of a text that is one ASCII decimal (sign, thousands commas, point); None for other texts."""
    text = text.strip(BLANKS)
    return float(text.replace(",", "")) if NUMBER.fullmatch(text) else None


Grade = Callable[[str, Sequence[Any]], Sequence[float]]
"""(answer, accepted answers) -> numbers of the parts."""


def _any(same: Callable[[str, Any], bool]) -> Grade:
    return lambda answer, accepted: [any(same(answer, one) for one in accepted)]


def _answer_reward(
    name: str, grade: Grade, parts: tuple[str, ...], key: str | None, tag: str | None, require_tag: bool
) -> RewardSpec:
    """Return a reward of these parts of an answer, of which the first counts, and of `format`."""

    def score(x: RewardInput) -> dict[str, Any]:
        truth = ground_truth(x, key)
        accepted = [untagged(one, tag) for one in (truth if isinstance(truth, (list, tuple)) else [truth])]
        answer, problem = tagged_text(x.answer, tag) if tag else (x.answer, "")
        if answer is None and not require_tag and tag and not find_tags(x.answer, (tag,)):
            answer = x.answer
        numbers = [0.0] * len(parts) if answer is None else map(float, grade(answer, accepted))
        detail = {"answer": answer if answer is None else answer.strip(BLANKS)[:MOST_ANSWER_CHARS]}
        graded = dict(zip(parts, numbers, strict=True))
        return {**graded, "format": float(not problem), "note": problem, "detail": detail}

    ranges = dict.fromkeys((*parts, "format"), UNIT)
    return RewardSpec(name, score, ranges, {parts[0]: 1.0}, pure=True, accuracy="answer")


def _same_text(answer: str, truth: Any) -> bool:
    expected = " ".join(str(truth).split()).casefold()
    return bool(expected) and " ".join(answer.split()).casefold() == expected


def _same_number(answer: str, truth: Any, *, tolerance: float) -> bool:
    expected = float(truth) if isinstance(truth, (int, float)) else plain_number(str(truth))
    if expected is None or not math.isfinite(expected):
        raise RewardError(
            f"the expected answer {quoted(truth, 60)} is not a number", hint="use exact_match, or repair the row"
        )
    number = plain_number(answer)
    return number is not None and abs(number - expected) <= tolerance


def _tags_in_order(x: RewardInput, *, tags: tuple[str, ...]) -> dict[str, Any]:
    tags_found = find_tags(x.answer, tags)
    expected_tags = [(name, closes) for name in tags for closes in (False, True)]
    if x.finish == "length" or [(t.name, t.closes) for t in tags_found] != expected_tags:
        return {"format": 0.0, "note": f"not exactly {' '.join(f'<{t}>...</{t}>' for t in tags)}"}
    edges = [0, *(i for tag in tags_found for i in (tag.start, tag.end)), len(x.answer)]
    texts = [x.answer[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
    outside, inside = texts[::2], texts[1::2]
    ok = not any(text.strip(BLANKS) for text in outside) and all(VISIBLE.search(text) for text in inside)
    return {"format": float(ok), "note": "" if ok else "text outside the tags, or an empty tag"}


def _length_part(x: RewardInput, *, soft_tokens: int, max_tokens: int) -> dict[str, Any]:
    part = {"length": measure_length(x, soft_tokens, max_tokens)}
    cut = "ended by a limit" if x.turns else "cut off at the token limit"
    return {**part, "note": cut} if x.finish == "length" else part
