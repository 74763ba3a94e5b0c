"""The answer in a response: the last box after the thought, or the text of the answer tag."""

from __future__ import annotations

import re
from typing import NamedTuple

from vlmrl.rewards.text_parsing import find_tags, tagged_text

MOST_ANSWER_CHARS = 500
"""Maximum length of an answer; a longer text is no final answer."""
PLACES = ("box", "tag", "text")
"""Places of an answer: the last box; the `<answer>` tag, with or without a box; the text where there is no box."""
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])(?=\s*[{0-9$\\+-]|\s*$)")
"""Box; `\\boxed` before a word or a full stop is only the name of the command."""
ESCAPE_OR_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


class AnswerText(NamedTuple):
    """Text of the answer, or the reason why there is none.

    Args:
        text: None if there is no answer.
        reason: "" if there is one.
    """

    text: str | None
    reason: str = ""


def after_thought(response: str) -> AnswerText:
    """Return the part of a response after its last `</think>`; all of it without such a tag."""
    tags = find_tags(response, ("think",))
    if not tags:
        return AnswerText(response)
    if not tags[-1].closes:
        return AnswerText(None, "the thought is not closed")
    return AnswerText(response[tags[-1].end :])


def last_box(text: str) -> AnswerText:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}`, of the inner one where boxes are nested."""
    boxes = list(BOX.finditer(text))
    if not boxes:
        return AnswerText(None, "there is no box")
    start = boxes[-1].end()
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    if text[start : start + 1] != "{":
        return AnswerText(None, "the last box has no braces")
    depth = 0
    for mark in ESCAPE_OR_BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(mark.group(), 0)
        if depth == 0:
            content = text[start + 1 : mark.start()].strip()
            return AnswerText(content) if content else AnswerText(None, "the last box is empty")
    return AnswerText(None, "the last box is not closed")


def find_answer(response: str, *, place: str = "box", thought: str = "skip") -> AnswerText:
    """Return the text of the final answer.

    Args:
        place: one of PLACES.
        thought: "skip": an answer in the thought does not count; "read": the whole response is read.
    """
    text, reason = after_thought(response) if thought == "skip" else AnswerText(response)
    if text is None:
        return AnswerText(None, reason)
    if place == "tag":
        text, reason = tagged_text(text, "answer")
        if text is None:
            return AnswerText(None, reason)
    answer = last_box(text)
    if place != "box" and answer.text is None and not BOX.search(text):
        answer = AnswerText(text.strip()) if text.strip() else AnswerText(None, "the answer is empty")
    if answer.text is None and place == "box" and thought == "skip" and text != response and BOX.search(response):
        return AnswerText(None, f"{answer.reason} after the thought")
    if answer.text is not None and len(answer.text) > MOST_ANSWER_CHARS:
        return AnswerText(None, f"the answer has more than {MOST_ANSWER_CHARS} characters")
    return answer
