"""Truth of a row of the task we_math, and its options.

The truth has `answer` (a letter, or a text), `options` (their text; None = the answer is free), `set` (name of the
composite problem that the row belongs to; None = none), `step` ("1", "2", "3" for sub-problems, "multi" for the
composite problem), `num_steps` (1 for sub-problems, 2 or 3 for composite problems), `concept`, and `solution`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import quoted

LETTERS = "ABCDEFGH"
MARK = re.compile(r"(?:^|[;\uff1b]|\s)\s*([A-H])\s*[.:\uff0e\uff1a](?=\s*[^;\s])")
"""Letter of an option before its text. In published rows, names of points are written like letters without a text."""
MULTI = "multi"
STEPS = ("1", "2", "3", MULTI)
NUM_STEPS = (2, 3)
"""Numbers of sub-problems that a composite problem can have."""


def true_answer(truth: Mapping[str, Any]) -> str:
    """Return the right answer of a row. Raises: RewardError for a row without one."""
    answer = truth.get("answer")
    if not isinstance(answer, str) or not answer.strip():
        raise RewardError(f"the row's `answer` is {quoted(answer, 60)}, not a text")
    return answer.strip()


def true_options(truth: Mapping[str, Any]) -> dict[str, str]:
    """Return letter -> text of the options of a row; {} if its answer is free."""
    options = truth.get("options")
    return dict(_options(options)) if isinstance(options, str) else {}


@lru_cache(maxsize=8192)
def _options(text: str) -> tuple[tuple[str, str], ...]:
    return tuple(read_options(text).items())


def read_options(text: str) -> dict[str, str]:
    """Return letter -> text of options that are written as `A. 300;B. 400; E. No correct answer`.

    A letter that repeats or goes back belongs to the text of the option before it.
    """
    marks: list[re.Match[str]] = []
    for mark in MARK.finditer(text):
        if not marks or mark[1] > marks[-1][1]:
            marks.append(mark)
    ends = [*(mark.start() for mark in marks[1:]), len(text)][: len(marks)]
    return {mark[1]: text[mark.end() : end].strip(" ;\t\r\n") for mark, end in zip(marks, ends, strict=True)}


def truth_problems(truth: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a truth, in words."""
    problems = []
    answer, options = truth.get("answer"), truth.get("options")
    if not isinstance(answer, str) or not answer.strip():
        problems.append(f"`answer` is {quoted(answer, 60)}, not a text")
    elif options is not None and (not isinstance(options, str) or answer not in read_options(options)):
        problems.append(f"`answer` is {quoted(answer, 60)}, and no option of {quoted(options, 60)} has this letter")
    if truth.get("set") is not None and truth.get("step") not in STEPS:
        problems.append(f"`step` is {quoted(truth.get('step'), 60)}, not one of {', '.join(STEPS)}")
    number = truth.get("num_steps")
    if truth.get("step") == MULTI and not (type(number) is int and number in NUM_STEPS):
        problems.append(f"`num_steps` is {quoted(number, 60)}, not one of {', '.join(map(str, NUM_STEPS))}")
    return problems


def notes_on(truths: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return a note for the data doctor on sets that metrics over sets leave out; {} if there are none."""
    members: dict[str, Counter[str]] = defaultdict(Counter)
    wholes: dict[str, set[int]] = defaultdict(set)
    for truth in truths:
        if truth.get("set") is not None:
            members[truth["set"]][truth["step"]] += 1
            if truth["step"] == MULTI:
                wholes[truth["set"]].add(truth["num_steps"])
    lacking, double = [], []
    for name, steps in members.items():
        needed = {MULTI, *map(str, range(1, max(wholes[name], default=1) + 1))}
        if needed - steps.keys():
            lacking.append(name)
        elif max(steps.values()) > 1 or len(wholes[name]) > 1 or steps.keys() - needed:
            double.append(name)
    texts = [
        f"{len(names):,} of {len(members):,} sets {what}, such as {quoted(names[0], 60)}"
        for names, what in ((lacking, "lack a sub-problem or the whole"), (double, "have a problem twice, or too many"))
        if names
    ]
    finding = f"{'; '.join(texts)}: the metrics over sets do not count them as they are"
    return {"sets": ("look", finding)} if texts else {}
