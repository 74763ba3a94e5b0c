"""Rows of published tables of the task we_math: sets of problems with options, and training rows with free answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vlmrl.data.cells import show, text_of
from vlmrl.data.columns import IMAGES
from vlmrl.errors import DataError
from vlmrl.rewards.text_parsing import tagged_text
from vlmrl.tasks.prompt_template import IMAGE
from vlmrl.tasks.table_rows import RowForm
from vlmrl.tasks.we_math.truth import MULTI, truth_problems
from vlmrl.types import Size

SPELLINGS = {
    "images": IMAGES,
    "problem": ("question", "problem"),
    "options": ("option", "options"),
    "answer": ("answer", "ground_truth"),
    "set": ("ID",),
    "step": ("key",),
    "concept": ("knowledge concept",),
    "solution": ("solution", "golden_cot", "cot"),
}
FORM_HELP = (
    "rows have an image, a question (or problem) and an answer; those of sets also option, ID and key (2steps_1,"
    " 2steps_2, 2steps_multi)"
)
KEY = re.compile(r"([23])steps_([123]|multi)")
TAGS = re.compile(r"</?(?:think|answer)>")
MOST_CHARS = 20_000


def table_form() -> RowForm:
    """Return the form of rows in tables."""
    return RowForm(SPELLINGS, (("images",), ("problem",), ("answer",)), _read, FORM_HELP)


def _read(cells: Mapping[str, Any], size: Size) -> tuple[dict[str, Any], dict[str, Any]]:
    problem = _text(cells, "problem")
    problem = problem.replace(IMAGE, " ").strip() if problem else None
    if not problem or len(problem) > MOST_CHARS:
        raise DataError(
            f"the question is {show(cells.get('problem'), 60)}, not a text of at most {MOST_CHARS:,} characters"
        )
    options = _text(cells, "options")
    answer = cells.get("answer")
    answer = (
        str(answer) if isinstance(answer, (int, float)) and not isinstance(answer, bool) else _text(cells, "answer")
    )
    truth = {
        "answer": _answer(answer),
        "options": options,
        **_place(cells),
        "concept": _text(cells, "concept"),
        "solution": _solution(_text(cells, "solution")),
    }
    if faults := truth_problems(truth) or _ungradable(truth):
        raise DataError("; ".join(faults))
    return truth, {"problem": problem, "options": options or ""}


def _ungradable(truth: Mapping[str, Any]) -> list[str]:
    """Return why the reward could never call a free answer right; [] if it can."""
    if truth["options"] is not None:
        return []
    from vlmrl.tasks.we_math.grader import answer_problem  # it loads SymPy

    problem = answer_problem(truth["answer"])
    return [f"`answer` is {show(truth['answer'], 60)}, which cannot be graded: {problem}"] if problem else []


def _text(cells: Mapping[str, Any], role: str) -> str | None:
    text = text_of(cells.get(role))
    return text.strip() or None if text else None


def _answer(text: str | None) -> str | None:
    """Return an answer without the tags around it."""
    inside = tagged_text(text, "answer")[0] if text else None
    return text if inside is None else inside.strip()


def _place(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Return the set of a row, its step, and its number of steps; a row without a key belongs to no set."""
    key = cells.get("step")
    if key is None:
        return {"set": None, "step": None, "num_steps": None}
    match = KEY.fullmatch(key) if isinstance(key, str) else None
    if match is None or (match[2] != MULTI and int(match[2]) > int(match[1])):
        raise DataError(f"`key` is {show(key, 60)}, not such as 2steps_1 or 3steps_multi")
    name = cells.get("set")
    if not isinstance(name, str) or not name.strip():
        raise DataError(f"`ID` is {show(name, 60)}, not the name of a set")
    return {"set": name.strip(), "step": match[2], "num_steps": int(match[1]) if match[2] == MULTI else 1}


def _solution(text: str | None) -> str | None:
    """Return the thought of a worked solution; None if it is too long, or has tags that are not those of a thought."""
    if text is None or len(text) > MOST_CHARS:
        return None
    thought = tagged_text(text, "think")[0]
    text = (thought if thought is not None else text).strip()
    return text if text and not TAGS.search(text) else None
